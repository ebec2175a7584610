"""Other machines' snapshots in this one's memory: whole or not at all, the newest of each."""

import threading

import pytest
from keeper_fakes import JOB
from unit_names import save_name, save_of

from outlast.checkpoint.manifest import (
    BLOCK_BYTES,
    FORMAT,
    FULL,
    MANIFEST,
    Manifest,
    encode,
    hashed,
    shard_file,
    state_file,
)
from outlast.keeper import memory as room
from outlast.keeper.memory import COPIES, Arena, Books, Holdings, KeptSnapshot, MemoryTier, Replica
from outlast.keeper.protocol import ReplicaOffer
from outlast.keeper.replicas import ReplicaRefused, ReplicaStore

GIB = 1 << 30
SIZE = BLOCK_BYTES + 5000


@pytest.fixture(name="free")
def _free():
    return [8 * GIB]


@pytest.fixture(name="held")
def _held(monkeypatch, free):
    monkeypatch.setattr(room, "available_bytes", lambda: free[0])
    monkeypatch.setattr(Arena, "touch_in_background", lambda _: None)
    return Holdings({}, lambda *_: None)


@pytest.fixture(name="guests")
def _guests(held):
    return ReplicaStore(JOB, held, threading.RLock())


def data_of(step, size=SIZE):
    return bytes([step]) * size


def offered(
    node="n1", step=1, attempt=1, *, rank=0, size=SIZE, kind=FULL, job=JOB, serial=1, held=0
):
    """An offer, and its small files."""
    small = {state_file(rank): b"{}"}
    files = {shard_file(rank): data_of(step, size)} if size else {}
    manifest = Manifest(
        format=FORMAT,
        job=job,
        step=step,
        attempt=attempt,
        serial=serial,
        nonce=save_of(step).nonce,
        world_size=1,
        layout={"world": 1},
        created_t=0.0,
        files={name: hashed(data) for name, data in {**small, **files}.items()},
        tensors={},
        kind=kind,
    )
    small[MANIFEST] = encode(manifest)
    sizes = {name: len(data) for name, data in files.items()}
    offer = ReplicaOffer(
        node=node,
        save=save_name(step, attempt, serial),
        files=sizes,
        small={name: len(data) for name, data in small.items()},
        held=held,
    )
    return offer, small


def fill(guest, step, size=SIZE, *, blocks=(0, 1), spoil=()):
    for file in guest.offer.files:
        for index in blocks:
            part = bytearray(data_of(step, size)[index * BLOCK_BYTES :][:BLOCK_BYTES])
            if index in spoil:
                part[-1] ^= 1
            guest.room_for(file, index, len(part))[:] = part
            guest.arrived(file, index)


def take(guests, *args, **options):
    offer, small = offered(*args, **options)
    guest = guests.receive(offer, small)
    fill(guest, guest.manifest.step)
    assert guest.is_whole(), guest.problem
    guests.adopt(guest)
    return offer


def test_a_copy_is_there_when_it_is_whole_and_survives_the_keeper(guests, held):
    take(guests, step=3)
    successor = Books()
    successor.take_over(held.books.encode(), held.books.arenas)
    for books in (held.books, successor):
        memory = MemoryTier(books.arenas, books.everything())
        assert memory.children() == [save_name(3)]
        assert memory.read(f"{save_name(3)}/{shard_file(0)}") == data_of(3)


def test_a_torn_block_or_one_that_is_missing_is_no_copy(guests, held):
    for how in ({"spoil": {1}}, {"blocks": (0,)}):
        guest = guests.receive(*offered())
        fill(guest, 1, **how)
        assert not guest.is_whole()
        assert "block 1 of rank-00000.safetensors" in guest.problem
        guests.give_up(guest)
    assert not held.books.copies
    assert len(held.books.of_rank(COPIES)) == 1  # used again, and not taken anew


def test_the_older_copy_stays_until_the_newer_one_is_whole(guests, held):
    take(guests, step=1)
    guest = guests.receive(*offered(step=2))
    fill(guest, 2, blocks=(0,))
    assert held.books.copies["n1"].save == save_name(1)
    guests.give_up(guest)
    take(guests, step=2)
    take(guests, step=3)
    assert held.books.copies["n1"].save == save_name(3)
    assert len(held.books.of_rank(COPIES)) == 2


