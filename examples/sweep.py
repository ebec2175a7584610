"""Sweep over learning rates: one small classifier for each, one after the other.

python examples/sweep.py

Each run has a directory of its own. Press Ctrl-C or kill the script, and start it again: runs that
had ended are not repeated, the one that was interrupted goes on, and the losses are those of the
script without Outlast, to the last bit. What a run lost: outlast report sweep/0.001
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import outlast

EPOCHS, RATES = 60, (1e-4, 1e-3, 1e-2)


def spirals(num):
    """Points of three spiral arms (num, 2), and the arm of each (num,)."""
    arm, radius = torch.arange(num) % 3, torch.rand(num)
    angle = 5 * radius + 2.1 * arm + 0.1 * torch.randn(num)
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], 1) * radius[:, None], arm)


def train_step(batch, model, optimizer):
    x, arm = batch
    loss = nn.functional.cross_entropy(model(x), arm)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train(rate):
    """The loss over all points, of a model that was trained with this rate."""
    torch.manual_seed(0)
    data = spirals(3000)
    loader = DataLoader(data, batch_size=100, shuffle=True)
    layers = [nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    with outlast.session(dir=f"sweep/{rate}", model=model, optimizer=optimizer) as session:
        for _ in session.epochs(EPOCHS):
            for batch in session.steps(loader):
                train_step(batch, model, optimizer)
    x, arm = data.tensors
    return nn.functional.cross_entropy(model(x), arm).item()


def main():
    for rate in RATES:
        print(f"learning rate {rate}: loss {train(rate)}", flush=True)


if __name__ == "__main__":
    main()
