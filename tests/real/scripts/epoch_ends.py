"""Code behind the loop of each epoch that reads what its body sets: FORM LOADER.

It dies behind the step DIE, once that is saved: of an epoch's last step, that is behind the loop.
In the step LOST one of two ranks is lost, and the other one goes on in its process.
"""

import itertools
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from ranks import meet
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from train import Points, fingerprint

import outlast
from outlast.attempt.over import over
from outlast.checkpoint.manifest import MANIFEST, parse

EPOCHS, STEPS = int(os.environ.get("EPOCHS", "3")), 3
FORM, LOADER = sys.argv[1:3]
DIE = int(os.environ.get("DIE", "-1"))
LOST, MARK = int(os.environ.get("LOST", "-1")), Path("is-lost")
IS_FIRST = not MARK.exists()
RANK, WORLD = meet() if "RANK" in os.environ else (0, 1)


def tell(*words):
    """In one write: two ranks have one file."""
    print(" ".join(map(str, words)) + "\n", end="", flush=True)


class Rows(IterableDataset):
    """Without a length."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return (self.data[n] for n in torch.randperm(len(self.data)).tolist())


class Batches:
    """An iterable of the script's own, that counts its passes."""

    def __init__(self, data):
        self.data, self.passes = data, 0

    def __iter__(self):
        self.passes += 1
        order = torch.randperm(12).reshape(STEPS, 4) + self.passes % 2
        return ((rows, torch.stack([self.data[n][1] for n in rows.tolist()])) for rows in order)


def made(data):
    """The loader, and a step's batches of all ranks are four samples of each."""
    sampler = DistributedSampler(data) if WORLD > 1 else None
    stock = {"batch_size": 4, "sampler": sampler, "shuffle": sampler is None, "drop_last": True}
    if LOADER == "outlast":
        return outlast.data.Loader(data, global_batch=4 * WORLD, seed=3)
    if LOADER == "across":  # batches reach over epochs
        return outlast.data.Loader(Points(10), global_batch=4, seed=3)
    if LOADER == "stream":
        shards = {"num_shards": 4, "sizes": [3] * 4, "global_batch": 4}
        return outlast.data.Stream(lambda n: [data[m] for m in range(n, 12, 4)], **shards)
    if LOADER == "rows":
        return DataLoader(Rows(data), 4)
    if LOADER == "batches":
        return Batches(Points(13))
    if LOADER == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(data, batch_size=4, shuffle=True)
    return DataLoader(data, num_workers=2 * (LOADER == "processes"), **stock)


class Job:
    """What is trained, and one step of it."""

    def __init__(self):
        torch.manual_seed(RANK)
        random.seed(RANK)
        self.data = Points(12 * WORLD)
        blocks = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 8)
        self.model = nn.Sequential(*blocks)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.7)
        self.warm = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=2)
        is_alone = WORLD == 1
        self.trained = self.model if is_alone else nn.parallel.DistributedDataParallel(self.model)
        self.average = AveragedModel(self.model)  # the same on all ranks, as the model is by now
        self.named = dict(vars(self))
        del self.named["data"], self.named["trained"]

    def step(self, batch):
        _, x = batch
        loss = F.mse_loss(self.trained(x + torch.rand(())), x)
        self.scaler.scale(loss).backward()
        if FORM != "accumulates" or session.step % 2:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
        self.warm.step()
        if session._void_steps.is_running:
            assert session.save().wait()  # it is there already
        if LOST < 0:  # survivors of a loss could not go on from their own state
            self.average.update_parameters(self.model)
            self.decay()
        session.log(loss=loss)
        tell("step", session.step, loss.item())
        if session.step == DIE:  # the save is of the boundary before this step
            die()
        if session.step + 1 == LOST and IS_FIRST:
            lose()
        return loss

    @torch.no_grad()
    def decay(self):
        """By hand, past the optimizer."""
        for parameter in self.model.parameters():
            parameter.mul_(0.999)


def lose():
    """Rank 1 dies behind all that the step sends, and the other has heard of it at its end."""
    if RANK == 0:
        MARK.touch()  # its sums have come to their end
        assert over.wait(60)
        return
    while not MARK.exists():
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)


def die():
    """Once the step is committed."""
    if session.step == DIE:
        until_committed()
        os.kill(os.getpid(), signal.SIGKILL)


def until_committed():
    place = Path(os.environ["OUTLAST_DIR"], "checkpoints")
    while not any(
        one.step == DIE and (place / str(one) / MANIFEST).exists() for one in saves(place)
    ):
        time.sleep(0.005)


def saves(place):
    return filter(None, (parse(one.name) for one in place.glob("*")))


def by_epochs(epochs):
    for epoch in epochs:
        for batch in session.steps(loader):
            loss = job.step(batch)
        die()
        tell("behind", epoch, loss.item())
        job.scheduler.step()


def by_function():
    for epoch in range(EPOCHS):
        tell("behind", epoch, one_epoch(session.steps(loader)))
        job.scheduler.step()


def one_epoch(batches):
    total = num = 0
    for batch in batches:
        total += job.step(batch).item()
        num += 1
    die()
    return total / num


def by_while():
    epoch = 0
    while epoch < EPOCHS:
        losses = []
        for batch in itertools.islice(session.steps(loader), 100):
            loss = job.step(batch)
            losses.append(loss.item())
        die()
        tell("behind", epoch, sum(losses) / len(losses))
        job.scheduler.step()
        epoch += 1


def by_steps():
    for batch in session.steps(loader, until=EPOCHS * STEPS):
        loss = job.step(batch)
    die()
    tell("behind", loss.item())
    job.scheduler.step()


FORMS = {
    "epochs": lambda: by_epochs(session.epochs(EPOCHS)),
    "accumulates": lambda: by_epochs(session.epochs(EPOCHS)),  # over the end of an epoch
    "range": lambda: by_epochs(range(EPOCHS)),
    "function": by_function,
    "while": by_while,
    "until": by_steps,
}
job = Job()
loader = made(job.data)
with outlast.session(**job.named, every=int(os.environ.get("EVERY", "1000"))) as session:
    FORMS[FORM]()
tell("end", session.step, fingerprint(job.named), torch.rand(()).item())
