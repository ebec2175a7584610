"""What is done with the seconds that are left; no clock, no storage."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.policy.drain import (
    AGREEMENT_S,
    HTTP_S,
    LEAVING_S,
    DrainTier,
    bandwidth_needed,
    check,
    hopeless,
    leaving_s,
    on_early,
    plan,
    stay_s,
)


def tier(name, slow_s=None, fast_s=None, *, outlasts=False, size=10**9):
    fast_s = slow_s if fast_s is None else fast_s
    return DrainTier(name=name, outlasts=outlasts, slow_s=slow_s, fast_s=fast_s, size=size)


LOCAL = tier("local", 2.0, 1.0)
SHARED = tier("shared", 8.0, 4.0, outlasts=True)
BUCKET = tier("bucket", 60.0, 30.0, outlasts=True)


@pytest.mark.parametrize(
    ("left_s", "choice", "tiers"),
    [
        (120, "flush", ("local", "shared", "bucket")),
        (30, "flush", ("local", "shared")),  # the bucket would not make it
        (11.5, "flush", ("shared",)),  # no time to go there by way of the local disk
        (9, "flush", ("local",)),  # nothing that outlasts the machine is in reach
        (2.9, "try", ("local",)),
        (1.2, "keep", ()),
        (0, "keep", ()),
    ],
)
def test_the_choice(left_s, choice, tiers):
    found = plan(left_s, [LOCAL, SHARED, BUCKET])
    assert (found.choice, found.tiers) == (choice, tiers)
    assert (found.left_s, found.words != "") == (left_s, True)


def test_what_it_says():
    found = plan(3.0, [tier("local", 6.2)])
    assert found.words == "it needs 6.4 s and 3.0 s are left"
    assert plan(3.0, [tier("local")]).words == ""


def test_the_step_s_end_counts():
    assert plan(10, [LOCAL], step_slow_s=5.0, step_fast_s=1.0).choice == "flush"
    assert plan(10, [LOCAL], step_slow_s=7.0, step_fast_s=1.0).choice == "try"
    assert plan(10, [LOCAL], step_slow_s=7.0, step_fast_s=7.5).choice == "keep"


def test_nobody_said_when():
    found = plan(None, [LOCAL, SHARED], step_slow_s=1.0)
    assert (found.choice, found.tiers, found.words) == ("flush", None, "")
    assert found.needs_s == pytest.approx(1.0 + AGREEMENT_S + 2.0)


def test_what_was_never_measured_is_tried():
    assert plan(30, [tier("new")]).choice == "try"
    assert plan(0, [tier("new")]).choice == "try"  # nothing is lost by it
    assert plan(30, [LOCAL, tier("new", outlasts=True)]).tiers == ("local",)


def test_without_any_tier_there_is_nothing_to_flush_to():
    assert plan(30, []).choice == "keep"


SECONDS = st.floats(0, 1000)
LANES = st.lists(st.tuples(SECONDS, st.floats(0, 1), st.booleans()), min_size=1, max_size=5).map(
    lambda found: [
        tier(f"t{number}", slow, slow * share, outlasts=outlasts)
        for number, (slow, share, outlasts) in enumerate(found)
    ]
)


@given(SECONDS, LANES, SECONDS, st.floats(0, 1))
def test_what_is_promised_fits(left_s, tiers, step_s, share):
    found = plan(left_s, tiers, step_slow_s=step_s, step_fast_s=step_s * share)
    names = [one.name for one in tiers]
    by_name = {one.name: one for one in tiers}
    assert list(found.tiers) == sorted(found.tiers, key=names.index)
    assert (found.choice == "keep") == (not found.tiers)
    if found.choice == "keep":
        assert all(left_s < step_s * share + one.fast_s + leaving_s(left_s) for one in tiers)
    if found.choice == "flush":
        first = by_name[found.tiers[0]].slow_s
        for name in found.tiers:
            copy_s = 0 if name == found.tiers[0] else by_name[name].slow_s
            needs_s = step_s + AGREEMENT_S + first + copy_s + leaving_s(left_s)
            assert needs_s <= left_s + 1e-6


@given(SECONDS, SECONDS, LANES)
def test_more_time_is_never_worse(left_s, more_s, tiers):
    order = {"keep": 0, "try": 1, "flush": 2}
    before, after = plan(left_s, tiers), plan(left_s + more_s, tiers)
    assert order[after.choice] >= order[before.choice]
    if before.choice == after.choice:
        outlasts = {one.name: one.outlasts for one in tiers}
        assert any(map(outlasts.get, after.tiers)) >= any(map(outlasts.get, before.tiers))


def test_tiers_that_cannot_make_it_make_way():
    assert hopeless(10, []) == []
    assert hopeless(10, [100.0]) == [False]  # nobody gains by its end
    assert hopeless(10, [5.0, 100.0]) == [False, True]
    assert hopeless(10, [5.0, 15.0]) == [False, False]  # alone it might
    assert hopeless(10, [200.0, 100.0]) == [True, False]
    assert hopeless(10, [math.inf, math.inf]) == [False, False]


def test_the_flush_that_the_facts_give():
    assert bandwidth_needed(640 * 10**9, 426.67) / 1e9 == pytest.approx(1.5, abs=1e-4)
    assert bandwidth_needed(640 * 10**9, 42.67) / 1e9 == pytest.approx(15, abs=1e-2)
    assert bandwidth_needed(640 * 10**9, 180) / 1e9 == pytest.approx(3.56, abs=0.005)
    needed = bandwidth_needed(640 * 10**9, 180, poll_s=5, http_s=2, step_s=10, margin_s=10)
    assert needed / 1e9 == pytest.approx(4.18, abs=0.005)
    assert bandwidth_needed(1, 10, step_s=10) == math.inf


# --- at the start --------------------------------------------------------------------------------


def checked(notice_s, tiers, step_s=0.5, *, leaves=True):
    return check(notice_s, tiers, heard_s=1.0 + HTTP_S, step_s=step_s, leaves=leaves)


def test_a_notice_that_is_long_enough():
    found = checked(120, [tier("shared", 33.3, outlasts=True)])
    assert found.fits
    assert found.words == "grace 120 s, save needs 38 s ✔"
    assert found.needs_s == pytest.approx(1.0 + HTTP_S + AGREEMENT_S + 0.5 + 33.3 + LEAVING_S)


def test_one_that_is_not_says_what_to_change():
    found = checked(30, [tier("local", 40.0, size=60 * 10**9)])
    assert not found.fits
    assert found.words == (
        "grace 30 s, save needs 45 s ✘ (40 s of it to write to local). It would fit at 2.37 GB/s: "
        "put a faster [[tier]] first, save less (checkpoint.moments), or use more machines"
    )


def test_a_step_that_is_longer_than_the_notice():
    found = checked(30, [tier("local", 4.0)], step_s=60.0)
    assert "To hear of it, end a step and leave takes 64 s alone" in found.words


def test_a_disk_that_goes_with_the_machine_is_said():
    assert "Add a [[tier]] that stays" in checked(120, [LOCAL]).words
    assert checked(120, [LOCAL], leaves=False).words == "grace 120 s, save needs 6.7 s ✔"
    assert "Add" not in checked(120, [LOCAL, SHARED]).words


def test_nothing_measured_nothing_said():
    assert checked(120, [tier("local")]) is None
    assert checked(120, []) is None


@pytest.mark.parametrize(
    ("setting", "has_deadline", "answer"),
    [
        ("auto", True, "leave"),
        ("auto", False, "save"),
        ("leave", False, "leave"),
        ("save", True, "save"),
        ("ignore", True, "ignore"),
    ],
)
def test_early_notices(setting, has_deadline, answer):
    assert on_early(setting, has_deadline=has_deadline) == answer


@pytest.mark.parametrize(
    ("idle", "left_s", "stays_s"),
    [
        (0, None, 0),
        (1, None, 0),
        (2, None, 5),
        (3, None, 10),
        (8, None, 300),
        (10**6, None, 300),
        (8, 100, 98),  # and not until it is killed
        (8, 0, 0),
    ],
)
def test_a_notice_that_comes_back_is_stayed_with_for_longer_each_time(idle, left_s, stays_s):
    assert stay_s(idle, longest_s=300.0, left_s=left_s) == stays_s