def test_the_copy_before_stays_until_the_next_one_comes_in(guests, held):
    """Other machines may not have sent their parts of the newest step yet."""
    take(guests, step=1)
    take(guests, step=2)
    offer, _ = take(guests, node="n2", step=2), take(guests, node="n2", step=3)
    assert offer.save == save_name(2)
    assert list(guests.inventory()) == [save_name(2), save_name(3), save_name(1)]
    memory = MemoryTier(held.books.arenas, guests.inventory())
    assert memory.read(f"{save_name(1)}/{shard_file(0)}") == data_of(1)
    successor = Books()
    successor.take_over(held.books.encode(), held.books.arenas)
    assert successor.everything().keys() == guests.inventory().keys()
    guests.receive(*offered(step=3))  # into the memory of the first
    assert list(guests.inventory()) == [save_name(2), save_name(3)]
    assert len(held.books.of_rank(COPIES)) == 4


def test_where_memory_is_short_the_older_copy_makes_way(guests, held, free):
    take(guests, step=1)
    free[0] = 0
    guest = guests.receive(*offered(step=2))
    assert not held.books.copies
    fill(guest, 2)
    guests.adopt(guest)
    assert held.books.copies["n1"].save == save_name(2)
    with pytest.raises(ReplicaRefused, match="no memory for"):
        guests.receive(*offered(node="n2"))
    assert held.books.copies["n1"].save == save_name(2)


def step_name(step, attempt=1):
    """Of a save that is counted by its step."""
    return save_name(step, attempt, step)


def test_where_each_step_is_kept_two_copies_stay_beside_the_one_that_comes(held, free):
    guests = ReplicaStore(JOB, held, threading.RLock(), each_step=True)
    take(guests, step=1, serial=1)
    take(guests, step=2, serial=2, held=1)
    guest = guests.receive(*offered(step=3, serial=3, held=2))
    assert set(guests.inventory()) == {step_name(1), step_name(2)}
    fill(guest, 3)
    guests.adopt(guest)
    assert set(guests.inventory()) == {step_name(2), step_name(3)}
    free[0] = 0
    take(guests, step=4, serial=4, held=3)  # there is the memory of the first
    assert set(guests.inventory()) == {step_name(3), step_name(4)}
    assert len(held.books.of_rank(COPIES)) == 3


def test_the_newest_step_that_all_hold_stays_however_many_come_after_it(held):
    """One machine's copies are late by several steps; its own and the others' go on."""
    guests = ReplicaStore(JOB, held, threading.RLock(), each_step=True)
    take(guests, step=3, serial=3)
    for step in range(4, 9):
        take(guests, step=step, serial=step, held=3)
        assert set(guests.inventory()) == {step_name(3), step_name(step)}
    take(guests, step=9, serial=9, held=8)
    assert set(guests.inventory()) == {step_name(8), step_name(9)}
    for step in range(10, 13):  # so does what an attempt goes on from, until all hold a step of it
        take(guests, step=step, attempt=2, serial=step)
        assert set(guests.inventory()) == {step_name(8), step_name(step, 2)}
    take(guests, step=13, attempt=2, serial=13, held=12)
    assert set(guests.inventory()) == {step_name(12, 2), step_name(13, 2)}
    assert len(held.books.of_rank(COPIES)) == 3


def test_several_machines_copies_of_each_step_come_into_memory_that_is_there(held):
    guests = ReplicaStore(JOB, held, threading.RLock(), each_step=True)
    guests.wards = frozenset({"n1", "n2"})
    arenas = []
    for step in range(1, 9):
        offers = [offered(node, step, serial=step, held=step - 1) for node in ("n1", "n2")]
        for guest in [guests.receive(*offer) for offer in offers]:
            fill(guest, step)
            guests.adopt(guest)
        arenas.append(set(held.books.of_rank(COPIES)))
    assert len(arenas[-1]) == 6
    assert arenas[2:] == [arenas[-1]] * 6, "nothing is given back and made anew"


