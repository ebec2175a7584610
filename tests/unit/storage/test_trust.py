"""Storages that cannot say who comes first are found; what is mounted is looked at."""

import pytest

from outlast.durable import Mount, mount_of
from outlast.peer.claims import Claim, Claims
from outlast.storage import Directory
from outlast.storage import trust as room
from outlast.storage.trust import distrust, doubt_of_mount, is_local, kept_for_s


class Ignoring(Directory):
    """A server that takes no notice of conditions, as npm's s3rver."""

    def put_new(self, name, data, **_):
        self.put(name, data)
        return True


class Refusing(Directory):
    """One that refuses each conditional put."""

    def put_new(self, name, data, **_):
        return False

    def read(self, name):
        return b"first"


class Late(Directory):
    """A listing that is kept: what was created since is not in it."""

    def __init__(self, root):
        super().__init__(root)
        self.kept = {}

    def children(self, name=""):
        return self.kept.setdefault(name, super().children(name))


class Stale(Directory):
    """What is read is what was there before."""

    def read(self, name):
        return b"" if "probe-" in name else super().read(name)


KINDS = [
    (Ignoring, "of two creates of one new name both were taken"),
    (Refusing, "of two creates of one new name none was taken"),
    (Late, "what was created is not listed at once"),
    (Stale, "what was created is not what is read back"),
]


@pytest.mark.parametrize(("kind", "words"), KINDS)
def test_what_cannot_be_relied_on_is_named(tmp_path, kind, words):
    storage = kind(tmp_path)
    storage.children("membership")
    found = str(distrust(storage, "membership"))
    assert found.startswith(words)
    assert "see to it that nobody else starts this job meanwhile" in found
    assert Directory(tmp_path).children("membership") == []


def claim_of(number):
    return Claim(attempt=number, node="n", host="h", address="", term="r")


@pytest.mark.parametrize(("kind", "words"), KINDS[:1] + KINDS[2:])
def test_it_is_said_before_the_first_claim_and_probed_once_for_each_place(tmp_path, kind, words):
    said = []
    storage = kind(tmp_path)
    storage.children("membership")
    puts, put_new = [], storage.put_new

    def watched(name, data):
        puts.append((name, len(said)))
        return put_new(name, data)

    storage.put_new = watched
    for turn in range(2):
        claims = Claims(storage, on_doubt=said.append)
        for number in (1, 2):
            claims.take(claim_of(2 * turn + number), number - 1)
        assert len(said) == turn + 1  # each start hears of it
    assert said[0].startswith(f"claims of attempts in {tmp_path} cannot be trusted: {words}")
    assert "\n" not in said[0]
    assert sum("probe-" in name for name, _ in puts) == 2
    assert all(heard for name, heard in puts if "attempt" in name)
    moved = kind(tmp_path.rename(tmp_path.with_name(f"{tmp_path.name}-moved")))
    moved.children("membership")
    Claims(moved, on_doubt=said.append).take(claim_of(9), 8)
    assert len(said) == 3
    assert "-moved cannot be trusted" in said[-1]


def test_nothing_is_said_of_a_directory_that_can_be_trusted(tmp_path, monkeypatch):
    said = []
    assert Claims(Directory(tmp_path), on_doubt=said.append).take(claim_of(1), 0)
    monkeypatch.setattr("outlast.peer.claims.distrust", lambda *_: 1 / 0)  # it is not asked again
    assert Claims(Directory(tmp_path), on_doubt=said.append).take(claim_of(2), 1)
    assert said == []


def test_a_storage_that_fails_is_none_that_lies(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(5, "Input/output error")

    said = []
    monkeypatch.setattr("outlast.peer.claims.distrust", fails)
    assert Claims(Directory(tmp_path), on_doubt=said.append).take(claim_of(1), 0)
    assert said == []


@pytest.mark.parametrize(
    ("kind", "options", "seconds"),
    [
        ("ext4", "rw", 0),
        ("nfs4", "rw,vers=4.2,hard", 60),
        ("nfs", "rw,vers=3,acdirmin=1,acdirmax=2", 2),
        ("nfs", "rw,vers=3,noac", 0),
        ("cifs", "rw,actimeo=1", 1),
        ("cifs", "rw", 30),
        ("lustre", "rw,flock", 0),
    ],
)
def test_how_long_a_client_goes_by_what_it_knows(kind, options, seconds):
    assert kept_for_s(Mount(kind, tuple(options.split(",")))) == seconds


@pytest.mark.parametrize(
    ("mount", "words"),
    [
        (Mount("nfs4", ("rw",)), "directory listings for up to 60 s (nfs4)"),
        (Mount("fuse.s3fs", ("rw",)), "it is mounted as fuse.s3fs, where two may create one name"),
        (Mount("nfs", ("rw", "acdirmax=3")), ""),
        (Mount("xfs", ()), ""),
    ],
)
def test_what_is_mounted_is_looked_at(tmp_path, monkeypatch, mount, words):
    monkeypatch.setattr(room, "mount_of", lambda _: mount)
    found = doubt_of_mount(Directory(tmp_path))
    assert words in str(found)
    assert bool(found) == bool(words)
    said = []
    assert Claims(Directory(tmp_path), on_doubt=said.append).take(claim_of(1), 0)
    assert len(said) == bool(words)


MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro
30 22 0:40 / /mnt/shared rw,relatime - nfs4 server:/export rw,vers=4.2,acdirmax=1
31 22 0:41 / /mnt/vm rw - virtiofs share rw
"""


def test_options_are_of_the_mount_and_of_the_file_system():
    assert mount_of("/mnt/shared/job", MOUNTS) == Mount(
        "nfs4", ("rw", "relatime", "rw", "vers=4.2", "acdirmax=1")
    )
    assert mount_of("/x", "") == Mount("", ())


@pytest.mark.parametrize(
    ("directory", "expected"), [("/job", True), ("/mnt/shared/job", False), ("/mnt/vm/job", False)]
)
def test_only_what_is_known_to_be_of_one_kernel_counts_as_local(directory, expected):
    assert is_local(directory, MOUNTS) is expected
