"""A process that brings a saved state back into a live model and optimizer; driven by lines.

Run by ``restoring.py``, like ``bench.worker``. ``prepare`` writes the state in every format,
``restore`` reads it in the one that this worker was started for, ``hold`` saves with Outlast and
stays, so that its keeper holds a snapshot when the process is killed. What is live before a
restore is another state than the saved one, in memory that is touched.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from bench.modes import DcpSave, Endless, Safetensors, TorchSave, flat
from bench.training import Loop, build, state_bytes, synchronize
from bench.worker import serve

IMPORTS: Final = {
    "outlast": "outlast.training.session",
    "dcp.load": "torch.distributed.checkpoint",
    "safetensors": "safetensors.torch",
}
FORMATS: Final = {"dcp.load": DcpSave, "torch.load mmap": TorchSave, "safetensors": Safetensors}


def main() -> None:
    """Answer commands until ``end``."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    serve(lambda: _Worker(options))


class _Worker:
    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._place = Path(options["directory"])
        self.model, self.optimizer = build(options["width"], options.get("device", "cpu"))
        self._loop = Loop(self.model, self.optimizer, options["tokens"])
        for _ in range(options["steps"]):
            self._loop.finish(time.perf_counter())
        self.ready = {"state_bytes": state_bytes(self.model, self.optimizer)}
        self._session: Any = None
        self._restore: dict[str, Callable[[], dict[str, Any]]] = {
            "outlast": self._outlast,
            "dcp.load": self._dcp,
            "torch.load mmap": self._torch,
            "safetensors": self._safetensors,
        }
        self.commands = {
            "prepare": self._prepare,
            "restore": self._timed,
            "hold": self._hold,
            "end": dict,
        }
        start = time.perf_counter()
        importlib.import_module(IMPORTS.get(options["mode"], "torch"))  # no part of a restore
        self._import_s = time.perf_counter() - start

    def _prepare(self) -> dict[str, Any]:
        for name in self._options["formats"]:
            kind = FORMATS.get(name)
            if kind is None:  # outlast, below
                continue
            folder = self._place / name
            folder.mkdir()
            kind(self.model, self.optimizer, folder).save(folder / "state")()
        with self._open() as session:
            for _ in session.steps(Endless(), until=1):
                pass  # the same state: a step of the session alone, saved when it is left
        return self._fingerprint()

    def _hold(self) -> dict[str, Any]:
        self._session = self._open()
        self._session.__enter__()
        steps = iter(self._session.steps(Endless(), until=10**9))
        next(steps)
        pending = self._session.save()
        while not pending.committed:  # a boundary takes it, a later one lets the engine catch up
            self._loop.forward_backward()
            next(steps)
        self._steps = steps
        return self._fingerprint()

    def _timed(self) -> dict[str, Any]:
        start = time.perf_counter()
        parts = self._restore[self._options["mode"]]()
        self._settle()
        elapsed = parts.pop("elapsed_s", time.perf_counter() - start)
        return {"restore_s": elapsed, "parts": parts, **self._fingerprint()}

    def _outlast(self) -> dict[str, Any]:
        session = self._open()
        start = time.perf_counter()
        session.__enter__()
        self._settle()
        end = time.perf_counter()
        lines = (self._place / "outlast" / "ledger.jsonl").read_text().splitlines()
        events = [event for event in map(json.loads, lines) if event["mono"] >= start]
        resumed = next(event for event in events if event["event"] == "resumed")
        read_s = resumed["read_s"]
        parts = {
            "elapsed_s": end - start,
            "import_s": self._import_s,
            "open_s": resumed["mono"] - start - read_s,
            "read_s": read_s,
            "after_s": end - resumed["mono"],
            "source": resumed["source"],
            **resumed.get("timings", {}),
        }
        session.__exit__(None, None, None)
        return parts

    def _dcp(self) -> dict[str, Any]:
        import torch.distributed.checkpoint as dcp

        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        reader = dcp.FileSystemReader(self._place / "dcp.load" / "state")
        dcp.load(state, storage_reader=reader, no_dist=True)
        return {}

    def _torch(self) -> dict[str, Any]:
        path = self._place / "torch.load mmap" / "state"
        self._copy(flat(torch.load(path, map_location="cpu", mmap=True, weights_only=True)))
        return {}

    def _safetensors(self) -> dict[str, Any]:
        from safetensors.torch import load_file

        self._copy(load_file(self._place / "safetensors" / "state"))
        return {}

    def _settle(self) -> None:
        synchronize(next(self.model.parameters()).device)

    def _copy(self, saved: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self._live().items():
                tensor.copy_(saved[name])

    def _live(self) -> dict[str, torch.Tensor]:
        return flat({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def _fingerprint(self) -> dict[str, Any]:
        """Of every tensor a little, so that a restore that restored nothing is noticed."""
        sums = [float(tensor.reshape(-1)[:64].double().sum()) for tensor in self._live().values()]
        return {"fingerprint": sum(index * value for index, value in enumerate(sums, 1))}

    def _open(self) -> Any:
        import outlast

        named = {"model": self.model, "optimizer": self.optimizer}
        return outlast.session(resume=True, dir=self._place / "outlast", every="100 h", **named)


if __name__ == "__main__":
    main()
