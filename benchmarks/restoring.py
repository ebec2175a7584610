"""How long a saved state takes to come back into a live model and optimizer.

A transformer's weights and AdamW moments (2.13 GB) are saved once in four formats; then the ways to
read them take turns in one run, each turn in a fresh process whose model and optimizer hold another
state in touched memory:

- outlast, with verification: entering a session. Its parts: ``import`` (not counted: the peers'
  imports are not either), ``open`` (job directory, keeper), ``read`` (``resumed.read_s`` in the
  ledger: finding, verifying and reading the checkpoint), ``after`` (applying what is left, start);
- ``dcp.load`` in place; ``torch.load(mmap=True)`` and ``safetensors`` with a copy into the live
  tensors. None of them notices a wrong byte.

Cold: the files were put out of the page cache (posix_fadvise DONTNEED after a sync) right before;
a host below a virtual disk may still hold them. Warm: they were read into it. From memory: a worker
that has just saved is killed with SIGKILL, and a session of another process goes on from what the
keeper holds; not available where the ledger's ``resumed.source`` does not say memory.

Limits, in the same run: the disk's, four readers of 16 MiB O_DIRECT blocks of Outlast's own file
into huge pages; memory's, a copy of as many bytes by one and by two threads. After each restore a
fingerprint over all tensors is compared.

    python benchmarks/restoring.py [--rotations 5] [--quick]
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

import torch

from bench.disk import copy_in_parts, drop_cache, fill_cache, memory, read_direct
from bench.rotation import TurnFailed, Worker, directory
from bench.tables import Requirements, cell, column, emit, machine, markdown, median
from bench.training import width_for

MODES: Final = ("outlast", "dcp.load", "torch.load mmap", "safetensors")
MEMORY: Final = "outlast, from memory"
PARTS: Final = ("import_s", "open_s", "read_s", "after_s")


class Restores:
    """Restores taken in turn; the samples of each way and each state of the cache.

    Args:
        place: where the saved state is to lie.
        options: size of the state, torch's threads.
        log: where the workers' own output goes.
        modes: in which it is saved.
    """

    def __init__(
        self,
        place: Path,
        options: Mapping[str, Any],
        log: IO[str],
        modes: Sequence[str] = MODES,
    ) -> None:
        self._place, self._options, self._log = place, dict(options), log
        self._options["formats"] = list(modes)
        self.samples: dict[str, list[dict[str, Any]]] = {}
        self.failed: dict[str, str] = {}
        self.num_bytes = 0
        self._fingerprint = 0.0

    def prepare(self) -> None:
        """Save one state in every format."""
        with self._worker("outlast", steps=3) as worker:
            self.num_bytes = worker.answer()["state_bytes"]
            self._fingerprint = worker.ask("prepare")["fingerprint"]
            worker.ask("end")

    def turn(self, mode: str) -> None:
        """One cold restore and one warm, in a process that has neither seen."""
        with self._worker(mode, steps=1) as worker:
            worker.answer()
            drop_cache(self._place)
            self._note(f"{mode}, cold", worker.ask("restore"))
            fill_cache(self._place / mode)
            self._note(f"{mode}, warm", worker.ask("restore"))
            worker.ask("end")

    def from_memory(self) -> None:
        """A restore from what a keeper holds after its worker was killed."""
        with self._worker("outlast", steps=1) as holder, self._worker("outlast", steps=1) as worker:
            holder.answer()
            worker.answer()
            holder.ask("hold")
            os.kill(holder.process.pid, signal.SIGKILL)
            holder.process.wait(30)
            sample = worker.ask("restore")
            worker.ask("end")
            source = sample["parts"]["source"]
            if "memory" not in source:
                raise TurnFailed(f"n/a: it came from {source}")
            self._note(MEMORY, sample)

    def data_file(self) -> Path:
        """The largest file of Outlast's checkpoint."""
        files = (self._place / "outlast").rglob("*.safetensors")
        return max(files, key=lambda file: file.stat().st_size)

    def _worker(self, mode: str, steps: int) -> Worker:
        options = {**self._options, "mode": mode, "steps": steps, "directory": str(self._place)}
        return Worker("bench.restore_worker", options, sys.executable, self._log)

    def _note(self, name: str, sample: dict[str, Any]) -> None:
        if not math.isclose(sample["fingerprint"], self._fingerprint, rel_tol=1e-9):
            raise TurnFailed("what was restored is not what was saved")
        self.samples.setdefault(name, []).append(sample)


