"""A job that hangs once, in a way of one's choosing: RECORDS STEPS KIND RANK STEP [--plain].

Its weights and losses depend on the number of workers and on nothing else, so that a run that hung
is compared with one that did not. Each step done is a line of RECORDS/steps-RANK.jsonl.
"""

import argparse
import ctypes
import hashlib
import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("kind")
    parser.add_argument("rank", type=int)
    parser.add_argument("step", type=int)
    parser.add_argument("--plain", action="store_true", help="a script that has no session")
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--again", action="store_true", help="in each attempt")
    return parser.parse_args()


def collate(options):
    """Where the culprit stays."""
    KINDS[options.kind](options)


def stop(options):
    os.kill(os.getpid(), signal.SIGSTOP)


def loop(options):
    while True:
        pass


def hold(options):
    ctypes.PyDLL(None).sleep(10_000)


def regex(options):
    """Without end, and without a system call that a signal would end."""
    re.match(r"(a+)+b", "a" * 60)


def lock(options):
    mine = threading.Lock()
    mine.acquire()
    mine.acquire()


def read(options):
    pipe = options.records / f"pipe-{os.getpid()}"
    os.mkfifo(pipe)
    fd = os.open(pipe, os.O_RDWR)
    os.read(fd, 1)


def vfork(options):
    """The kernel holds the one that starts a process until that one has gone on: state D."""
    pipe = options.records / f"pipe-{os.getpid()}"
    os.mkfifo(pipe)
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, pipe, 0, 0)])


def calm(options):
    """Nothing happens."""


def skip(options):
    """See ``step``: it leaves a sum out that all others take part in."""


KINDS = {
    "stop": stop,
    "loop": loop,
    "hold": hold,
    "regex": regex,
    "lock": lock,
    "read": read,
    "vfork": vfork,
    "calm": calm,
    "skip": skip,
}


class Hanger:
    def __init__(self, options):
        self.options = options
        self.mark = options.records / "hung"

    def is_due(self, step):
        options = self.options
        here = dist.get_rank() == options.rank and step == options.step
        if here and (options.again or not self.mark.exists()):
            self.mark.touch()
            return True
        return False


def step(model, optimizer, number, options, hanger):
    due = hanger.is_due(number)
    if due:
        collate(options)
    generator = torch.Generator().manual_seed(number * 100 + dist.get_rank())
    x = torch.randn(4, 8, generator=generator)
    loss = ((model(x) - x) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not (due and options.kind == "skip"):
        dist.barrier()
    time.sleep(options.pause)
    return loss.item()


def main():
    options = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    # Buckets that stay as they are: of three and more ranks a resumed run sums in the same order.
    model = DistributedDataParallel(module, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    hanger = Hanger(options)
    records = (options.records / f"steps-{rank}.jsonl").open("a", buffering=1)

    def one(number):
        loss = step(model, optimizer, number, options, hanger)
        line = {"step": number, "loss": loss, "done_t": time.time(), "pid": os.getpid()}
        records.write(json.dumps(line) + "\n")

    if options.plain:
        for number in range(1, options.steps + 1):
            one(number)
    else:
        with outlast.session(model=module, optimizer=optimizer, every="5 steps") as session:
            for _ in session.steps(range(options.steps), until=options.steps):
                one(session.step + 1)
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    (options.records / f"final-{rank}.json").write_text(json.dumps({"hash": digest}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
