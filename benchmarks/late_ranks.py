"""One of four workers is three times as slow: wait for it, have others make its shards, or drop.

Four workers on gloo under a session each, with ``outlast.SameBits`` and ``outlast.data.Loader``. A
shard takes a forward and backward pass of a small network and a sleep in it, as a device would take
its time: so what is measured does not depend on the cores. One worker's sleep is three times as
long, from the first step to the last. The ways take turns in the same processes, job after job;
``nobody late`` is the same job without it. Of each job the steps behind the first ``SETTLE`` count:
their median time, and the samples in their sums per second. Then the job's last checkpoint is
audited, and the hash over weights and optimizer is compared.

    python benchmarks/late_ranks.py [--turns 5] [--steps 60] [--shards 16] [--shard-ms 20]
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

import outlast
from bench import tables
from bench.ports import free_port

WORKERS: Final = 4
SLOW_RANK: Final = 1
FACTOR: Final = 3.0
SETTLE: Final = 20  # steps: until it is decided, and shares have moved
WIDTH: Final = 64
SAMPLES: Final = 4  # of a shard
WAYS: Final = {
    "nobody late": ("wait", 1.0),
    "wait": ("wait", FACTOR),
    "move": ("move", FACTOR),
    "drop": ("drop", FACTOR),
}


def main() -> None:
    """Run the jobs in turns; print JSON and a table."""
    options = parse()
    if options.place is not None:
        work(options)
        return
    with tempfile.TemporaryDirectory() as place:
        launch(options, Path(place))
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for way, turn in itertools.product(WAYS, range(options.turns)):
            found[way].append(look(options, Path(place, f"{turn}-{way}")))
    result = {"machine": tables.machine(), "shards": options.shards, "runs": found}
    tables.emit(result, [table(found), verdict(found)])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--shard-ms", type=float, default=20.0)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def launch(options: argparse.Namespace, place: Path) -> None:
    """Run the workers, which go through all jobs, to their end."""
    environment = {
        **os.environ,
        "WORLD_SIZE": str(WORKERS),
        "LOCAL_WORLD_SIZE": str(WORKERS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, "--place", str(place)]
    for name in ("turns", "steps", "shards", "shard_ms"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    workers = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(WORKERS)
    ]
    try:
        codes = [worker.wait() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    if any(codes):
        raise SystemExit(f"the workers ended with {codes}")


def look(options: argparse.Namespace, job: Path) -> dict[str, Any]:
    """What one job took, and what its audit says."""
    ranks = [json.loads(Path(f"{job}.{rank}.json").read_text()) for rank in range(WORKERS)]
    command = [sys.executable, "-m", "outlast", "checkpoints", "show", "--samples", "--json"]
    shown = subprocess.run([*command, str(job)], check=True, capture_output=True)
    audit = json.loads(shown.stdout)
    ends = ranks[0]["ends_s"]
    made = [sum(of["made"][step] for of in ranks) for step in range(options.steps)]
    steps_s = [after - before for before, after in itertools.pairwise(ends[SETTLE - 1 :])]
    return {
        "step_s": statistics.median(steps_s),
        "samples_per_s": sum(made[SETTLE:]) / sum(steps_s),
        "in_sum": sum(made[SETTLE:]) / (len(steps_s) * options.shards * SAMPLES),
        "shards_of_last": [of["made"][-1] // SAMPLES for of in ranks],
        "hashes": sorted({of["hash"] for of in ranks}),
        "is_proved": audit["proved"],
        "handed_out": audit["samples"],
        "dropped": audit["num_dropped"],
        "counted": audit["samples"] - audit["num_dropped"] == sum(made),
    }


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Medians, and the range."""
    base = statistics.median(tables.column(found["wait"], "samples_per_s"))
    rows = []
    for way, runs in found.items():
        speed = tables.column(runs, "samples_per_s")
        rows.append(
            [
                way,
                tables.cell([1000 * one for one in tables.column(runs, "step_s")], 0),
                tables.cell(speed, 0),
                f"{statistics.median(speed) / base:.2f}",
                f"{100 * statistics.median(tables.column(runs, 'in_sum')):.1f} %",
                " ".join(map(str, runs[-1]["shards_of_last"])),
            ]
        )
    header = ["", "a step, ms", "samples/s", "beside waiting", "samples in sums", "shards"]
    return tables.markdown(header, rows)


def verdict(found: dict[str, list[dict[str, Any]]]) -> str:
    """What must hold of every job."""
    exact = {
        word
        for way in ("nobody late", "wait", "move")
        for one in found[way]
        for word in one["hashes"]
    }
    every = [one for runs in found.values() for one in runs]
    lines = {
        "the same weights and optimizer state undisturbed, waiting and moving": len(exact) == 1,
        "every audit proves its samples": all(one["is_proved"] for one in every),
        "what the audit counts is what was made": all(one["counted"] for one in every),
        "nothing is dropped but by drop": all(
            (one["dropped"] > 0) == (way == "drop") for way, runs in found.items() for one in runs
        ),
    }
    return "\n".join(f"{'PASS' if holds else 'FAIL'}  {line}" for line, holds in lines.items())


# --- in a worker ---------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    """One worker of all jobs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for turn in range(options.turns):
        for way, (answer, slow) in WAYS.items():
            os.environ["OUTLAST_WORKERS_LATE"] = answer
            train(options, options.place / f"{turn}-{way}", slow)
            dist.barrier()
    dist.destroy_process_group()


def train(options: argparse.Namespace, job: Path, slow: float) -> None:
    """One worker of one job."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.1)),
        nn.Linear(WIDTH, 8),
    )
    points = torch.utils.data.TensorDataset(
        torch.arange(997), torch.randn(997, WIDTH), torch.randint(8, (997,))
    )
    model = outlast.SameBits(net, shards=options.shards)
    optimizer = torch.optim.AdamW(net.parameters())
    loader = outlast.data.Loader(
        points, global_batch=options.shards * SAMPLES, shards=options.shards, seed=1
    )
    shard_s = options.shard_ms / 1000 * (slow if rank == SLOW_RANK else 1.0)
    ends_s: list[float] = []
    made: list[int] = []
    with outlast.session(model=model, optimizer=optimizer, loader=loader, dir=job) as session:
        for batch in session.steps(loader, until=options.steps):
            made.append(0)
            for ids, x, y in model.shards(batch):
                time.sleep(shard_s)
                model.backward(nn.functional.cross_entropy(model(x), y))
                made[-1] += len(ids)
            optimizer.step()
            ends_s.append(time.monotonic())
    digest = hashlib.sha256()
    states = [*net.state_dict().values()]
    states += [one for state in optimizer.state.values() for one in state.values()]
    for state in states:
        digest.update(state.detach().numpy().tobytes())
    found = {"ends_s": ends_s, "made": made, "hash": digest.hexdigest()}
    Path(f"{job}.{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
