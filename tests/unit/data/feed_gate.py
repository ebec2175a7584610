"""The gate: a run cut off at any batch and resumed equals the undisturbed one, to the bit."""

import json
import random

import numpy as np
import torch

from outlast.data import open_feed, random_state


def draw():
    """What a training step draws."""
    return (random.random(), float(np.random.rand()), torch.rand(2).tolist())


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def plain(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def through_json(value):
    """Plain values through JSON, tensors as they are: what a checkpoint does."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        assert all(isinstance(key, str) for key in value)
        return {key: through_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [through_json(item) for item in value]
    assert value is None or isinstance(value, str | int | float), type(value)
    return json.loads(json.dumps(value))


def take(feed, num_batches, *, start=0, save=False):
    steps, saved = [], [through_json((feed.state(), random_state.capture()))] if save else []
    for _ in range(start, num_batches):
        batch = plain(next(feed))
        steps.append((feed.epoch, batch, draw()))
        if save:
            saved.append(through_json((feed.state(), random_state.capture())))
    return steps, saved


def undisturbed(build, num_batches, *, save):
    seed_all(0)
    feed = open_feed(build(), rank=0, world_size=1)
    try:
        return take(feed, num_batches, save=save)
    finally:
        feed.close()


def plain_loop(build, num_batches):
    """What the script would get without us."""
    seed_all(0)
    loader = build()
    steps = []
    epoch = 0
    while True:
        for sampler in (loader.sampler, loader.batch_sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        for batch in loader:
            steps.append((epoch, plain(batch), draw()))
            if len(steps) == num_batches:
                return steps
        epoch += 1


def resumed(build, saved, num_batches, *, start):
    seed_all(999 + start)
    feed = open_feed(build(), rank=0, world_size=1)
    feed_state, random_numbers = saved
    feed.restore(feed_state)
    random_state.restore(random_numbers)
    try:
        return take(feed, num_batches, start=start)[0]
    finally:
        feed.close()


def restarted_every(build, num_batches, *, every):
    """The steps of a run that is cut off again and again."""
    steps, saved = undisturbed(build, every, save=True)
    while len(steps) < num_batches:
        seed_all(99)
        feed = open_feed(build(), rank=0, world_size=1)
        feed.restore(saved[-1][0])
        random_state.restore(saved[-1][1])
        more, saved = take(feed, every, save=True)
        feed.close()
        steps += more
    return steps


def check(build, num_batches, *, cuts=None):
    """Cut at each of ``cuts`` (all by default); returns the steps of the undisturbed run."""
    steps, saved = undisturbed(build, num_batches, save=True)
    assert undisturbed(build, num_batches, save=False)[0] == steps, "saving disturbs the run"
    for cut in range(num_batches + 1) if cuts is None else cuts:
        rest = resumed(build, saved[cut], num_batches, start=cut)
        assert rest == steps[cut:], f"resumed after batch {cut}"
    return steps
