"""A job whose model FSDP2 divides over all workers, and whose steps are kept in every other block.

    each_step_train.py RECORDS MB STEP_MS STEPS BLOCK

``MB`` is each rank's part of the state, in 10^6 bytes. A step takes ``STEP_MS`` and what it
computes itself: as on a GPU, the cores are free meanwhile. RECORDS/RANK.json has the seconds from
one batch to the next, and whether that step was kept.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import outlast

WIDTH: Final = 512
BYTES_OF_A_WEIGHT: Final = 12  # the weight and AdamW's two moments
END: Final = 10**6


def main() -> None:
    """Train and leave the times."""
    records, size, step_ms, steps, block = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    num = max(int(float(size) * 1e6 * world / BYTES_OF_A_WEIGHT / WIDTH**2), 1)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num)),
    )
    mesh = init_device_mesh("cpu", (world,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.randn(4, WIDTH)
    loader = [data] * int(steps)
    found: list[dict[str, Any]] = []
    with outlast.session(model=model, optimizer=optimizer, every=END) as session:
        keeping = session._on.each_step
        before_s = time.perf_counter()
        for x in session.steps(loader):
            now_s = time.perf_counter()
            if found:
                found[-1]["seconds"] = now_s - before_s
            before_s = now_s
            keeping._is_on = session.step // int(block) % 2 == 1  # at the end of this step
            found.append({"kept": keeping._is_on})
            loss = (model(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(float(step_ms) / 1e3)
    (Path(records) / f"{rank}.json").write_text(json.dumps(found[:-1]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
