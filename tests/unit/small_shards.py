"""A small net, batches in shards, and one step with them."""

import torch

from outlast.data import Shards


def net(*more):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), *more, torch.nn.Linear(4, 1))


def batch(num_shards=4, position=0):
    generator = torch.Generator().manual_seed(position)
    parts = [torch.randn(2, 3, generator=generator) for _ in range(num_shards)]
    return Shards(parts, of=num_shards, first=0, position=position)


def step(model, shards):
    losses = []
    for x in model.shards(shards):
        loss = model(x).square().mean()
        model.backward(loss)
        losses.append(loss.detach())
    return losses
