"""What measuring a step's time costs: the same step with and without it, side by side.

Two real workers (gloo, DDP) train with steps of ``--step-ms``. In each, blocks of steps with the
meter on and off alternate in the same process, so that the machine's moods hit both alike; both
workers switch at the same steps. Reported of rank 0: the median step of each kind, their ratio, the
spread of the ratios of neighbouring blocks, and the meter's own CPU time per step, on the training
thread. With ``--store``: what rank 0's agent takes to read and judge what so many machines tell,
with steps of a second.

    python benchmarks/straggler_cost.py [--step-ms 20] [--blocks 60] [--steps 25] [--store 1000]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from outlast.attempt.beat import BEATS_VARIABLE, Beat
from outlast.attempt.link import connect, open_store
from outlast.health.watched import LEAST, Times, Timings, interval_s
from outlast.launch import symptoms as judged
from outlast.ledger.file import QueuedLedger
from outlast.policy.stragglers import StepReports, Stragglers
from outlast.training.timing import Meter, Samples

HOST_S = 1.5e-3  # of a step, about: forward, backward and sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--store", type=int, default=0, help="machines of eight ranks each")
    options = parser.parse_args()
    if "RANK" in os.environ:
        worker(options)
        return
    result = {"step_ms": options.step_ms, **measured(sys.argv[1:])}
    if options.store:
        result["store"] = store_load(options.store)
    print(json.dumps(result, indent=1))


def measured(arguments: list[str]) -> dict[str, Any]:
    """Run both workers; what rank 0 found."""
    with socket.socket() as probe, tempfile.TemporaryDirectory(dir="/dev/shm") as beats:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        shared |= {BEATS_VARIABLE: beats, "OMP_NUM_THREADS": "1"}
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, *arguments],
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        told = [one.communicate(timeout=3600)[0] for one in workers]
        found: dict[str, Any] = json.loads(told[0])
        return found


def worker(options: argparse.Namespace) -> None:
    """One worker: blocks with and without the meter."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    trained = torch.nn.parallel.DistributedDataParallel(model)
    batch = torch.randn(32, 64)
    meter = Meter(
        Beat(), Samples(QueuedLedger(Path(), job=""), 1), alone=False, is_saving=lambda: False
    )
    number = 0

    def step(on: bool) -> tuple[float, float]:
        nonlocal number
        began_s, cpu_s = time.perf_counter(), time.thread_time()
        if on:
            meter.loading()
            meter.stepping()
        loss = trained(batch).pow(2).mean()
        loss.backward()
        busy_s = time.thread_time() - cpu_s
        # A device that computes, asleep, so that two workers fit two cores: as long whatever was
        # before it, or it would hide what the meter took there.
        time.sleep(max(options.step_ms / 1000 - HOST_S, 0.0))
        cpu_s = time.thread_time()
        number += 1
        if on:
            meter.updating(0.0)
            meter.ended(number)
        return time.perf_counter() - began_s, busy_s + time.thread_time() - cpu_s

    blocks: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for block in range(2 * options.blocks + 2):
        on = bool(block % 2) ^ bool(block // 2 % 2)
        if on:
            meter.open([model])
        seen = [step(on) for _ in range(options.steps)]
        if on:
            meter.close()
        if block >= 2:  # the first of each kind warms up
            blocks[on].append(
                (statistics.median(s for s, _ in seen), statistics.median(c for _, c in seen))
            )
    if dist.get_rank() == 0:
        print(json.dumps(summary(blocks, options)))
    dist.destroy_process_group()


def summary(
    blocks: dict[bool, list[tuple[float, float]]], options: argparse.Namespace
) -> dict[str, Any]:
    """Medians, their ratio, its spread, and the CPU time that is the meter's own."""
    off, on = ([whole for whole, _ in blocks[kind]] for kind in (False, True))
    cpu_off, cpu_on = ([cpu for _, cpu in blocks[kind]] for kind in (False, True))
    ratios = statistics.quantiles([b / a for a, b in zip(off, on, strict=True)], n=4)
    own_us = (statistics.median(cpu_on) - statistics.median(cpu_off)) * 1e6
    return {
        "off_ms": statistics.median(off) * 1000,
        "on_ms": statistics.median(on) * 1000,
        "overhead_percent": (statistics.median(on) / statistics.median(off) - 1) * 100,
        "ratio_quartiles": ratios,
        "own_cpu_us_per_step": own_us,
        "own_cpu_percent_of_step": own_us / options.step_ms / 10,
        "blocks": len(on),
        "steps_per_block": options.steps,
    }


def store_load(machines: int, ranks: int = 8) -> dict[str, float]:
    """Seconds that one look at all machines takes rank 0's agent, and how often it looks."""
    server, port = open_store("127.0.0.1")
    client = connect("127.0.0.1", port, judged.STORE)
    random = np.random.default_rng(0)
    size = 0
    keys = [judged._key(machine) for machine in range(machines)]

    def tell(first: int) -> float:
        nonlocal size
        took_s = 0.0
        numbers = np.arange(first, first + LEAST).astype(np.int64).tobytes()
        for machine, key in enumerate(keys):
            rows = random.normal(1.0, 0.02, (ranks, LEAST, 4)) * [0.8, 0.1, 0.1, 0.0]
            told = Times(
                ranks=tuple(range(machine * ranks, (machine + 1) * ranks)),
                kinds=(1,) * ranks,
                steps=numbers,
                seconds=rows.astype(np.float32).tobytes(),
            )
            raw = judged._encoder.encode(Timings(attempt=1, node=f"n{machine}", ranks=(told,)))
            size = len(raw)
            began_s = time.perf_counter()
            client.set(key, raw)
            took_s += time.perf_counter() - began_s
        return took_s / machines

    steps = StepReports(machines * ranks)
    judge = Stragglers([1] * (machines * ranks))
    looks, sets, cpus = [], [], []
    for first in range(1, 100, 5):  # five new steps each time: one a second
        sets.append(tell(first))
        began_s, cpu_s = time.perf_counter(), time.process_time()
        for raw in client.multi_get(keys):
            for times in judged._decoder.decode(raw).ranks:
                steps.add(times.ranks, times.kinds, times.steps, times.seconds)
        for number, (compute, wait, data, stall) in steps.complete():
            judge.see(number, compute, wait, data, stall)
        looks.append(time.perf_counter() - began_s)
        cpus.append(time.process_time() - cpu_s)
    del server
    return {
        "machines": machines,
        "ranks": machines * ranks,
        "word_bytes": size,
        "set_us": statistics.median(sets) * 1e6,
        "look_s": statistics.median(looks[5:]),  # once there are enough steps to judge
        "look_cpu_s": statistics.mean(cpus[5:]),  # the store's server in it
        "first_look_s": looks[0],
        "every_s": interval_s(machines),
        "core_percent": statistics.mean(cpus[5:]) / interval_s(machines) * 100,
    }


if __name__ == "__main__":
    main()
