"""What each part of a save takes from a training loop beside it, one part at a time.

A save copies the state, hashes it and writes it. Here another process does one of these with as
many bytes, at full speed, while the loop of ``saving.py`` trains; the loss is the time of all steps
that overlap with it, less as many undisturbed medians. Nothing of Outlast runs: this is what the
machine (its memory, its host's disk threads, its neighbours) takes for the work itself, and what a
save that does this work has to be read against. The parts take turns, "nothing" (the other process
sleeps for as long as a copy takes) among them: it shows how far a loss is off by noise.

- copy: one thread, into memory that was touched before: each byte is read once and written once;
- hash: XXH3-128 over blocks of 16 MiB in memory, one thread: each byte is read once;
- write: O_DIRECT blocks of 16 MiB over an old file and one fsync, two threads: each byte is read
  once, by the device.

    python benchmarks/save_burden.py [--threads 2] [--rotations 4] [--dir DIR] [--quick]
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import torch
import xxhash

from bench.disk import BLOCK, copy_in_parts, memory, write_direct
from bench.rotation import directory
from bench.tables import cell, emit, machine, markdown
from bench.training import Loop, build, num_bytes, width_for

PARTS: Final = ("nothing", "copy", "hash", "write")
NOTHING_S: Final = 0.3
SETTLE: Final = 2


def main() -> None:
    """Measure, print one JSON object and a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=2128.0, help="size of the state, MB")
    parser.add_argument("--tokens", type=int, default=16, help="per step: the length of a step")
    parser.add_argument("--threads", type=int, default=1, help="torch's, for training")
    parser.add_argument("--rotations", type=int, default=6)
    parser.add_argument("--undisturbed", type=int, default=6, help="steps before each part")
    parser.add_argument("--dir", type=Path, help="where to write: a directory on the disk meant")
    parser.add_argument("--quick", action="store_true", help="a small smoke run")
    options = parser.parse_args()
    if options.quick:
        options.mb, options.rotations = 64.0, 1
    width = width_for(options.mb)
    size = num_bytes(width) // BLOCK * BLOCK
    place = options.dir or Path(tempfile.gettempdir())
    description = machine(place)
    found: dict[str, dict[str, list[float]]] = {}
    with directory(place) as path:
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        helper = context.Process(target=work, args=(theirs, size, path / "data"), daemon=True)
        helper.start()
        ours.recv()  # it is ready
        torch.set_num_threads(options.threads)
        loop = Loop(*build(width), options.tokens)
        for _ in range(SETTLE):
            step(loop)
        for _ in range(options.rotations):
            for part in PARTS:
                taken = beside(loop, ours, part, options.undisturbed)
                for key, value in taken.items():
                    found.setdefault(part, {}).setdefault(key, []).append(value)
        ours.send("")
        helper.join()
    result = {"benchmark": "save_burden", "machine": description, "bytes": size, "parts": found}
    header = ["part", "it took, s", "taken from training, s", "step meanwhile, x"]
    keys = ("took_s", "lost_s", "step_x")
    rows = ([part, *(cell(one[key]) for key in keys)] for part, one in found.items())
    emit(result, [markdown(header, rows)])


def step(loop: Loop) -> float:
    """One step; its seconds."""
    return loop.finish(time.perf_counter()).total


def beside(loop: Loop, helper: Connection, part: str, undisturbed: int) -> dict[str, float]:
    """Train while the other process does ``part``: what it took, and what it cost."""
    usual = statistics.median(step(loop) for _ in range(undisturbed))
    helper.send(part)
    start = time.perf_counter()
    steps = []
    while not helper.poll():
        steps.append(step(loop))
    lost_s = time.perf_counter() - start - len(steps) * usual
    step_x = statistics.mean(steps) / usual
    return {"took_s": helper.recv(), "lost_s": lost_s, "step_x": step_x, "step_s": usual}


def work(asked: Connection, size: int, file: Path) -> None:
    """In the other process: do what is asked for, and answer with its seconds."""
    torch.set_num_threads(1)
    source, target = memory(size, huge=False), memory(size, huge=False)
    view = memoryview(source)
    tensors = [torch.frombuffer(one, dtype=torch.uint8) for one in (source, target)]
    write_direct(file, source, 2, new=True)
    asked.send("ready")
    while part := asked.recv():
        start = time.perf_counter()
        if part == "copy":
            copy_in_parts(tensors[0], tensors[1], 1)
        elif part == "hash":
            for offset in range(0, size, BLOCK):
                xxhash.xxh3_128_intdigest(view[offset : offset + BLOCK])
        elif part == "write":
            write_direct(file, source, 2, new=False)
        else:
            time.sleep(NOTHING_S)
        asked.send(time.perf_counter() - start)


if __name__ == "__main__":
    main()
