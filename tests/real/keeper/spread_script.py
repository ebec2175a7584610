"""A job that may go on with fewer ranks: RECORDS MODE STEPS EVERY; what it is made of: sharded.py.

Rank 0 writes RECORDS/entered.pt (the state that the session came with) and RECORDS/at-STEP.pt.
"""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import torch
import torch.distributed as dist
from sharded import Model, note, spread
from torch.utils.data import Dataset

import outlast


class Rows(Dataset):
    def __len__(self):
        return 600

    def __getitem__(self, index):
        return torch.full((64,), float(index))


def main():
    records, mode, steps, every = sys.argv[1:]
    options = SimpleNamespace(records=Path(records))
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model(401, norm=False)
    trained = spread(model, mode, world_size)
    named = {"model": model, "optimizer": torch.optim.AdamW(trained.parameters(), lr=1e-2)}
    loader = outlast.data.Loader(Rows(), global_batch=6, seed=3)
    with outlast.session(every=every, loader=loader, **named) as session:
        note(options, "entered", named, rank)
        for rows in session.steps(loader, until=int(steps)):
            note(options, f"at-{session.step}", named, rank)
            named["optimizer"].zero_grad()
            trained(rows).square().mean().backward()
            named["optimizer"].step()
            time.sleep(0.01)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
