"""What the workers of one group come to, beside one worker alone; prints what differs.

    many_sums.py [forever]

Each case is a small model, or two at once, that goes through some steps twice: here with the group,
and then on each rank by itself, in a group of its own. Losses, gradients and buffers must be the
same, bit for bit.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import outlast
from outlast.data.order import held
from outlast.reduce import exchange


class Everything(nn.Module):
    """Batch norm, dropout, a part that few shards reach, one that none does, and a frozen one."""

    def __init__(self, dtype):
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.rare, self.never, self.frozen = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)
        self.last = nn.Linear(6, 3)
        self.frozen.requires_grad_(False)
        self.to(dtype)
        self.first.to(memory_format=torch.channels_last)

    def forward(self, x):
        x = nn.functional.dropout(self.norm(self.first(x)).relu(), 0.3, self.training).mean((2, 3))
        found = self.last(x) + self.frozen(x)
        return (found + self.rare(x) if x[0, 0] > x[0, 1] else found).square().mean()


def shard(number, step, dtype):
    generator = torch.Generator().manual_seed(1000 * step + number)
    scale = 2.0 ** torch.randint(-6, 6, (3, 2, 5, 5), generator=generator)
    return (torch.randn(3, 2, 5, 5, generator=generator) * scale).to(dtype)


def train(num_shards, group, dtype, steps=2):
    """All that comes of it: losses, gradients, weights, buffers."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(0)
    model = outlast.SameBits(Everything(dtype), shards=num_shards, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    mine = held(num_shards, rank, world)
    for step in range(steps):
        parts = [shard(number, step, dtype) for number in mine]
        batch = outlast.data.Shards(parts, of=num_shards, first=mine.start, position=step)
        for x in model.shards(batch):
            model.backward(model(x))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found += [model.loss, *(p.grad for p in model.parameters())]
        found = [None if one is None else one.detach().clone() for one in found]
        optimizer.step()
    return [*found, *model.module.state_dict().values()]


def train_two(group, steps=2):
    """Two models of one size whose loops are open at once, and what comes of them.

    Rank 1 answers late for the first one, as a busy machine may: the second one's sums come by.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(0)
    one, other = (
        outlast.SameBits(Everything(torch.float32), shards=4, seed=seed, process_group=group)
        for seed in range(2)
    )
    answer, mine, found = exchange.Messages._answer, held(4, rank, world), []

    def late(self, *arguments):
        if rank == 1 and self is one._gradients._exchange:
            time.sleep(0.2)
        answer(self, *arguments)

    exchange.Messages._answer = late
    for step in range(steps):
        parts = [shard(number, step, torch.float32) for number in mine]
        batch = outlast.data.Shards(parts, of=4, first=mine.start, position=step)
        for x, y in zip(one.shards(batch), other.shards(batch), strict=True):
            one.backward(one(x))
            other.backward(3 * other(y))
        found += [p.grad for model in (one, other) for p in model.parameters()]
        found = [None if gradient is None else gradient.clone() for gradient in found]
    exchange.Messages._answer = answer
    return found


def same(one, other):
    if one is None or other is None:
        return one is other
    one, other = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(one, other)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    while sys.argv[1:] == ["forever"]:
        train(8, None, torch.float32)
        print("trained", flush=True)
    alone = [dist.new_group([each]) for each in range(world)][rank]
    wrong, compared = [], 0
    pairs = list(zip(*map(train_two, (None, alone)), strict=True))
    if not all(same(*pair) for pair in pairs):
        wrong.append((rank, "two models"))
    for way in ("messages", "collectives"):
        if way == "collectives":
            exchange.Messages = (
                exchange.CollectiveExchange
            )  # what a GPU takes, in the host's memory
        for dtype in (torch.float32, torch.bfloat16):
            for num_shards in (1, 2, 3, 5, 8, 12):
                ours, theirs = (train(num_shards, group, dtype) for group in (None, alone))
                pairs = list(zip(ours, theirs, strict=True))
                compared += len(pairs)
                if not all(same(*pair) for pair in pairs):
                    wrong.append((rank, way, str(dtype), num_shards))
    print(f"compared {compared}, wrong: {wrong}", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(bool(wrong))


if __name__ == "__main__":
    main()
