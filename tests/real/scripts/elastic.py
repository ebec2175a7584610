"""Training that is the same, bit for bit, at any number of workers: RECORDS STEPS [options].

Each sample's gradient is rounded to a multiple of 2^-20, and they are added as whole numbers: no
sum depends on who adds what, or in which order. A line of RECORDS/steps-RANK.jsonl is a step that
this process has completed; the end is RECORDS/final-RANK.json.
"""

import argparse
import hashlib
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from train import Points, update, whose

import outlast

GRAIN = 2.0**-20


class Exact:
    """Descent with momentum, by sums of whole numbers."""

    def __init__(self, model, global_batch):
        self.weight = model.weight.detach()
        self.velocity = torch.zeros_like(self.weight)
        self._scale = GRAIN / global_batch

    def step(self, samples):
        """One step on this worker's samples; returns the loss of all workers' in grains."""
        total = torch.zeros(self.weight.numel() + 1, dtype=torch.int64)
        for x in samples.double():
            error = self.weight @ x - x
            parts = torch.cat([torch.outer(error, x).flatten(), error.square().sum()[None]])
            total += (parts / GRAIN).round().long()
        dist.all_reduce(total)
        gradient = total[:-1].double().view_as(self.weight) * self._scale
        self.velocity.mul_(0.5).add_(gradient)
        self.weight.sub_(self.velocity, alpha=0.05)
        return int(total[-1])

    def state_dict(self):
        return {"velocity": self.velocity}

    def load_state_dict(self, state):
        self.velocity.copy_(state["velocity"])


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--every", default="3 steps")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds, in each step")
    parser.add_argument("--global-batch", type=int, default=6)
    parser.add_argument("--end", type=Path, help="a file with the step to end at, once it is there")
    parser.add_argument("--stock", action="store_true", help="a loader that is tied to the ranks")
    return parser.parse_args()


def loader_of(options, rank, world):
    """Ours, or a stock one."""
    data = Points(50)
    if not options.stock:
        return outlast.data.Loader(data, global_batch=options.global_batch, seed=3)
    sampler = torch.utils.data.DistributedSampler(data, world, rank, seed=3)
    size = options.global_batch // world
    return torch.utils.data.DataLoader(data, batch_size=size, sampler=sampler)


def main():
    options = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False, dtype=torch.float64)
    optimizer = Exact(model, options.global_batch)
    loader = loader_of(options, rank, world)
    named = {"model": model, "optimizer": optimizer, "loader": loader}
    records = (options.records / f"steps-{rank}.jsonl").open("a", buffering=1)
    head = whose(rank, world)
    with outlast.session(every=options.every, **named) as session:
        for ids, samples in session.steps(loader, until=options.steps):
            loss = optimizer.step(samples)
            step = session.step + 1
            records.write(
                json.dumps({**head, "step": step, "loss": loss, "ids": ids.tolist()}) + "\n"
            )
            time.sleep(options.pause)
            # All are in the same step or the next: whoever writes a later one reaches all in time.
            if options.end and options.end.exists() and step >= int(options.end.read_text()):
                break
    digest = hashlib.sha256()
    update(digest, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    final = {"step": session.step, "resumed": session.resumed, "hash": digest.hexdigest(), **head}
    (options.records / f"final-{rank}.json").write_text(json.dumps(final))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
