"""What metrics cost a training step: the same job with its exporter at work and standing still.

``outlast run`` trains with two workers (gloo) that compute all the time, so that on two cores the
exporter has none of its own. Each step does a fixed piece of work of about ``--step-ms``, however
long that takes: a step that is padded to a length would hide what another process costs. Blocks of
seconds alternate within one run: with the exporter, which is scraped every ``--scrape-s`` (three
times as often as is usual with Prometheus), and with the exporter stopped (SIGSTOP) and not
scraped. The order within a pair alternates too.

Reported: the median step of both kinds of block; the ratio of neighbouring blocks with its
quartiles; and the exporter's own processor time over the time that it ran, as a share of one core:
what it could cost at most if a worker stood still for all of it, and what no ratio on a shared
machine could show.

    python benchmarks/metrics_cost.py [--step-ms 50] [--pairs 12] [--block-s 10] [--scrape-s 5]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist

import outlast

SIZE = 128
CALIBRATE_S = 2.0
READY_S = 120.0


class CostBlock(NamedTuple):
    """A stretch of monotonic time, and whether the exporter was at work in it."""

    is_on: bool
    began_s: float
    ended_s: float


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--block-s", type=float, default=10.0)
    parser.add_argument("--scrape-s", type=float, default=5.0)
    parser.add_argument("--records", type=Path, help="of a worker, which this starts")
    options = parser.parse_args()
    if options.records is not None:
        train(options.records, options.step_ms / 1000)
        return
    print(json.dumps({"step_ms": options.step_ms, **measured(options)}, indent=1))


# --- the workers ----------------------------------------------------------------------------------


def train(records: Path, step_s: float) -> None:
    """One worker, until a file says that it is enough."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(SIZE, SIZE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(SIZE, SIZE)
    rounds = calibrated(x, step_s)
    data = torch.utils.data.TensorDataset(torch.randn(4096, SIZE))
    loader = outlast.data.Loader(data, global_batch=32, seed=0)
    with (
        (records / f"steps-{dist.get_rank()}").open("w", buffering=1) as file,
        outlast.session(model=model, optimizer=optimizer, loader=loader, every="20 s") as session,
    ):
        while not (records / "enough").exists():
            for (batch,) in session.steps(loader, until=session.step + 20):
                for _ in range(rounds):
                    x = (x @ x).clamp(-1, 1)
                loss = model(batch).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                optimizer.step()
                session.log(loss=loss)
                file.write(f"{time.monotonic()}\n")


def calibrated(x: torch.Tensor, step_s: float) -> int:
    """How many rounds make a step, the same on all workers."""
    rounds, began_s = 0, time.thread_time()
    while time.thread_time() - began_s < CALIBRATE_S:
        x = (x @ x).clamp(-1, 1)
        rounds += 1
    shared = torch.tensor(max(int(rounds * step_s / CALIBRATE_S), 1))
    dist.broadcast(shared, 0)
    return int(shared)


# --- the blocks -----------------------------------------------------------------------------------


def measured(options: argparse.Namespace) -> dict[str, float]:
    """Run the job, alternate, and compare."""
    with tempfile.TemporaryDirectory() as place, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        command = [*(sys.executable, "-m", "outlast", "run"), "--nproc-per-node=2", "--resume"]
        command += ["--dir", f"{place}/job", __file__, "--records", place]
        environ = {
            **os.environ,
            "OUTLAST_METRICS_PORT": str(port),
            "OUTLAST_NOTICE_PLATFORM": "none",
        }
        job = subprocess.Popen([*command, "--step-ms", str(options.step_ms)], env=environ)
        try:
            wait_for(Path(place) / "steps-0", job, port)
            exporter = exporter_of(job)
            blocks, cpu_s = alternated(exporter, port, options)
        finally:
            (Path(place) / "enough").touch()
            job.wait(READY_S)
        ends_s = [float(line) for line in (Path(place) / "steps-0").read_text().split()]
    on_s = sum(block.ended_s - block.began_s for block in blocks if block.is_on)
    return {**compared(blocks, ends_s), "exporter_percent_of_a_core": 100 * cpu_s / on_s}


def wait_for(steps: Path, job: subprocess.Popen[bytes], port: int) -> None:
    """Until steps are made, and metrics are shown."""
    until_s = time.monotonic() + READY_S
    while time.monotonic() < until_s:
        if job.poll() is not None:
            raise SystemExit("metrics_cost.py: the job has ended by itself")
        if steps.exists() and len(steps.read_text()) > 1000 and scraped(port):
            return
        time.sleep(0.2)
    raise SystemExit("metrics_cost.py: no metrics of steps are shown")


def scraped(port: int) -> bool:
    """Ask as Prometheus does; whether there was an answer."""
    with contextlib.suppress(OSError):
        accept = {"Accept": "application/openmetrics-text;version=1.0.0"}
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=accept)
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return b"outlast_step_seconds" in answer.read()
    return False


def exporter_of(job: subprocess.Popen[bytes]) -> psutil.Process:
    """The job's exporter."""
    for child in psutil.Process(job.pid).children():
        if "outlast.metrics" in child.cmdline():
            return child
    raise SystemExit("metrics_cost.py: the job has no exporter")


def alternated(
    exporter: psutil.Process, port: int, options: argparse.Namespace
) -> tuple[list[CostBlock], float]:
    """The blocks, and the exporter's processor seconds in those that it was at work in."""
    blocks, cpu_s = [], 0.0
    for pair in range(options.pairs):
        for is_on in (True, False) if pair % 2 else (False, True):
            exporter.send_signal(signal.SIGCONT if is_on else signal.SIGSTOP)
            before = exporter.cpu_times()
            began_s = time.monotonic()
            while (left_s := began_s + options.block_s - time.monotonic()) > 0:
                if is_on and not scraped(port):
                    raise SystemExit("metrics_cost.py: a scrape has failed")
                time.sleep(min(options.scrape_s, left_s))
            blocks.append(CostBlock(is_on, began_s, time.monotonic()))
            after = exporter.cpu_times()
            cpu_s += after.user + after.system - before.user - before.system
    exporter.send_signal(signal.SIGCONT)
    return blocks, cpu_s


def compared(blocks: list[CostBlock], ends_s: list[float]) -> dict[str, float]:
    """Median steps of both kinds, and the ratios of neighbouring blocks."""
    steps = list(itertools.pairwise(ends_s))
    medians = [
        statistics.median(
            end - begin for begin, end in steps if block.began_s <= begin and end <= block.ended_s
        )
        for block in blocks
    ]
    kinds = {
        on: [m for m, one in zip(medians, blocks, strict=True) if one.is_on is on]
        for on in (True, False)
    }
    ratios = [on / off for on, off in zip(kinds[True], kinds[False], strict=True)]
    quarters = statistics.quantiles(ratios, n=4)
    return {
        "without_metrics_ms": statistics.median(kinds[False]) * 1000,
        "with_metrics_ms": statistics.median(kinds[True]) * 1000,
        "overhead_percent": (statistics.median(ratios) - 1) * 100,
        "ratio_quartile_low": quarters[0],
        "ratio_quartile_high": quarters[2],
        "pairs": len(ratios),
        "steps": len(steps),
    }


if __name__ == "__main__":
    main()
