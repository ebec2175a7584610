"""Training loops of every kind whose state a session must save bit for bit."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing._internal.two_tensor import TwoTensor

BIG = (1 << 22) + 4097  # elements: more than a block of 16 MiB, and no multiple of one


class Case(NamedTuple):
    """A loop: what the session is given, one step of it, and what is to be seen of its saves."""

    named: dict[str, Any]
    step: Callable[[int], None]
    is_lazy: bool = True  # something is left for later at each boundary
    voids: int = 0  # snapshots that may be void until the session has learned what changes
    skips: bool = False  # in some steps no optimizer steps: behind them nothing is left


CASES: dict[str, Callable[[str], Case]] = {}


def case(build):
    """Register a case under its name."""
    CASES[build.__name__] = build
    return build


def net(device, width=24, *, norm=False):
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(width)] if norm else [nn.ReLU()]
    return nn.Sequential(nn.Linear(8, width), *middle, nn.Linear(width, 8)).to(device)


def batch(device, dtype=torch.float32):
    return torch.randn(6, 8, dtype=dtype).to(device)


def loop(model, optimizer, device, before=lambda _: None, after=lambda _: None):
    """The usual step, with something done right before and right after the optimizer's."""

    def step(number):
        x = batch(device, next(model.parameters()).dtype)
        optimizer.zero_grad()
        mse_loss(model(x), x).backward()
        before(number)
        optimizer.step()
        after(number)

    return step


def plain(build, **options):
    """A case of one model and one optimizer."""

    def made(device):
        model = net(device)
        optimizer = build(model.parameters(), **options)
        return Case({"model": model, "optimizer": optimizer}, loop(model, optimizer, device))

    return made


