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


def main() -> None:
    """Train for ever: whoever started this ends it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("--sleep", type=float, default=0.03)
    options, _ = parser.parse_known_args()
    plain, torchft = (importlib.import_module(name) for name in ("ddp_plain", "torchft"))
    torch.set_num_threads(1)
    rank = int(os.environ["REPLICA"])
    torch.manual_seed(0)
    model = plain.GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

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
    records = plain.Records(options.records, rank)
    parameters = list(model.parameters())
    while True:
        manager.start_quorum()
        optimizer.zero_grad()
        loss = model(*plain.batch(manager.current_step(), rank))
        loss.backward()
        flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
        manager.allreduce(flat).wait()
        offset = 0
        for parameter in parameters:
            size = parameter.numel()
            parameter.grad.copy_(flat[offset : offset + size].view_as(parameter))
            offset += size
        if manager.should_commit():
            optimizer.step()
            time.sleep(options.sleep)
            records.completed(manager.current_step(), loss.item(), manager.num_participants())


if __name__ == "__main__":
    main()
