"""Which tensors only optimizers change, and being called before they do."""

import pytest
import torch
from unit_fakes import stand_in_for_graphs

from outlast.checkpoint.tree import flatten
from outlast.script import objects as states
from outlast.script.objects import Lazy, Objects


def judged(**named):
    objects = Objects(named)
    tensors = {}
    for key, value in objects.capture().items():
        tensors |= flatten(value, key)[1]
    return Lazy(objects.stateful, tensors), tensors


def net():
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
    )


def stepped(model, kind=torch.optim.AdamW, **options):
    optimizer = kind(model.parameters(), **options)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return optimizer


def test_parameters_and_what_optimizers_keep_for_them_are_lazy_and_nothing_else():
    model = net()
    optimizer = stepped(model, lr=torch.tensor(0.1))
    average = torch.optim.swa_utils.AveragedModel(model)
    found, tensors = judged(model=model, optimizer=optimizer, average=average)
    parameters = {f"model.{name}" for name, _ in model.named_parameters()}
    state = {name for name in tensors if name.startswith("optimizer.state.")}
    assert len(state) == 3 * len(parameters)
    assert found.names == parameters | state
    assert found.optimizers == ("optimizer",)


def test_frozen_parameters_are_lazy_tied_ones_under_both_names():
    model = net()
    model.append(torch.nn.Linear(4, 1))
    model[3].weight = model[2].weight
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    found, _ = judged(model=model, optimizer=optimizer)
    assert {"model.0.weight", "model.2.weight", "model.3.weight"} <= found.names


@pytest.mark.parametrize("with_other_optimizer", [False, True])
def test_a_model_that_no_optimizer_works_on_is_not_lazy(with_other_optimizer):
    other = net()
    named = {"model": net()}
    if with_other_optimizer:
        named |= {"other": other, "optimizer": stepped(other)}
    found, _ = judged(**named)
    assert not any(name.startswith("model.") for name in found.names)
    assert bool(found.names) == with_other_optimizer


def test_they_are_copied_in_the_order_in_which_the_optimizer_touches_them():
    model = net()
    parameters = list(model.named_parameters())[::-1]
    optimizer = torch.optim.AdamW([p for _, p in parameters])
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    found, _ = judged(model=model, optimizer=optimizer)
    for turn, (name, _) in enumerate(parameters):
        assert found.order[f"model.{name}"] == turn
        assert found.order[f"optimizer.state.{name}.exp_avg"] == turn


def test_moments_are_what_may_lose_bits_and_nothing_else_that_an_optimizer_keeps():
    model = net()
    optimizer = stepped(model, amsgrad=True)
    for parameter in model.parameters():
        optimizer.state[parameter]["master"] = parameter.detach().clone()
    found, _ = judged(model=model, optimizer=optimizer)
    slots = {name.rpartition(".")[2] for name in found.moments}
    assert slots == {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


def test_moments_that_are_no_fp32_stay_as_they_are():
    model = net().double()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3).double()).sum().backward()
    optimizer.step()
    found, _ = judged(model=model, optimizer=optimizer)
    assert found.moments == set()


@pytest.fixture
def hooked():
    calls = []
    handle = states.hook(lambda _: calls.append("before"), lambda: calls.append("graphed"))
    yield calls
    handle.remove()


def test_the_hook_is_called_before_any_optimizer_changes_anything(hooked):
    torch.manual_seed(0)
    model = net()
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []

    def first(*_):
        seen.append((list(hooked), torch.equal(model[0].weight, before)))

    optimizer.register_step_pre_hook(first)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    assert seen == [(["before"], True)]
    assert not torch.equal(model[0].weight, before)


def test_the_hook_is_gone_when_it_is_removed():
    calls = []
    states.hook(lambda _: calls.append(1), lambda: None).remove()
    stepped(net())
    assert calls == []


def test_a_step_that_is_recorded_into_a_graph_is_told_apart(hooked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    stepped(net())
    assert hooked == ["graphed"]


# --- optimizers that say nothing -----------------------------------------------------------------


def due(steps, until):
    """Boundaries, from step 0 on, at which a word is due; ``steps`` are those with one."""
    heard, found = states.StepsHeard(0), []
    for step in range(until + 1):
        if step in steps:
            heard.stepped(step)
            heard.stepped(step)  # several optimizers
        if heard.is_due(step):
            found.append(step)
    return found


def test_a_step_without_the_word_that_was_due_is_found():
    assert due(set(), 4) == [1, 2, 3, 4], "in a graph from before"
    assert due({1, 2, 3, 4}, 4) == []
    assert due({1, 2, 4}, 6) == [3, 6]
    assert due({3, 6, 9}, 11) == [1, 2], "accumulation"
    assert due({3, 6, 9}, 13) == [1, 2, 12, 13]
    assert due({1, 2, 3, 6, 9}, 11) == [4, 5], "accumulation that begins later"


def test_what_has_never_been_heard_is_not_certain():
    heard = states.StepsHeard(7)
    assert not heard.is_due(7)
    assert not heard.is_certain(7)
    heard.stepped(8)
    assert heard.is_certain(8)
    assert not heard.is_certain(9)


def test_replays_of_graphs_are_told_until_it_is_removed(monkeypatch):
    stand_in_for_graphs(monkeypatch, lambda calls: calls.append("replayed"))
    calls = []
    handle = states.hook(lambda _: None, lambda: None, lambda: calls.append("told"))
    torch.cuda.CUDAGraph.replay(calls)
    handle.remove()
    torch.cuda.CUDAGraph.replay(calls)
    assert calls == ["told", "replayed", "replayed"]
