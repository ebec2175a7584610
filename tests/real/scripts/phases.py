"""A job with phases, of which one rank is told in the middle of one that its machine must go.

RECORDS UNTIL [--strike PHASE --at STEP --on RANK --times N]: warm-up (passes before the loop),
forward, backward, optimizer, save (one is in flight), evaluation (in the loop, after the
optimizer), after (an evaluation behind the loop). The process sends itself the signal: a real one,
at that very place.
"""

from __future__ import annotations

import argparse
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
from train import Momentum, Points, fingerprint

import outlast

EVALUATED_EVERY = 4


class Striker:
    def __init__(self, options, rank):
        self.phase = options.strike if rank == options.on else ""
        self.at, self.times = options.at, options.times

    def __call__(self, phase, step):
        """Strike, if it is time to."""
        if phase == self.phase and step >= self.at and self.times:
            self.times -= 1
            os.kill(os.getpid(), random.Random(step).choice([signal.SIGTERM, signal.SIGUSR1]))


class Net(nn.Module):
    def __init__(self, strike):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.2)
        self.strike, self.step = strike, 0

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        if self.training:
            self.strike("forward", self.step)
        return self.second(self.dropout(hidden))


class Striking(Momentum):
    def step(self):
        self.model.strike("optimizer", self.model.step)
        super().step()


def evaluate(model, strike, phase, step, batches):
    """Ranks meet in each batch, as they do where a model is spread over them."""
    model.eval()
    total = torch.zeros(1)
    with torch.no_grad():
        for number in range(batches):
            total += F.mse_loss(model(torch.full((2, 8), float(number))), torch.zeros(2, 8))
            dist.all_reduce(total)
            time.sleep(0.005)
            if number == 2:
                strike(phase, step)
    model.train()
    return float(total)


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("until", type=int)
    parser.add_argument("--strike", default="")
    parser.add_argument("--at", type=int, default=0)
    parser.add_argument("--on", type=int, default=0)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--every", default="7 steps")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--evaluation", type=int, default=6, help="batches")
    parser.add_argument("--evaluated-from", type=int, default=0, help="step")
    return parser.parse_args()


def main():
    options = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    strike = Striker(options, rank)
    torch.manual_seed(0)
    model = Net(strike)
    torch.manual_seed(1 + rank)
    random.seed(1 + rank)
    optimizer = Striking(model)
    loader = outlast.data.Loader(Points(60), global_batch=6, seed=3)
    records = (options.records / f"steps-{rank}.jsonl").open("a", buffering=1)
    with outlast.session(every=options.every, model=model, optimizer=optimizer) as session:
        # Long enough that nobody has begun to train before all have heard of it.
        evaluate(model, strike, "warm-up", session.step, 1000 if options.strike == "warm-up" else 4)
        for ids, x in session.steps(loader, until=options.until):
            model.step = session.step + 1
            line = {"pid": os.getpid(), "step": model.step, "ids": ids.tolist()}
            records.write(json.dumps(line) + "\n")
            loss = F.mse_loss(model(x), x)
            optimizer.zero_grad()
            loss.backward()
            strike("backward", model.step)
            optimizer.step()
            if strike.phase == "save" and model.step >= strike.at:
                session.save()  # of this boundary; the next step is taken while it is written
            if strike.phase == "save" and model.step >= strike.at + 1:
                strike("save", model.step)
            if model.step % EVALUATED_EVERY == 0 and model.step >= options.evaluated_from:
                evaluate(model, strike, "evaluation", model.step, options.evaluation)
            session.log(loss=loss)
            time.sleep(options.pause)
            if options.strike == "after" and model.step == options.until:
                time.sleep(1.0)  # the end of a loop is worth a save of its own from then on
        # And that nobody has finished before the end of the loop is committed.
        evaluate(model, strike, "after", session.step, 1000 if options.strike == "after" else 4)
    final = {"step": session.step, "resumed": session.resumed}
    final["hash"] = fingerprint({"model": model, "optimizer": optimizer})
    (options.records / f"final-{rank}.json").write_text(json.dumps(final))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
