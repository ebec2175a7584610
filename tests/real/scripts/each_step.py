"""Training whose model is divided over all machines: RECORDS STEPS [options].

A line of RECORDS/steps-RANK.jsonl is a step that this rank has begun; the end, with a hash of this
rank's part of everything, is RECORDS/final-RANK.json. ``--replicas 2`` makes two replica groups.
LATE_S is how long a step waits for what keeps it: a test has not ten seconds for each.
"""

import argparse
import json
import os
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from train import Points, fingerprint, whose

import outlast
from outlast.training import each_step

each_step.LATE_S = float(os.environ.get("LATE_S", each_step.LATE_S))


class Local:
    """An object whose state is told as this rank has it."""

    def __init__(self, named):
        self.state_dict = lambda: part_of(named.state_dict())


def part_of(value):
    if isinstance(value, dict):
        return {key: part_of(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [part_of(one) for one in value]
    return value.to_local() if hasattr(value, "to_local") else value


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--every", default="1000 steps")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds, in each step")
    parser.add_argument("--width", type=int, default=37)  # which no number of ranks divides
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--end", type=Path, help="a file with the step to end at, once it is there")
    return parser.parse_args()


def divided(options, world):
    """The model, spread over all workers, or over those of each replica group."""
    net = nn.Sequential(
        nn.Linear(8, options.width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(options.width, 8)
    )
    mesh = init_device_mesh("cpu", (world,))
    if options.replicas > 1:
        sizes, names = (options.replicas, world // options.replicas), ("replicate", "shard")
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    for layer in (net[0], net[3]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def main():
    options = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = divided(options, world)
    torch.manual_seed(1 + rank)
    random.seed(1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = outlast.data.Loader(Points(50), global_batch=2 * world, seed=3)
    named = {"model": model, "optimizer": optimizer, "loader": loader}
    records = (options.records / f"steps-{rank}.jsonl").open("a", buffering=1)
    head = whose(rank, world)
    with outlast.session(every=options.every, **named) as session:
        for ids, x in session.steps(loader, until=options.steps):
            step = session.step + 1
            records.write(json.dumps({**head, "step": step, "ids": ids.tolist()}) + "\n")
            loss = F.mse_loss(model(x + random.random() * 0.1), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
            time.sleep(options.pause)
            # All are in the same step or the next: whoever writes a later one reaches all in time.
            if options.end and options.end.exists() and step >= int(options.end.read_text()):
                break
    state = {"model": Local(model), "optimizer": Local(optimizer)}
    final = {"step": session.step, "hash": fingerprint(state), **head}
    (options.records / f"final-{rank}.json").write_text(json.dumps(final))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
