"""Planted: a running mean of the loss, in a variable of the loop, scales each step."""

import torch
from torch import nn

import outlast


def main():
    torch.manual_seed(0)
    rows = torch.randn(256, 8)
    data = torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = outlast.data.Loader(data, global_batch=8, seed=1)
    running = 1.0
    with outlast.session(model=model, optimizer=optimizer, loader=loader, every=50) as session:
        for x, y in session.steps(loader, until=60):
            loss = nn.functional.smooth_l1_loss(model(x), y, beta=max(running, 0.1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running = 0.9 * running + 0.1 * loss.item()


main()
