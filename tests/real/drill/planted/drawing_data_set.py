"""Planted: the data set draws its noise in the loader's processes."""

import numpy as np
import torch
from torch import nn

import outlast


class Noisy(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return 256

    def __getitem__(self, index):
        row = self.rows[index]
        return row + torch.from_numpy(np.random.normal(0, 0.1, 8)).float(), row.sum()[None]


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=1)

with outlast.session(model=model, optimizer=optimizer, every=50) as session:
    for _ in session.epochs(2):
        for x, y in session.steps(loader):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
