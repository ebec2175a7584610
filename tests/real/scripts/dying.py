"""What scripts have in common that die where they are told: RECORDS STEPS KIND [--die …].

``--die RANK:STEP:PLACE``, once in the job, with SIGKILL; ``joining`` in step 0 is on the way into a
job in which somebody has died.

RECORDS/final-RANK.json is the end, with a hash of each named object and of the random numbers, and
how often this process has run the loop's body.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import meet, random_states
from train import Points, update

import outlast


def _parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("kind")
    parser.add_argument("--die", action="append", default=[])
    parser.add_argument("--pause", type=float, default=0.0, help="seconds, where it could die")
    return parser.parse_args()


OPTIONS = _parse()
NOW = [0, 0]  # the rank, and the step


def die_here(place):
    """Die if that is asked for, once in the job."""
    time.sleep(OPTIONS.pause)
    for number, one in enumerate(OPTIONS.die):
        who, when, where = one.split(":")
        mark = OPTIONS.records / f"died-{number}"
        if [int(who), int(when), where] == [*NOW, place] and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def begin():
    """Come into the job; the rank, and the number of workers."""
    NOW[0], world = meet()
    if (OPTIONS.records / "died-0").exists():
        die_here("joining")
    return NOW[0], world


def stock_loader(rank, world):
    """One of torch's, with processes of its own."""
    sampler = torch.utils.data.DistributedSampler(Points(48), world, rank, seed=3)
    return torch.utils.data.DataLoader(
        Points(48), batch_size=3, sampler=sampler, num_workers=2, persistent_workers=True
    )


def own_loader(size):
    """One of ours."""
    return outlast.data.Loader(Points(size), global_batch=12, seed=3)


def double(state, bucket):
    """A communication hook of the script's own."""
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer.div_(2 * dist.get_world_size()), async_op=True)
    die_here("bucket")
    return work.get_future().then(lambda done: done.value()[0].mul_(2))


def record_end(step, bodies, named):
    """Write down how it has ended."""
    found = {"torch": [one.tolist() for one in random_states()], "python": random.getstate()}
    hashes = {name: hashlib.sha256(repr(one).encode()).hexdigest() for name, one in found.items()}
    for name, one in named.items():
        digest = hashlib.sha256()
        update(digest, one.state_dict())
        hashes[name] = digest.hexdigest()
    final = {"step": step, "hash": hashes, "bodies": bodies, "pid": os.getpid()}
    (OPTIONS.records / f"final-{NOW[0]}.json").write_text(json.dumps(final))
