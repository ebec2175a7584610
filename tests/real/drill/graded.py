"""A small job for ``outlast drill``: [--average|--breaks|--no-session|--unseeded]; 400 slow steps.

With ``--average`` what it trains on is pulled at by an average that the session was not given; with
``--breaks`` it fails behind step 30 of each run but the undisturbed one.
"""

import argparse
import copy
import time
from pathlib import Path

import torch
from torch import nn

import outlast

parser = argparse.ArgumentParser()
for name in ("average", "breaks", "no-session", "unseeded"):
    parser.add_argument(f"--{name}", action="store_true")
given = parser.parse_args()

if not given.unseeded:
    torch.manual_seed(0)
rows = torch.randn(512, 8)
data = torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
teacher = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(batches):
    for x, y in batches:
        made = sum(int(one["step"]) for one in list(optimizer.state.values())[:1])
        if given.breaks and made == 30 and "undisturbed" not in Path.cwd().parts:
            raise ValueError("a bug that shows under fire")
        loss = nn.functional.mse_loss(model(x), y)
        if given.average:
            with torch.no_grad():
                target = teacher(x)
            loss = loss + 0.1 * nn.functional.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for slow, quick in zip(teacher.parameters(), model.parameters(), strict=True):
            slow.data.lerp_(quick.data, 0.1)
        time.sleep(0.02)


if given.no_session:
    train(torch.utils.data.DataLoader(data, batch_size=4))
else:
    loader = outlast.data.Loader(data, global_batch=4, seed=1)
    parts = {"model": model, "optimizer": optimizer}
    with outlast.session(**parts, loader=loader, every=5) as session:
        train(session.steps(loader, until=400))
