"""A job whose step time varies tenfold, by right: RECORDS SECONDS SEED.

Usual steps take 0.1 to 0.3 s. Now and then the loader is slow, a step compiles (for the first time,
and again for another shape), and every 20 steps the model is evaluated, for ten times as long.
"""

import argparse
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast


def slow_loader(draw):
    while True:
        time.sleep(draw.uniform(1.0, 2.0) if draw.random() < 0.05 else 0.01)
        yield torch.randn(4, 8)


def evaluate_model(model, seconds):
    model.eval()
    until = time.monotonic() + seconds
    with torch.no_grad():
        while time.monotonic() < until:
            model(torch.randn(4, 8))
    model.train()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("seed", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    draw = random.Random(options.seed * 2 + rank)
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    until = torch.tensor([time.time() + options.seconds], dtype=torch.float64)  # to the second
    dist.broadcast(until, 0)
    slowest, steps = 0.0, 0
    with outlast.session(model=module, optimizer=optimizer, every="20 steps") as session:
        for x in session.steps(slow_loader(draw), until=10**9):
            begun = time.monotonic()
            time.sleep(4.0 if session.step == 0 else draw.uniform(0.1, 0.3))  # "compiles"
            loss = (model(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (session.step + 1) % 20 == 0:
                evaluate_model(module, 3.0 if rank == 0 else 0.0)
            over = torch.tensor([float(time.time() > until.item())])
            dist.all_reduce(over)
            slowest, steps = max(slowest, time.monotonic() - begun), steps + 1
            if over.item():
                break
    (options.records / f"done-{rank}").write_text(f"{steps} {slowest:.2f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
