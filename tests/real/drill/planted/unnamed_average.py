"""Planted: an average of the weights pulls at each step, and the session was not given it."""

import copy

import torch
from torch import nn

import outlast

torch.manual_seed(0)
rows = torch.randn(256, 8)
data = torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
teacher = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = outlast.data.Loader(data, global_batch=8, seed=1)

with outlast.session(model=model, optimizer=optimizer, loader=loader, every=50) as session:
    for x, y in session.steps(loader, until=60):
        with torch.no_grad():
            target = teacher(x)
        guess = model(x)
        loss = nn.functional.mse_loss(guess, y) + 0.1 * nn.functional.mse_loss(guess, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, quick in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.lerp_(quick, 0.1)
