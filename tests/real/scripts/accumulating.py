"""Jobs that accumulate gradients, or have a batch norm, under DDP: RECORDS STEPS KIND [options].

``--die RANK:STEP:PLACE``, once in the job, with SIGKILL.

In kinds of ``WINDOWS`` the optimizer steps after every fourth batch.

RECORDS/final-RANK.json is the end, with a hash of each named object and of the random numbers, and
how often this process has run the loop's body.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.optim import swa_utils
from train import Points, update

import outlast


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("kind")
    parser.add_argument("--die", action="append", default=[])
    parser.add_argument("--pause", type=float, default=0.0, help="seconds, where it could die")
    return parser.parse_args()


OPTIONS = parse()
KIND = OPTIONS.kind
NORMS = {"norm", "norm_no_sync"}
WINDOWS = {"no_sync", "sums", "sums_stock", "saved", "counted", "norm_no_sync"}
NO_SYNC = KIND.endswith("no_sync")
BATCHES = 4 if KIND in WINDOWS else 1  # of an optimizer's step
AT = [0, 0]  # rank and step


def die_here(rank, step, place):
    """Die if that is asked for, once in the job."""
    time.sleep(OPTIONS.pause)
    for number, one in enumerate(OPTIONS.die):
        who, when, where = one.split(":")
        mark = OPTIONS.records / f"died-{number}"
        if (int(who), int(when), where) == (rank, step, place) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def loader_of(rank, world):
    if not KIND.endswith("stock"):
        return outlast.data.Loader(Points(50), global_batch=12, seed=3)
    sampler = torch.utils.data.DistributedSampler(Points(48), world, rank, seed=3)
    return torch.utils.data.DataLoader(
        Points(48), batch_size=3, sampler=sampler, num_workers=2, persistent_workers=True
    )


def double(state, bucket):
    """A communication hook of the script's own."""
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer.div_(2 * dist.get_world_size()), async_op=True)
    die_here(*AT, "bucket")
    return work.get_future().then(lambda done: done.value()[0].mul_(2))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if (OPTIONS.records / "died-0").exists():
        die_here(rank, 0, "joining")
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(32)] if KIND in NORMS else []
    net = nn.Sequential(nn.Linear(8, 32), *norm, nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 8))
    torch.manual_seed(1 + rank)
    random.seed(1 + rank)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5000)
    average = swa_utils.AveragedModel(net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    model = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    model.register_comm_hook(None, double)
    named = {"model": net, "optimizer": optimizer, "schedule": schedule}
    # With batch norms it would have each rank's own statistics.
    named |= {"scaler": scaler} if KIND in NORMS else {"average": average, "scaler": scaler}
    optimizer.register_step_post_hook(lambda *_: die_here(*AT, "optimizer"))
    bodies = 0
    every = "1000 steps" if KIND in WINDOWS - {"saved"} else "5 steps"
    with outlast.session(every=every, **named) as session:
        steps = session.steps(loader_of(rank, world), until=OPTIONS.steps)
        batches = ((session.step, x) for _, x in steps)
        if KIND == "counted":  # by the script itself
            batches = ((number, x) for number, (_, x) in enumerate(steps))
        for number, x in batches:
            step, bodies = session.step + 1, bodies + 1
            AT[:] = rank, step
            is_last = number % BATCHES == BATCHES - 1
            die_here(rank, step, "forward")
            with contextlib.nullcontext() if is_last or not NO_SYNC else model.no_sync():
                loss = F.mse_loss(model(x + random.random() * 0.1), x)
                if KIND not in WINDOWS or (NO_SYNC and step % BATCHES == 1):
                    optimizer.zero_grad()
                die_here(rank, step, "backward")
                scaler.scale(loss).backward()
            if not is_last:
                die_here(rank, step, "accumulated")
                continue
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            die_here(rank, step, "summed")
            scaler.step(optimizer)
            scaler.update()
            die_here(rank, step, "stepped")
            schedule.step()
            if KIND not in NORMS:
                average.update_parameters(net)
            if KIND in WINDOWS and not NO_SYNC:
                optimizer.zero_grad()
    found = {"torch": torch.get_rng_state().tolist(), "python": random.getstate()}
    hashes = {name: hashlib.sha256(repr(one).encode()).hexdigest() for name, one in found.items()}
    for name, one in named.items():
        digest = hashlib.sha256()
        update(digest, one.state_dict())
        hashes[name] = digest.hexdigest()
    final = {"step": session.step, "hash": hashes, "bodies": bodies, "pid": os.getpid()}
    (OPTIONS.records / f"final-{rank}.json").write_text(json.dumps(final))


main()
