"""Whatever is on the disk, the newest valid checkpoints are never among what may go."""

import hypothesis.strategies as st
from hypothesis import example, given, settings

from outlast.policy.retention import removable

steps = st.sets(st.integers(0, 30), max_size=15)


@given(committed=steps, unfinished=steps, invalid=steps, keep=st.integers(-1, 6))
@example(committed={1, 2}, unfinished=set(), invalid={1, 2}, keep=1)
@example(committed={5}, unfinished=set(), invalid={3}, keep=1)
@settings(max_examples=500, deadline=None)
def test_what_may_go(committed, unfinished, invalid, keep):
    unfinished = unfinished - committed
    gone = removable(committed, unfinished, keep=keep, invalid=invalid)
    assert list(gone) == sorted(set(gone))
    assert set(gone) <= committed | unfinished, "what is not there cannot be removed"
    valid = sorted(committed - invalid)
    kept = valid[-max(keep, 1) :]
    assert set(gone).isdisjoint(kept)
    if not valid:
        assert list(gone) == []
        return
    older = {step for step in (committed & invalid) | unfinished if step < valid[-1]}
    assert set(gone) == (set(valid) - set(kept)) | older


def test_rotten_ones_do_not_push_out_the_last_that_can_be_read():
    assert list(removable([100, 200, 300, 400], [], keep=3, invalid={200, 300, 400})) == []
    assert list(removable([100, 200, 300, 400, 500], [], keep=2, invalid={200, 300, 400})) == [
        200,
        300,
        400,
    ]


def test_one_in_the_making_stays():
    assert list(removable([100, 200], [150, 250], keep=1, invalid=set())) == [100, 150]
