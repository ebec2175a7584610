"""A job that obeys orders, as one under the drill does: RUN STEPS [--pause S] [--ids].

Its losses and weights depend on the step, the rank and the number of workers alone. Each step done
is a line of RUN/steps-RANK.jsonl; the end is RUN/final-RANK.json.
"""

import argparse
import hashlib
import json
import os
import time
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast
from outlast.drill import orders


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--pause", type=float, default=0.05)
    parser.add_argument("--ids", action="store_true", help="the model takes token ids")
    parser.add_argument("--width", type=int, default=16)
    return parser.parse_args()


def main():
    options = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    first = nn.EmbeddingBag(32, options.width) if options.ids else nn.Linear(8, options.width)
    module = nn.Sequential(first, nn.ReLU(), nn.Linear(options.width, 8))
    model = DistributedDataParallel(module, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    records = (options.run / f"steps-{rank}.jsonl").open("a", buffering=1)
    with outlast.session(model=module, optimizer=optimizer, every="5 steps") as session:
        for _ in session.steps(range(options.steps), until=options.steps):
            number = session.step + 1
            orders.ahead_of_step(options.run, rank, number)
            generator = torch.Generator().manual_seed(number * 100 + rank)
            x = torch.randn(4, 8, generator=generator)
            y = model((x * 5).long() % 32 if options.ids else x)
            loss = ((y - x) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
            time.sleep(options.pause)
            line = {"step": number, "loss": loss.item(), "pid": os.getpid(), "t": time.time()}
            line["now"] = datetime.now().timestamp()
            records.write(json.dumps(line) + "\n")
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    (options.run / f"final-{rank}.json").write_text(json.dumps({"hash": digest}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
