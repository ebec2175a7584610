"""Train a small classifier: points on three spirals, one process.

outlast run --dir jobs/plain examples/plain.py

While it trains, kill a worker from another terminal (pgrep -f launch.worker finds it), or press
Ctrl-C and type the command again. It ends with the same plain.safetensors, to the last
bit, as the script without Outlast.
"""

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import outlast

EPOCHS = 300


def spirals(num):
    """Points of three spiral arms (num, 2), and the arm of each (num,)."""
    arm, radius = torch.arange(num) % 3, torch.rand(num)
    angle = 5 * radius + 2.1 * arm + 0.1 * torch.randn(num)
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], 1) * radius[:, None], arm)


def train_step(batch, model, optimizer, scheduler):
    x, arm = batch
    loss = nn.functional.cross_entropy(model(x), arm)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()


@torch.no_grad()
def accuracy(model, data):
    """The share of the points that the model gets right."""
    x, arm = data.tensors
    model.eval()
    right = model(x).argmax(1) == arm
    model.train()
    return right.float().mean().item()


def main():
    torch.manual_seed(0)
    data = spirals(3000)
    loader = DataLoader(data, batch_size=100, shuffle=True)
    layers = [nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))
    with outlast.session(model=model, optimizer=optimizer, scheduler=scheduler) as session:
        for epoch in session.epochs(EPOCHS):
            for batch in session.steps(loader):
                train_step(batch, model, optimizer, scheduler)
            print(f"epoch {epoch}: {accuracy(model, data):.1%} right", flush=True)
    save_file(model.state_dict(), "plain.safetensors")


if __name__ == "__main__":
    main()
