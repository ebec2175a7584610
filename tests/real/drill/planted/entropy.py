"""Planted: noise comes from a generator that NumPy seeds from the machine."""

import numpy as np
import torch
from torch import nn

import outlast

torch.manual_seed(0)
rows = torch.randn(256, 8)
data = torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = outlast.data.Loader(data, global_batch=8, seed=1)
noise = np.random.default_rng()

with outlast.session(model=model, optimizer=optimizer, loader=loader, every=50) as session:
    for x, y in session.steps(loader, until=60):
        noisy = x + torch.from_numpy(noise.normal(0, 0.1, x.shape)).float()
        loss = nn.functional.mse_loss(model(noisy), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
