"""A data-parallel job whose workers live through the loss of others: RECORDS STEPS [options].

Each completed step is a line of RECORDS/steps-RANK.jsonl; the end is RECORDS/final-RANK.json, with
a hash over weights, optimizer, schedule and random-number states; each line has such a hash too, as
of its step's end. ``--do`` has something happen,
once in the job: RANK:STEP:PLACE:WHAT, as in ``2:7:reduced:die``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from ranks import DEVICE, meet
from torch import nn
from train import Points, fingerprint

import outlast


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--every", default="1000 steps")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds, in each step")
    parser.add_argument("--do", action="append", default=[])
    parser.add_argument("--same-bits", action="store_true", help="at any number of workers")
    parser.add_argument("--batches", type=int, default=1, help="of an optimizer's step")
    parser.add_argument("--beginning", type=float, default=0.0, help="seconds, before the session")
    return parser.parse_args()


SHARDS = 12
OPTIONS = parse()


def happen(rank, step, place):
    """Do what is asked for here, the first time."""
    for number, one in enumerate(OPTIONS.do):
        who, when, where, what = one.split(":")
        if (int(who), int(when), where) != (rank, step, place):
            continue
        if what == "bug":  # each time
            raise ZeroDivisionError(f"there is no step {step}")
        mark = OPTIONS.records / f"done-{number}"
        if not mark.exists():
            mark.touch()
            ACTS[what]()


def busy():
    while True:
        time.sleep(0.001)  # tests need the cores


def swallow():
    while True:
        try:
            dist.barrier()
        except RuntimeError:
            time.sleep(0.01)


def die_behind():
    """Once what was asked for before this has happened elsewhere."""
    while not all((OPTIONS.records / f"done-{number}").exists() for number in range(2)):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


ACTS = {
    "die_behind": die_behind,
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "leave": lambda: os._exit(3),
    "busy": busy,
    "swallow": swallow,
}


class Records:
    """What the steps came to; one that a loss has interrupted is not complete, and made again."""

    def __init__(self, rank, named):
        self._file = (OPTIONS.records / f"steps-{rank}.jsonl").open("a", buffering=1)
        self._named = named
        self._newest = None

    def made(self, step, loss, ids):
        self._newest = {
            "step": step,
            "loss": loss,
            "ids": ids,
            "pid": os.getpid(),
            "rank": dist.get_rank(),
            "attempt": int(os.environ.get("OUTLAST_ATTEMPT", "0")),
            "world": dist.get_world_size(),
            "threads": threading.active_count(),
            "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        }

    def completed(self, step):
        if self._newest is not None and self._newest["step"] == step:
            line = {**self._newest, "state": fingerprint(self._named)}
            self._file.write(json.dumps(line) + "\n")
            self._newest = None


def run(rank):
    happen(rank, 0, "begun")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 8)).to(DEVICE)
    same_bits = OPTIONS.same_bits
    torch.manual_seed(1 + rank * (not same_bits))
    random.seed(1 + rank * (not same_bits))
    shards = {"shards": SHARDS} if same_bits else {}
    loader = outlast.data.Loader(Points(50), global_batch=12, seed=3, **shards)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5000)
    # Without a bucket that is laid out anew, so that more than two workers sum in the same order.
    ddp = (
        outlast.SameBits(model, **shards)
        if same_bits
        else nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    )
    named = {"model": ddp, "loader": loader, "optimizer": optimizer, "scheduler": scheduler}
    records = Records(rank, {**named, "model": model})
    time.sleep(OPTIONS.beginning)

    def sums(step, x, ids):
        x = x.to(DEVICE)
        happen(rank, step, "forward")
        loss = F.mse_loss(ddp(x + random.random() * 0.1), x)
        if step % OPTIONS.batches == 1 % OPTIONS.batches:
            optimizer.zero_grad()
        happen(rank, step, "backward")
        loss.backward()
        return loss.item(), ids.tolist()

    def same_sums(step, batch):
        samples, noise = [], random.random() * 0.1
        if step % OPTIONS.batches == 1 % OPTIONS.batches:
            optimizer.zero_grad()
        for ids, given in ddp.shards(batch):
            x = given.to(DEVICE)
            happen(rank, step, "forward")
            loss = F.mse_loss(ddp(x + noise), x)
            happen(rank, step, "backward")
            ddp.backward(loss)
            samples += ids.tolist()
        return float(ddp.loss), samples

    def one_step(step, batch):
        loss, ids = same_sums(step, batch) if same_bits else sums(step, batch[1], batch[0])
        happen(rank, step, "reduced")
        if step % OPTIONS.batches == 0:
            optimizer.step()
            happen(rank, step, "stepped")
            scheduler.step()
        if OPTIONS.pause:
            time.sleep(OPTIONS.pause)
        records.made(step, loss, ids)
        return loss

    with outlast.session(every=OPTIONS.every, **named) as session:
        happen(rank, session.step, "resumed")
        for batch in session.steps(loader, until=OPTIONS.steps):
            records.completed(session.step)
            session.log(loss=one_step(session.step + 1, batch))
        records.completed(session.step)
    step = session.step
    final = {"step": step, "pid": os.getpid(), "hash": fingerprint({**named, "model": model})}
    (OPTIONS.records / f"final-{rank}.json").write_text(json.dumps(final))
    happen(rank, step, "finished")


rank, _ = meet()
run(rank)
sys.exit(0)
