"""Ways to save, each behind the same few calls, as its own documentation says to use it best.

A mode is told of every step boundary. At one where a save is wanted it begins one, blocks for as
long as that way of saving blocks, and gives a function that waits until everything is durable. What
a library leaves in the page cache is fsynced here ("+fsync"): durable means the same for all.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from bench.disk import fsync_tree

Wait = Callable[[], float]  # waits until durable; the monotonic time at which that was so
LEDGER_S: Final = 2.0


class Mode:
    """A way to save.

    Args:
        model: what is trained.
        optimizer: its optimizer, whose state exists already.
        directory: an empty directory for checkpoints.
    """

    notes = ""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, directory: Path
    ) -> None:
        self.model, self.optimizer, self.directory = model, optimizer, directory
        self._number = 0

    def ask(self) -> None:
        """In the step before: what may be asked for ahead."""

    def boundary(self, wanted: bool) -> Wait | None:
        """At each step boundary; with ``wanted`` a save begins here, or at a later boundary."""
        return self.save(self._next()) if wanted else None

    def save(self, path: Path) -> Wait:
        """Save to ``path``."""
        raise NotImplementedError

    def updating(self) -> AbstractContextManager[Any]:
        """Held while the optimizer changes the state."""
        return contextlib.nullcontext()

    def tidy(self) -> None:
        """Between measurements: remove what was saved, as retention would."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            for entry in self.directory.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def details(self) -> dict[str, Any]:
        """What the last save tells about itself."""
        return {}

    def end(self) -> None:
        """No more saves."""

    def state(self) -> dict[str, Any]:
        """Live tensors, as they are given to torch.save and its like."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _next(self) -> Path:
        self._number += 1
        return self.directory / f"save-{self._number:04d}"


class Nothing(Mode):
    """No save at all: what is measured then is the noise."""

    def save(self, path: Path) -> Wait:
        """Durable at once."""
        del path
        now = time.perf_counter()
        return lambda: now


class Endless:
    """A loader that costs nothing."""

    def __iter__(self) -> Iterator[None]:
        while True:
            yield None


class Outlast(Mode):
    """``session.save()``: asked for during a step, taken at the boundary after it.

    Durable is when the ledger's ``commit`` event says so.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, directory: Path
    ) -> None:
        super().__init__(model, optimizer, directory)
        import outlast

        named = {"model": model, "optimizer": optimizer}
        self.session = outlast.session(dir=directory, every="100 h", keep=1, **named)
        self.session.__enter__()
        self._steps = iter(self.session.steps(Endless(), until=10**9))
        self._pending: Any = None

    def ask(self) -> None:
        """Returns at once."""
        self._pending = self.session.save()

    def boundary(self, wanted: bool) -> Wait | None:
        """The session's own boundary; it says at which one the save is taken."""
        next(self._steps)
        pending = self._pending
        if not wanted or pending is None or pending.step != self.session.step:
            return None
        self._pending = None

        def wait() -> float:
            if not pending.wait(600):
                raise RuntimeError(pending.error or "no commit within 600 s")
            told = time.perf_counter()
            while (event := self._event("commit", pending.step)) is None:
                if time.perf_counter() - told > LEDGER_S:
                    return told  # no such event: when we were told must do
                time.sleep(0.05)
            return float(event["mono"])

        return wait

    def tidy(self) -> None:
        """Its own retention does that."""

    def details(self) -> dict[str, Any]:
        """The last save's ``snapshot`` and ``commit`` events."""
        return {name: self._event(name, None) for name in ("snapshot", "commit")}

    def end(self) -> None:
        """Leave the session, which saves the last step."""
        self._steps.close()  # type: ignore[attr-defined]
        self.session.__exit__(None, None, None)

    def _event(self, name: str, step: int | None) -> dict[str, Any] | None:
        for line in reversed((self.directory / "ledger.jsonl").read_text().splitlines()):
            with contextlib.suppress(ValueError):  # a line that is being written
                event: dict[str, Any] = json.loads(line)
                if event["event"] == name and step in (None, event.get("step")):
                    return event
        return None