def test_where_each_step_is_kept_the_only_copy_makes_way_for_none(held, free):
    guests = ReplicaStore(JOB, held, threading.RLock(), each_step=True)
    take(guests, step=1)
    free[0] = 0
    with pytest.raises(ReplicaRefused, match="no memory for"):
        guests.receive(*offered(step=2))
    assert list(guests.inventory()) == [save_name(1)]


def test_what_is_here_already_or_older_is_not_taken(guests):
    take(guests, step=5, attempt=2)
    assert guests.receive(*offered(step=5, attempt=2)) is None
    with pytest.raises(ReplicaRefused, match=f"{save_name(5, 2)} is here"):
        guests.receive(*offered(step=9, attempt=1))
    take(guests, step=4, attempt=3)


def test_two_copies_of_one_machine_do_not_come_at_once(guests):
    guest = guests.receive(*offered())
    with pytest.raises(ReplicaRefused, match="another copy"):
        guests.receive(*offered(step=2))
    guests.give_up(guest)
    guests.receive(*offered(step=2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda offer, small: offer.files.update({shard_file(0): 7}), "not what the manifest says"),
        (lambda offer, small: offer.files.update({"../../etc/x": 7}), "does not name ../../etc/x"),
        (lambda offer, small: small.update({state_file(0): b"[]"}), "does not match its checksum"),
        (lambda offer, small: small.update({MANIFEST: b"{}"}), "torn or altered"),
        (lambda offer, small: small.pop(MANIFEST), "is empty"),
        (lambda offer, small: setattr(offer, "save", save_name(8)), "that of step 1"),
        (lambda offer, small: setattr(offer, "save", "../x"), "not the name of a save"),
        (lambda offer, small: setattr(offer, "save", save_name(1, 8)), "is that of"),
    ],
)
def test_what_makes_no_sense_is_refused(guests, held, change, words):
    offer, small = offered()
    change(offer, small)
    with pytest.raises(ReplicaRefused, match=words):
        guests.receive(offer, small)
    assert not held.books.of_rank(COPIES)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"job": "other"}, "of job other"), ({"kind": "weights"}, "cannot be resumed")],
)
def test_other_jobs_and_weights_alone_are_refused(guests, options, words):
    with pytest.raises(ReplicaRefused, match=words):
        guests.receive(*offered(**options))


@pytest.mark.parametrize("block", [("rank-00001.safetensors", 0, 5), (shard_file(0), 2, 5)])
def test_a_block_that_does_not_exist_has_no_room(guests, block):
    guest = guests.receive(*offered())
    with pytest.raises(ValueError, match="there is no block"):
        guest.room_for(*block)
    with pytest.raises(ValueError, match="has 5000 bytes, not 5"):
        guest.room_for(shard_file(0), 1, 5)


def test_who_is_gone_is_seen_off_once_newer_copies_are_here(guests, held):
    take(guests, "gone", step=1)
    take(guests, "stays", step=1)
    guests.wards = frozenset({"stays"})
    guests.see_off(save_of(1))
    assert held.books.copies.keys() == {"gone", "stays"}  # not older: its part may be needed
    guests.see_off(save_of(1, 2))
    assert held.books.copies.keys() == {"stays"}
    guests.wards = frozenset()
    guests.see_off(save_of(1, 2))
    assert not held.books.of_rank(COPIES)


def test_commits_of_this_machine_leave_copies_alone(guests, held):
    take(guests, step=1)
    held.leave_out((0,), ())
    assert held.books.copies.keys() == {"n1"}


def test_two_saves_of_a_step_are_two_and_the_parts_of_one_are_one():
    books = Books()
    one, two = save_name(7), save_name(7, attempt=2)
    parts = {
        name: KeptSnapshot(files={}, small={MANIFEST: name.encode(), "a": b"x"})
        for name in (one, two)
    }
    books.kept = {one: parts[one]}
    books.copies = {"n1": Replica(save=two, kept=parts[two])}
    same = KeptSnapshot(files={}, small={MANIFEST: two.encode(), "b": b"y"})
    books.copies["n2"] = Replica(save=two, kept=same)
    found = books.everything()
    assert found[one].small.keys() == {MANIFEST, "a"}
    assert found[two].small.keys() == {MANIFEST, "a", "b"}
