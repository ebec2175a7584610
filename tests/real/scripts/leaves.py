"""Leaves its session: ``leaves.py WAY``; prints the step and the weights that it ends with.

Ranks accumulate gradients of their own over four batches, then sum them. WAY says how a loop of
twelve steps is left: ``end`` (not at all), ``alike`` (all ranks break in step 6, in the midst of
the four), ``apart`` (rank 1 breaks earlier, and nothing is summed), ``gone`` (rank 1 fails),
``waits`` (steps last until a signal comes), ``hangs`` (a step that does not end), ``first``
(rank 1 has notice, and is gone before the step that all agreed on ends).
"""

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

import outlast

way, rank = sys.argv[1], int(os.environ.get("RANK", "0"))
if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
rows = torch.arange(4.0 * 24).view(24, 1, 4).sin()
alone = way in ("apart", "gone") or not dist.is_initialized()
with outlast.session(model=model, optimizer=optimizer, every="1 h") as session:
    print("begun", os.getpid(), flush=True)
    until = 10_000 if way in ("waits", "hangs") else 12
    for row in session.steps(rows, until=until):
        (model(row + rank).square().mean()).backward()
        if (session.step + 1) % 4 == 0:
            for parameter in () if alone else model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
        if way == "alike" and session.step + 1 == 6:
            break
        if way == "apart" and rank == 1 and session.step + 1 == 4:
            break
        if way == "gone" and rank == 1 and session.step + 1 == 4:
            raise ValueError("one rank fails")
        if way == "first" and session.step + 1 == 6:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            while "outlast-leaving" not in [one.name for one in threading.enumerate()]:
                time.sleep(0.01)
            if rank == 1:
                os._exit(75)
            dist.barrier()
        if way == "waits":
            time.sleep(0.05)
        while way == "hangs":
            time.sleep(0.05)
print("ended", session.step, [p.flatten().tolist() for p in model.parameters()], flush=True)
