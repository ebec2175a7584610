"""Jobs whose model is divided within replica groups (HSDP): RECORDS STEPS KIND [--die …].

As ``dying.py`` has it. In the order of a step the places are forward, backward, bucket (behind the
backward pass of the last block), summed, step (the optimizer has changed its parameters, and has
not returned), stepped and ended. A device mesh of two groups of half of the workers each; ``flat``
divides the model over all workers; in ``held`` rank 0 holds a process group in a variable; in
``late`` the last rank sums late in step 9.
"""

import random
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from dying import NOW, OPTIONS, begin, die_here, own_loader, record_end
from ranks import DEVICE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import outlast

KIND = OPTIONS.kind
LATE_S = 0.5
WINDOWS = {"sums", "no_sync"}
BATCHES = 4 if KIND in WINDOWS else 1  # of an optimizer's step


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 21), nn.Linear(21, 8)  # which no number of ranks divides
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.down(self.drop(torch.relu(self.up(x))))


def divided(net, world):
    """The model, in replica groups; and what the script asks for groups of its own."""
    if KIND == "flat":
        mesh = init_device_mesh(DEVICE.type, (world,))
    else:
        names = ("replicate", "shard")
        mesh = init_device_mesh(DEVICE.type, (2, world // 2), mesh_dim_names=names)
    for block in net:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh), mesh


def sum_late(rank):
    """One part's sums end later than another's, which are complete by then."""
    all_reduce = dist.all_reduce

    def late(*args, **options):
        time.sleep(LATE_S * ([rank, 9] == NOW))
        return all_reduce(*args, **options)

    dist.all_reduce = late


def local(value):
    """State as this rank has it."""
    if isinstance(value, dict):
        return {key: local(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [local(one) for one in value]
    return value.to_local() if hasattr(value, "to_local") else value


class Local:
    """An object whose state is told as this rank has it."""

    def __init__(self, value):
        self.state_dict = lambda: local(value.state_dict())


def main():
    rank, world = begin()
    torch.manual_seed(0)
    net, mesh = divided(nn.Sequential(Block(), Block(), nn.Linear(8, 8)).to(DEVICE), world)
    torch.manual_seed(1 + rank)
    random.seed(1 + rank)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5000)
    net[-1].weight.register_post_accumulate_grad_hook(lambda _: die_here("bucket"))
    optimizer.register_step_post_hook(lambda *_: die_here("step"))
    if KIND == "late":
        sum_late(world - 1)
    held = mesh.get_group(0) if KIND == "held" and rank == 0 else None
    named = {"model": net, "optimizer": optimizer, "schedule": schedule}
    loader, bodies = own_loader(60), 0
    every = "1000 steps" if KIND in WINDOWS else "5 steps"
    with outlast.session(every=every, **named) as session:
        for _, given in session.steps(loader, until=OPTIONS.steps):
            NOW[1], bodies, x = session.step + 1, bodies + 1, given.to(DEVICE)
            (OPTIONS.records / f"at-{rank}").write_text(str(session.step))
            is_last = NOW[1] % BATCHES == 0
            if KIND == "no_sync":
                net.set_requires_gradient_sync(is_last)
            die_here("forward")
            loss = F.mse_loss(net(x + random.random() * 0.1), x)
            if NOW[1] % BATCHES == 1 % BATCHES:
                optimizer.zero_grad()
            die_here("backward")
            loss.backward()
            if not is_last:
                die_here("accumulated")
                continue
            if KIND == "clip":
                norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                assert norm.full_tensor().isfinite()
            die_here("summed")
            optimizer.step()
            die_here("stepped")
            schedule.step()
            die_here("ended")
    del held
    record_end(session.step, bodies, {name: Local(one) for name, one in named.items()})


main()
