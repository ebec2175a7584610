"""Planted: the loop counts its batches by enumerate, and steps after each fourth of them."""

import torch
from torch import nn

import outlast

torch.manual_seed(0)
rows = torch.randn(256, 8)
data = torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = outlast.data.Loader(data, global_batch=8, seed=1)

with outlast.session(model=model, optimizer=optimizer, loader=loader, every=50) as session:
    for number, (x, y) in enumerate(session.steps(loader, until=60)):
        loss = nn.functional.mse_loss(model(x), y) / 4
        loss.backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
