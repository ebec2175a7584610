"""Data-parallel jobs of many kinds that a loss interrupts: RECORDS STEPS KIND [--die …].

As ``dying.py`` has it. In the order of a step the places are forward, backward, bucket (behind the
first sum of a backward pass), summed, step (the optimizer has changed its parameters, and has not
returned), stepped, and ended (the body's last line); and where collectives of its own are in it,
word0 to word9. Behind the loop of an epoch, which counts as step 100 and so on, they are before,
between (all have spoken) and behind.
"""

import random
import shutil

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from dying import NOW, OPTIONS, begin, die_here, double, own_loader, record_end, stock_loader
from ranks import DEVICE
from torch import nn
from torch.optim import swa_utils

import outlast

PARALLEL = nn.parallel.DistributedDataParallel
# torch 2.13 has new names for them.
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


KIND = OPTIONS.kind
PER_EPOCH = 5


def wrapped(net):
    """The model as the script calls it."""
    fixed = {"static_graph": True} if KIND == "static" else {"find_unused_parameters": True}
    if KIND == "compiled_inside":
        return PARALLEL(torch.compile(net, backend="aot_eager"), **fixed)
    if KIND == "compiled":  # which asks for larger buckets
        backend = "inductor" if shutil.which("gcc") else "aot_eager"
        return torch.compile(PARALLEL(net, **fixed), backend=backend)
    model = PARALLEL(net, bucket_cap_mb=0.0005, **fixed)  # a sum for each layer
    if KIND == "hook":
        model.register_comm_hook(None, double)
    return model


def speak(x, loss):
    """Collectives of the script's own, of every kind; what would be wrong in any step is found."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mean, both = loss.detach().clone(), torch.stack([loss.detach(), x.mean()])
    parts = [torch.empty((), device=DEVICE) for _ in range(world)]
    lines, one = (torch.empty(num, device=DEVICE) for num in (2 * world, 2))
    found, given = [None] * world, [None]
    told = [{"words": "many"}] if rank == 0 else [{"words": "few"}]
    work = dist.all_reduce(mean, async_op=True)
    words = (
        lambda: dist.all_gather(parts, loss.detach()),
        work.wait,
        lambda: GATHER(lines, both),
        lambda: SCATTER(one, lines),
        lambda: dist.all_gather_object(found, {"rank": rank}),
        lambda: dist.broadcast_object_list(told, 0),
        lambda: dist.scatter_object_list(given, [*range(world)] if rank == 0 else None, 0),
        lambda: dist.gather_object(rank, [*found] if rank == 0 else None, 0),
        lambda: dist.reduce(both, 0),
        dist.barrier,
    )
    for number, word in enumerate(words):
        die_here(f"word{number}")
        word()
    assert all(isinstance(other["rank"], int) for other in found)
    assert told[0]["words"]
    numbers = torch.cat([mean.view(1), torch.stack(parts), lines, one, both])
    assert torch.isfinite(numbers).all(), numbers
    return mean / world


def batches(session, loader, net, plateau):
    """What is trained on; the kinds of epochs speak around their loops."""
    if not KIND.startswith("epochs"):
        if KIND == "outside":
            dist.all_reduce(torch.ones(1, device=DEVICE))
        dist.barrier()
        yield from session.steps(loader, until=OPTIONS.steps)
        return
    for epoch in session.epochs(OPTIONS.steps // PER_EPOCH):
        if KIND != "epochs_plain":
            dist.barrier()
        yield from session.steps(loader)
        NOW[1] = 100 + epoch
        die_here("before")
        found = sum(parameter.square().sum() for parameter in net.parameters()).detach()
        dist.all_reduce(found)
        die_here("between")
        if KIND != "epochs_plain":
            plateau.step(found.item())
        die_here("behind")


def scale(net, x, loss):
    """What is spoken about goes into the gradients."""
    if KIND == "own":
        factor = 1 + speak(x, loss)
        for parameter in net.parameters():
            parameter.grad.mul_(factor)


def drift(net, world):
    """The weights change, and no version counter tells of it."""
    if KIND == "weights":
        for parameter in net.parameters():
            dist.all_reduce(parameter.data)
            parameter.data.mul_(0.99 / world)


def main():
    rank, world = begin()
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(32)] if KIND == "buffers" else []
    net = nn.Sequential(nn.Linear(8, 32), *norm, nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 8))
    net.to(DEVICE)
    other = nn.Linear(8, 8, device=DEVICE)  # with an optimizer that steps every second time
    torch.manual_seed(1 + rank)
    random.seed(1 + rank)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    seldom = torch.optim.SGD(other.parameters(), lr=1e-2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5000)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.9)
    average = swa_utils.AveragedModel(net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    scaler = torch.amp.GradScaler(DEVICE.type, growth_interval=3)
    model = wrapped(net)
    net[-1].weight.register_post_accumulate_grad_hook(lambda _: die_here("bucket"))
    optimizer.register_step_post_hook(lambda *_: die_here("step"))
    step_of = optimizer.step
    if KIND == "compiled_step":  # half a second of imports, which no other kind needs
        step_of = torch.compile(optimizer.step, backend="aot_eager")
    named = {"model": net, "optimizer": optimizer, "schedule": schedule}
    named |= {"average": average, "scaler": scaler, "plateau": plateau}
    if KIND == "several":
        beside = PARALLEL(other)
        named |= {"other": other, "seldom": seldom}
    loader, bodies = stock_loader(rank, world) if KIND == "stock" else own_loader(60), 0
    with outlast.session(every="5 steps", **named) as session:
        for _, given in batches(session, loader, net, plateau):
            NOW[1], bodies, x = session.step + 1, bodies + 1, given.to(DEVICE)
            drift(net, world)
            die_here("forward")
            loss = F.mse_loss(model(x + random.random() * 0.1), x)
            is_seldom = KIND == "several" and NOW[1] % 2
            if is_seldom:
                loss = loss + beside(x).square().mean()
                seldom.zero_grad()
            optimizer.zero_grad()
            die_here("backward")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scale(net, x, loss)
            die_here("summed")
            if is_seldom:
                scaler.step(seldom)
            if KIND == "compiled_step":
                step_of()
            else:
                scaler.step(optimizer)
            scaler.update()
            die_here("stepped")
            if KIND.endswith("late"):
                speak(x, loss)
            schedule.step()
            average.update_parameters(net)
            die_here("ended")
    dist.all_reduce(torch.ones(1, device=DEVICE))  # as ever, behind the session
    record_end(session.step, bodies, named)


main()
