"""What ``ddp_plain.py`` does, with torchft in place of a launcher: one replica.

Gradients go through ``Manager.allreduce`` in one buffer. torchft's own ``DistributedDataParallel``
is not used: on gloo it ends the survivors when a kill hits in the middle of its all-reduce.
"""

from __future__ import annotations

import argparse
import importlib
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def manager_of(model: Any, optimizer: Any, rank: int) -> Any:
    """The manager of a replica that is one process."""
    torchft = importlib.import_module("torchft")

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(found: dict[str, Any]) -> None:
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        replica_id=f"replica{rank}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        timeout=timedelta(seconds=10),
    )
    manager.kept_store = store  # it lives as long as the manager
    return manager


def step(manager: Any, model: Any, optimizer: Any, batch: Any) -> float | None:
    """Make a step; its loss, or None if it was not committed."""
    manager.start_quorum()
    optimizer.zero_grad()
    loss = model(*batch)
    loss.backward()
    parameters = list(model.parameters())
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    manager.allreduce(flat).wait()
    offset = 0
    for parameter in parameters:
        size = parameter.numel()
        parameter.grad.copy_(flat[offset : offset + size].view_as(parameter))
        offset += size
    if not manager.should_commit():
        return None
    optimizer.step()
    return float(loss.item())


def main() -> None:
    """Train for ever: whoever started this ends it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("--sleep", type=float, default=0.03)
    options, _ = parser.parse_known_args()
    plain = importlib.import_module("ddp_plain")
    torch.set_num_threads(1)
    rank = int(os.environ["REPLICA"])
    torch.manual_seed(0)
    model = plain.GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    manager = manager_of(model, optimizer, rank)
    records = plain.Records(options.records, rank)
    while True:
        loss = step(manager, model, optimizer, plain.batch(manager.current_step(), rank))
        if loss is not None:
            time.sleep(options.sleep)
            records.completed(manager.current_step(), loss, manager.num_participants())


if __name__ == "__main__":
    main()
