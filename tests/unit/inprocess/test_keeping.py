"""What a session does at each step so that the others can go on after a loss."""

from types import SimpleNamespace

import pytest
import torch

from outlast.attempt.beat import BEATS_VARIABLE, Descent, read_own
from outlast.attempt.over import over
from outlast.checkpoint.plan import OWN
from outlast.inprocess import living
from outlast.inprocess.living import Keeping
from outlast.script.objects import BoundaryState, Objects


class Loop:
    """A session's loop of one parameter."""

    def __init__(self):
        self.model = torch.nn.Linear(2, 1, bias=False)
        self.let_go = []
        self.drawn = 0
        self.step = 0
        self.keeping = Keeping(
            *(SimpleNamespace(rank=0, world_size=2), Descent(1, 1, 2)),
            Objects({"m": self.model}),
            newest=self.newest,
            own=lambda: self.own(self.step),
            own_end=self.own,
            let_go=lambda: self.let_go.append(True),
        )

    def own(self, step):
        return {"step": step, "random": {"words": self.drawn}, "data": None}

    def newest(self):
        return BoundaryState(
            step=self.step,
            data={"m": {"weight": {"$": "tensor", "name": "m.weight"}}, OWN: self.own(self.step)},
            tensors={"m.weight": self.model.weight},
            lazy=frozenset({"m.weight"}),
            order={},
        )

    def end(self, step):
        self.step = step
        self.stalled_s = self.keeping.keep(step)


@pytest.fixture(name="loop")
def _loop(tmp_path, monkeypatch):
    monkeypatch.setenv(BEATS_VARIABLE, str(tmp_path))
    made = Loop()
    yield made
    made.keeping.close()
    over.begin_again()
    living.forget()


def records():
    return {(one.step, one.is_final): one for one in read_own()}


def test_the_moment_stays_only_where_there_is_a_next_attempt(loop):
    loop.end(3)
    loop.keeping.close()
    assert living.kept() is None


def test_the_moment_stays_where_the_attempt_is_over(loop):
    loop.end(3)
    over.happen()
    assert loop.let_go == [True]
    loop.keeping.close()
    assert living.kept_step() == 3


def test_a_backward_pass_and_an_optimizer_say_what_will_be_the_end(loop):
    loop.end(3)
    loop.drawn = 1
    loop.model(torch.ones(1, 2)).sum().backward()
    assert (4, False) in records()
    before = records()[4, False].blob
    loop.drawn = 2
    loop.keeping.before_optimizer()
    assert records()[4, False].blob != before
    assert (3, True) in records()


def test_the_moment_stays_while_gradients_are_accumulated(loop):
    loop.end(3)
    for step in (4, 5):
        loop.model(torch.ones(1, 2)).sum().backward()
        loop.keeping.stay(step)
    loop.model(torch.ones(1, 2)).sum().backward()
    assert {(3, True), (6, False)} <= set(records())
    over.happen()
    loop.keeping.close()
    assert living.kept_step() == 3


def test_what_was_accumulated_for_one_of_two_optimizers_leaves_no_moment(loop):
    loop.end(3)
    loop.keeping.before_optimizer()
    loop.keeping.spoil()
    loop.keeping.stay(4)
    assert not loop.keeping.has(3)
    over.happen()
    loop.keeping.close()
    assert living.kept() is None


def test_nothing_is_said_before_the_first_step(loop):
    loop.model(torch.ones(1, 2)).sum().backward()
    loop.keeping.before_optimizer()
    assert records() == {}


def test_the_hook_goes_with_the_session(loop):
    loop.end(3)
    loop.keeping.close()
    loop.model(torch.ones(1, 2)).sum().backward()
    assert (4, False) not in records()


def test_state_that_cannot_be_kept_never_stops_training(loop, monkeypatch, caplog):
    def refuse(*_):
        raise RuntimeError("inference tensors do not track a version")

    monkeypatch.setattr(living, "Moment", refuse)
    for step in (1, 2):
        loop.end(step)
        loop.keeping.before_optimizer()
    assert len(caplog.records) == 1
    over.happen()
    loop.keeping.close()
    assert living.kept() is None


def test_what_it_takes_is_counted(loop):
    loop.end(1)
    assert loop.stalled_s > 0


def test_a_moment_that_a_graph_may_have_changed_is_nobody_s(loop):
    loop.end(3)
    loop.keeping.spoil()
    over.happen()
    loop.keeping.close()
    assert living.kept() is None
