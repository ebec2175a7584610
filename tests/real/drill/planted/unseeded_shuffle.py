"""Planted: Python's random decides on the order, and has no seed."""

import random

import torch
from torch import nn

import outlast

torch.manual_seed(0)
rows = torch.randn(256, 8)
order = list(range(256))
random.shuffle(order)
data = torch.utils.data.TensorDataset(rows[order], rows[order].sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = outlast.data.Loader(data, global_batch=8, seed=1)

with outlast.session(model=model, optimizer=optimizer, loader=loader, every=50) as session:
    for x, y in session.steps(loader, until=60):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