class TorchSave(Mode):
    """``torch.save`` and an fsync."""

    notes = "+fsync"

    def save(self, path: Path) -> Wait:
        """Blocks to the end."""
        torch.save(self.state(), path)
        return _now_durable(path)


class Safetensors(Mode):
    """``safetensors.torch.save_file`` and an fsync; it takes one flat dict of tensors."""

    notes = "+fsync"

    def save(self, path: Path) -> Wait:
        """Blocks to the end."""
        from safetensors.torch import save_file

        save_file(flat(self.state()), path)
        return _now_durable(path)


class DcpSave(Mode):
    """``dcp.save``: blocking, four threads; it fsyncs its files.

    The state is given as it is: renaming the optimizer's parameters would be the caller's time.
    """

    def save(self, path: Path) -> Wait:
        """Blocks to the end."""
        import torch.distributed.checkpoint as dcp

        writer = dcp.FileSystemWriter(path, thread_count=4)
        dcp.save(self.state(), storage_writer=writer)
        return _now_durable(path)


class DcpAsync(DcpSave):
    """``dcp.async_save`` with a stager that keeps its memory, as fast as it gets without CUDA.

    Subclasses choose the number of writing threads and whether staging is asynchronous too; the
    optimizer then waits until the state is staged.
    """

    thread_count = 4
    asynchronous_staging = False

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, directory: Path
    ) -> None:
        super().__init__(model, optimizer, directory)
        self.stager = self.make_stager()
        # Its thread's collectives must not come between those of the training.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._staged: Any = None

    def make_stager(self) -> Any:
        """Pinned memory and non-blocking copies need CUDA; shared memory needs a process."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        return DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=self.asynchronous_staging,
                use_non_blocking_copy=False,
            )
        )

    def save(self, path: Path) -> Wait:
        """Blocks while the state is staged, unless that is asynchronous."""
        import torch.distributed.checkpoint as dcp

        writer = dcp.FileSystemWriter(path, thread_count=self.thread_count)
        begun = dcp.async_save(
            self.state(),
            storage_writer=writer,
            async_stager=self.stager,
            process_group=self._group,
        )
        self._staged = getattr(begun, "staging_completion", None)
        return when_done(getattr(begun, "upload_completion", begun), path)

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """No change to the state before it is staged."""
        if self._staged is not None:
            self._staged.result(600)
            self._staged = None
        yield

    def end(self) -> None:
        """Let the stager's memory go."""
        self.stager.close()


class DcpAsyncOneThread(DcpAsync):
    """The same with the default number of writing threads."""

    thread_count = 1


class DcpAsyncStaging(DcpAsync):
    """The same with asynchronous staging."""

    asynchronous_staging = True


def flat(state: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a nested state under dotted names."""
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            found[f"{prefix}{key}"] = value
    return found


def _now_durable(path: Path) -> Wait:
    # Every rank syncs all of the checkpoint: what another did already costs nothing.
    fsync_tree(path)
    end = time.perf_counter()
    return lambda: end


def when_done(future: Future[Any], path: Path) -> Wait:
    """Waits for a library's future; the thread that fulfils it syncs and looks at the clock.

    One of ours would first have to get hold of a core and of the interpreter.
    """
    stopped = threading.Event()
    end = [0.0]

    def stop(done: Future[Any]) -> None:
        if done.exception() is None:
            fsync_tree(path)
            end[0] = time.perf_counter()
        stopped.set()

    future.add_done_callback(stop)

    def wait() -> float:
        future.result(600)
        stopped.wait(600)
        return end[0]

    return wait


def single_rank_group() -> None:
    """A process group of one, which some libraries insist on."""
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


MODES: dict[str, type[Mode]] = {
    "nothing": Nothing,
    "outlast": Outlast,
    "dcp.async_save 4 threads": DcpAsync,
    "dcp.async_save 1 thread": DcpAsyncOneThread,
    "dcp.async_save async staging": DcpAsyncStaging,
    "dcp.save 4 threads": DcpSave,
    "torch.save": TorchSave,
    "safetensors": Safetensors,
}
