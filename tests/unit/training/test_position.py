"""Where a loop begins."""

from types import SimpleNamespace

import pytest

from outlast.data import Loader, open_feed
from outlast.training.position import Position


def rig(rank):
    def opened(loader, trail, step):
        return open_feed(loader, rank=rank, world_size=2, trail=trail, step=step)

    return SimpleNamespace(link=SimpleNamespace(rank=rank), open_feed=opened)


def begin(loader, step=0, rank=0):
    position = Position()
    position.loop = 1
    objects = SimpleNamespace(forget_loader=lambda loader: None, stateful={})
    streams = SimpleNamespace(forget=lambda: None, restore=lambda step: None)
    position.open(
        loader, step, rig=rig(rank), objects=objects, streams=streams, afresh=None, epochs=1
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
