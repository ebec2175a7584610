"""Jobs that accumulate gradients, or have a batch norm, under DDP: RECORDS STEPS KIND [options].

As ``dying.py`` has it. In kinds of ``WINDOWS`` the optimizer steps after every fourth batch.
"""

import contextlib
import random

import torch
import torch.nn.functional as F  # noqa: N812
from dying import NOW, OPTIONS, begin, die_here, double, own_loader, record_end, stock_loader
from torch import nn
from torch.optim import swa_utils

import outlast

KIND = OPTIONS.kind
NORMS = {"norm", "norm_no_sync"}
WINDOWS = {"no_sync", "sums", "sums_stock", "saved", "counted", "norm_no_sync"}
NO_SYNC = KIND.endswith("no_sync")
BATCHES = 4 if KIND in WINDOWS else 1  # of an optimizer's step


def main():
    rank, world = begin()
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(32)] if KIND in NORMS else []
    net = nn.Sequential(nn.Linear(8, 32), *norm, nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 8))
    torch.manual_seed(1 + rank)
    random.seed(1 + rank)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5000)
    average = swa_utils.AveragedModel(net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    model = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    model.register_comm_hook(None, double)
    named = {"model": net, "optimizer": optimizer, "schedule": schedule}
    # With batch norms it would have each rank's own statistics.
    named |= {"scaler": scaler} if KIND in NORMS else {"average": average, "scaler": scaler}
    optimizer.register_step_post_hook(lambda *_: die_here("optimizer"))
    bodies = 0
    every = "1000 steps" if KIND in WINDOWS - {"saved"} else "5 steps"
    with outlast.session(every=every, **named) as session:
        loader = stock_loader(rank, world) if KIND.endswith("stock") else own_loader(50)
        steps = session.steps(loader, until=OPTIONS.steps)
        batches = ((session.step, x) for _, x in steps)
        if KIND == "counted":  # by the script itself
            batches = ((number, x) for number, (_, x) in enumerate(steps))
        for number, x in batches:
            NOW[1], bodies = session.step + 1, bodies + 1
            is_last = number % BATCHES == BATCHES - 1
            die_here("forward")
            with contextlib.nullcontext() if is_last or not NO_SYNC else model.no_sync():
                loss = F.mse_loss(model(x + random.random() * 0.1), x)
                if KIND not in WINDOWS or (NO_SYNC and NOW[1] % BATCHES == 1):
                    optimizer.zero_grad()
                die_here("backward")
                scaler.scale(loss).backward()
            if not is_last:
                die_here("accumulated")
                continue
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            die_here("summed")
            scaler.step(optimizer)
            scaler.update()
            die_here("stepped")
            schedule.step()
            if KIND not in NORMS:
                average.update_parameters(net)
            if KIND in WINDOWS and not NO_SYNC:
                optimizer.zero_grad()
    record_end(session.step, bodies, named)


main()
