"""What optimizers do not change, as it was at a step's end."""

import pytest
import torch
from torch import nn

from outlast.checkpoint.plan import OWN
from outlast.checkpoint.tree import flatten
from outlast.errors import ConfigError
from outlast.inprocess import living as module
from outlast.inprocess.living import Looks, is_equal, of_all, with_buffers
from outlast.script.objects import BoundaryState, Lazy, Objects


class Counter:
    """An object of the script."""

    def __init__(self):
        self.seen = [0, torch.zeros(2)]

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Job:
    def __init__(self, optimizer=torch.optim.AdamW, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.model[2].bias.requires_grad_(False)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.optimizer = optimizer(self.model.parameters(), lr=0.1, **options)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.counter = Counter()
        self.objects = Objects(
            {
                "model": self.model,
                "average": self.average,
                "optimizer": self.optimizer,
                "schedule": self.schedule,
                "counter": self.counter,
            }
        )
        self.train()

    def body(self):
        """All of a step but what the optimizer does to weights."""
        self.model(torch.randn(5, 3)).sum().backward()
        self.optimizer._opt_called = True
        self.schedule.step()
        self.counter.seen[0] += 1
        self.counter.seen[1] += 1
        for held in self.average.parameters():
            held.data.mul_(0.9)  # past the version counters, as many averages are made

    def train(self):
        self.body()
        self.optimizer.step()

    def state(self):
        data, tensors = {}, {}
        for key, value in {**self.objects.capture(), OWN: {"own": torch.ones(1)}}.items():
            data[key], found = flatten(value, key)
            tensors |= found
        lazy = Lazy(self.objects.stateful, tensors)
        return BoundaryState(step=1, data=data, tensors=tensors, lazy=lazy.names, order=lazy.order)

    def looks(self):
        found = Looks(self.objects)
        assert found.take() is None, "nothing is known yet"
        found.learn(self.state())
        return found


def as_lists(whole):
    return {name: tensor.tolist() for name, tensor in whole.tensors.items()}, whole.data


KINDS = [
    (torch.optim.AdamW, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.Adagrad, {}),
]


@pytest.mark.parametrize(("optimizer", "options"), KINDS)
def test_what_a_body_changes_is_what_it_was(optimizer, options):
    job = Job(optimizer, **options)
    looks = job.looks()
    for _ in range(3):
        job.train()
        expected = as_lists(of_all(job.state()).whole(job.state))
        taken = looks.take()
        job.body()
        assert as_lists(taken.whole(job.state)) == expected
        assert as_lists(of_all(job.state()).whole(job.state)) != expected


def test_equal_states_have_equal_digests_whoever_has_them():
    one, other = Job(), Job()
    looks, others = one.looks(), other.looks()
    assert looks.take().digest == others.take().digest
    for change in (
        lambda: other.model(torch.randn(5, 3)),
        other.schedule.step,
        lambda: other.counter.seen.append("more"),
        lambda: next(other.average.parameters()).data.add_(1),
        lambda: other.optimizer.param_groups[0].update(lr=7.0),
    ):
        before = others.take().digest
        change()
        assert others.take().digest != before


@pytest.mark.parametrize("is_learnt", [True, False])
def test_what_ddp_sends_is_kept_apart_and_not_compared(monkeypatch, is_learnt):
    job, other = Job(), Job()
    sent = {b.data_ptr() for one in (job, other) for b in one.model.buffers()}
    monkeypatch.setattr(module.groups, "sent_buffers", lambda: sent)
    looks, others = Looks(job.objects), Looks(other.objects)
    if is_learnt:
        looks, others = job.looks(), other.looks()

    def taken(job, looks):
        return looks.take() or of_all(job.state())

    other.model(torch.randn(5, 3))
    one, two = taken(job, looks), taken(other, others)
    assert one.digest == two.digest
    assert set(one.sent) == {f"model.1.{name}" for name, _ in job.model[1].named_buffers()}
    assert not is_equal(one.buffers, two.buffers)
    assert is_equal(one.buffers, one.buffers_now())
    job.model(torch.randn(5, 3))
    assert not is_equal(one.buffers, one.buffers_now())
    found = with_buffers(one.whole(job.state).tensors, two.buffers)
    for name, buffer in other.model[1].named_buffers():
        assert torch.equal(found[f"model.1.{name}"], buffer)
    sent.clear()
    assert taken(job, looks).digest != taken(other, others).digest


def test_what_was_not_there_at_the_beginning_is_seen():
    job = Job()
    job.model[0].weight.grad = None
    job.optimizer.state.clear()
    looks = job.looks()
    job.train()
    taken = looks.take()
    assert len(taken.live) > len(list(job.model.parameters()))
    assert as_lists(taken.whole(job.state)) == as_lists(of_all(job.state()).whole(job.state))


def test_other_modules_are_looked_at_anew():
    job = Job()
    looks = job.looks()
    job.model.append(nn.BatchNorm1d(1))
    assert looks.take() is None
    looks.learn(job.state())
    taken = looks.take()
    assert as_lists(taken.whole(job.state)) == as_lists(of_all(job.state()).whole(job.state))


def test_a_state_of_other_parts_completes_nothing():
    job = Job()
    taken = job.looks().take()
    slots = next(iter(job.optimizer.state.values()))
    slots["exp_avg"] = slots["exp_avg"].clone()
    with pytest.raises(ConfigError, match="other parts"):
        taken.whole(job.state)


class Own(torch.optim.SGD):
    """Somebody's."""


class Described(nn.Linear):
    def get_extra_state(self):
        return {"a": 1}

    def set_extra_state(self, state):
        pass


@pytest.mark.parametrize("what", ["optimizer", "model", "slots"])
def test_what_is_not_torchs_own_is_gone_through_each_time(what):
    job = Job(Own) if what == "optimizer" else Job()
    if what == "model":
        job.model[0] = Described(3, 3)
    if what == "slots":
        next(iter(job.optimizer.state.values()))["words"] = "more than a number"
    looks = Looks(job.objects)
    for _ in range(2):
        looks.learn(job.state())
        assert looks.take() is None
