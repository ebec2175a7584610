"""Losses of local updates beside data parallel training, at equal tokens, and the bytes they send.

A decoder of bytes learns Python's own library on several replicas, once in each way: with DDP, with
DiLoCo, and with Streaming DiLoCo in int8. All see the same batches in the same steps, with the same
inner optimizer. The loss is that on files that nobody has trained on, of the model that all
replicas have at the end. Bytes are those that a replica sends for its parameters' sake.

    python benchmarks/local_updates.py [--replicas 4] [--steps 400] [--every 30] [--width 96]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast
from bench.ports import free_port

CONTEXT: Final = 128
HELD_OUT: Final = 10  # of so many files, one is for the evaluation
RATE, WARM_UP = 2e-3, 30
REPORTS: Final = 10  # points of the curve


class Decoder(nn.Module):  # type: ignore[misc]
    """A small language model of bytes: (rows, CONTEXT) → (rows, CONTEXT, 256)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(
            *(width, max(width // 32, 1), 4 * width),
            dropout=0.0,
            batch_first=True,
            norm_first=True,
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, rows: Any) -> Any:  # noqa: D102 - torch's
        mask = nn.Transformer.generate_square_subsequent_mask(rows.shape[1])
        x = self.bytes(rows) + self.places.weight[: rows.shape[1]]
        return self.head(self.norm(self.blocks(x, mask, is_causal=True)))


def texts() -> tuple[Any, Any]:
    """Bytes to train on, and held out."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    parts = [[path.read_bytes() for path in files[rest::HELD_OUT]] for rest in range(HELD_OUT)]
    held, *others = (b"".join(part) for part in parts)
    return torch.frombuffer(bytearray(b"".join(others)), dtype=torch.uint8), torch.frombuffer(
        bytearray(held), dtype=torch.uint8
    )


def rows_of(text: Any, num: int, seed: int) -> Any:
    """Rows drawn from a text: (num, CONTEXT + 1)."""
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - CONTEXT - 1, (num,), generator=draw)
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long()


def loss_of(model: Any, rows: Any) -> Any:
    logits = model(rows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def sent_bytes(num: int, replicas: int, row: dict[str, Any], steps: int) -> float:
    """What a replica sends: the same traffic as a ring all-reduce, every so many steps."""
    whole: float = 2 * (replicas - 1) / replicas * num * 4
    if row["way"] == "data parallel":
        return whole * steps
    share = 260 / 1024 if row.get("exchange") == "int8" else 1.0
    return float(whole * share * (steps // row["every"]))


def train(rank: int, port: int, row: dict[str, Any], options: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=options.replicas)
    torch.manual_seed(0)
    text, held = texts()
    net = Decoder(options.width, options.layers)
    model: Any = net
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=0.1)
    given = {name: value for name, value in row.items() if name != "way"}
    local = None
    if row["way"] == "data parallel":
        model = DistributedDataParallel(net)
    else:
        local = outlast.LocalUpdates(net, optimizer, **given)
    check = rows_of(held, 128, 1)

    def held_out() -> float:
        with torch.no_grad():
            return float(sum(loss_of(net, part) for part in check.split(32)) / 4)

    curve = []
    began_s = time.monotonic()
    for step in range(options.steps):
        left = 0.5 * (1 + math.cos(math.pi * step / options.steps))
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / WARM_UP, 1.0) * (0.05 + 0.95 * left)
        loss = loss_of(model, rows_of(text, options.batch, 10_000 * step + rank))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if rank == 0 and (step + 1) % max(options.steps // REPORTS, 1) == 0:
            curve.append((step + 1, round(held_out(), 4)))
    if local is not None:
        local.sync()
    if rank == 0:
        num = sum(parameter.numel() for parameter in net.parameters())
        found = {
            **row,
            "parameters": num,
            "loss": round(held_out(), 4),
            "seconds": round(time.monotonic() - began_s, 1),
            "sent_mb": round(sent_bytes(num, options.replicas, row, options.steps) / 1e6, 1),
            "curve": curve,
        }
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=30)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4, help="rows, of each replica")
    options = parser.parse_args()
    context = get_context("spawn")
    rows: list[dict[str, Any]] = [
        {"way": "data parallel"},
        {"way": "DiLoCo", "every": options.every},
        {
            "way": "streaming",
            "every": options.every,
            "exchange": "int8",
            "fragments": 3,
            "overlap": 1,
            "outer_lr": 0.4,
        },
    ]
    for row in rows:
        port = free_port()
        started = [
            context.Process(target=train, args=(rank, port, row, options))
            for rank in range(options.replicas)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join()
        if any(process.exitcode for process in started):
            sys.exit(f"{row['way']} failed: {[process.exitcode for process in started]}")


if __name__ == "__main__":
    main()
