"""A data-parallel job, on one GPU with NCCL, that hangs once where that is asked for.

    TEST_DEVICE=cuda:0 gpu_train.py RECORDS STEPS [--hang-at STEP]

Each completed step is a line of RECORDS/steps-RANK.jsonl; the weights' digest at the end is in
RECORDS/final-RANK.json. A hang is one on the device: a kernel that does not come to its end, behind
which the sum of the gradients waits, and the host for that. On a CPU (gloo) it is a lock.
"""

import argparse
import hashlib
import json
import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import DEVICE, meet
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

WIDTH = {"cuda": 2048, "cpu": 64}


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--hang-at", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.02)
    return parser.parse_args()


def hang(device):
    if device.type == "cuda":
        torch.cuda._sleep(1 << 50)  # cycles: days
        return
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def main():
    options = parse()
    rank, _ = meet()
    device, width = DEVICE, WIDTH[DEVICE.type]
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1), nn.Linear(width, width))
    module.to(device)
    # Without a bucket that is laid out anew: more than two workers would sum in another order.
    model = DistributedDataParallel(module, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    records = (options.records / f"steps-{rank}.jsonl").open("a", buffering=1)
    mark = options.records / "hung"
    done = 0

    def completed(step):
        nonlocal done
        if step > done:  # one that a loss has interrupted is made again
            attempt = int(os.environ["OUTLAST_ATTEMPT"])
            line = {"step": step, "t": time.time(), "pid": os.getpid(), "attempt": attempt}
            records.write(json.dumps(line) + "\n")
        done = step

    with outlast.session(model=module, optimizer=optimizer, every="5 steps") as session:
        done = session.step
        for _ in session.steps(range(options.steps), until=options.steps):
            completed(session.step)
            number = session.step + 1
            if number == options.hang_at and not mark.exists():
                mark.touch()
                hang(device)
            generator = torch.Generator().manual_seed(number + 1000 * rank)
            x = torch.randn(64, width, generator=generator).to(device)
            loss = (model(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
            time.sleep(options.pause)
        completed(session.step)
    weights = torch.cat([p.detach().flatten().cpu() for p in module.parameters()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    (options.records / f"final-{rank}.json").write_text(json.dumps({"hash": digest}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
