"""Training on a stream, shuffled and packed, by sums that are exact: RECORDS STEPS [options].

A line of RECORDS/steps-RANK.jsonl is a step that this process has completed, with the tokens of
its samples; the end is RECORDS/final-RANK.json.
"""

import argparse
import hashlib
import json
import os
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
from elastic import Exact
from torch import nn
from train import update

import outlast

LENGTH = 8
RNG = random.Random(7)
LENGTHS = [[RNG.randrange(20) for _ in range(RNG.randrange(12))] for _ in range(9)]


def documents(shard):
    first = shard * 1000
    for length in LENGTHS[shard]:
        yield list(range(first, first + length))
        first += length


def collate(samples):
    tokens = torch.stack(samples)
    return tokens, (tokens % 97).double() / 97


class Rows:
    """Rows of tokens that can be asked for by number."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return torch.arange(index * LENGTH, (index + 1) * LENGTH)


def drawn(num_workers):
    """A loader whose steps differ in size, in an order that weights draw."""
    return outlast.data.Loader(
        Rows(),
        weights=[1 + index % 3 for index in range(50)],
        lengths=[1 + index % 5 for index in range(50)],
        global_tokens=30,
        seed=3,
        collate_fn=collate,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        worker_init_fn=torch.manual_seed,
    )


class Repeating(outlast.data.Stream):
    """Hands out its ninth batch twice."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch
            if self.position == 9 * self.global_batch:
                yield batch


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds, in each step")
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--drawn", action="store_true", help="no stream: a loader by weights")
    parser.add_argument("--plant", action="store_true", help="a bug in the stream")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(LENGTH, LENGTH, bias=False, dtype=torch.float64)
    kind = Repeating if options.plant else outlast.data.Stream
    stream = (
        drawn(options.num_workers)
        if options.drawn
        else kind(
            documents,
            num_shards=len(LENGTHS),
            global_batch=8,
            lanes=4,
            seed=3,
            buffer=6,
            pack=LENGTH,
            collate_fn=collate,
            num_workers=options.num_workers,
        )
    )
    named = {"model": model, "optimizer": Exact(model, 8)}
    rank = dist.get_rank()
    records = (options.records / f"steps-{rank}.jsonl").open("a", buffering=1)
    with outlast.session(every="3 steps", loader=stream, **named) as session:
        for tokens, samples in session.steps(stream, until=options.steps):
            named["optimizer"].step(samples)
            line = {"pid": os.getpid(), "step": session.step + 1, "ids": tokens.tolist()}
            records.write(json.dumps({**line, "rank": rank, "world": dist.get_world_size()}) + "\n")
            time.sleep(options.pause)
    digest = hashlib.sha256()
    update(digest, {name: named[name].state_dict() for name in named})
    final = {"step": session.step, "hash": digest.hexdigest()}
    (options.records / f"final-{rank}.json").write_text(json.dumps(final))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