def main() -> None:
    """Measure, print one JSON object and the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=2128.0, help="size of the state, MB")
    parser.add_argument("--threads", type=int, default=2, help="torch's")
    parser.add_argument("--rotations", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to write: a directory on the disk meant")
    parser.add_argument("--no-memory", action="store_true", help="leave out the keeper's memory")
    parser.add_argument("--quick", action="store_true", help="a small smoke run")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="workers' own output")
    options = parser.parse_args()
    if options.quick:
        options.mb, options.rotations = 64.0, 1
    description = machine(options.dir or Path(tempfile.gettempdir()))
    given = {"width": width_for(options.mb), "tokens": 16, "threads": options.threads}
    limits: dict[str, list[float]] = {}
    with (
        options.log.open("a") as log,
        directory(options.dir or Path(tempfile.gettempdir())) as place,
    ):
        restores = Restores(place, given, log)
        try:
            restores.prepare()
        except TurnFailed as error:
            sys.exit(f"nothing was measured: the state could not be saved: {error}")
        for rotation in range(options.rotations):
            for mode in (*MODES, *(() if options.no_memory else (MEMORY,))):
                if mode not in restores.failed:
                    print(f"turn {rotation + 1}: {mode}", file=sys.stderr, flush=True)
                    take(restores, mode)
            for name, seconds in measure_limits(restores).items():
                limits.setdefault(name, []).append(seconds)
    required = requirements(restores, limits)
    result = {
        "benchmark": "restoring",
        "machine": description,
        "bytes": restores.num_bytes,
        "samples": restores.samples,
        "failed": restores.failed,
        "limits_s": limits,
        "requirements": required.rows,
    }
    emit(result, [table(restores, limits), parts_table(restores), required.table()])


def take(restores: Restores, mode: str) -> None:
    """One turn; a mode that fails is left out from then on, with its reason."""
    try:
        if mode == MEMORY:
            restores.from_memory()
        else:
            restores.turn(mode)
    except TurnFailed as error:
        restores.failed[mode] = str(error)


def measure_limits(restores: Restores) -> dict[str, float]:
    """Seconds that as many bytes take at least, from the disk and from memory."""
    file = restores.data_file()
    drop_cache(file)
    size, elapsed = read_direct(file)
    scale = restores.num_bytes / size
    source = torch.frombuffer(memory(restores.num_bytes, huge=True), dtype=torch.uint8)
    target = torch.frombuffer(memory(restores.num_bytes, huge=False), dtype=torch.uint8)
    return {
        "disk, 4 readers": elapsed * scale,
        "memory, 1 thread": copy_in_parts(source, target, 1),
        "memory, 2 threads": copy_in_parts(source, target, 2),
    }


def requirements(restores: Restores, limits: dict[str, list[float]]) -> Requirements:
    """What a restore must show beside the others and beside the machine."""

    def of(name: str) -> float | None:
        return median(restores.samples.get(name, []), "restore_s")

    required = Requirements()
    disk = median([{"s": seconds} for seconds in limits["disk, 4 readers"]], "s")
    copied = median([{"s": seconds} for seconds in limits["memory, 1 thread"]], "s")
    required.at_most("cold, beside dcp.load", of("outlast, cold"), 1.0, of("dcp.load, cold"))
    required.at_most("cold, beside the disk's limit", of("outlast, cold"), 1.5, disk)
    required.at_most("from memory, beside a copy by one thread", of(MEMORY), 2.0, copied)
    return required


def table(restores: Restores, limits: dict[str, list[float]]) -> str:
    """Seconds, cold and warm, and the limits."""
    rows = []
    for mode in MODES:
        cells = [
            cell(column(restores.samples.get(f"{mode}, {cache}", []), "restore_s"))
            for cache in ("cold", "warm")
        ]
        rows.append([mode, *cells, restores.failed.get(mode, "")])
    held = cell(column(restores.samples.get(MEMORY, []), "restore_s"))
    rows.append([MEMORY, "", held, restores.failed.get(MEMORY, "")])
    for name, seconds in limits.items():
        from_disk = name.startswith("disk")
        rows.append([f"limit: {name}", cell(seconds), "", ""])
        if not from_disk:
            rows[-1][1:3] = ["", cell(seconds)]
    return markdown(["restore", "cold, s", "warm, s", ""], rows)


def parts_table(restores: Restores) -> str:
    """Where the time of entering a session goes."""
    rows = []
    for name in ("outlast, cold", "outlast, warm", MEMORY):
        parts = [sample["parts"] for sample in restores.samples.get(name, [])]
        if parts:
            rows.append([name, *(cell(column(parts, part)) for part in PARTS)])
    return markdown(["session", *(part[:-2] + ", s" for part in PARTS)], rows)


if __name__ == "__main__":
    main()
