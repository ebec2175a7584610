"""A training of a moment, OUT: it saves once and at its end, and waits for what it saves.

So the keeper does much the same in each run: it commits, copies and prunes. Where the run goes on
from is printed. What comes out is a hash of weights, velocities and random numbers in
``OUT/final-RANK``. A run that is started again behind the end must come to the same.
"""

import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import outlast

STEPS = 6
ASKED = 3  # the step in which a save is asked for


class Kept:
    """Tensors that are saved with the model."""

    def __init__(self, tensors):
        self.tensors = tensors

    def state_dict(self):
        return {"tensors": self.tensors}

    def load_state_dict(self, state):
        for mine, saved in zip(self.tensors, state["tensors"], strict=True):
            mine.copy_(saved)


def main():
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.2), nn.Linear(64, 1))
    velocity = [torch.zeros_like(weight) for weight in model.parameters()]
    torch.manual_seed(1 + rank)
    with outlast.session(every="1000 steps", model=model, velocity=Kept(velocity)) as session:
        if not rank:
            print(f"resumed from step {session.step}", flush=True)
        save = None
        for _ in session.steps(range(STEPS), until=STEPS):
            if save is not None:
                save.wait(60)
            train(model, velocity)
            save = session.save() if session.step == ASKED - 1 else None
    end(Path(sys.argv[1]) / f"final-{rank}", [*model.parameters(), *velocity])
    if dist.is_initialized():
        dist.destroy_process_group()


def train(model, velocity):
    """One step on a random batch: the random state counts as well."""
    x = torch.randn(16, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for weight, speed, gradient in zip(model.parameters(), velocity, gradients, strict=True):
            if dist.is_initialized():
                dist.all_reduce(gradient)
            speed.mul_(0.9).add_(gradient)
            weight.sub_(speed, alpha=0.01)


def end(place, tensors):
    """Leave what came out; where something came out before, it must be the same."""
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for tensor in tensors:
        digest.update(tensor.detach().numpy().tobytes())
    if place.exists() and place.read_text() != f"{digest.hexdigest()}\n":
        sys.exit(f"{place}: another end than before")
    place.write_text(f"{digest.hexdigest()}\n")


if __name__ == "__main__":
    main()
