"""A loop of a script's own with Accelerate: RECORDS [--plain] [--die STEP …] [KEY=VALUE …].

With Outlast's session, or without. Its last rank dies, once, at the end of each STEP (a batch).
The loss of each is appended to RECORDS/logs.jsonl; RECORDS/final.json has the weights' hash.
"""

import argparse
import contextlib
import hashlib
import json
import os
import signal
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

PARSER = argparse.ArgumentParser()
PARSER.add_argument("records", type=Path)
PARSER.add_argument("--plain", action="store_true")
PARSER.add_argument("--noisy", action="store_true", help="the collator draws")
PARSER.add_argument("--stream", action="store_true", help="an iterable data set")
PARSER.add_argument("--processes", type=int, default=0, help="of the loader")
PARSER.add_argument("--skip", type=int, default=0, help="batches of each epoch to leave out")
PARSER.add_argument("--saves", type=int, default=0, help="save_state() after so many steps")
PARSER.add_argument("--asks", action="store_true", help="save_state() asks for a checkpoint")
PARSER.add_argument("--load", help="load_state() in front of the loop, where it is there")
PARSER.add_argument("--die", type=int, action="append", default=[])
PARSER.add_argument("arguments", nargs="*", help="of DataLoaderConfiguration, as JSON")
OPTIONS = PARSER.parse_intermixed_args()
EPOCHS, SIZE, BATCH = 3, 54, 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1)]
        self.net = nn.Sequential(*layers, nn.Linear(32, 8))

    def forward(self, given):
        return self.net(given)


class Counted:
    """An object of the script's own, registered for checkpointing."""

    def __init__(self):
        self.total, self.steps, self.begun = 0.0, 0, 0

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


class Stream(IterableDataset):
    def __init__(self, points):
        self.points = points

    def __iter__(self):
        return iter(self.points)


def noisy(rows):
    rows = torch.stack([row[0] for row in rows])
    return [rows + 0.1 * torch.randn(rows.shape)]


class Loop:
    def __init__(self):
        given = dict(one.split("=") for one in OPTIONS.arguments)
        given = {key: json.loads(value) for key, value in given.items()}
        self.accelerator = accelerator = Accelerator(
            cpu=True,
            mixed_precision="bf16",
            gradient_accumulation_steps=3,
            dataloader_config=DataLoaderConfiguration(**given),
            project_config=ProjectConfiguration(
                OPTIONS.records / "project", automatic_checkpoint_naming=True, total_limit=2
            ),
        )
        set_seed(1)
        data = TensorDataset(torch.randn(SIZE, 8))
        if OPTIONS.stream:
            data = Stream(data)
        loader = DataLoader(
            data,
            BATCH,
            shuffle=None if OPTIONS.stream else True,
            collate_fn=noisy if OPTIONS.noisy else None,
            num_workers=OPTIONS.processes,
        )
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
        prepared = accelerator.prepare(model, optimizer, loader, schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared
        self.counted = Counted()
        accelerator.register_for_checkpointing(self.counted)

    def run(self):
        session = None
        with contextlib.ExitStack() as stack:
            if not OPTIONS.plain:
                from outlast.integrations.accelerate import session_of

                asks = not OPTIONS.asks
                given = session_of(self.accelerator, every="3 steps", accelerator_saves=asks)
                session = stack.enter_context(given)
            if OPTIONS.load and Path(OPTIONS.load).exists():
                self.accelerator.load_state(OPTIONS.load)
                if session is None or not session.resumed:
                    self.counted.begun = self.counted.steps
            for _ in session.epochs(EPOCHS) if session else range(EPOCHS):
                loader = self.loader
                if OPTIONS.skip:
                    loader = self.accelerator.skip_first_batches(loader, OPTIONS.skip)
                for batch in session.steps(loader) if session else loader:
                    self.step(batch)

    def step(self, batch):
        accelerator = self.accelerator
        with accelerator.accumulate(self.model):
            loss = (self.model(batch[0]) - batch[0]).square().mean()
            accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        given = batch[0]
        if accelerator.even_batches:  # else they are of several sizes, and nothing gathers them
            given = accelerator.gather_for_metrics(given)
        seen = given.sum().item()
        self.counted.total += seen
        self.counted.steps += 1
        rate = self.schedule.get_last_lr()[0]
        noted = [self.counted.steps, loss.item(), self.counted.total, rate, accelerator.step]
        if accelerator.is_main_process:
            with (OPTIONS.records / "logs.jsonl").open("a") as file:
                file.write(json.dumps(noted) + "\n")
        if OPTIONS.saves and self.counted.steps % OPTIONS.saves == 0:
            accelerator.save_state()
        step = self.counted.steps - self.counted.begun
        mark = OPTIONS.records / f"died-{step}"
        if step in OPTIONS.die and accelerator.is_last_process and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def end(self):
        if self.accelerator.is_main_process:
            digest = hashlib.sha256()
            for _, value in sorted(self.accelerator.unwrap_model(self.model).state_dict().items()):
                digest.update(value.numpy().tobytes())
            found = {"hash": digest.hexdigest(), "step": self.counted.steps}
            (OPTIONS.records / "final.json").write_text(json.dumps(found))


def main():
    torch.set_num_threads(1)
    loop = Loop()
    loop.run()
    loop.end()


main()
