"""A training job of seconds, as a person would write it: RECORDS STEPS [options].

Each step begun is a line of RECORDS/steps-RANK.jsonl; the end is RECORDS/final-RANK.json, with a
hash over weights, optimizer, schedule and random-number states.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from ranks import random_states
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import outlast


class Points(Dataset):
    def __init__(self, size):
        self.x = torch.randn(size, 8, generator=torch.Generator().manual_seed(11))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return index, self.x[index]


class Momentum:
    """SGD by hand: torch.optim imports torch._dynamo, a second and a half for each worker."""

    def __init__(self, model):
        self.model = model
        self.velocity = [torch.zeros_like(p) for p in model.parameters()]

    def zero_grad(self):
        for parameter in self.model.parameters():
            parameter.grad = None

    def step(self):
        with torch.no_grad():
            for parameter, velocity in zip(self.model.parameters(), self.velocity, strict=True):
                if dist.is_initialized():
                    dist.all_reduce(parameter.grad)
                velocity.mul_(0.9).add_(parameter.grad)
                parameter.sub_(velocity, alpha=0.01)

    def state_dict(self):
        return {"velocity": self.velocity}

    def load_state_dict(self, state):
        for mine, saved in zip(self.velocity, state["velocity"], strict=True):
            mine.copy_(saved)


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--every", default="3 steps")
    parser.add_argument("--loader", default="outlast")
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds, in each step")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--size", type=int, default=50)
    parser.add_argument("--light", action="store_true", help="without torch.optim and DDP")
    parser.add_argument("--no-group", action="store_true")
    parser.add_argument("--gate", type=Path, help="a file that is waited for")
    parser.add_argument("--gate-in", type=int, default=0, help="the step; else before the first")
    parser.add_argument("--raise-in", type=int, default=0, help="the step that has a bug")
    return parser.parse_args()


def build_loader(options, rank, world_size):
    points = Points(options.size)
    processes = {"num_workers": options.num_workers}
    if options.loader == "outlast":
        return outlast.data.Loader(points, global_batch=4, seed=3, **processes)
    if options.loader == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(points, 4, shuffle=True, **processes)
    if options.loader == "distributed":
        sampler = DistributedSampler(points, num_replicas=world_size, rank=rank, seed=3)
        return DataLoader(points, 2, sampler=sampler, **processes)
    return DataLoader(points, 4, shuffle=True, **processes)


def main():
    options = parse()
    torch.set_num_threads(1)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1 and not options.no_group:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    width = options.width
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 8))
    torch.manual_seed(1 + rank)
    random.seed(1 + rank)
    loader = build_loader(options, rank, world_size)
    named = {"model": model, "loader": loader}
    trained = model
    if options.light:
        optimizer = scheduler = Momentum(model)
        named["optimizer"] = optimizer
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5000)
        named |= {"optimizer": optimizer, "scheduler": scheduler}
        if world_size > 1:
            trained = nn.parallel.DistributedDataParallel(model)

    records = (options.records / f"steps-{rank}.jsonl").open("a", buffering=1)
    with outlast.session(every=options.every, **named) as session:
        if options.gate and not options.gate_in:
            wait_for(options.gate, rank)
        for ids, x in session.steps(loader, until=options.steps):
            line = {"pid": os.getpid(), "step": session.step + 1, "ids": ids.tolist()}
            records.write(json.dumps(line) + "\n")
            if options.gate and line["step"] == options.gate_in:
                wait_for(options.gate, rank)
            if line["step"] == options.raise_in:
                raise ZeroDivisionError(f"there is no step {options.raise_in}")
            loss = F.mse_loss(trained(x + random.random() * 0.1), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if scheduler is not optimizer:
                scheduler.step()
            session.log(loss=loss)
            if options.pause:
                time.sleep(options.pause)
    final = {"step": session.step, "resumed": session.resumed, "hash": fingerprint(named)}
    (options.records / f"final-{rank}.json").write_text(json.dumps(final))
    if dist.is_initialized():
        dist.destroy_process_group()


def wait_for(gate, rank):
    gate.with_suffix(f".{rank}").touch()
    deadline = time.monotonic() + 100
    while not gate.exists() and time.monotonic() < deadline:
        time.sleep(0.005)


def whose(rank, world):
    """What says of a record who has written it."""
    return {
        "pid": os.getpid(),
        "node": socket.gethostname(),
        "rank": rank,
        "world": world,
        "attempt": int(os.environ.get("OUTLAST_ATTEMPT", "0")),
    }


def fingerprint(named):
    digest = hashlib.sha256()
    for state in random_states():
        digest.update(state.numpy().tobytes())
    digest.update(repr(random.getstate()).encode())
    update(digest, {name: named[name].state_dict() for name in sorted(named) if name != "loader"})
    return digest.hexdigest()


def update(digest, value):
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(raw.numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            update(digest, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            update(digest, item)
    else:
        digest.update(repr(value).encode())


if __name__ == "__main__":
    main()
