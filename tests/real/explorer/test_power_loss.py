"""The power fails at any moment of what we do to storage: nothing that was promised is lost.

Each operation is recorded once, under strace, call by call; the trees that a power loss may leave
are built from the recording and looked at (see ``power_loss`` for the model, ``promises`` for what
must hold). At every moment both extremes are looked at, and drawn subsets beside them:
``OUTLAST_TEST_SEED`` draws others, ``OUTLAST_TEST_ALL=1`` many more.
"""

import itertools
import shutil

import pytest
from explorer import explore_all
from operations import EVERYTHING, Site

import thorough

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")

DRAWN = 60 if thorough.ALL else 3


@pytest.fixture(name="site")
def _site(floor, tmp_path):
    return Site(floor, tmp_path / "site")


def test_a_power_loss_at_any_moment(site, rng):
    recordings = itertools.chain.from_iterable(make(site) for make in EVERYTHING)
    found = explore_all(recordings, rng, DRAWN)
    print(*found, sep="\n")
    names = "first launcher, next launcher, saves and copies, repair, mend, prune"
    assert [one.name for one in found] == names.split(", ")
    assert all(one.news for one in found)  # each operation changes something
    assert sum(one.states for one in found) > 2000
    end = found[-1].known
    assert (len(end.saves), end.attempt, end.hurt) == (12, 5, frozenset())
