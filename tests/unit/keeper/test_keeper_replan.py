"""While the end waits for slower tiers: who is given up, and by what pace."""

import time
from types import SimpleNamespace

import pytest
from unit_names import save_of

from outlast.keeper import copies as room
from outlast.keeper.copies import DurableTier, TierCopies
from outlast.storage import Directory


@pytest.fixture(name="copies")
def _copies(tmp_path):
    recorded = []
    tiers = [DurableTier(name, Directory(tmp_path / name), 3) for name in ("local", "near", "far")]
    copies = TierCopies("job", tiers, lambda event, **fields: recorded.append((event, fields)))
    copies.recorded = recorded
    yield copies
    copies.stop()


def manifest_of(step):
    return SimpleNamespace(step=step, attempt=1, save=save_of(step))


def busy(copies, name, *, since_s, done, total=100, step=7):
    """As if the tier's thread were in the middle of a copy."""
    copier = copies._copiers[name]
    copier._current = SimpleNamespace(manifest=manifest_of(step), tier="local", ranks=(0,))
    copier._since_s = time.monotonic() - since_s
    copier.done_bytes, copier.total_bytes = done, total
    return copier


def test_the_pace_is_that_of_the_try_in_progress(copies):
    assert busy(copies, "near", since_s=10, done=20).rest_s() == pytest.approx(40, rel=0.05)
    assert busy(copies, "near", since_s=10, done=0).rest_s() == pytest.approx(10, rel=0.05)
    assert busy(copies, "near", since_s=1, done=1).rest_s() is None  # too early to say
    assert copies._copiers["far"].rest_s() is None  # nothing is due, or it only prunes


@pytest.mark.parametrize(
    ("left_s", "near", "far", "given_up"),
    [
        (10, (4, 50), (4, 1), ["far"]),  # 4 s and 400 s
        (500, (4, 50), (4, 1), []),
        (10, (4, 50), (1, 0), []),  # it has only begun
        (100, (4, 50), (4, 0), []),  # a slow first block
        (1, (4, 50), (9, 0), ["far"]),
        (10, (4, 0), (1, 0), []),  # alone
    ],
)
def test_who_cannot_make_it_makes_way(copies, left_s, near, far, given_up):
    busy(copies, "near", since_s=near[0], done=near[1])
    busy(copies, "far", since_s=far[0], done=far[1])
    copies.replan(left_s)
    assert [name for name, one in copies._copiers.items() if one.is_given_up] == given_up
    assert [fields["tier"] for _, fields in copies.recorded] == given_up
    copies.replan(left_s)  # said once
    assert len(copies.recorded) == len(given_up)


def test_a_tier_that_was_given_up_takes_nothing_more_and_is_not_done(copies):
    busy(copies, "near", since_s=4, done=50)
    far = busy(copies, "far", since_s=4, done=1)
    copies.replan(10)
    far._current = None
    far.submit(SimpleNamespace(manifest=manifest_of(8), tier="local", ranks=()))
    assert far.idle
    assert not copies.is_complete
    assert room.PACE_AFTER_S == 2.0
