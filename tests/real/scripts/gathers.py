"""A model whose state takes all ranks, as a sharded weight that is put together: RECORDS.

An optimizer that is in no checkpoint steps, and a tensor that is in none changes.
"""

import datetime
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

records = Path(sys.argv[1])


class Gathers(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        dist.all_reduce(torch.ones(1))
        super()._save_to_state_dict(destination, prefix, keep_vars)


dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
torch.manual_seed(1)
model, other = Gathers(), nn.Linear(4, 4)
plain = nn.Sequential(nn.Linear(4, 4))
plain[0].register_buffer("seen", torch.zeros(()), persistent=False)
trained = DistributedDataParallel(nn.Sequential(model, plain, other))
optimizer = torch.optim.SGD([*model.parameters(), *plain.parameters()], 0.1)
unnamed = torch.optim.SGD(other.parameters(), 0.1)
batches = [torch.randn(2, 4) for _ in range(40)]
with outlast.session(model=model, plain=plain, optimizer=optimizer, every=4) as session:
    for loop in range(1, 11):
        for batch in session.steps(batches, until=4 * loop):  # a save is due at its end
            trained(batch).square().mean().backward()
            plain[0].seen += 1
            for one in (optimizer, unnamed):
                one.step()
                one.zero_grad()
records.joinpath(f"done-{dist.get_rank()}").touch()
dist.destroy_process_group()
