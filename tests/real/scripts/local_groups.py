"""Two replicas of two ranks each: RECORDS. What outlast.LocalUpdates makes of DDP and of FSDP2."""

import hashlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from train import update

import outlast

RECORDS = Path(sys.argv[1])


def digest(net):
    found = hashlib.sha256()
    update(found, {"model": net.state_dict()})
    return found.hexdigest()


def refused(model, group=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        outlast.LocalUpdates(model, optimizer, every=3, group=group)
    except outlast.ConfigError as error:
        return str(error)
    return ""


def refused_later(model):
    """It is wrapped once LocalUpdates is there; the error comes in the first step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outlast.LocalUpdates(model, optimizer, every=3)
    wrapped = DistributedDataParallel(model)
    wrapped(torch.ones(1, 8)).sum().backward()
    try:
        optimizer.step()
    except outlast.ConfigError as error:
        return str(error)
    return ""


def leave_in_flight(group):
    """The process ends while an exchange is in flight, and pauses for its bandwidth."""
    net = nn.Linear(100, 100)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    outlast.LocalUpdates(net, optimizer, 2, overlap=1, bandwidth=20_000, group=group)
    for _ in range(2):
        net(torch.ones(1, 100)).sum().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "within"))
    across, within = mesh["replicas"].get_group(), mesh["within"].get_group()
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    outer = DistributedDataParallel(net, process_group=within)
    local = outlast.LocalUpdates(outer, optimizer, every=3, group=across, exchange="int8")
    digests = []
    for step in range(6):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        nn.functional.mse_loss(outer(x), x).backward()
        optimizer.step()
        digests.append(digest(net))
    everybody = DistributedDataParallel(nn.Linear(8, 8))
    sharded = fully_shard(nn.Linear(8, 8), mesh=mesh["within"])
    text = {
        "digests": digests,
        "local_step": local.local_step,
        "ddp": refused(everybody),
        "inside": refused(everybody.module),
        "later": refused_later(nn.Linear(8, 8)),
        "fsdp2": refused(sharded, across),
    }
    (RECORDS / f"groups-{rank}.json").write_text(json.dumps(text))
    leave_in_flight(across)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
