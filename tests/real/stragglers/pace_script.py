"""A job whose ranks' pace is set: RECORDS STEPS [--slow RANK KIND FACTOR FIRST LAST] …

The emulated device sleeps, so that four workers on two cores do not hold each other up. Each step
ends with DDP's sum of the gradients, as a person's script would do it.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist

import outlast


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--compute", type=float, default=0.02)
    parser.add_argument("--load", type=float, default=0.002)
    parser.add_argument("--noise", type=float, default=0.03)
    parser.add_argument(
        "--slow", nargs=5, default=None, metavar=("R", "KIND", "X", "FIRST", "LAST")
    )
    parser.add_argument("--slow-node", help="the machine that is slow, in computing, by half")
    parser.add_argument("--way", choices=("ddp", "explicit", "real"), default="ddp")
    parser.add_argument("--every", default="100000 steps")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class Pace:
    """How long this rank takes, in each step."""

    def __init__(self, options, rank):
        self.options, self.rank, self.step = options, rank, 0
        self.random = random.Random(options.seed * 100 + rank)

    def of(self, kind):
        base = self.options.compute if kind == "compute" else self.options.load
        factor = max(self.random.gauss(1.0, self.options.noise), 0.5)
        extra = 0.0
        slow = self.options.slow
        is_mine = slow and int(slow[0]) == self.rank and slow[1] == kind
        if is_mine and int(slow[3]) <= self.step <= int(slow[4]):
            extra = (float(slow[2]) - 1) * self.options.compute
        if kind == "compute" and self.options.slow_node == os.uname().nodename:
            extra = 0.5 * base
        return base * factor + extra


class Batches(torch.utils.data.IterableDataset):
    def __init__(self, pace):
        self.pace = pace

    def __iter__(self):
        generator = torch.Generator().manual_seed(3)
        while True:
            self.pace.step += 1
            time.sleep(self.pace.of("loader"))
            yield torch.randn(4, 8, generator=generator)


def work(seconds, way):
    """What the device does; for real it is this core that computes."""
    if way != "real":
        time.sleep(seconds)
        return
    until = time.thread_time() + seconds
    a = torch.ones(64, 64)
    while time.thread_time() < until:
        a = a @ a / 64


def main():
    options = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    trained = (
        torch.nn.parallel.DistributedDataParallel(model) if options.way != "explicit" else model
    )
    pace = Pace(options, rank)
    with outlast.session(model=model, every=options.every) as session:
        pace.step = session.step
        for batch in session.steps(Batches(pace), until=options.steps):
            loss = trained(batch).pow(2).mean()
            work(pace.of("compute"), options.way)
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if options.way == "explicit":
                        dist.all_reduce(parameter.grad)
                    parameter.sub_(parameter.grad, alpha=0.001)
            (options.records / f"at-{rank}").write_text(str(session.step))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
