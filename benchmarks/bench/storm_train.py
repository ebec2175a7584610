"""One training for ``storm_beside.py``, kept by a session, by torch.save, or by torchft.

Model, data and records are those of ``ddp_plain.py``. Besides its lines, a worker leaves its
process id in RECORDS/pid-RANK, in RECORDS/discarded-RANK.jsonl what torchft did not commit, and at
the end the step and the weights' digest in RECORDS/final-RANK.json. Where Outlast is not installed,
the other two ways run all the same.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before torch is imported: a worker that still starts can be killed
    _rank = os.environ.get("REPLICA") or os.environ["RANK"]
    Path(sys.argv[1], f"pid-{_rank}").write_text(str(os.getpid()))

import torch
import torch.distributed as dist

FIRST_SAVE_S = 1.0  # until it is known what a save costs


class Training:
    """The model, and what is recorded of it.

    Args:
        options: the command line.
        rank: of this worker.
    """

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self.plain = importlib.import_module("ddp_plain")
        self.rank = rank
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = self.plain.GPT()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.records = self.plain.Records(options.records, rank)
        self._options = options

    def ddp_step(self, ddp: Any, step: int) -> float:
        """Make a step; its loss."""
        loss = ddp(*self.plain.batch(step, self.rank))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        time.sleep(self._options.sleep)
        return float(loss.item())

    def completed(self, step: int, loss: float, world: int) -> bool:
        """Note a step; whether it was the last."""
        self.records.completed(step, loss, world)
        if step in self._options.digest_at:
            self._write(f"digest-{step}-{self.rank}.json", step)
        return self.is_over(step)

    def is_over(self, step: int) -> bool:
        """Whether this step is the last; leave the final digest if it is."""
        # All are in the same step or the next: whoever writes a later one reaches all in time.
        end: Path = self._options.end
        if not end.exists() or step < int(end.read_text()):
            return False
        self._write(f"final-{self.rank}.json", step)
        return True

    def _write(self, name: str, step: int) -> None:
        digest = hashlib.sha256()
        for tensor in self.model.state_dict().values():
            digest.update(tensor.numpy().tobytes())
        unfinished = self._options.records / f"{name}.tmp"
        unfinished.write_text(json.dumps({"step": step, "hash": digest.hexdigest()}))
        unfinished.replace(self._options.records / name)


class Saver:
    """Checkpoints as a careful user writes them: fsync, rename, and no more of them than pay.

    Args:
        path: the checkpoint's.
        training: what is saved.
        mean_s: between two kills: the interval follows Young, sqrt(2 × cost of a save × mean).
        every_s: the interval instead of that; 0 for Young's.
    """

    def __init__(self, path: Path, training: Training, mean_s: float, every_s: float) -> None:
        self._path = path
        self._training = training
        self._mean_s = mean_s
        self._every_s = every_s
        self._cost_s = 0.0
        self._last_s = time.monotonic()

    def load(self) -> int:
        """The step to go on from."""
        if not self._path.exists():
            return 0
        found = torch.load(self._path)
        self._training.model.load_state_dict(found["model"])
        self._training.optimizer.load_state_dict(found["optimizer"])
        self._cost_s = found["cost_s"]
        return int(found["step"])

    def save_if_due(self, step: int) -> None:
        """Save where the interval is over."""
        begun_s = time.monotonic()
        young_s = math.sqrt(2 * self._cost_s * self._mean_s) or FIRST_SAVE_S
        if begun_s < self._last_s + (self._every_s or young_s):
            return
        model, optimizer = self._training.model, self._training.optimizer
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        unfinished = self._path.with_suffix(".tmp")
        with unfinished.open("wb") as file:
            torch.save({**state, "step": step, "cost_s": self._cost_s}, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self._path)
        self._last_s = time.monotonic()
        cost_s = self._last_s - begun_s
        self._cost_s += (cost_s - self._cost_s) * (0.2 if self._cost_s else 1.0)


def main() -> None:
    """Train until the file ``--end`` names a step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("--way", choices=["session", "save", "torchft"], required=True)
    parser.add_argument("--end", type=Path, required=True)
    parser.add_argument("--sleep", type=float, default=0.015, help="seconds in each step")
    parser.add_argument("--mean-s", type=float, default=8.0, help="between two kills")
    parser.add_argument("--save-s", type=float, default=0.0, help="between saves; 0 for Young's")
    parser.add_argument("--digest-at", type=int, nargs="*", default=[])
    options = parser.parse_args()
    match options.way:
        case "session":
            with_session(options)
        case "save":
            with_saves(options)
        case _:
            with_torchft(options)


def with_session(options: argparse.Namespace) -> None:
    """Outlast saves when it wants to."""
    outlast, modes = (importlib.import_module(name) for name in ("outlast", "bench.modes"))
    dist.init_process_group("gloo")
    training, world = Training(options, dist.get_rank()), dist.get_world_size()
    ddp = torch.nn.parallel.DistributedDataParallel(training.model)
    kept = {"model": training.model, "optimizer": training.optimizer}
    loss: float | None = None
    with outlast.session(**kept, every="auto") as session:
        for _ in session.steps(modes.Endless(), until=10**9):
            # Whatever the step before came to: one that a loss has interrupted is made again.
            if loss is not None and training.completed(session.step, loss, world):
                break
            loss = training.ddp_step(ddp, session.step)
    dist.destroy_process_group()


def with_saves(options: argparse.Namespace) -> None:
    """Rank 0 saves, all load."""
    dist.init_process_group("gloo")
    training, world = Training(options, dist.get_rank()), dist.get_world_size()
    saver = Saver(options.records / "model.pt", training, options.mean_s, options.save_s)
    step = saver.load()
    ddp = torch.nn.parallel.DistributedDataParallel(training.model)
    while not training.completed(step + 1, training.ddp_step(ddp, step), world):
        step += 1
        if training.rank == 0:
            saver.save_if_due(step)
    dist.destroy_process_group()


def with_torchft(options: argparse.Namespace) -> None:
    """A new replica heals from one that lives; nothing is on disk."""
    torchft_train = importlib.import_module("bench.torchft_train")
    training = Training(options, int(os.environ["REPLICA"]))
    discarded = (options.records / f"discarded-{training.rank}.jsonl").open("a", buffering=1)
    manager = torchft_train.manager_of(training.model, training.optimizer, training.rank)
    while True:
        batch = training.plain.batch(manager.current_step(), training.rank)
        loss = torchft_train.step(manager, training.model, training.optimizer, batch)
        if loss is None:
            discarded.write(json.dumps({"t": time.time(), "step": manager.current_step()}) + "\n")
            continue
        time.sleep(options.sleep)
        training.records.completed(manager.current_step(), loss, manager.num_participants())
        if training.is_over(manager.current_step()):
            os._exit(0)  # its threads wait for a quorum that nobody needs any more


if __name__ == "__main__":
    main()