adam = torch.optim.AdamW
CASES |= {
    "adamw_foreach": plain(adam, foreach=True),
    "adamw_fused": plain(adam, fused=True),
    "adamw_for_loop": plain(adam, foreach=False),
    "adamw_amsgrad": plain(adam, amsgrad=True),
    "adamw_lr_tensor": plain(adam, lr=torch.tensor(1e-3)),
    "sgd_nesterov": plain(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
    "adagrad": plain(torch.optim.Adagrad),
    "rprop": plain(torch.optim.Rprop),
}


@case
def adamw_capturable(device):
    return plain(adam, capturable=True)(device)


@case
def averaged_model(device):
    model = net(device)
    optimizer = adam(model.parameters())
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    step = loop(model, optimizer, device, after=lambda _: ema.update_parameters(model))
    return Case({"model": model, "optimizer": optimizer, "ema": ema}, step)


class Average:
    """An average kept by hand."""

    def __init__(self, model):
        self.model = model
        self.values = [p.detach().clone() for p in model.parameters()]

    def update(self, _):
        with torch.no_grad():
            for mine, parameter in zip(self.values, self.model.parameters(), strict=True):
                mine.lerp_(parameter, 0.1)

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"]


@case
def average_by_hand_before(device):
    model = net(device)
    optimizer, ema = adam(model.parameters()), Average(model)
    step = loop(model, optimizer, device, before=ema.update)
    return Case({"model": model, "optimizer": optimizer, "ema": ema}, step)


@case
def average_by_hand_after(device):
    model = net(device)
    optimizer, ema = adam(model.parameters()), Average(model)
    step = loop(model, optimizer, device, after=ema.update)
    return Case({"model": model, "optimizer": optimizer, "ema": ema}, step)


class Pupil(nn.Module):
    """A model with its teacher in it, which follows ahead of the optimizer's step."""

    def __init__(self):
        super().__init__()
        self.pupil, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def follow(self, _):
        with torch.no_grad():
            for mine, its in zip(self.teacher.parameters(), self.pupil.parameters(), strict=True):
                mine.lerp_(its, 0.1)

    def forward(self, x):
        return self.pupil(x) + self.teacher(x)


@case
def teacher_in_the_model(device):
    torch.manual_seed(0)
    model = Pupil().to(device)
    optimizer = adam([p for p in model.parameters() if p.requires_grad])
    step = loop(model, optimizer, device, before=model.follow)
    return Case({"model": model, "optimizer": optimizer}, step, voids=2)


@case
def batch_norm(device):
    model = net(device, norm=True)
    optimizer = adam(model.parameters())
    return Case({"model": model, "optimizer": optimizer}, loop(model, optimizer, device))


@case
def accumulation_and_clipping(device):
    model = net(device)
    optimizer = adam(model.parameters())

    def step(number):
        x = batch(device)
        mse_loss(model(x), x).backward()
        if number % 3 == 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()

    return Case({"model": model, "optimizer": optimizer}, step)


@case
def tied_weights(device):
    model = net(device, 8)
    model[2].weight = model[0].weight
    optimizer = adam(model.parameters())
    return Case({"model": model, "optimizer": optimizer}, loop(model, optimizer, device))


@case
def bf16(device):
    model = net(device).to(torch.bfloat16)
    optimizer = adam(model.parameters())
    return Case({"model": model, "optimizer": optimizer}, loop(model, optimizer, device))


@case
def frozen_parameters(device):
    model = net(device)
    model[0].requires_grad_(False)
    optimizer = adam(model.parameters())
    return Case({"model": model, "optimizer": optimizer}, loop(model, optimizer, device))


@case
def two_optimizers(device):
    """A generator and a discriminator, which step at different times; its weights are clipped."""
    one, other = net(device), net(device, 12)
    first, second = adam(one.parameters()), torch.optim.RMSprop(other.parameters(), momentum=0.9)
    named = {"one": one, "other": other, "first": first, "second": second}

    def step(number):
        x = batch(device)
        second.zero_grad()
        (-mse_loss(other(one(x).detach()), x)).backward()
        second.step()
        for parameter in other.parameters():
            parameter.data.clamp_(-0.3, 0.3)
        if number % 2:
            first.zero_grad()
            other(one(x)).square().mean().backward()
            first.step()

    return Case(named, step)


class PastTheCounter(torch.optim.Optimizer):
    """A user's optimizer that writes through ``.data``."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                velocity = state.setdefault("velocity", torch.zeros_like(parameter.data))
                velocity.data.mul_(0.9).add_(parameter.grad.data)
                parameter.data.add_(velocity, alpha=-group["lr"])


@case
def optimizer_that_writes_past_the_counter(device):
    model = net(device)
    optimizer = PastTheCounter(model.parameters())
    return Case({"model": model, "optimizer": optimizer}, loop(model, optimizer, device))


class InPairs(torch.optim.Optimizer):
    """An optimizer whose state is of a subclass without memory of its own, as an 8-bit one's."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    zeros = torch.zeros_like(parameter, requires_grad=False)
                    state["both"] = TwoTensor(zeros, zeros.clone())
                state["both"].mul_(0.9).add_(TwoTensor(parameter.grad, parameter.detach()))
                parameter.add_(state["both"].a, alpha=-group["lr"])


@case
def tensors_of_subclasses(device):
    """Such a state, and a frozen weight of a subclass, as a quantized model has."""
    model = net(device)
    pair = TwoTensor(torch.randn(8, 8), torch.randn(8, 8)).to(device)
    model.register_parameter("frozen", nn.Parameter(pair, requires_grad=False))
    optimizer = InPairs(p for p in model.parameters() if p.requires_grad)
    return Case({"model": model, "optimizer": optimizer}, loop(model, optimizer, device))


class Momentum(Average):
    """A user's optimizer that torch knows nothing of."""

    def __init__(self, model):
        super().__init__(model)
        self.values = [torch.zeros_like(value) for value in self.values]

    def zero_grad(self):
        self.model.zero_grad()

    def step(self):
        with torch.no_grad():
            for velocity, parameter in zip(self.values, self.model.parameters(), strict=True):
                velocity.mul_(0.9).add_(parameter.grad)
                parameter.sub_(velocity, alpha=0.01)


@case
def optimizer_that_is_none_of_torchs(device):
    model = net(device)
    optimizer = Momentum(model)
    step = loop(model, optimizer, device)
    return Case({"model": model, "optimizer": optimizer}, step, is_lazy=False)


@case
def lbfgs(device):
    model = net(device)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=40)
    x = batch(device)

    def closure():
        optimizer.zero_grad()
        loss = mse_loss(model(x), x)
        loss.backward()
        return loss

    return Case({"model": model, "optimizer": optimizer}, lambda _: optimizer.step(closure))


