"""Where a loop begins."""

from types import SimpleNamespace

import pytest
import torch

from outlast.data import Loader, open_feed
from outlast.data.feed import TRAIL
from outlast.data.generators import same
from outlast.data.trail import read_record
from outlast.training.position import Position


def books(rank):
    def opened(loader, trail, step):
        return open_feed(loader, rank=rank, world_size=2, trail=trail, step=step)

    return SimpleNamespace(link=SimpleNamespace(rank=rank), open_feed=opened)


def begin(loader, step=0, rank=0):
    position = Position()
    position.loop = 1
    objects = SimpleNamespace(forget_loader=lambda loader: None, stateful={})
    streams = SimpleNamespace(forget=lambda: None, restore=lambda step: None)
    position.open(
        loader, step, books=books(rank), objects=objects, streams=streams, afresh=None, epochs=1
    )


@pytest.mark.parametrize(
    ("taken", "step", "rank", "is_said"),
    [(1, 0, 0, True), (1, 0, 1, False), (1, 9, 0, False), (0, 0, 0, False)],
)
def test_a_batch_that_was_taken_before_the_first_step_is_missed(taken, step, rank, is_said, capsys):
    loader = Loader(range(20), global_batch=5)
    for _ in zip(range(taken), loader, strict=False):
        pass
    begin(loader, step, rank)
    said = capsys.readouterr().err
    assert ("the loader stands at sample 5 before the job's first step" in said) == is_said


def stands(loader):
    """A position in its loop's first step."""
    position = Position()
    position.loop = 1
    objects = SimpleNamespace(forget_loader=lambda loader: None, stateful={})
    streams = SimpleNamespace(forget=lambda: None, restore=lambda step: None)
    given = {"books": books(0), "objects": objects, "streams": streams, "afresh": None}
    position.open(loader, 0, **given, epochs=None)
    position.next(0)
    return position


class Stateful(list):
    """A loader with a state of its own."""

    pace = 1

    def state_dict(self):
        return {"pace": self.pace, "words": [torch.ones(2) * self.pace]}

    def load_state_dict(self, state):
        self.pace = state["pace"]


@pytest.mark.parametrize("kind", [Stateful, list, lambda items: Loader(items, global_batch=4)])
def test_what_was_foreseen_of_a_steps_end_is_not_worked_out_again(kind):
    position = stands(kind(range(20)))
    foreseen = position.ahead()
    position.completed()
    assert position.reached() is foreseen
    state = dict(position.state())
    assert read_record(foreseen[TRAIL]) == read_record(state[TRAIL])
    assert same([foreseen], [state | {TRAIL: foreseen[TRAIL]}])


def test_a_loader_whose_state_a_step_has_changed_is_asked_again():
    loader = Stateful(range(20))
    position = stands(loader)
    foreseen = position.ahead()
    loader.pace = 2
    position.completed()
    assert position.reached() is not foreseen
    assert same([position.reached()], [position.state()])
