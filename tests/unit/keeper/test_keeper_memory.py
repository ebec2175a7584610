"""What is in memory: the books and their pages, who is given which arena, how much there is."""

import os

import pytest
from unit_names import save_name

from outlast.keeper import memory as limited
from outlast.keeper import memory as room
from outlast.keeper import wire
from outlast.keeper.memory import (
    BOOKS,
    Arena,
    Books,
    Holdings,
    KeptSnapshot,
    MemoryTier,
    read_page,
    write_page,
)

GIB = 1 << 30
MIB = 1 << 20


@pytest.fixture(name="told")
def _told():
    return []


@pytest.fixture(name="held")
def _held(told, monkeypatch):
    monkeypatch.setattr(room, "available_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(Arena, "touch_in_background", lambda _: None)
    return Holdings({}, lambda message, fds: told.append((message, fds)))


def reserve(held, size, buffers=1, *, rank=0, ranks=(0, 1), in_use=(), attempt=1):
    ask = wire.Reserve(num_bytes=size, buffers=buffers, workers=len(ranks))
    return held.reserve(ask, rank=rank, attempt=attempt, ranks=ranks, in_use=in_use)


# --- pages --------------------------------------------------------------------------------------


def test_a_torn_page_leaves_the_one_before():
    arena, data = Arena.make(4 * MIB), os.urandom(1000)
    write_page(arena, 1, b"first")
    write_page(arena, 2, data)
    assert read_page(arena, 2) == (2, data)
    for place in (0, 9, 17, 25, 39, 40, 500, 1039):
        arena.view[place] ^= 1
        assert read_page(arena, 2) is None
        assert read_page(arena, 1) == (1, b"first")
        arena.view[place] ^= 1
    write_page(arena, 4, bytes(3 * MIB))  # more than a page holds
    assert read_page(arena, 4) is None


def test_a_successor_finds_what_is_whole(held):
    one, two = (reserve(held, MIB, rank=rank).arenas[0] for rank in (0, 1))
    held.books.arenas[one].view[:5] = b"state"
    held.books.kept[save_name(3)] = KeptSnapshot(
        files={"a": (one, 5)}, small={"manifest.json": b"{}"}
    )
    held.books.kept[save_name(4)] = KeptSnapshot(files={"a": (one, 5), "b": (two, 5)}, small={})
    for _ in range(4):
        held.note()
    fds = {number: os.dup(fd) for number, fd in held.all().items() if number != two}
    successor = Holdings(fds, lambda *_: None)
    assert successor.books.kept.keys() == {save_name(3)}  # the other one's memory has not come
    memory = MemoryTier(successor.books.arenas, successor.books.kept)
    assert memory.read(f"{save_name(3)}/a") == b"state"
    successor.books.kept.clear()
    successor.note()  # its pages go on where its predecessor's ended
    fds = {number: os.dup(fd) for number, fd in successor.all().items()}
    assert Holdings(fds, lambda *_: None).books.kept == {}
    assert reserve(successor, MIB, rank=0).arenas == (one,)


def test_books_that_are_no_books_are_empty():
    books = Books()
    books.take_over(b"garbage", {1: Arena.make(1)})
    assert (books.arenas, books.kept) == ({}, {})


def test_an_arena_is_looked_at_without_its_descriptor():
    arena = Arena.make(10)
    seen = Arena.seen(os.dup(arena.fd))
    arena.view[:2] = b"ab"
    assert bytes(seen.view[:2]) == b"ab"
    assert seen.fd == -1


# --- who is given what --------------------------------------------------------------------------


def test_arenas_are_given_again_and_grow(held, told):
    first = reserve(held, MIB, 2)
    assert len(first.arenas) == 2
    assert reserve(held, MIB, 2).arenas == first.arenas
    larger = reserve(held, 9 * MIB, 2)
    assert not set(larger.arenas) & set(first.arenas)
    assert held.books.arenas.keys() == set(larger.arenas)
    dropped = [message.arena for message, _ in told if isinstance(message, wire.Drop)]
    assert dropped == list(first.arenas)


def test_what_a_save_has_yet_to_be_written_from_is_not_given_away(held):
    (first,) = reserve(held, MIB).arenas
    (second,) = reserve(held, MIB, in_use={first}).arenas
    assert first != second
    assert held.books.arenas.keys() == {first, second}
    held.leave_out({0, 1}, in_use={first})
    assert first in held.books.arenas
    held.leave_out({0, 1}, in_use=())
    assert held.books.arenas.keys() == {second}


def test_memory_of_ranks_that_are_no_more_goes_with_the_next_commit(held):
    (one,), (two,) = (reserve(held, MIB, rank=rank).arenas for rank in (0, 1))
    held.books.kept[save_name(3)] = KeptSnapshot(files={"a": (one, 5), "b": (two, 5)}, small={})
    held.leave_out({0}, in_use=())
    assert held.books.arenas.keys() == {one}
    assert held.books.kept == {}


def test_all_ranks_of_a_machine_are_told_the_same(held, monkeypatch):
    size = 2 * GIB  # two buffers of two ranks fit into eight; no more than that
    first = reserve(held, size - GIB // 4, 2, rank=0)
    monkeypatch.setattr(room, "available_bytes", lambda: 100 * GIB)
    second = reserve(held, size - GIB // 8, 2, rank=1)
    assert len(first.arenas) == len(second.arenas) == 1
    assert len(reserve(held, size, 2, rank=0, attempt=2).arenas) == 2


def test_untouched_memory_is_not_counted_twice(held, monkeypatch):
    asked = []
    monkeypatch.setattr(
        room,
        "admit",
        lambda size, *, wanted, available_bytes, useful: (
            asked.append(available_bytes) or room.Admission(buffers=1)
        ),
    )
    (arena,) = reserve(held, 64 * MIB).arenas
    reserve(held, 64 * MIB, attempt=2)
    held.books.arenas[arena].touch()
    reserve(held, 64 * MIB, attempt=3)
    reserve(held, 64 * MIB, attempt=4, rank=1, ranks=(1,))  # rank 0's is not to be had
    reserve(held, 64 * MIB, attempt=5, in_use={arena})  # a save that a tier hangs on needs it
    assert asked == [8 * GIB, 8 * GIB, 8 * GIB + 64 * MIB, 8 * GIB, 8 * GIB]


def test_without_any_memory_there_is_no_arena_and_a_word(held, monkeypatch):
    def refuse(_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Arena, "make", refuse)
    answer = reserve(held, MIB)
    assert (answer.arenas, answer.words) == ((), "no memory for snapshots: Too many open files")
    assert BOOKS in held.all()


# --- how much there is --------------------------------------------------------------------------


def group(directory, **files):
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(str(text))


def test_the_tightest_limit_of_version_2_counts(tmp_path):
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    stat = "anon 5\ninactive_file 7\nactive_file 9\n"
    group(tmp_path / "g" / "a", memory__max=1000, memory__current=400, memory__stat=stat)
    group(tmp_path / "g" / "a" / "b", memory__max="max", memory__current=300)
    assert limited.limits(own, tmp_path / "g") == [607]
    assert limited.available_bytes(own, tmp_path / "g") == 607
    group(tmp_path / "g" / "a" / "b", memory__max=100, memory__current=300)
    assert limited.available_bytes(own, tmp_path / "g") == 0


def test_limits_of_version_1_count_too(tmp_path):
    own = tmp_path / "own"
    own.write_text("4:memory:/docker/x\n3:cpu,cpuacct:/\n0::/\n")
    files = {"memory__limit_in_bytes": 1000, "memory__usage_in_bytes": 100}
    # In a container the group's path is the host's, and the top of the mount is the container's.
    group(tmp_path / "g" / "memory", **files, memory__stat="total_inactive_file 11\n")
    assert limited.limits(own, tmp_path / "g") == [911]


def test_without_groups_the_machine_counts(tmp_path):
    assert limited.limits(tmp_path / "none", tmp_path) == []
    assert limited.available_bytes(tmp_path / "none", tmp_path) > 0


# --- each step -----------------------------------------------------------------------------------


def test_there_must_be_room_for_what_is_kept_of_others(held):
    """Four of this machine's own, and four of others', of 1 GiB each: 8 GiB have not that."""
    ask = wire.Reserve(num_bytes=GIB, buffers=4, workers=1, versions=2, copies=0)
    assert len(held.reserve(ask, rank=0, attempt=1, ranks=(0,), in_use=()).arenas) == 4
    ask = wire.Reserve(num_bytes=GIB, buffers=4, workers=1, versions=2, copies=4)
    answer = held.reserve(ask, rank=0, attempt=2, ranks=(0,), in_use=())
    assert len(answer.arenas) < 4
    assert "buffers in place of 4 (4.50 GiB more are for others' copies)" in answer.words


def test_two_versions_stay_where_a_larger_state_needs_other_memory(held):
    numbers = reserve(held, MIB, 4, ranks=(0,)).arenas
    for step, number in enumerate(numbers, 1):
        held.books.kept[save_name(step)] = KeptSnapshot(files={"a": (number, 5)}, small={})
    assert held.books.alone() == {numbers[3]}
    assert held.books.alone(2) == set(numbers[2:])
    ask = wire.Reserve(num_bytes=9 * MIB, buffers=4, workers=1, versions=2)
    held.reserve(ask, rank=0, attempt=2, ranks=(0,), in_use=())
    assert held.books.kept.keys() == {save_name(3), save_name(4)}
