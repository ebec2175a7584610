"""A job over several ranks: RECORDS MODE STEPS; says what each boundary's state was as a whole.

MODE is how the model is spread: plain, ddp, fsdp, tp, hsdp, stages. Rank 0 writes
RECORDS/entered.pt (the state that the session came with) and RECORDS/at-STEP.pt for each boundary;
each rank RECORDS/final-RANK.json and, where ranks differ, RECORDS/own-RANK-STEP.pt.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import outlast
from outlast.checkpoint.capture import Copiers


class Model(nn.Module):
    def __init__(self, width, norm):
        super().__init__()
        self.up, self.down = nn.Linear(64, width), nn.Linear(width, 64)
        self.norm = nn.BatchNorm1d(64) if norm else nn.Identity()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.norm(self.down(torch.relu(self.up(x)))) * self.scale


def spread(model, mode, world_size):
    from torch.distributed.device_mesh import init_device_mesh

    if mode == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if mode in ("fsdp", "hsdp"):
        from torch.distributed.fsdp import fully_shard

        sizes = (world_size,) if mode == "fsdp" else (2, world_size // 2)
        names = ("shard",) if mode == "fsdp" else ("replicate", "shard")
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        model.scale = nn.Parameter(model.scale.detach().reshape(1))
        for part in (model.up, model.down, model):
            fully_shard(part, mesh=mesh)
    if mode == "tp":
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        mesh = init_device_mesh("cpu", (world_size,))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh, plan)
    return model


class Rows(torch.optim.Optimizer):
    """As Adafactor or SM3: statistics of rows and of columns, and finer ones in a dict."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state, square = self.state[p], p.grad.square()
                row = square.mean(dim=-1, keepdim=True) if p.dim() > 1 else square
                state["row"] = row if "row" not in state else state["row"] * 0.9 + row
                state["fine"] = {"sum": state["row"].double() / 3}
                p.sub_(p.grad / (state["row"].sqrt() + 1e-3), alpha=group["lr"])


def whole(value):
    """State as one process would have it; a collective where it is spread."""
    if isinstance(value, torch.Tensor):
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        return full.detach().clone()
    if isinstance(value, dict):
        return {key: whole(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [whole(inner) for inner in value]
    return copy.deepcopy(value)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("mode")
    parser.add_argument("steps", type=int)
    parser.add_argument("--width", type=int, default=401)  # no number of ranks divides it
    parser.add_argument("--norm", action="store_true")
    parser.add_argument("--every", default="2 steps")
    parser.add_argument("--perturb-at", type=int, default=-1)
    parser.add_argument("--rows", action="store_true", help="an optimizer of row statistics")
    parser.add_argument("--vector-scale", action="store_true", help="as FSDP2 wants it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model(options.width, options.norm)
    if options.vector_scale:
        model.scale = nn.Parameter(model.scale.detach().reshape(1))
    if options.mode == "stages":
        named = {f"stage{rank}": model.up if rank == 0 else model.down}
        trained = next(iter(named.values()))
    else:
        trained = spread(model, options.mode, world_size)
        named = {"model": model}
    kind = Rows if options.rows else torch.optim.AdamW
    optimizer = kind(trained.parameters(), lr=1e-2)
    key = f"optimizer{rank}" if options.mode == "stages" else "optimizer"
    named[key] = optimizer
    train(options, named, trained, optimizer, rank)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def train(options, named, trained, optimizer, rank):
    left, submit = [], Copiers.submit

    def submitted(copiers, capture):
        total = capture.plan.size - len(capture.plan.head)
        left.append(total - capture.copied_at_once_bytes)
        submit(copiers, capture)

    Copiers.submit = submitted
    torch.manual_seed(5 + (rank if options.norm else 0))
    with outlast.session(every=options.every, keep=100, **named) as session:
        note(options, "entered", named, rank)
        for _ in session.steps([0] * 1000, until=options.steps):
            note(options, f"at-{session.step}", named, rank)
            rows = next(p for p in trained.parameters() if p.dim() == 2).shape[1]
            optimizer.zero_grad()
            trained(torch.randn(6, rows)).square().mean().backward()
            optimizer.step()
            time.sleep(0.05)  # for saves to end
            if session.step == options.perturb_at and rank == 1:
                weight = named["model"].up.weight.detach()
                (weight.to_local() if options.mode == "hsdp" else weight)[3, 3] += 1
        note(options, f"at-{session.step}", named, rank)
    final = {"step": session.step, "resumed": session.resumed, "left": left}
    (options.records / f"final-{rank}.json").write_text(json.dumps(final))


def note(options, name, named, rank):
    state = {key: whole(value.state_dict()) for key, value in named.items()}
    if rank == 0:
        torch.save(state, options.records / f"{name}.pt")
    torch.save(state, options.records / f"{name}-{rank}.pt")


if __name__ == "__main__":
    main()
