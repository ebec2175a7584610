"""Whose turn it is: what a change of the interval comes to."""

import pytest

from outlast import config
from outlast.plan.posterior import Posterior
from outlast.training.turns import Turns


class Engine:
    idle = idle_soon = True


@pytest.fixture
def changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return []


def turns(changes, known=None, **given):
    return Turns(
        config.load(given or None, environ={}),
        Engine(),
        lambda *_: None,
        on_change=changes.append,
        known=known,
    )


def test_each_change_of_the_interval_is_told_once(changes):
    one = turns(changes)
    one.taken(1, 1e6, 1.0)
    one.taken(2, 1e6, 1.0)
    (first,) = changes
    assert first.before_s is None
    for step in range(3, 40):
        one.taken(step, 1e6, 9.0)
    assert len(changes) > 1
    assert changes[1].reason == "checkpoints block training for longer"
    assert changes[1].before_s == first.interval_s


def test_what_the_jobs_past_says_counts(changes):
    turns(changes).taken(1, 0.0, 1.0)
    turns(changes, Posterior(num_seen=30, seen_h=10.0)).taken(1, 0.0, 1.0)
    without, with_it = changes
    assert with_it.interval_s < without.interval_s / 2
    assert with_it.num_seen == pytest.approx(30, rel=0.01)


@pytest.mark.parametrize("every", ["200 steps", "5 min"])
def test_an_interval_that_was_asked_for_is_kept(changes, every):
    one = turns(changes, **{"checkpoint.every": every})
    for step in range(9):
        one.taken(step, 1e6, 9.0)
    assert not changes
