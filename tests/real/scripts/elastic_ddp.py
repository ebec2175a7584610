"""``elastic.py`` with DDP, whose sums depend on the number of workers: RECORDS STEPS [options].

A line is a step that has begun to be made, and of which attempt; what was computed is not compared.
"""

import json
import time

import elastic
import torch
import torch.distributed as dist
from torch import nn
from train import Points, whose

import outlast


def main():
    options = elastic.parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = outlast.data.Loader(Points(50), global_batch=options.global_batch, seed=3)
    named = {"model": model, "optimizer": optimizer, "loader": loader}
    with outlast.session(every=options.every, **named) as session:
        for _, samples in session.steps(loader, until=options.steps):
            rank, world = dist.get_rank(), dist.get_world_size()
            line = {"step": session.step + 1, **whose(rank, world)}
            with (options.records / f"steps-{rank}.jsonl").open("a") as records:
                records.write(json.dumps(line) + "\n")
            ends = options.end and options.end.exists()
            if ends and session.step >= int(options.end.read_text()):
                break
            nn.functional.mse_loss(model(samples), samples).backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(options.pause)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
