"""Planted: the data set counts what it has given, and makes samples by that."""

import torch
from torch import nn

import outlast


class Growing(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
        self.given = 0

    def __len__(self):
        return 256

    def __getitem__(self, index):
        self.given += 1
        row = self.rows[index] * (1 + self.given / 100)
        return row, row.sum()[None]


torch.manual_seed(0)
data = Growing()
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)

with outlast.session(model=model, optimizer=optimizer, every=50) as session:
    for _ in session.epochs(2):
        for x, y in session.steps(loader):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
