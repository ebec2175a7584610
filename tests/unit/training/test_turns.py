"""Whose turn it is: what a change of the interval comes to."""

import time

import pytest

from outlast import config
from outlast.ledger.file import Ledger
from outlast.policy.cadence import cost_of
from outlast.policy.hazard import Hazard, Posterior
from outlast.policy.tier_cadence import Cost
from outlast.training.turns import Turns


class Engine:
    idle = idle_soon = keeps = True


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
    assert changes[1].reason == "checkpoints cost training more"
    assert changes[1].before_s == first.interval_s


def test_what_the_jobs_past_says_counts(changes):
    turns(changes).taken(1, 0.0, 1.0)
    turns(changes, Hazard(Posterior(num_seen=30, seen_h=10.0))).taken(1, 0.0, 1.0)
    without, with_it = changes
    assert with_it.interval_s < without.interval_s / 2
    assert with_it.num_seen == pytest.approx(30, rel=0.01)


@pytest.mark.parametrize("every", ["200 steps", "5 min"])
def test_an_interval_that_was_asked_for_is_kept(changes, every):
    one = turns(changes, **{"checkpoint.every": every})
    for step in range(9):
        one.taken(step, 1e6, 9.0)
    assert not changes


def test_other_ranks_decide_nothing_and_tell_nothing(changes):
    one = turns(changes)
    other = Turns(
        config.load(None, environ={}),
        Engine(),
        lambda *_: None,
        on_change=changes.append,
        known=None,
        leads=False,
    )
    other.taken(1, 1e6, 1.0)
    assert not changes
    one.taken(1, 1e6, 1.0)
    assert changes


def test_a_slower_tier_learns_what_its_copies_cost_from_the_ledger(changes, tmp_path):
    (tmp_path / "outlast.toml").write_text(
        "[[tier]]\nurl = 'memory:'\n[[tier]]\nname = 'slow'\nurl = '/slow'\n[price]\nspot = 1.0\n"
    )
    one = turns(changes)
    assert [one.tier_turns.due(turn, 0.0, all_of_them=False) for turn in range(3)] == [None] * 3
    (tmp_path / "outlast-job").mkdir()
    ledger = Ledger(tmp_path / "outlast-job", job="j", attempt=1, rank=0)
    for step in range(1, 4):
        ledger.append("tier_copied", tier="slow", step=step, seconds=60.0, bytes=10**9)
    ledger.close()
    now_s = time.monotonic()
    one.taken(1, now_s, 1e-3)
    one.tier_turns.settle(10.0)
    one.taken(2, now_s + 30.0, 1e-3)
    (change,) = [change for change in changes if change.tier]
    assert change.tier == "slow"
    assert change.cost_s == pytest.approx(0.05 * 60.0)
    assert change.interval_s == pytest.approx((2 * 3.0 * 20 * 3600) ** 0.5, rel=0.01)
    assert one.tier_turns.due(1, now_s + 60.0, all_of_them=False) == ["memory"]
    assert one.tier_turns.due(1, now_s + 60.0, all_of_them=True) is None
    assert one.tier_turns.due(1, now_s + 1000.0, all_of_them=False) is None


@pytest.mark.parametrize("order", ["before it is taken", "after", "behind another"])
def test_a_commit_that_fails_is_repeated_by_the_next(changes, monkeypatch, order):
    monkeypatch.setenv("OUTLAST_STORE", "h:1")
    one = turns(changes)
    tiers = one.tier_turns
    tiers._cadence.measured("local", Cost(copy_s=100.0))
    tiers.due(0, 0.0, all_of_them=False, stays=True)
    one.taken(1, 0.0, 0.01, ["local"])
    assert tiers.due(1, 30.0, all_of_them=False, stays=True) == []
    if order == "before it is taken":
        one.written(2, 0.0, error="no space")
    one.taken(2, 30.0, 0.01, ["local"])
    if order == "behind another":
        one.taken(3, 60.0, 0.01, [])
    if order != "before it is taken":
        one.written(2, 0.0, error="no space")
    assert tiers.due(2, 60.0, all_of_them=False, stays=True) is None


def test_what_a_save_takes_from_the_steps_counts(changes):
    """Writing makes them longer, besides what the loop is blocked for."""
    light, heavy = turns(changes), turns(changes)
    heavy.written(1, 8.0)
    heavy.written(1, 0.0)  # one that failed says nothing
    for one in (light, heavy):
        one.taken(1, 0.0, 0.5)
    without, with_it = changes
    assert (without.cost_s, with_it.cost_s) == (0.5, cost_of(0.5, 8.0))
    light.written(1, 8.0)
    light.taken(2, 10.0, 0.5)
    assert changes[-1].cost_s == cost_of(0.5, 8.0)  # the first one is not in the mean
    assert with_it.interval_s > 2 * without.interval_s