@case
def sparse_gradients(device):
    torch.manual_seed(0)
    model = nn.Embedding(40, 6, sparse=True).to(device)
    optimizer = torch.optim.SparseAdam(model.parameters())

    def step(_):
        optimizer.zero_grad()
        model(torch.randint(40, (5,), device=device)).square().sum().backward()
        optimizer.step()

    return Case({"model": model, "optimizer": optimizer}, step)


@case
def parameters_that_are_added_and_replaced(device):
    model = net(device)
    optimizer = adam(model.parameters())
    usual = loop(model, optimizer, device)

    def step(number):
        if number == 5:
            model.append(nn.Linear(8, 8).to(device))
            optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 0.1})
        if number == 9:
            with torch.no_grad():
                model[0].weight.data = model[0].weight.data * 2
        usual(number)

    return Case({"model": model, "optimizer": optimizer}, step, voids=1)


@case
def compiled_step(device):
    model = net(device)
    optimizer = adam(model.parameters())
    compiled = torch.compile(optimizer.step, backend="aot_eager")
    optimizer.zero_grad()
    mse_loss(model(batch(device)), batch(device)).backward()
    optimizer.step()

    def step(_):
        optimizer.zero_grad()
        mse_loss(model(batch(device)), batch(device)).backward()
        compiled()

    return Case({"model": model, "optimizer": optimizer}, step)


@case
def scaler_and_schedulers(device):
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    kind = torch.device(device).type
    scaler = torch.amp.GradScaler(kind, init_scale=4.0, growth_interval=3)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [3])
    named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}

    def step(number):
        x = batch(device)
        optimizer.zero_grad()
        with torch.autocast(kind, torch.bfloat16):
            loss = mse_loss(model(x), x)
        scaler.scale(loss * (float("inf") if number % 5 == 4 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()

    return Case(named, step, skips=True)


@case
def large_and_strided(device):
    """A tensor of more than a block, one that is laid out by channels, and NaNs."""
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
    model = nn.ModuleDict({"conv": conv, "table": nn.ParameterList([torch.zeros(BIG)])}).to(device)
    with torch.no_grad():
        model["table"][0][::1000] = float("nan")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(_):
        optimizer.zero_grad()
        x = torch.randn(2, 8, 5, 5, device=device)
        (conv(x).square().mean() + model["table"][0][1:3000].sum()).backward()
        optimizer.step()

    return Case({"model": model, "optimizer": optimizer}, step)


@case
def graph_from_before(device):
    """An optimizer's step in a CUDA graph that was captured before the session."""
    model = net(device)
    optimizer = adam(model.parameters(), capturable=device == "cuda")
    x = batch(device)

    def once():
        optimizer.zero_grad()
        mse_loss(model(x), x).backward()
        optimizer.step()

    if device == "cuda":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                once()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            once()
        replay = graph.replay
    else:
        once()
        # As a graph does it: by address, and nothing that torch keeps of a tensor moves.
        held = [one for state in optimizer.state.values() for one in (*state.values(),)]
        written = [one for one in (*model.parameters(), *held) if one.dim()]
        numbers = itertools.count()

        def replay():
            number = next(numbers) % 250
            for one in written:
                ctypes.memset(one.data_ptr() + one.nbytes // 2, number, one.element_size())

    named = {"model": model, "optimizer": optimizer}
    return Case(named, lambda _: replay(), is_lazy=False)


DEVICE_ONLY = {"adamw_capturable": "cuda"}
