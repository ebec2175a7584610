"""The power fails at any moment of what we do to storage: nothing that was promised is lost.

Each operation is recorded once, under strace, call by call; the trees that a power loss may leave
are built from the recording and looked at (see ``power_loss`` for the model, ``promises`` for what
must hold). At every moment both extremes are looked at, and drawn subsets beside them:
``OUTLAST_TEST_SEED`` draws others, ``OUTLAST_TEST_ALL=1`` many more.

Then two faults: a process is killed before one of its calls, and another one goes on; what the
first had not made durable is still not, and the power fails after that.
"""

import itertools
import shutil
import subprocess
import sys

import pytest
from explorer import explore_all
from operations import EVERYTHING, Site, membership_killed, saves_killed
from promises import Known
from recording import Unknown, look, read, under_strace

import thorough

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")

DRAWN = 60 if thorough.ALL else 3
LAUNCHERS_KILLED, KEEPERS_KILLED = (60, 40) if thorough.ALL else (4, 1)
CALLS_OF_A_LAUNCHER, CALLS_OF_A_KEEPER = 70, 200  # of those that follow each other closely


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


def test_a_launcher_killed_and_then_a_power_loss(floor, tmp_path, rng):
    for number in rng.sample(range(1, CALLS_OF_A_LAUNCHER), LAUNCHERS_KILLED):
        site = Site(floor, tmp_path / f"site-{number}")
        print(*explore_all(membership_killed(site, number), rng, DRAWN))


def test_a_keeper_killed_and_then_a_power_loss(floor, tmp_path, rng):
    for number in rng.sample(range(1, CALLS_OF_A_KEEPER), KEEPERS_KILLED):
        site = Site(floor, tmp_path / f"site-{number}")
        assert site.member(3).wait(60) == 0
        known = Known().after(site.lines())
        print(*explore_all(saves_killed(site, number), rng, DRAWN, known))


# What changes storage in a way that nobody has thought about must not be passed over.
UNKNOWN = {
    "symlink": "os.symlink('a', root + '/b')",
    "a mapping": "f = open(root + '/a', 'r+b'); mmap.mmap(f.fileno(), 4)",
    "a renamed directory": "os.mkdir(root + '/d'); os.rename(root + '/d', root + '/e')",
    "fallocate": "os.posix_fallocate(os.open(root + '/a', os.O_RDWR), 0, 9)",
    "from elsewhere": "os.rename(root + '/a', root + '.a')",
    "sendfile": "os.sendfile(os.open(root + '/b', 66), os.open(root + '/a', 0), 0, 4)",
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_a_call_that_is_not_known_fails(tmp_path, what):
    root, log = tmp_path / "root", tmp_path / "log"
    root.mkdir()
    (root / "a").write_bytes(b"1234")
    before = look(root)
    script = f"import mmap, os; root = {str(root)!r}; {UNKNOWN[what]}"
    subprocess.run(under_strace(log, sys.executable, "-c", script), check=True)
    with pytest.raises(Unknown):
        read(log, root, before, tmp_path / "heard")
