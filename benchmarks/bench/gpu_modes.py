"""Ways to save from a GPU: ``dcp.async_save`` with the stager that its documentation made for it.

Its memory is pinned and kept from save to save and its copies do not block. Staging in the
background happens on a stream of its own, which waits for nothing: the loop synchronises at the end
of each step, and the optimizer waits until the state is staged.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from bench.modes import DcpAsync, Mode, Wait, single_rank_group, when_done


class DcpPinned(DcpAsync):
    """Staging while the caller waits; a thread writes."""

    shared = False

    def make_stager(self) -> Any:
        """Pinned; in shared memory only if a process writes, which is what that is for."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        return DefaultStager(
            StagingOptions(
                use_pinned_memory=True,
                use_shared_memory=self.shared,
                use_async_staging=self.asynchronous_staging,
                use_non_blocking_copy=True,
            )
        )


class DcpPinnedStaging(DcpPinned):
    """Staging in the background; a thread writes."""

    asynchronous_staging = True


class DcpPinnedProcess(DcpPinnedStaging):
    """Staging in the background into shared memory; a process writes."""

    shared = True

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, directory: Path
    ) -> None:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # else it asks for this host's name
        single_rank_group()
        super().__init__(model, optimizer, directory)

    def save(self, path: Path) -> Wait:
        """Returns once the staging has begun."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        begun = dcp.async_save(
            self.state(),
            storage_writer=dcp.FileSystemWriter(path, thread_count=self.thread_count),
            async_stager=self.stager,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        self._staged = begun.staging_completion
        return when_done(begun.upload_completion, path)


GPU_MODES: dict[str, type[Mode]] = {
    "dcp.async_save pinned": DcpPinned,
    "dcp.async_save pinned, async staging": DcpPinnedStaging,
    "dcp.async_save pinned, async staging, process": DcpPinnedProcess,
}
