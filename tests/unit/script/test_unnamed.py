"""What is at work and was not named is said once; what is saved in any way is not spoken of."""

import pytest
import torch
from torch import nn

from outlast.script.gradients import ScriptGradients
from outlast.script.objects import Objects
from outlast.script.unnamed import STEPS, Unnamed


class Wrapper:
    """As Accelerate's and others: holds an optimizer, and its state under names of its own."""

    def __init__(self, optimizer):
        self.inner = {"optimizers": [optimizer]}

    def state_dict(self):
        (optimizer,) = self.inner["optimizers"]
        state = optimizer.state_dict()
        return {"groups": str(state["param_groups"]), "count": torch.ones(1)}

    def load_state_dict(self, state):
        pass


class Outer(torch.optim.Optimizer):
    """An optimizer around another one, as Accelerate's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self.__dict__["optimizer"], name)

    def step(self, *_, **__):
        self.optimizer.step()

    def state_dict(self):
        return self.optimizer.state_dict()


class Timm:
    """A scheduler that is none of torch's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.param_groups[0]["lr"] *= 0.9

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Holder(nn.Module):
    """A model with an optimizer in it, in whose state it is not."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.optimizer = torch.optim.AdamW(self.layer.parameters())


class Saver(Holder):
    """The same, and it is."""

    def state_dict(self, *args, **options):
        own = self.optimizer.state_dict()["param_groups"]
        return {**super().state_dict(*args, **options), "optimizer": str(own)}


def lines(capsys, named, body, steps=2 * STEPS):
    unnamed = Unnamed(Objects(named))
    gradients = ScriptGradients(lambda: named, unnamed.saw)
    gradients.open(0)
    unnamed.open()
    try:
        for step in range(steps):
            gradients.handed_out()
            body(step)
            gradients.completed(step + 1)
            unnamed.completed()
    finally:
        gradients.close()
        unnamed.close()
    return [line.removeprefix("outlast: ") for line in capsys.readouterr().err.splitlines()]


def trains(model, optimizer, *others):
    def body(_):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        for other in others:
            other.step()
        optimizer.zero_grad()

    return body


def build(kind=torch.optim.AdamW):
    model = nn.Linear(3, 1)
    return model, kind(model.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_that_steps_and_is_not_named(kind, capsys):
    model, optimizer = build(kind)
    (line,) = lines(capsys, {"model": model}, trains(model, optimizer))
    assert line == (
        f"the {kind.__name__} that steps is in no checkpoint: a resumed run goes on with a fresh "
        "one; name it: outlast.session(..., optimizer=optimizer)"
    )
    assert not lines(capsys, {"m": model, "opt": optimizer}, trains(model, optimizer))
    for wrapped in (Wrapper(optimizer), Outer(optimizer)):
        assert not lines(capsys, {"model": model, "w": wrapped}, trains(model, optimizer))
    named = {"model": model, "optimizer": optimizer}
    assert not lines(capsys, named, trains(model, Outer(optimizer)))


class Countable(torch.optim.SGD):
    """As a container of optimizers, which has none of its own: it is false."""

    def __len__(self):
        return 0


def test_one_that_is_false_is_seen_too(capsys):
    model, optimizer = build(Countable)
    (line,) = lines(capsys, {"model": model}, trains(model, optimizer))
    assert line.startswith("the Countable that steps is in no checkpoint")


def test_an_optimizer_inside_of_a_model(capsys):
    model, other = Holder(), Saver()
    (line,) = lines(capsys, {"model": model}, trains(model.layer, model.optimizer))
    assert "the AdamW that steps is in no checkpoint" in line
    assert not lines(capsys, {"model": other}, trains(other.layer, other.optimizer))


def test_a_model_that_is_trained_and_not_named(capsys):
    (model, optimizer), (second, its) = build(), build(torch.optim.SGD)

    def body(step):
        trains(model, optimizer)(step)
        trains(second, its)(step)

    named = {"model": model, "optimizer": optimizer}
    (line,) = lines(capsys, named, body)
    assert line.endswith("outlast.session(..., model2=model2, optimizer2=optimizer2)")
    (line,) = lines(capsys, {**named, "its": its}, body)
    assert line.endswith("outlast.session(..., model2=model2)")
    assert not lines(capsys, {**named, "its": its, "second": second}, body)


class Fused(nn.Linear):
    """Its state has its one weight in two parts."""

    def __init__(self):
        super().__init__(3, 4, bias=False)
        self.register_state_dict_post_hook(Fused.split)

    @staticmethod
    def split(_, state, prefix, __):
        both = state.pop(f"{prefix}weight")
        state[f"{prefix}even"], state[f"{prefix}odd"] = both[::2].clone(), both[1::2].clone()


def test_what_a_module_gives_under_other_names_is_saved(capsys):
    model = nn.Sequential(Fused(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert not lines(capsys, {"model": model, "optimizer": optimizer}, trains(model, optimizer))


def test_schedulers(capsys):
    model, optimizer = build()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    named = {"model": model, "optimizer": optimizer}
    (line,) = lines(capsys, named, trains(model, optimizer, scheduler))
    assert line == (
        "the CosineAnnealingLR that steps is in no checkpoint: a resumed run begins its schedule "
        "anew; name it: outlast.session(..., scheduler=scheduler)"
    )
    with_it = {**named, "scheduler": scheduler}
    assert not lines(capsys, with_it, trains(model, optimizer, scheduler))
    # It refers to the optimizer, and does not save it.
    without = {"model": model, "scheduler": scheduler}
    (line,) = lines(capsys, without, trains(model, optimizer, scheduler))
    assert "the AdamW that steps" in line


def test_schedulers_in_a_scheduler_and_those_of_others(capsys):
    model, optimizer = build()
    parts = [torch.optim.lr_scheduler.ConstantLR(optimizer) for _ in range(2)]
    whole = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [3])
    named = {"model": model, "optimizer": optimizer}
    (line,) = lines(capsys, named, trains(model, optimizer, whole))
    assert "the SequentialLR that steps" in line
    assert not lines(capsys, {**named, "whole": whole}, trains(model, optimizer, whole))

    model, optimizer = build()
    timm = Timm(optimizer)
    named = {"model": model, "optimizer": optimizer}
    (line,) = lines(capsys, named, trains(model, optimizer, timm))
    assert "the Timm that steps" in line
    assert not lines(capsys, {**named, "timm": timm}, trains(model, optimizer, timm))


def test_averages_and_scales(capsys):
    model, optimizer = build()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    scaler, disabled = (torch.amp.GradScaler("cpu", enabled=on) for on in (True, False))

    def body(step):
        for one in (scaler, disabled):
            one.scale(model(torch.ones(2, 3)).sum()).backward()
            one.step(optimizer)
            one.update()
            optimizer.zero_grad()
        averaged.update_parameters(model)

    named = {"model": model, "optimizer": optimizer}
    said = "\n".join(lines(capsys, named, body))
    assert said.count("in no checkpoint") == 2
    assert "the AveragedModel that is updated" in said
    assert "outlast.session(..., ema=ema)" in said
    assert "outlast.session(..., scaler=scaler)" in said
    assert not lines(capsys, {**named, "ema": averaged, "scaler": scaler}, body)


def test_what_lives_for_a_step_is_not_spoken_of(capsys):
    model, optimizer = build()

    def body(step):
        attack = torch.zeros(2, 3, requires_grad=True)
        other = torch.optim.Adam([attack])
        for _ in range(9):
            model(attack).sum().backward()
            other.step()
        trains(model, optimizer)(step)

    assert not lines(capsys, {"model": model, "optimizer": optimizer}, body)
