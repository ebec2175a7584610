"""Planted: the share that a dropout leaves out grows with each step, and is in no checkpoint."""

import torch
from torch import nn

import outlast


def main():
    torch.manual_seed(0)
    rows = torch.randn(256, 8)
    data = torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.0), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = outlast.data.Loader(data, global_batch=8, seed=1)
    with outlast.session(model=model, optimizer=optimizer, loader=loader, every=50) as session:
        for x, y in session.steps(loader, until=60):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model[1].p += 0.01


main()
