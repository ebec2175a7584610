"""Training with ``outlast.SameBits``, a network of either kind: RECORDS STEPS [options].

A line of RECORDS/steps-RANK.jsonl is a step that this process has completed; the end is
RECORDS/final-RANK.json, with a hash over weights, buffers, optimizer and schedule.
"""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import Dataset
from train import update, whose

import outlast

SIZE = 61


class Pictures(Dataset):
    """Noise with a class; loading draws random numbers, as augmentation does."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        picture = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(index))
        return index, picture + 0.1 * torch.rand(1, 8, 8), index % 5


class Texts(Dataset):
    """Numbers with some order in them."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return index, (torch.arange(17) * (index % 7 + 1) + index) % 32, 0


class Convolutions(nn.Module):
    """With batch norm and dropout, and a head that only some shards reach."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2)),
            *(nn.Conv2d(8, 8, 3, stride=2), nn.BatchNorm2d(8, momentum=None), nn.ReLU()),
        )
        self.head, self.rare = nn.Linear(72, 5), nn.Linear(72, 5)

    def forward(self, pictures, classes):
        found = self.features(pictures).flatten(1)
        scores = self.head(found)
        if int(classes[0]) == 3:
            scores = scores + self.rare(found)
        return F.cross_entropy(scores, classes)


class Transformer(nn.Module):
    """With dropout and tied weights."""

    def __init__(self, width=32):
        super().__init__()
        self.bytes, self.places = nn.Embedding(32, width), nn.Embedding(16, width)
        layer = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.bytes.weight

    def forward(self, texts, _):
        x, y = texts[:, :-1], texts[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        found = self.layers(self.bytes(x) + self.places.weight, mask=mask, is_causal=True)
        return F.cross_entropy(self.head(found).flatten(0, 1), y.flatten())


KINDS = {"convolutions": (Convolutions, Pictures), "transformer": (Transformer, Texts)}


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--kind", choices=KINDS, default="convolutions")
    parser.add_argument("--every", default="3 steps")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds, in each step")
    parser.add_argument("--global-batch", type=int, default=24)
    parser.add_argument("--shards", type=int, default=12)
    parser.add_argument("--end", type=Path, help="a file with the step to end at, once it is there")
    parser.add_argument("--shard-pause", type=float, default=0.0, help="seconds, in each shard")
    parser.add_argument("--slow", type=int, default=-1, help="the rank that is slow")
    parser.add_argument("--slow-pause", type=float, default=0.0, help="seconds, in its shards")
    parser.add_argument("--slow-while", type=Path, help="a file that is there as long as it is")
    parser.add_argument("--hashes", action="store_true", help="of weights and optimizer, each step")
    parser.add_argument("--num-workers", type=int, default=0, help="loader processes")
    return parser.parse_args()


def pause_of(options, rank):
    is_slow = rank == options.slow
    if is_slow and options.slow_while is not None:
        is_slow = options.slow_while.exists()
    return options.slow_pause if is_slow else options.shard_pause


def hash_of(*values):
    digest = hashlib.sha256()
    for value in values:
        update(digest, value.state_dict())
    return digest.hexdigest()


def main():
    options = parse()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        dist.init_process_group("gloo")
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_float32_matmul_precision(os.environ.get("PRECISION", "highest"))
    torch.manual_seed(0)
    network, dataset = KINDS[options.kind]
    model = outlast.SameBits(network(), shards=options.shards, seed=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5000)
    loader = outlast.data.Loader(
        dataset(),
        global_batch=options.global_batch,
        shards=options.shards,
        seed=3,
        num_workers=options.num_workers,
    )
    named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    records = (options.records / f"steps-{rank}.jsonl").open("a", buffering=1)
    head = whose(rank, world)
    with outlast.session(every=options.every, **named) as session:
        for batch in session.steps(loader, until=options.steps):
            ids = []
            for numbers, *shard in model.shards(batch):
                model.backward(model(*shard))
                time.sleep(pause_of(options, rank))
                ids += numbers.tolist()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            step = session.step + 1
            line = {**head, "step": step, "loss": model.loss.item().hex(), "ids": ids}
            if options.hashes:
                line["hash"] = hash_of(model.module, optimizer, scheduler)
            records.write(json.dumps(line) + "\n")
            time.sleep(options.pause)
            # All are in the same step or the next: whoever writes a later one reaches all in time.
            if options.end and options.end.exists() and step >= int(options.end.read_text()):
                break
    found = hash_of(model.module, optimizer, scheduler)
    final = {"step": session.step, "resumed": session.resumed, "hash": found, **head}
    (options.records / f"final-{rank}.json").write_text(json.dumps(final))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
