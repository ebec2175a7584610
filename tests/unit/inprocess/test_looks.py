"""What optimizers do not change, as it was at a step's end."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from outlast.checkpoint.plan import OWN
from outlast.checkpoint.tree import flatten
from outlast.errors import ConfigError
from outlast.inprocess import looks as module
from outlast.inprocess.looks import Looks, is_equal, of_all, with_buffers
from outlast.script.objects import BoundaryState, Lazy, Objects
from thorough import examples


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


def test_a_module_that_another_one_takes_the_place_of_completes_nothing():
    job = Job()
    job.model[1] = nn.BatchNorm1d(3, affine=False)  # it has buffers alone
    looks = paced(job)
    job.model[1] = nn.BatchNorm1d(3, affine=False)
    with pytest.raises(ConfigError, match="other parts"):
        looks.take().whole(job.state)


def test_an_optimizer_that_seldom_steps_is_looked_at_each_time():
    job = Job()
    looks = job.looks()
    for number in range(3 * module.DUE):
        job.body()
        if number % 10 == 9:
            job.optimizer.step()
        assert looks.take().marks.hold(), number


def test_a_state_of_other_parts_completes_nothing():
    job = Job()
    taken = job.looks().take()
    slots = next(iter(job.optimizer.state.values()))
    slots["exp_avg"] = slots["exp_avg"].clone()
    with pytest.raises(ConfigError, match="other parts"):
        taken.whole(job.state)


def paced(job):
    """After some steps it is known that one of an optimizer's tensors tells of all."""
    looks = job.looks()
    for _ in range(4):
        job.train()
        looks.take()
    return looks


def slots_of(job):
    return [one for each in job.optimizer.state.values() for one in each.values()]


@pytest.mark.parametrize(("optimizer", "options"), KINDS)
def test_one_of_an_optimizers_tensors_is_looked_at_for_all(monkeypatch, optimizer, options):
    job = Job(optimizer, **options)
    looks = paced(job)
    seen, look = [], module._CommonPace.look
    monkeypatch.setattr(module._CommonPace, "look", lambda pace: seen.append(look(pace)))
    for _ in range(2 * module.DUE):
        job.train()
        marks = looks.take().marks
        job.body()
        assert marks.hold(), "its steps move all of them together"
    assert len(seen) <= 2, "all of them are looked at once in so many steps"
    num = len(slots_of(job))
    assert len(looks.take().marks._tensors) == len(looks.take().live) - num


@pytest.mark.parametrize("at", [0, 1, 4])
def test_an_optimizers_tensor_that_is_written_to_is_not_believed(at):
    job = Job()
    looks = paced(job)
    marks = looks.take().marks
    slots_of(job)[at].add_(0)
    assert not marks.hold(), "written to since"
    job.train()
    for _ in range(module.DUE):
        taken, then = looks.take(), [one.clone() for one in slots_of(job)]
        if taken.marks.hold():
            assert all(map(torch.equal, slots_of(job), then))
        job.train()
    assert looks.take().marks.hold(), "by then all of them were looked at again"


@pytest.mark.parametrize("what", ["weight", "moved weight", "moved slot", "step"])
def test_what_has_changed_since_is_seen(what):
    job = Job()
    looks = paced(job)
    marks = looks.take().marks
    assert marks.hold()
    if what == "weight":
        with torch.no_grad():
            job.model[0].weight.add_(0)
    elif what == "moved weight":
        job.model[0].weight.data = job.model[0].weight.data.clone()
    elif what == "moved slot":
        slots_of(job)[1].data = slots_of(job)[1].data.clone()
    else:
        job.train()
    assert not marks.hold()


@given(st.data())
@examples(60)
def test_whatever_moves_apart_is_looked_at_by_itself(data):
    """Weights without a gradient now and then, and writes by hand between steps."""
    job = Job()
    looks = job.looks()
    weights = [one for one in job.model.parameters() if one.requires_grad]
    for _ in range(data.draw(st.integers(3, 40))):
        job.body()
        is_odd = data.draw(st.integers(0, 7)) == 0
        if is_odd:
            for one in data.draw(st.lists(st.sampled_from(weights), unique_by=id)):
                one.grad = None
        job.optimizer.step()
        if data.draw(st.integers(0, 7)) == 0:
            is_odd = True
            data.draw(st.sampled_from(slots_of(job))).mul_(0.5)
        taken = looks.take()
        then = [one.clone() for one in taken.live]
        job.body()
        if not is_odd and data.draw(st.booleans()):
            data.draw(st.sampled_from([*slots_of(job)])).add_(1)
        holds = taken.marks.hold()
        assert not holds or all(map(torch.equal, taken.live, then))


def test_where_another_weight_gets_its_first_gradient_there_are_more_tensors():
    job = Job()
    job.model[2].bias.requires_grad_(True)
    looks = job.looks()
    job.model[2].bias.requires_grad_(False)
    for _ in range(4):
        job.train()
        before = looks.take()
    job.model[2].bias.requires_grad_(True)
    job.train()
    assert len(looks.take().live) >= len(before.live)
    assert as_lists(looks.take().whole(job.state)) == as_lists(of_all(job.state()).whole(job.state))


def test_settings_are_taken_as_they_are():
    job = Job()
    looks = paced(job)
    group = job.optimizer.param_groups[0]
    for change in (
        lambda: group.update(lr=0.5),
        lambda: group.update(betas=[0.9, 0.99]),
        lambda: group["betas"].append(1.0),  # a list can change where it lies
        lambda: group.update(lr=torch.tensor(0.25)),
        lambda: group["lr"].mul_(2),
    ):
        before = looks.take().digest
        change()
        taken = looks.take()
        assert taken.digest != before
        assert as_lists(taken.whole(job.state)) == as_lists(of_all(job.state()).whole(job.state))


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
