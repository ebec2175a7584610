"""What ``session_train.py`` does, with the same bits at any number of workers.

A step's batch has twelve shards, which four workers or three divide evenly.
"""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist

import outlast
from bench.session_train import begin

SHARDS = 12


def main() -> None:
    """Train for ever: whoever started this ends it."""
    options, plain, model, optimizer = begin()
    same = outlast.SameBits(model, shards=SHARDS)
    shape = (4096, plain.CONTEXT + 1)
    data = torch.utils.data.TensorDataset(torch.randint(0, plain.VOCABULARY, shape))
    loader = outlast.data.Loader(data, global_batch=SHARDS, seed=0, shards=SHARDS)
    records = plain.Records(options.records, dist.get_rank())
    named = {"model": same, "optimizer": optimizer, "loader": loader}
    with outlast.session(every="5 steps", **named) as session:
        for batch in session.steps(loader, until=10**9):
            optimizer.zero_grad()
            for (tokens,) in same.shards(batch):
                same.backward(same(tokens[:, :-1], tokens[:, 1:]))
            optimizer.step()
            time.sleep(options.sleep)
            loss = float("nan") if same.loss is None else float(same.loss)
            if math.isfinite(loss):  # else a loss has interrupted it, and it is made once more
                records.of(dist.get_rank()).completed(session.step + 1, loss, dist.get_world_size())


if __name__ == "__main__":
    main()
