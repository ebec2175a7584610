"""The models' disk keeps what every storage promises."""

import errno

import pytest
from ram_disk import Crash, RamDisk
from storage_contract import StorageContract


class TestRamDisk(StorageContract):
    @pytest.fixture(name="storage")
    def _storage(self):
        return RamDisk()


def test_its_user_can_die_before_each_durable_change():
    disk = RamDisk()
    for name in "abc":
        disk.put(f"tree/{name}", b"1")
    disk.fuse = 1
    with pytest.raises(Crash):
        disk.remove_tree("tree", ("a",))
    assert sorted(disk.files) == ["tree/a", "tree/c"]
    with pytest.raises(Crash):
        disk.put("more", b"1")
    assert disk.read("tree/a") == b"1"


def test_a_full_one_is_read_and_tidied():
    disk = RamDisk()
    disk.put("a", b"1")
    disk.fails = errno.ENOSPC
    for act in (lambda: disk.put("b", b"2"), lambda: disk.create("b")):
        with pytest.raises(OSError, match="No space"):
            act()
    assert disk.read("a") == b"1"
    disk.remove("a")
    disk.fails = errno.EIO
    with pytest.raises(OSError, match="error"):
        disk.children()
