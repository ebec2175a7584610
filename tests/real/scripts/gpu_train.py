"""A job of one worker, on a GPU with NCCL, that hangs once where that is asked for.

    gpu_train.py RECORDS STEPS [--hang-at STEP] [--device cuda]

Each step done is a line of RECORDS/steps.jsonl; the weights' digest at the end is in
RECORDS/final.json. A hang is one on the device: a kernel that does not come to its end, behind
which the sum of the gradients waits, and the host for that. On a CPU (gloo) it is a lock.
"""

import argparse
import hashlib
import json
import os
import threading
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same bits in every run

import torch
import torch.distributed as dist
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
    parser.add_argument("--device", default="cuda")
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
    on_gpu = options.device == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    width = WIDTH[device.type]
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1), nn.Linear(width, width))
    module.to(device)
    model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    records = (options.records / "steps.jsonl").open("a", buffering=1)
    mark = options.records / "hung"
    with outlast.session(model=module, optimizer=optimizer, every="5 steps") as session:
        for _ in session.steps(range(options.steps), until=options.steps):
            number = session.step + 1
            if number == options.hang_at and not mark.exists():
                mark.touch()
                hang(device)
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(64, width, generator=generator).to(device)
            loss = (model(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            line = {"step": number, "loss": loss.item(), "t": time.time(), "pid": os.getpid()}
            records.write(json.dumps(line) + "\n")
            time.sleep(options.pause)
    weights = torch.cat([p.detach().flatten().cpu() for p in module.parameters()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    (options.records / "final.json").write_text(json.dumps({"hash": digest}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
