"""Files kept to be written over: what may become one, who may have one, and when they go."""

import errno
import mmap
import os

import pytest
from storage_contract import memory
from unit_fakes import listing, num_descriptors

from outlast.storage import Directory, directory
from outlast.storage.directory import ALIGN, Spares

BIG = 16 * ALIGN
SHARD = "rank-00000.safetensors"


@pytest.fixture
def storage(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "MIN_BYTES", BIG)
    return Directory(tmp_path / "root", 2)


def write(storage, name, size, seed=0):
    data = memory(size, seed)
    blob = storage.create(name, size)
    blob.write_at(data, 0)
    blob.finish()
    return data


def inode(storage, name):
    return (storage.root / name).stat().st_ino


def kept(storage):
    place = storage.root / ".spare"
    return listing(place) if place.exists() else []


def test_a_file_of_a_removed_tree_is_written_over(storage):
    write(storage, f"a/{SHARD}", BIG + 5000)
    was = inode(storage, f"a/{SHARD}")
    storage.remove_tree("a")
    assert len(kept(storage)) == 1
    assert storage.children() == []
    data = write(storage, f"b/{SHARD}", BIG + 100, seed=1)
    assert inode(storage, f"b/{SHARD}") == was
    assert storage.read(f"b/{SHARD}") == data
    assert kept(storage) == []
    assert listing(storage.root / "b") == [SHARD]


def test_no_more_are_kept_than_asked_for(storage):
    for num in range(3):
        write(storage, f"a/{num}.safetensors", BIG)
    storage.remove_tree("a")
    assert len(kept(storage)) == 2
    write(storage, f"b/{SHARD}", BIG)
    assert len(kept(storage)) == 1
    write(storage, "b/small", BIG - 1)
    assert len(kept(storage)) == 1


@pytest.mark.parametrize(("name", "size"), [("f.safetensors", BIG - 1), ("f.json", BIG)])
def test_only_big_tensor_files_are_kept(storage, name, size):
    write(storage, f"a/{name}", size)
    storage.remove_tree("a")
    assert kept(storage) == []


def test_without_spares_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "MIN_BYTES", BIG)
    storage = Directory(tmp_path)
    write(storage, f"a/{SHARD}", BIG)
    storage.remove_tree("a")
    assert listing(tmp_path) == []


def test_the_spare_nearest_in_size_is_taken(tmp_path, storage):
    storage = Directory(tmp_path / "root", 6)
    for num in range(1, 7):
        write(storage, f"a/{num}.safetensors", num * BIG)
    inodes = {num: inode(storage, f"a/{num}.safetensors") for num in range(1, 7)}
    storage.remove_tree("a")
    for size, nearest in [(4.1, 4), (3.9, 3), (4.9, 5), (9, 6), (2.1, 2), (8, 1)]:
        write(storage, f"b/{nearest}", int(size * BIG))
        assert inode(storage, f"b/{nearest}") == inodes[nearest]


def test_old_bytes_never_show(storage):
    """An upload that stops leaves no file, and a shorter one no tail."""
    write(storage, f"a/{SHARD}", 3 * BIG)
    storage.remove_tree("a")
    blob = storage.create(f"b/{SHARD}", 2 * BIG)
    blob.write_at(memory(BIG), 0)
    with pytest.raises(ValueError, match="bytes written"):
        blob.finish()
    blob.abandon()
    assert listing(storage.root / "b") == []


def test_a_file_with_a_second_name_is_left_alone(storage, tmp_path):
    """A backup made of hard links would change with it."""
    data = write(storage, f"a/{SHARD}", BIG)
    os.link(storage.root / "a" / SHARD, tmp_path / "backup")
    storage.remove_tree("a")
    assert kept(storage) == []
    write(storage, f"b/{SHARD}", BIG, seed=1)
    assert (tmp_path / "backup").read_bytes() == data


def test_a_spare_that_got_a_second_name_is_not_taken(storage, tmp_path):
    data = write(storage, f"a/{SHARD}", BIG)
    storage.remove_tree("a")
    os.link(storage.root / ".spare" / kept(storage)[0], tmp_path / "backup")
    write(storage, f"b/{SHARD}", BIG, seed=1)
    assert (tmp_path / "backup").read_bytes() == data


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_a_file_that_somebody_still_reads_does_not_change_under_their_eyes(storage, how):
    data = write(storage, f"a/{SHARD}", BIG)
    with (storage.root / "a" / SHARD).open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        if how == "mapped":
            file.close()
        storage.remove_tree("a")
        other = write(storage, f"b/{SHARD}", BIG, seed=1)
        assert storage.read(f"b/{SHARD}") == other
        assert mapping[:] == data
        mapping.close()


