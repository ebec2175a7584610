"""A training script for soaks: CORPUS STEPS; its bits are the same on any number of machines.

    outlast drill --soak 30min --machines 3 -- benchmarks/soak_train.py CORPUS 100000000

The demo's model in small, under ``SameBits``: with torch's DDP on three workers the first step
after a resume would sum in another order. CORPUS is any file of some megabytes.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import outlast
from outlast.drill.demo_train import Gpt, Windows

SHARDS = 6

dist.init_process_group("gloo")
torch.manual_seed(0)
model = Gpt(width=64, heads=2, layers=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = Windows(Path(sys.argv[1]))
loader = outlast.data.Loader(data, global_batch=2 * SHARDS, seed=7, shards=SHARDS)
same = outlast.SameBits(model, shards=SHARDS)
parts = {"model": model, "optimizer": optimizer, "loader": loader}

with outlast.session(**parts, every="20 steps") as session:
    for batch in session.steps(loader, until=int(sys.argv[2])):
        optimizer.zero_grad()
        for _, text in same.shards(batch):
            loss = same(text)
            same.backward(loss)
        optimizer.step()
        session.log(loss=loss)
