"""Planted: two threads add to the same rows, in an order that is another one each time."""

import torch
from torch import nn

import outlast

torch.manual_seed(0)
torch.set_num_threads(4)
data = torch.utils.data.TensorDataset(torch.randint(0, 4, (256, 4096)))
table = nn.Parameter(torch.randn(4, 64))
head = nn.Linear(64, 1)
model = nn.ParameterDict({"table": table, "head": head.weight})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = outlast.data.Loader(data, global_batch=8, seed=1)

with outlast.session(model=model, optimizer=optimizer, loader=loader, every=50) as session:
    for (picked,) in session.steps(loader, until=60):
        rows = table[picked]
        loss = (rows * torch.randn_like(rows)).mean(1).tanh().pow(2).mean() + head.weight.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
