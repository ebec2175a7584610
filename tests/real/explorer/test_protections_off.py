"""Each protection is switched off in turn, and the explorer says what it was for.

An explorer that sees nothing would pass all of its other tests. The protection is switched off in
the processes that are recorded (see ``protections``), and the checksum, which protects who reads,
where the trees are looked at. What is expected to be said is in the table below. A protection
whose absence nothing notices does not belong in the code.
"""

import random
import shutil

import pytest
from explorer import explore_all
from operations import NotDone, Site, membership, membership_killed, repair, saves
from promises import Broken, Known
from protections import TABLE, off

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")

BETWEEN = 2  # the directory is made, and its name is not durable: see ``points``


def killed(site):
    """The first launcher is killed where it has made the job's directory, and no more."""
    return membership_killed(site, BETWEEN)


# Protection → the operation in which it is missed, and what the explorer then says.
MISSED = {
    "directory fsync": (membership, r"the job was \w+, and is \w+ now"),
    "directories of others": (killed, r"the job was \w+, and is \w+ now"),
    "ledger's name": (membership, "the ledger is gone, with 1 lines"),
    "file fsync": (membership, r"the job was \w+, and is \w+ now"),
    "manifest last": (saves, "is listed in local, and is not whole"),
    "manifest goes first": (saves, "is listed in local, and is not whole"),
    "checksum": (repair, "has other bytes than were saved"),
    "retention guard": (saves, "is gone; there are"),
    "note": (saves, "retention has left"),
    "own names": (saves, "step 4 cannot be saved"),
}


@pytest.mark.parametrize("protection", MISSED)
def test_what_is_switched_off_is_missed(floor, tmp_path, protection):
    operation, words = MISSED[protection]
    site = Site(floor, tmp_path / "site", without=protection)
    if operation in (saves, repair):
        assert site.member(3).wait(60) == 0
    if operation is repair:
        assert len(list(saves(site, steps=2))) == 1
    known = Known().after(site.lines())
    looks_without = protection if protection == "checksum" else ""
    with off(looks_without), pytest.raises((Broken, NotDone), match=words) as caught:
        explore_all(operation(site), random.Random(0), 3, known)
    print(f"without {protection}: {caught.value}")


def test_the_table_is_whole():
    assert MISSED.keys() | {"claim"} == TABLE.keys()
