"""Planted: nothing seeds torch, so that each run begins with other weights."""

import numpy as np
import torch
from torch import nn

import outlast

rows = torch.from_numpy(np.random.default_rng(0).standard_normal((256, 8), dtype=np.float32))
data = torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = outlast.data.Loader(data, global_batch=8, seed=1)

with outlast.session(model=model, optimizer=optimizer, loader=loader, every=50) as session:
    for x, y in session.steps(loader, until=60):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
