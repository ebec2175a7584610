"""``elastic.py`` with ``outlast.SameBits``, whose sums are torch's: RECORDS STEPS [options].

A line is a step that is complete; one that a loss has interrupted is made again and has one line.
"""

import hashlib
import json
import time

import elastic
import torch
import torch.distributed as dist
from torch import nn
from train import Points, update, whose

import outlast

SHARDS = 6


def main():
    options = elastic.parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 8))
    model = outlast.SameBits(net, shards=SHARDS)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
    loader = outlast.data.Loader(Points(50), global_batch=2 * SHARDS, seed=3, shards=SHARDS)
    named = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
    newest = {"step": 0}
    with outlast.session(every=options.every, **named) as session:
        try:
            for batch in session.steps(loader, until=options.steps):
                write(options, session.step, newest)
                # All are in the same step or the next: whoever writes a later one reaches all.
                if (
                    options.end
                    and options.end.exists()
                    and session.step >= int(options.end.read_text())
                ):
                    break
                ids = []
                for part_ids, samples in model.shards(batch):
                    ids += part_ids.tolist()
                    model.backward(nn.functional.mse_loss(model(samples), samples))
                optimizer.step()
                schedule.step()
                time.sleep(options.pause)
                newest = {"step": session.step + 1, "loss": float(model.loss), "ids": ids}
                # Of the attempt that made it.
                newest |= whose(dist.get_rank(), dist.get_world_size())
            else:
                write(options, session.step, newest)
        except SystemExit:  # its machine leaves, at the end of a step
            write(options, session.step, newest)
            raise
    rank, digest = dist.get_rank(), hashlib.sha256()
    update(digest, {"model": net.state_dict(), "optimizer": optimizer.state_dict()})
    head = whose(rank, dist.get_world_size())
    final = {"step": session.step, "resumed": session.resumed, "hash": digest.hexdigest(), **head}
    (options.records / f"final-{rank}.json").write_text(json.dumps(final))
    dist.destroy_process_group()


def write(options, step, newest):
    if newest["step"] != step or not step:
        return
    rank = dist.get_rank()
    with (options.records / f"steps-{rank}.jsonl").open("a") as records:
        records.write(json.dumps(newest) + "\n")


if __name__ == "__main__":
    main()
