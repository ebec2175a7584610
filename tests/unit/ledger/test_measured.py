"""What a ledger shows of storage and steps."""

import pytest

from outlast.ledger.events import Event
from outlast.ledger.measured import NEWEST_SAVES, Measured, TierTime, tier_times
from outlast.notice.desk import standing
from outlast.tiers import Tier


def event(name, attempt=1, **fields):
    return Event(
        t=0.0, mono=0.0, job="j", attempt=attempt, node="n", rank=0, event=name, fields=fields
    )


def commit(step, durable_s, tier="local", **fields):
    return event("commit", step=step, durable_s=durable_s, tier=tier, **{"bytes": 100} | fields)


def test_nothing_is_known_at_first():
    measured = Measured()
    assert (measured.step, measured.save("local"), measured.newest) == (None, None, {})


def test_saves_by_tier():
    measured = Measured([commit(3, 0.5), commit(6, 0.7)])
    measured.take(event("tier_copied", step=3, tier="s3", seconds=9.0, bytes=90))
    assert measured.save("local") == (0.7, 0.5)
    assert measured.save("s3") == (9.0, 9.0)
    assert measured.newest == {"local": 6, "s3": 3}
    assert measured.sizes == {"local": 100, "s3": 90}


def test_what_no_tier_has_got_is_known_until_the_next_resume():
    measured = Measured([commit(3, 0.5), event("save_skipped", step=9, reason="of all tiers")])
    assert measured.missed is None
    for step, why in ((7, "tier local did not get it"), (6, "tier s3 did not get it")):
        measured.take(event("save_skipped", step=step, tier="local", reason=why))
    assert measured.missed == (7, "tier local did not get it")
    words = standing((Tier(name="local", url="/x", keep=1),), measured)
    assert words == (
        "step 7 was in memory alone, and is lost: tier local did not get it; step 3 stands"
    )
    measured.take(event("resumed", attempt=2, step=3))
    assert measured.missed is None


def test_slow_is_the_ninth_decile_of_the_newest():
    measured = Measured(commit(n, 1.0) for n in range(1, 50))
    measured.take(commit(50, 30.0))
    assert measured.save("local") == (1.0, 1.0)  # one in twenty
    for n in range(3):
        measured.take(commit(51 + n, 30.0))
    assert measured.save("local") == (30.0, 1.0)
    for n in range(NEWEST_SAVES):
        measured.take(commit(60 + n, 2.0))
    assert measured.save("local") == (2.0, 2.0)


@pytest.mark.parametrize(
    "odd",
    [
        commit(9, 1.0, kind="weights"),
        commit(9, 1.0, tier=""),
        commit(9, 1.0, tier=None),
        commit(None, 1.0),
        event("tier_copied"),
        event("step"),
        event("step", step="x", seconds=1),
        event("notice", step=9, tier="local"),
    ],
)
def test_what_says_nothing_teaches_nothing(odd):
    measured = Measured([commit(3, 0.5), odd])
    assert measured.newest == {"local": 3}
    assert measured.save("local") == (0.5, 0.5)
    assert measured.step is None


def test_steps_without_what_saves_held_up():
    measured = Measured()
    measured.take(event("resumed", step=10))
    measured.take(event("step", step=12, seconds=1.0, stalled_s=0.2))
    assert measured.step == (0.4, 0.4)
    measured.take(event("step", step=22, seconds=8.0, stalled_s=0.0))
    assert measured.step == (0.8, 0.4)


def test_steps_of_two_attempts_are_not_mixed():
    measured = Measured([event("resumed", step=0), event("step", step=10, seconds=1.0)])
    measured.take(event("step", attempt=2, step=9, seconds=50.0))
    measured.take(event("step", attempt=2, step=10, seconds=0.1))
    assert measured.step == (0.1, 0.1)


def copied(step, seconds, tier="s3", **fields):
    return event("tier_copied", step=step, seconds=seconds, tier=tier, **{"bytes": 90} | fields)


def snapshot(step, blocked_s, tiers=None):
    return event("snapshot", step=step, blocked_s=blocked_s, tiers=tiers)


def test_what_each_tier_took():
    skipped = event("save_skipped", step=9, tier="s3", reason="slow")
    events = [commit(3, 0.5), copied(3, 9.0), commit(6, 0.75), skipped, commit(9, 0.25)]
    assert tier_times([]) == {}
    assert tier_times(events) == {
        "local": TierTime(num=3, bytes=300, seconds=1.5, slowest_s=0.75, newest_step=9),
        "s3": TierTime(num=1, bytes=90, seconds=9.0, slowest_s=9.0, newest_step=3, num_skipped=1),
    }


def blocked(events):
    return {tier: one.blocked_s for tier, one in tier_times(events).items()}


def test_a_snapshot_blocks_for_the_tiers_that_it_was_for():
    events = [commit(3, 0.5), copied(3, 9.0)]
    assert blocked([snapshot(3, 0.5, ["local"]), *events]) == {"local": 0.5, "s3": 0.0}
    assert blocked([snapshot(3, 0.5, ["s3", "local"]), *events]) == {"local": 0.25, "s3": 0.25}
    assert blocked([snapshot(3, 0.5, ["s3", "s3", 7]), *events]) == {"local": 0.0, "s3": 0.5}


def test_one_that_was_for_all_tiers_blocks_for_those_that_its_step_came_to():
    events = [snapshot(3, 0.5), commit(3, 0.5), snapshot(6, 1.0), commit(6, 0.5), copied(3, 9.0)]
    assert blocked(events) == {"local": 1.25, "s3": 0.25}
    assert blocked(reversed(events)) == {"local": 1.25, "s3": 0.25}
    assert blocked([*events, snapshot(9, 8.0)]) == {"local": 1.25, "s3": 0.25}  # came nowhere
    assert blocked([*events, snapshot(6, 2.0)]) == {"local": 3.25, "s3": 0.25}  # saved again


@pytest.mark.parametrize(
    "odd",
    [
        commit(9, -1.0),
        commit(9, "x"),
        commit(9, 1.0, tier=""),
        commit(9, 1.0, tier=None),
        snapshot(3, -1.0),
        snapshot(3, None),
        snapshot(None, 1.0, []),
        event("save_skipped", step=9, tier=None),
    ],
)
def test_of_what_is_damaged_no_tier_took_anything(odd):
    events = [snapshot(3, 0.5), commit(3, 0.5)]
    assert tier_times([*events, odd]) == tier_times(events)
