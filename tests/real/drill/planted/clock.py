"""Planted: the learning rate falls with the seconds since the start."""

import time

import torch
from torch import nn

import outlast

torch.manual_seed(0)
rows = torch.randn(256, 8)
data = torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = outlast.data.Loader(data, global_batch=8, seed=1)
started = time.time()

with outlast.session(model=model, optimizer=optimizer, loader=loader, every=50) as session:
    for x, y in session.steps(loader, until=60):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + time.time() - started)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
