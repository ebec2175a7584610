"""What hearing the platform costs a training step: the same loop with and without a watcher.

Blocks of steps (a real model padded by computing to ``--step-ms``) alternate: with the watcher's
thread polling a metadata service each ``--poll`` seconds, and without. The service is another
process on this machine, as it is another machine's in a cloud. Reported: medians of both kinds of
block, the ratio of neighbouring blocks with its quartiles, and the processor time of one poll, from
which the ratio that nothing could measure follows: poll's time over the polling period.

    python benchmarks/notice_cost.py [--step-ms 50] [--blocks 30] [--seconds 3] [--poll 1]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

import torch

from outlast.notice.aws import AwsWatcher
from outlast.notice.watch import WatchThread

SERVE = """
import sys
from outlast.drill.metadata_server import AwsMetadataServer
with AwsMetadataServer() as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--poll", type=float, default=1.0)
    options = parser.parse_args()
    service = subprocess.Popen(
        [sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert service.stdout is not None
    assert service.stdin is not None
    url = service.stdout.readline().strip()
    try:
        print(json.dumps(measure(url, options), indent=1))
    finally:
        service.stdin.close()
        service.wait(10)


def measure(url: str, options: argparse.Namespace) -> dict[str, object]:
    """The figures."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(32, 64), torch.randn(32, 1)

    def block(steps: int) -> float:
        """Milliseconds of one step. Each does a fixed piece of work, however long that takes."""
        start = time.perf_counter()
        for _ in range(steps * passes):
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return (time.perf_counter() - start) / steps * 1000

    passes = 1
    one_ms = statistics.median(block(50) for _ in range(9))
    passes = max(round(options.step_ms / one_ms), 1)
    steps = max(round(options.seconds * 1000 / options.step_ms), 1)
    block(steps)
    without: list[float] = []
    with_watcher: list[float] = []
    polls = 0
    for _ in range(options.blocks):
        without.append(block(steps))
        watcher = AwsWatcher(url)
        thread = WatchThread(watcher, print, interval_s=options.poll)
        thread.start()
        with_watcher.append(block(steps))
        thread.stop()
        polls += watcher.polls
    ratios = [mine / other for mine, other in zip(with_watcher, without, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    poll_us = poll_cost_us(url)
    return {
        "step_ms": {
            "without": statistics.median(without),
            "with": statistics.median(with_watcher),
        },
        "ratio": {"median": quartiles[1], "quartiles": [quartiles[0], quartiles[2]]},
        "polls_heard": polls,
        "poll_processor_us": poll_us,
        "share_of_one_core": poll_us / 1e6 / options.poll,
    }


def poll_cost_us(url: str, polls: int = 300) -> float:
    """Processor time of this process for one poll, in microseconds: the median."""
    watcher = AwsWatcher(url)
    found = []
    for _ in range(polls):
        start = time.thread_time()
        watcher.poll()
        found.append((time.thread_time() - start) * 1e6)
    return statistics.median(found)


if __name__ == "__main__":
    main()