def test_links_and_directories_are_no_spares(storage, tmp_path):
    (tmp_path / "precious").write_bytes(bytes(BIG))
    (storage.root / ".spare").mkdir(parents=True)
    (storage.root / ".spare" / "link").symlink_to(tmp_path / "precious")
    (storage.root / ".spare" / "directory").mkdir()
    write(storage, f"b/{SHARD}", BIG, seed=1)
    assert (tmp_path / "precious").read_bytes() == bytes(BIG)


@pytest.mark.parametrize("call", ["rename", "open"])
def test_a_spare_that_is_lost_or_cannot_be_used_gives_a_new_file(storage, monkeypatch, call):
    write(storage, f"a/{SHARD}", BIG)
    storage.remove_tree("a")
    real, failed = getattr(os, call), []

    def failing(first, *rest, **more):
        is_new = call == "open" and rest[0] & (os.O_CREAT | os.O_DIRECTORY)
        if not is_new and len(failed) < 1:
            failed.append(first)
            raise OSError(errno.EACCES, "Permission denied")
        return real(first, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        data = write(storage, f"b/{SHARD}", BIG, seed=1)
    assert len(failed) == 1
    assert storage.read(f"b/{SHARD}") == data
    assert listing(storage.root / "b") == [SHARD]


# --- a full disk ----------------------------------------------------------------------------------


@pytest.fixture
def full(monkeypatch):
    """``full(call)``: the call finds no room for as long as there are spares."""

    def make(storage, call, number=errno.ENOSPC):
        real, place = getattr(os, call), storage.root / ".spare"

        def failing(*arguments, **more):
            if listing(place):
                raise OSError(number, "No space left on device")
            return real(*arguments, **more)

        monkeypatch.setattr(os, call, failing)

    return make


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(("call", "size"), [("pwrite", 10), ("write", None), ("rename", 10)])
def test_spares_give_way_when_the_disk_is_full(storage, full, call, size, number):
    write(storage, f"a/{SHARD}", BIG)
    storage.remove_tree("a")
    blob = storage.create("f", size)
    full(storage, call, number)
    blob.write(b"0123456789")
    blob.finish()
    assert storage.read("f") == b"0123456789"
    assert kept(storage) == []


def test_making_a_file_or_a_directory_finds_room(storage, full):
    for call in ("mkdir", "open"):
        write(storage, f"a/{SHARD}", BIG)
        storage.remove_tree("a")
        full(storage, call)
        storage.create(f"new-{call}/f").abandon()
        assert kept(storage) == []


def test_all_writers_that_met_a_full_disk_go_on(storage, monkeypatch):
    """One drops the spares; the other finds none, and there is room all the same."""
    write(storage, f"a/{SHARD}", BIG)
    storage.remove_tree("a")
    blob, pwrite = storage.create("f", 2 * ALIGN), os.pwrite

    def failing(fd, view, offset):
        if offset == 0 and kept(storage):
            blob.write_at(memory(ALIGN), ALIGN)  # another writer, while this call is made
            raise OSError(errno.ENOSPC, "No space left on device")
        if kept(storage):
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, view, offset)

    monkeypatch.setattr(os, "pwrite", failing)
    blob.write_at(memory(ALIGN), 0)
    blob.finish()
    assert storage.size("f") == 2 * ALIGN


def test_a_disk_that_stays_full_is_an_error(storage, monkeypatch):
    write(storage, f"a/{SHARD}", BIG)
    storage.remove_tree("a")
    before, tries = num_descriptors(), []

    def failing(*_):
        tries.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    blob = storage.create("f", 10)
    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(OSError, match="No space left"):
        blob.write(b"0123456789")
    blob.abandon()
    assert len(tries) == 2
    assert num_descriptors() == before
    assert listing(storage.root) == [".spare"]


def test_dropping(storage):
    spares = Spares(storage.root, 1)
    assert not spares.drop()
    write(storage, f"a/{SHARD}", BIG)
    storage.remove_tree("a")
    assert spares.drop()
    assert kept(storage) == []
