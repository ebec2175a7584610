"""A job with batches that are no good: RECORDS STEPS [options].

Each completed step is a line of RECORDS/steps-RANK.jsonl; the end is RECORDS/final-RANK.json, with
a hash over weights, optimizer, schedule and random-number states. ``--poison 30:nan`` has one
sample of batch 30 be no number, ``30:spike`` all of its samples so large that the loss is ten times
what it was. ``--without 30-31`` gives data in which these batches are not there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, Dataset
from train import fingerprint

import outlast
from outlast.data.loader import Slices

GLOBAL_BATCH = 12
SIZE = GLOBAL_BATCH * 400
SEED = 3


class Points(Dataset):
    """Noise, and a few points that are not."""

    def __init__(self, poisoned):
        self.x = torch.randn(SIZE, 8, generator=torch.Generator().manual_seed(11))
        for kind, ids in poisoned:
            if kind == "nan":
                self.x[ids[-1], 3] = math.nan  # of the last rank's part of the batch
            else:
                self.x[ids] *= math.sqrt(10.0)

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return index, self.x[index]


class Cleaned(outlast.data.Loader):
    """The order of the data, from which some batches are missing."""

    missing = ()

    def _slices(self):
        return CleanedSlices(self, self.missing)


class CleanedSlices(Slices):
    def __init__(self, loader, missing):
        super().__init__(loader)
        self._missing = missing

    def __getitem__(self, span):
        position = span.position  # a sample keeps the random numbers that belong to its place
        for first, last in self._missing:
            if position >= (first - 1) * GLOBAL_BATCH:
                position += (last - first + 1) * GLOBAL_BATCH
        return super().__getitem__(span._replace(position=position))


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--every", default="4 steps")
    parser.add_argument("--poison", action="append", default=[])
    parser.add_argument("--without", action="append", default=[])
    parser.add_argument("--same-bits", action="store_true")
    parser.add_argument("--loader", default="outlast")
    parser.add_argument("--until-gone", action="store_true", help="epochs=1 rather than until")
    parser.add_argument("--pause", type=float, default=0.005, help="seconds, in each step")
    parser.add_argument("--die-in", default="", help="ATTEMPT:STEP that ends with a SIGKILL")
    return parser.parse_args()


def loader_of(options, shards):
    plain = outlast.data.Loader(range(SIZE), global_batch=GLOBAL_BATCH, seed=SEED)
    poisoned = []
    for one in options.poison:
        number, _, kind = one.partition(":")
        poisoned.append((kind, plain.ids((int(number) - 1) * GLOBAL_BATCH)))
    points = Points(poisoned)
    missing = [tuple(map(int, one.split("-"))) for one in options.without]
    if options.loader == "outlast":
        loader = Cleaned(points, global_batch=GLOBAL_BATCH, seed=SEED, shards=shards)
        loader.missing = missing
        return loader
    order = [plain.ids(at) for at in range(0, SIZE, GLOBAL_BATCH)]
    for first, last in reversed(missing):
        del order[first - 1 : last]
    if options.loader == "stock":
        return DataLoader(points, batch_sampler=order)
    if options.loader == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(points, batch_sampler=order)
    if options.loader == "stream":
        kept = [one for ids in order for one in ids]
        return outlast.data.Stream(
            lambda _: ((one, points.x[one]) for one in kept),
            num_shards=1,
            global_batch=GLOBAL_BATCH,
            shuffle=False,
        )
    return [torch.utils.data.default_collate([points[one] for one in ids]) for ids in order]


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 8))


class Reconstruct(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, x):
        return F.mse_loss(self.inner(x), x)


def main(options):
    torch.set_num_threads(1)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Reconstruct()
    trained = model
    if options.same_bits:
        trained = outlast.SameBits(model, shards=6, seed=5)
    elif world > 1:
        trained = nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(1 + rank)
    random.seed(1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5000)
    loader = loader_of(options, 6 if options.same_bits else None)
    objects = {"model": trained, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    records = (options.records / f"steps-{rank}.jsonl").open("a", buffering=1)
    attempt = int(os.environ.get("OUTLAST_ATTEMPT", "0"))
    with outlast.session(every=options.every, **objects) as session:
        ends = {"epochs": 1} if options.until_gone else {"until": options.steps}
        for batch in session.steps(loader, **ends):
            optimizer.zero_grad()
            ids = []
            if options.same_bits:
                for numbers, x in trained.shards(batch):
                    trained.backward(trained(x))
                    ids += numbers.tolist()
                loss = trained.loss
            else:
                numbers, x = batch
                ids = numbers.tolist()
                loss = trained(x)
                loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            scheduler.step()
            session.log(loss=loss, grad_norm=norm)
            step = session.step + 1
            head = {"attempt": attempt, "step": step, "loss": float(loss).hex(), "ids": ids}
            records.write(json.dumps(head | {"drawn": random.random()}) + "\n")
            if options.die_in == f"{attempt}:{step}" and rank == 0:
                os.kill(os.getpid(), 9)
            time.sleep(options.pause)
    named = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    final = {"step": session.step, "resumed": session.resumed, "hash": fingerprint(named)}
    (options.records / f"final-{rank}.json").write_text(json.dumps(final))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    OPTIONS = parse()
    main(OPTIONS)
