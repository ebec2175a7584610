"""A job of several ranks that trains a model sharded by FSDP2; rank 0 answers as ``bench.worker``.

Rank 0 starts the others with the variables that torchrun sets, passes every command on to them, and
answers with the worst rank's numbers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.measure import Measurement
from bench.modes import MODES
from bench.ports import free_port
from bench.training import Loop, Model, adamw, state_bytes
from bench.worker import serve

WORST: Final = (
    "step_s",
    "blocked_s",
    "blocked_call_s",
    "blocked_optimizer_s",
    "durable_s",
    "lost_s",
    "step_x",
    "step_x_most",
)


def main() -> None:
    """Answer commands until ``end``, on rank 0; follow them on the others."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    if "RANK" not in os.environ:
        _start_others(options["world_size"])
    if os.environ["RANK"] == "0":
        serve(lambda: _Rank(options))
    rank = _Rank(options)
    while True:
        command = rank.agree_on("")
        rank.follow(command)
        if command == "end":
            os._exit(0)


class _Rank:
    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        dist.init_process_group("gloo")
        self._commands = dist.new_group(backend="gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        torch.manual_seed(0)
        self._model = Model(options["width"])
        for block in self._model.h:
            fully_shard(block, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = adamw(self._model)
        self._loop = Loop(self._model, self._optimizer, options["tokens"], seed=dist.get_rank())
        for _ in range(2):
            self._loop.finish(time.perf_counter())
        sizes = self._gather(state_bytes(self._model, self._optimizer))
        self.ready = {"state_bytes": sum(sizes)}
        self.commands = {name: self._on_all(name) for name in ("begin", "save", "end")}
        self._measurement: Measurement
        self._notes = ""

    def agree_on(self, command: str) -> str:
        """Rank 0's command, on all ranks."""
        given = [command]
        dist.broadcast_object_list(given, src=0, group=self._commands)
        return given[0]

    def follow(self, command: str) -> dict[str, Any]:
        """Do it; a rank that fails fails all of them."""
        error, result = "", {}
        try:
            result = getattr(self, f"_{command}")()
        except Exception as failure:  # noqa: BLE001 - told to rank 0
            error = f"rank {dist.get_rank()}: {type(failure).__name__}: {failure}"
        results = self._gather((error, result))
        for told, _ in results:
            if told:
                raise RuntimeError(told)
        worst = {key: max(each[key] for _, each in results) for key in WORST if key in result}
        return {**result, **worst}

    def _on_all(self, name: str) -> Any:
        return lambda: self.follow(self.agree_on(name))

    def _begin(self) -> dict[str, Any]:
        kind = MODES[self._options["mode"]]
        self._mode = kind(self._model, self._optimizer, Path(self._options["directory"]))
        self._measurement = Measurement(
            self._loop, self._mode, self._options["undisturbed"], self._everywhere
        )
        return {"notes": self._mode.notes}

    def _save(self) -> dict[str, Any]:
        dist.barrier(self._commands)
        return self._measurement.save()

    def _end(self) -> dict[str, Any]:
        self._mode.end()
        return {}

    def _everywhere(self, here: bool) -> bool:
        flag = torch.tensor(int(here))
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._commands)
        return bool(flag)

    def _gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found


def _start_others(world_size: int) -> None:
    shared = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    os.environ.update(shared)
    for rank in range(1, world_size):
        environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        subprocess.Popen(
            [sys.executable, "-m", "bench.fsdp_worker", sys.argv[1]],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
        )
    os.environ.update(RANK="0", LOCAL_RANK="0")


if __name__ == "__main__":
    main()
