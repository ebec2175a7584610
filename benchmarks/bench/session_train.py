"""What ``ddp_plain.py`` does, with a session in place of its own checkpoints.

Where the job's workers recover in their processes, they do so here.
"""

from __future__ import annotations

import argparse
import importlib
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import outlast
from bench.modes import Endless


def begin() -> tuple[argparse.Namespace, Any, Any, torch.optim.Optimizer]:
    """The command line, the plain script as a module, and its model and optimizer in a group."""
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("--sleep", type=float, default=0.03)
    options = parser.parse_args()
    plain = importlib.import_module("ddp_plain")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = plain.GPT()
    return options, plain, model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def main() -> None:
    """Train for ever: whoever started this ends it."""
    options, plain, model, optimizer = begin()
    rank, world = dist.get_rank(), dist.get_world_size()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    records = plain.Records(options.records, rank)
    loss = torch.zeros(())
    with outlast.session(model=model, optimizer=optimizer, every="5 steps") as session:
        first = session.step
        for _ in session.steps(Endless(), until=10**9):
            if session.step > first:  # that one is complete, and never made again
                records.completed(session.step, loss.item(), world)
            loss = ddp(*plain.batch(session.step, rank))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(options.sleep)


if __name__ == "__main__":
    main()
