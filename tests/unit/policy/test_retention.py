"""Whatever is on the disk, the newest valid checkpoints are never among what may go."""

import hypothesis.strategies as st
from hypothesis import example, given

from outlast.policy.retention import removable
from thorough import examples

steps = st.sets(st.integers(0, 30), max_size=15)


@given(
    committed=steps,
    unfinished=steps,
    invalid=steps,
    weights_only=steps,
    superseded=steps,
    in_use=steps,
    keep=st.integers(-1, 6),
)
@example(
    committed={1, 2},
    unfinished=set(),
    invalid={1, 2},
    weights_only=set(),
    superseded=set(),
    in_use=set(),
    keep=1,
)
@example(
    committed={5},
    unfinished=set(),
    invalid={3},
    weights_only=set(),
    superseded=set(),
    in_use=set(),
    keep=1,
)
@examples(300)
def test_what_may_go(committed, unfinished, invalid, weights_only, superseded, in_use, keep):
    unfinished = unfinished - committed
    gone = removable(
        committed,
        unfinished,
        keep=keep,
        invalid=invalid,
        weights_only=weights_only,
        superseded=superseded,
        in_use=in_use,
    )
    assert list(gone) == sorted(set(gone))
    assert set(gone) <= committed | unfinished, "what is not there cannot be removed"
    assert set(gone).isdisjoint(in_use)
    keep = max(keep, 1)
    old = (committed - invalid) & superseded
    weights = sorted(((committed - invalid) & weights_only) - old)
    full = sorted(committed - invalid - weights_only - old)
    assert set(gone).isdisjoint(full[-keep:])
    if not full:
        assert set(gone) == (set(weights[:-keep]) | old) - in_use
        return
    older = {step for step in committed & invalid if step < full[-1]} | unfinished | old
    older |= {step for step in weights if step < full[-keep:][0]}
    assert set(gone) == (set(full[:-keep]) | older) - in_use


@given(
    committed=steps,
    invalid=steps,
    weights_only=steps,
    in_use=steps,
    healthy=steps,
    keep=st.integers(1, 4),
)
@examples(300)
def test_one_to_roll_back_to_stays(committed, invalid, weights_only, in_use, healthy, keep):
    known = {"keep": keep, "invalid": invalid, "weights_only": weights_only, "in_use": in_use}
    gone = set(removable(committed, [], **known, healthy=healthy))
    full = sorted(committed - invalid - weights_only)
    if full:
        stays = max(set(full) & healthy, default=full[0])
        assert stays not in gone
        candidates = [step for step in full if step > stays][:1] if stays in healthy else []
        assert gone == set(removable(committed, [], **known)) - {stays, *candidates}


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60), st.integers(1, 3))
def test_however_the_loss_goes_there_is_one_from_before_the_sign(story, keep):
    """Commits follow each other; each turns out healthy a little later, or never."""
    committed, healthy, first_bad = set(), set(), None
    for step, (is_bad, is_noticed) in enumerate(story, 1):
        committed.add(step)
        first_bad = first_bad or (step if is_bad else None)
        if first_bad is None and step > 1:
            healthy.add(step - 1)
        if first_bad is not None and is_noticed and min(committed) < first_bad:
            assert max(s for s in committed if s < first_bad) <= first_bad - 1
        committed -= set(removable(committed, [], keep=keep, invalid=(), healthy=healthy))
        if first_bad != 1:
            assert min(committed) < (first_bad or step + 1)


def test_weights_do_not_push_out_what_can_be_resumed_from():
    gone = removable([100, 200, 300, 400], [], keep=2, invalid=[], weights_only=[200, 300, 400])
    assert list(gone) == []
    gone = removable([50, 100, 150, 200, 250], [], keep=1, invalid=[], weights_only=[50, 150, 250])
    assert list(gone) == [50, 100, 150]


def test_rotten_ones_do_not_push_out_the_last_that_can_be_read():
    assert list(removable([100, 200, 300, 400], [], keep=3, invalid={200, 300, 400})) == []
    assert list(removable([100, 200, 300, 400, 500], [], keep=2, invalid={200, 300, 400})) == [
        200,
        300,
        400,
    ]


def test_unfinished_ones_go_only_where_there_is_one_to_resume_from():
    assert list(removable([100, 200], [150, 250], keep=1, invalid=set())) == [100, 150, 250]
    assert list(removable([100], [150], keep=1, invalid={100})) == []
