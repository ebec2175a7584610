"""What hearing the platform costs a training step: the same loop with and without the watchers.

Blocks of steps alternate, with the platform's watchers in their threads and without. Each step does
a fixed piece of work (a real model, as often as fits into ``--step-ms``), however long that takes:
a step that is padded to a length would hide what a thread of ours costs. The service is another
process on this machine, as it is another machine's in a cloud.

Reported: medians of both kinds of block; the ratio of neighbouring blocks with its quartiles, by
the clock and by the training thread's own processor time (what others do on the machine is in the
first and not in the second). Then, for each platform, the processor time that its watchers'
threads took while the loop ran, over the wall time: what no ratio on a shared machine could show.

    python benchmarks/notice_cost.py [--step-ms 10] [--blocks 200] [--seconds 1] [--poll 1]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bench import TESTS
from outlast.notice.platform import choose
from outlast.notice.source import WatchThread

SERVE = """
import sys
sys.path.append(sys.argv[2])
from metadata_servers import alibaba, azure, gcp
from outlast.drill import metadata_server as aws
kinds = {"aws": aws.AwsMetadataServer, "gcp": gcp.GcpMetadataServer,
         "azure": azure.AzureMetadataServer, "alibaba": alibaba.AlibabaMetadataServer}
with kinds[sys.argv[1]]() as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""
PLATFORMS = ("aws", "gcp", "azure", "alibaba")


class Watching:
    """The threads of a platform's watchers, and the processor time they have taken."""

    def __init__(self, platform: str, url: str, interval_s: float) -> None:
        self.watchers = choose(platform, url).watchers
        self._threads = [WatchThread(one, print, interval_s) for one in self.watchers]
        for thread in self._threads:
            thread.start()
        self._clocks = [time.pthread_getcpuclockid(one) for one in map(_number, self._threads)]
        self.started_s = time.perf_counter()

    @property
    def polls(self) -> int:
        """So far."""
        return sum(getattr(one, "polls", 0) for one in self.watchers)

    def processor_s(self) -> float:
        """So far."""
        return sum(map(time.clock_gettime, self._clocks))

    def stop(self) -> None:
        """End the threads."""
        for thread in self._threads:
            thread.stop()


def _number(thread: WatchThread) -> int:
    number = thread._thread.ident
    assert number is not None
    return number


@contextmanager
def service(platform: str) -> Iterator[str]:
    """A metadata service in a process of its own; its address."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, platform, str(TESTS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(10)


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each block")
    parser.add_argument("--poll", type=float, default=1.0)
    parser.add_argument("--alone", type=float, default=30.0, help="seconds for each platform")
    options = parser.parse_args()
    step = work(options.step_ms)
    steps = max(round(options.seconds * 1000 / options.step_ms), 1)
    with service("aws") as url:
        found: dict[str, Any] = compare(step, steps, url, options)
    found["watchers"] = {name: alone(step, name, options) for name in PLATFORMS}
    print(json.dumps(found, indent=1))


def work(step_ms: float) -> Callable[[], None]:
    """A step: a fixed piece of work that takes about so long."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(32, 64), torch.randn(32, 1)

    def passes(count: int) -> None:
        for _ in range(count):
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    passes(50)
    start = time.perf_counter()
    passes(500)
    count = max(round(step_ms / ((time.perf_counter() - start) / 500 * 1000)), 1)
    return lambda: passes(count)


def compare(
    step: Callable[[], None], steps: int, url: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Blocks with and without the watcher, in turns; which comes first takes turns too."""
    clock: dict[bool, list[float]] = {False: [], True: []}
    own: dict[bool, list[float]] = {False: [], True: []}
    for pair in range(options.blocks):
        for watched in (pair % 2 == 0, pair % 2 == 1):
            watching = Watching("aws", url, options.poll) if watched else None
            start, start_own = time.perf_counter(), time.thread_time()
            for _ in range(steps):
                step()
            clock[watched].append((time.perf_counter() - start) / steps * 1000)
            own[watched].append((time.thread_time() - start_own) / steps * 1000)
            if watching is not None:
                watching.stop()
    return {
        "step_ms": {
            "without": statistics.median(clock[False]),
            "with": statistics.median(clock[True]),
        },
        "ratio_by_the_clock": ratio(clock[True], clock[False]),
        "ratio_by_processor_time": ratio(own[True], own[False]),
    }


def ratio(mine: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles over neighbouring blocks."""
    quartiles = statistics.quantiles([a / b for a, b in zip(mine, other, strict=True)], n=4)
    return {"median": quartiles[1], "quartiles": [quartiles[0], quartiles[2]]}


def alone(step: Callable[[], None], platform: str, options: argparse.Namespace) -> dict[str, float]:
    """What this platform's watchers take of one core while the loop runs."""
    with service(platform) as url:
        watching = Watching(platform, url, options.poll)
        while time.perf_counter() - watching.started_s < options.alone:
            step()
        spent_s, wall_s = watching.processor_s(), time.perf_counter() - watching.started_s
        polls = watching.polls
        watching.stop()
    return {
        "polls": polls,
        "processor_us_per_poll": spent_s / polls * 1e6,
        "share_of_one_core": spent_s / wall_s,
    }


if __name__ == "__main__":
    main()
