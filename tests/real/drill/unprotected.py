"""A job of two workers that a drain is hard on, with a protection switched off: [WITHOUT].

Rank 1 is slow behind its optimizer: rank 0 is in the next step nearly all the time, and waits there
for a gradient of rank 1's. Batches come from a loader's process. ``WITHOUT`` names what is switched
off in this process; left out is nothing.
"""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import outlast
from outlast.attempt.link import Agreement
from outlast.data import shield

STEPS = 20


def stop_at_ones_own_step():
    """A drain is asked for and decided upon; then each rank takes the step that it is in."""
    decided = Agreement._decided

    def at_own_step(self, message):
        if message["action"] == "drain":
            own = self._progress
            message = {**message, "at": own.completed + own.in_step}
        decided(self, message)

    Agreement._decided = at_own_step


def shield_nobody():
    """A loader's processes answer signals as torch has them do."""
    shield._shielded = lambda _, begin: begin()


SWITCH_OFF = {"agreement": stop_at_ones_own_step, "loader shield": shield_nobody}


def main():
    for without in sys.argv[1:]:
        SWITCH_OFF[without]()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    rows = torch.randn(4 * STEPS, 8, generator=torch.Generator().manual_seed(rank))
    loader = DataLoader(TensorDataset(rows), batch_size=4, num_workers=1)
    parts = {"model": module, "optimizer": optimizer, "loader": loader}
    with outlast.session(**parts, every="5 steps") as session:
        for (x,) in session.steps(loader, until=STEPS):
            loss = ((model(x) - x) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
            time.sleep(0.25 * rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
