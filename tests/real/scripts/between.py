"""Changes its objects in front of its loops and between them: ``between.py CHANGE[,…] [N]``.

Three loops of four steps, the changes in front of the second and the third (``first``: in front of
the first, and nowhere else). With N it is killed once step N is saved. Prints what it ends with.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import outlast

names, dies_at = sys.argv[1].split(","), int(sys.argv[2]) if sys.argv[2:] else 1000
rank = int(os.environ.get("RANK", "0"))
torch.manual_seed(0)
model = inner = torch.nn.Sequential(
    torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
)
if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(inner)
optimizer = torch.optim.AdamW(inner.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


class Tally:
    """Counts, in a number and past the counters of a tensor."""

    def __init__(self):
        self.count, self.sums = 0, torch.zeros(3)

    def __call__(self):
        self.count += 1
        self.sums.numpy()[1] += self.count

    def state_dict(self):
        return {"count": self.count, "sums": self.sums}

    def load_state_dict(self, state):
        self.count, self.sums = state["count"], state["sums"].clone()


def halve():
    with torch.no_grad():
        for parameter in inner.parameters():
            parameter.mul_(0.5)


def forget_moments():
    optimizer.state.clear()


def lower_the_rate():
    optimizer.param_groups[0]["lr"] *= 0.5


tally = Tally()
changes = {
    "data": lambda: inner[0].weight.data.mul_(0.5),
    "no_grad": halve,
    "rate": lower_the_rate,
    "scheduler": scheduler.step,
    "moments": forget_moments,
    "object": tally,
    "first": inner[2].reset_parameters,
}
rows = torch.arange(4.0 * 12).view(12, 4).sin()
loader = torch.utils.data.DataLoader(rows, batch_size=3, shuffle=True)
named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "tally": tally}
with outlast.session(every="1 h", **named) as session:
    if "first" in names:
        changes["first"]()
    for epoch in range(3):
        for name in names if epoch else ():
            if name != "first":
                changes[name]()
        for batch in session.steps(loader):
            if session.step + 1 == dies_at:
                pending = session.save()
                time.sleep(0.3)  # until it is agreed for this step
            if session.step >= dies_at and pending.wait(60):
                if dist.is_initialized():
                    dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            (model(batch + rank).square().mean() * (1 + tally.count)).backward()
            optimizer.step()
moments = [list(map(torch.Tensor.tolist, one.values())) for one in optimizer.state.values()]
weights = [parameter.tolist() for parameter in inner.parameters()]
rates = optimizer.param_groups[0]["lr"], scheduler.last_epoch
print("ended", session.step, weights, moments, rates, tally.count, tally.sums.tolist(), flush=True)
if dist.is_initialized():
    dist.barrier()
    os._exit(0)  # past the destructor of DDP, which may wait for a thread that waits for it
