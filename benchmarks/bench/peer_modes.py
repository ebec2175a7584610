"""Ways to save of libraries that live in virtual environments of their own."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from bench.disk import fsync_tree
from bench.modes import Mode, Wait, single_rank_group, when_done

GIVE_UP_S = 120.0


class TorchCheckpointing(Mode):
    """torch_checkpointing's ``save``: asynchronous staging, then a process that writes.

    Its direct I/O fails on ext4, so that it is switched off; it does not fsync.
    """

    notes = "+fsync; use_direct_io=False"

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, directory: Path
    ) -> None:
        super().__init__(model, optimizer, directory)
        library = importlib.import_module("torch_checkpointing")
        staging = importlib.import_module("torch_checkpointing.staging")
        files = importlib.import_module("torch_checkpointing.storage.filesystem")
        config = library.AsyncCheckpointSaverConfig(
            staging_config=staging.CheckpointStagerConfig(
                use_pinned_memory=False, use_non_blocking_copy=False
            )
        )
        self._manager = library.CheckpointManager(
            library.CheckpointManager.Config(
                save=config,
                storage_config=files.LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    def save(self, path: Path) -> Wait:
        """Returns at once; the optimizer waits for the staging."""
        return when_done(self._manager.save(str(path), self.state()), path)

    def updating(self) -> AbstractContextManager[Any]:
        """Its documentation asks for this around the optimizer's step."""
        guard: AbstractContextManager[Any] = self._manager.lock()
        return guard

    def end(self) -> None:
        """Stop its process."""
        self._manager.close()


class Dlrover(Mode):
    """DLRover's flash checkpoint, without its agent: a copy to shared memory, a process writes."""

    notes = "+fsync"

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, directory: Path
    ) -> None:
        super().__init__(model, optimizer, directory)
        single_rank_group()
        ddp = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.ddp")
        logging.disable(logging.INFO)
        self._disk = ddp.StorageType.DISK
        self._checkpointer = ddp.DdpCheckpointer(str(directory))

    def save(self, path: Path) -> Wait:
        """Blocks while the state is copied."""
        number = self._number
        file = self.directory / str(number) / "state.pt"
        self._checkpointer.save_checkpoint(number, self.state(), str(file), storage_type=self._disk)
        del path
        trackers = [
            self.directory / name
            for name in ("latest_checkpointed_iteration.txt", "dlrover_latest.txt")
        ]

        def wait() -> float:
            _poll(lambda: any(_text(tracker) == str(number) for tracker in trackers))
            return _synced(self.directory)

        return wait

    def tidy(self) -> None:
        """All but its tracker files."""
        trackers = {file.name: _text(file) for file in self.directory.glob("*.txt")}
        super().tidy()
        for name, text in trackers.items():
            (self.directory / name).write_text(text)

    def end(self) -> None:
        """It leaves its shared memory behind."""
        for file in Path("/dev/shm").glob("ckpt_shm_*"):
            file.unlink()


class Moonclip(Mode):
    """moonclip, every snapshot full at its lowest level of compression: the quickest it does."""

    notes = "zstd 1, full snapshots"

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, directory: Path
    ) -> None:
        super().__init__(model, optimizer, directory)
        self._manager = importlib.import_module("moonclip").CheckpointManager(
            str(directory),
            compression_level=1,
            full_every_steps=1,
            max_full_snapshots=2,
            keep_base_in_memory=False,
        )

    def save(self, path: Path) -> Wait:
        """Blocks while the state is copied."""
        del path
        self._manager.save(step=self._number, model=self.model, optimizer=self.optimizer)

        def wait() -> float:
            self._manager.flush()
            return _synced(self.directory)

        return wait

    def tidy(self) -> None:
        """Its own retention does that."""


PEER_MODES: dict[str, type[Mode]] = {
    "torch_checkpointing": TorchCheckpointing,
    "dlrover": Dlrover,
    "moonclip": Moonclip,
}


def _synced(path: Path) -> float:
    fsync_tree(path)
    return time.perf_counter()


def _poll(done: Callable[[], bool]) -> None:
    end = time.monotonic() + GIVE_UP_S
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"not durable within {GIVE_UP_S:.0f} s")
        time.sleep(0.01)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
