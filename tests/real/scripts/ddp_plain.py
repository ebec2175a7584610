"""Data-parallel training as people write it for torchrun; it knows nothing of outlast.

    torchrun --nproc-per-node 4 ddp_plain.py RECORDS [--steps N] [--every K] [--sleep S]

A small GPT on gloo with AdamW. Rank 0 saves every K steps to RECORDS/model.safetensors, and all
resume from there. Each completed step is a line of RECORDS/steps-RANK.jsonl, with its time.
"""

import argparse
import json
import os
import socket
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

VOCABULARY, CONTEXT, BATCH = 256, 64, 4


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.ln1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.fc2(F.gelu(self.fc(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, width=64, layers=2, heads=4):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.ln(x)).flatten(0, 1), targets.flatten())


class Records:
    """Lines about completed steps."""

    def __init__(self, directory, rank):
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / f"steps-{rank}.jsonl").open("a", buffering=1)
        self._head = {"rank": rank, "pid": os.getpid(), "node": socket.gethostname()}

    def of(self, rank):
        """From here on this process is another rank."""
        self._head["rank"] = rank
        return self

    def completed(self, step, loss, world):
        line = {"t": time.time(), "step": step, "loss": loss, "world": world, **self._head}
        self._file.write(json.dumps(line) + "\n")


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--sleep", type=float, default=0.03, help="seconds in each step")
    parser.add_argument("--timeout", type=float, help="of collectives, seconds; torch's default")
    return parser.parse_args()


def batch(step, rank):
    """The batch that ``rank`` sees in ``step``."""
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    tokens = torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def save(path, model, optimizer, step):
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
    unfinished = path.with_suffix(".tmp")
    save_file(tensors, unfinished, metadata={"step": str(step)})
    unfinished.replace(path)


def load(path, model, optimizer):
    """The step that ``path`` is of; 0 without it."""
    if not path.exists():
        return 0
    weights, moments = {}, {}
    with safe_open(path, "pt") as file:
        for key in file.keys():  # noqa: SIM118 - not a mapping
            kind, _, name = key.partition(".")
            if kind == "model":
                weights[name] = file.get_tensor(key)
            else:
                index, _, name = name.partition(".")
                moments.setdefault(int(index), {})[name] = file.get_tensor(key)
        step = int(file.metadata()["step"])
    model.load_state_dict(weights)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
    return step


def main():
    options = parse()
    torch.set_num_threads(1)
    given = {"timeout": timedelta(seconds=options.timeout)} if options.timeout else {}
    dist.init_process_group("gloo", **given)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoint = options.records / "model.safetensors"
    step = load(checkpoint, model, optimizer)
    ddp = nn.parallel.DistributedDataParallel(model)
    records = Records(options.records, rank)
    while step < options.steps:
        loss = ddp(*batch(step, rank))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(options.sleep)
        step += 1
        records.completed(step, loss.item(), world)
        if rank == 0 and step % options.every == 0:
            save(checkpoint, model, optimizer, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
