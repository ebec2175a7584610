"""What changes under the copy makes a snapshot void: never committed, taken again, learned from."""

import os
import signal

import pytest
import torch
from lazy_watch import _job, _watch  # noqa: F401 - fixtures
from state_bits import copy_of, difference, held

import outlast
from outlast.checkpoint.capture import Capture
from outlast.ledger.file import read_events
from outlast.storage import Directory
from whole_reads import load

SIZE = 300  # rows and columns: large enough to be shared by ranks


def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, 1))
    return model, torch.optim.AdamW(model.parameters())


def one_step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(2, SIZE)).sum().backward()
    optimizer.step()


def train(job, named, change=lambda step: None, *, before_save=lambda num: None, num_saves=3):
    """Save one time after another from step 2 on, with a change under each copy.

    Args:
        change: called with the number of completed steps, behind each boundary.
        before_save: called with the number of saves, in front of each.

    Returns:
        The last step; the saves; step → the state at its boundary.
    """
    at, saves = {}, []
    with outlast.session(dir=job, every="1 h", keep=100, **named) as session:
        for _ in session.steps(range(10**6), until=10**6):
            at[session.step] = copy_of(named)
            if session.step >= 2 and (not saves or saves[-1].wait(0.0)):
                if len(saves) == num_saves:
                    break
                before_save(len(saves))
                saves.append(session.save())
            change(session.step)
            one_step(**named)
    return session.step, saves, at


def assert_held(job, steps, at, named):
    """The checkpoints of these steps hold what was there."""
    for step in steps:
        found = held(load(Directory(job / "checkpoints"), step), named)
        assert not difference(at[step], found)


def steps_of(job, event):
    return [e["step"] for e in read_events(job) if e.event == event]


def reasons(job):
    return [e["reason"] for e in read_events(job) if e.event == "save_skipped"]


def through_the_counter(weight):
    with torch.no_grad():
        weight.mul_(1.01)


def in_the_middle(weight):
    with torch.no_grad():
        weight[SIZE // 2].mul_(1.01)


def past_the_counter(weight):
    weight.data.mul_(1.01)


def through_numpy(weight):
    array = weight.detach().numpy()
    array *= 1.01


def of_the_moments(optimizer):
    def change(weight):
        optimizer().state[weight]["exp_avg"].add_(1)

    return change


CHANGES = {
    "in place": (through_the_counter, "model.0.weight"),
    "in place, in the middle": (in_the_middle, "model.0.weight"),
    "a moment": (None, "optimizer.state.0.weight.exp_avg"),
}
PAST = {"through .data": past_the_counter, "through numpy": through_numpy}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_tensor_that_changes_under_the_copy_voids_the_snapshot_once(job, watch, kind):
    model, optimizer = build()
    named = {"model": model, "optimizer": optimizer}
    change, name = CHANGES[kind]
    change = change or of_the_moments(lambda: optimizer)
    watch.pace = "idle"  # nothing is copied before the hook, and the change comes before it
    last, saves, at = train(job, named, lambda step: change(model[0].weight) if step >= 2 else None)
    # The first save was void: its step is not committed, a later one is, and whoever asked knows.
    void = saves[0].not_before
    committed = steps_of(job, "commit")
    assert void not in committed
    assert committed == [*[save.step for save in saves], last]  # and the end
    assert saves[0].step > void
    assert reasons(job) == [f"{name} changed under the copy; it is taken again, all at once"]
    # All at once; from then on all but that tensor is left for later, and nothing is void.
    total = watch.left[0] + watch.at_once[0]
    size = SIZE * SIZE * 4
    assert watch.left[1] == 0
    assert watch.left[2:4] == [watch.left[0] - size] * 2
    assert watch.at_once[1] == total
    assert_held(job, committed, at, named)


@pytest.mark.parametrize("how", PAST)
def test_who_writes_past_the_counter_waits_for_the_copy(job, watch, how):
    model, optimizer = build()
    named = {"model": model, "optimizer": optimizer}
    watch.pace = "idle"
    _, saves, at = train(job, named, lambda _: PAST[how](model[0].weight))
    assert not reasons(job)
    committed = steps_of(job, "commit")
    assert committed[:3] == [save.step for save in saves]
    assert_held(job, committed[:3], at, named)
    # Of what somebody has a view of nothing is left for later.
    size = SIZE * SIZE * 4
    later = size if how == "through numpy" else 0
    assert {watch.left[0] - left for left in watch.left} <= {0, later}


def test_a_tensor_of_another_shape_where_it_lies_voids_the_snapshot_once(job):
    model, optimizer = build()
    model.spare = torch.nn.Parameter(torch.randn(6, 4), requires_grad=False)
    optimizer.add_param_group({"params": [model.spare]})
    named = {"model": model, "optimizer": optimizer}

    def before_save(num_saves):
        if num_saves == 2:
            model.spare.data = model.spare.data.view(4, 6)

    last, saves, at = train(job, named, before_save=before_save, num_saves=4)
    why = "model.spare is not of the dtype or shape that it was; it is taken again, all at once"
    assert reasons(job) == [why]
    committed = steps_of(job, "commit")
    assert committed == [*[save.step for save in saves], last]  # and the end
    assert_held(job, committed, at, named)
    assert at[committed[-1]]["model"]["spare"].shape == (4, 6)


@pytest.fixture
def meddler(monkeypatch):
    """Somebody who changes the weight between a boundary and the copy of what was left, once."""

    def meddle(model):
        take_now, left = Capture.take_now, [1]

        def taken(capture):
            take_now(capture)
            if left and capture._trusted:
                left.pop()
                through_the_counter(model[0].weight)

        monkeypatch.setattr(Capture, "take_now", taken)

    return meddle


@pytest.mark.parametrize("how", ["finish", "drain"])
def test_the_last_snapshot_is_taken_again_on_the_spot(job, watch, meddler, monkeypatch, how):
    model, optimizer = build()
    named = {"model": model, "optimizer": optimizer}

    steps = 4 if how == "finish" else 100_000

    def train():
        with outlast.session(dir=job, every="1 h", **named) as session:
            monkeypatch.setattr(session._on.ending, "may_save", lambda *_: False)
            for _ in session.steps(range(steps), until=steps):
                one_step(model, optimizer)
                if session.step == 2:
                    meddler(model)
                    if how == "drain":
                        os.kill(os.getpid(), signal.SIGTERM)

    if how == "drain":
        with pytest.raises(SystemExit) as left:
            train()
        assert left.value.code == 75
    else:
        train()
    last = steps_of(job, "drained")[0] if how == "drain" else 4
    assert steps_of(job, "commit") == [last]
    assert watch.left[1:] == [0]
    assert [r.partition(" ")[0] for r in reasons(job)] == ["model.0.weight"]
    found = held(load(Directory(job / "checkpoints"), last), named)
    assert not difference(copy_of(named), found)


def test_a_void_save_is_made_good_by_the_end_of_the_loop(job, watch):
    model, optimizer = build()
    watch.pace = "idle"
    with outlast.session(model=model, optimizer=optimizer, dir=job, every="1 h") as session:
        for _ in session.steps(range(100), until=4):
            if session.step == 2:
                pending = session.save()
            if session.step == 3:
                through_the_counter(model[0].weight)
            one_step(model, optimizer)
    assert pending.wait(0)
    assert pending.step == 4
    assert steps_of(job, "commit") == [4]
