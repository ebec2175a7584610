"""A step whose sums have no end changes nothing, whatever the rest of the loop's body does."""

import copy

import pytest
import torch

from outlast.attempt.over import over
from outlast.inprocess import interrupted
from outlast.inprocess.interrupted import StepCollectives


class Gone(torch.autograd.Function):
    """A sum that another rank does not take part in any more."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("Connection closed by peer")


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "counting": lambda p: Counting(p, {"k": 0}),
}


class Counting(torch.optim.Optimizer):
    """As others write theirs: counters in the groups, and in the object."""

    num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad)


@pytest.fixture(name="attempt")
def _attempt():
    """Ends when a test says so."""
    over.is_held = True
    yield over
    over.is_held = False
    over.begin_again()


@pytest.fixture(name="trained", params=OPTIMIZERS)
def _trained(request, attempt):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer = OPTIMIZERS[request.param](model.parameters())
    hook = interrupted.stand(lambda: [optimizer], StepCollectives())
    yield model, optimizer
    hook.remove()


def facts(model, optimizer):
    found = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    plain = {name: value for name, value in vars(optimizer).items() if isinstance(value, int)}
    return copy.deepcopy(found | plain)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def body(model, optimizer, *, is_lost=False, scaler=None):
    x = torch.arange(6.0).view(2, 3)
    loss = model(Gone.apply(x.requires_grad_()) if is_lost else x).square().mean()
    optimizer.zero_grad()
    if scaler is None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def test_nothing_of_it_changes(trained, attempt):
    body(*trained)
    before = facts(*trained)
    attempt.happen()
    body(*trained, is_lost=True)
    assert attempt.is_void
    assert same(facts(*trained), before)
    attempt.begin_again()
    body(*trained)
    assert not same(facts(*trained), before)


def test_with_a_scaler_too(trained, attempt):
    scaler = torch.amp.GradScaler("cpu")
    body(*trained, scaler=scaler)
    before = facts(*trained)
    attempt.happen()
    body(*trained, is_lost=True, scaler=scaler)
    assert attempt.is_void
    assert same(facts(*trained), before)


def test_the_body_goes_on_with_a_gradient_for_each_weight(trained, attempt):
    """Where a sum cannot be begun, the backward pass has come to none of them."""
    model, optimizer = trained
    body(*trained)
    attempt.happen()
    optimizer.zero_grad()
    Gone.apply(model(torch.ones(2, 3))).sum().backward()
    assert attempt.is_void
    assert all(not parameter.grad.any() for parameter in model.parameters())


def test_what_is_the_scripts_own_is_raised(trained, attempt, monkeypatch):
    monkeypatch.setattr("outlast.attempt.over.ECHO_S", 0.01)
    with pytest.raises(RuntimeError, match="Connection closed"):
        body(*trained, is_lost=True)
    assert not attempt.is_void


def test_without_it_torch_is_torchs_own():
    ddp = torch.nn.parallel.DistributedDataParallel
    before = torch.autograd.backward, ddp._pre_forward, ddp._post_forward
    interrupted.stand(list, StepCollectives()).remove()
    assert (torch.autograd.backward, ddp._pre_forward, ddp._post_forward) == before
