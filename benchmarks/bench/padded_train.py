"""Steps of one length under DDP, timed from one batch to the next: RECORDS STEPS STEP_MS.

Padded by computing: sleeping would hide what a thread of the session's costs.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import outlast

WIDTH, LAYERS = 64, 15  # 30 parameters


def main() -> None:
    """Train, and leave the seconds of each step."""
    records, steps, step_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]) / 1000
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.TensorDataset(torch.randn(4096, WIDTH))
    loader = outlast.data.Loader(data, global_batch=32, seed=0)
    found: list[float] = []
    named = {"model": model, "optimizer": optimizer, "loader": loader}
    with outlast.session(every="10 h", **named) as session:
        before = time.perf_counter()
        for (x,) in session.steps(loader, until=steps):
            now = time.perf_counter()
            found.append(now - before)
            before = now
            loss = nn.functional.mse_loss(model(x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            while time.perf_counter() - now < step_s:
                pass
    (records / f"steps-{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
