"""Saves in flight: who may come when, what a failure costs, and that nothing comes too late."""

import msgspec
import pytest
from keeper_fakes import FakeKeeper, FakePeer, full_disk
from unit_fakes import WatchedStorage

from outlast.checkpoint.load import verify
from outlast.checkpoint.manifest import BLOCK_BYTES, FileEntry, decode, encode, step_name
from outlast.keeper import wire
from outlast.keeper.commit import Part
from outlast.keeper.files import make_way
from outlast.keeper.memory import Kept
from outlast.storage import Directory

EIO = OSError(5, "Input/output error")


def manifest_of(disk, step):
    return decode(disk.read(f"{step_name(step)}/manifest.json"), step)


def is_committed(disk, step):
    return disk.exists(f"{step_name(step)}/manifest.json")


def watched(keeper, disk, fail=lambda operation, name: None):
    """Have the keeper use a disk that is watched; ``fail`` as in ``WatchedStorage``."""
    storage = WatchedStorage(disk, fail)
    keeper.saves._files._tiers = {"local": storage}
    return storage


# --- the usual course ---------------------------------------------------------------------------


def test_a_save_is_committed_to_the_tier_and_to_memory(keeper, disk):
    worker = keeper.worker()
    worker.save(5, 1)
    keeper.run()
    (ended,) = worker.ended
    assert (ended.error, ended.tier, ended.num_files) == ("", "local", 3)
    assert verify(disk, 5).files.keys() == {"rank-00000.json", "rank-00000.safetensors"}
    assert keeper.books.kept[5].files == {"rank-00000.safetensors": (worker.arena, 1064)}
    ((event, fields),) = keeper.events
    assert (event, fields["step"], fields["tier"]) == ("commit", 5, "local")
    (committed,) = keeper.committed
    assert (committed.ranks, committed.by_us) == ((0,), True)
    assert keeper.saves.idle


def test_the_commit_comes_when_the_last_of_all_ranks_is_whole(keeper, disk):
    one, two = keeper.worker(0, 2), keeper.worker(1, 2)
    two.save(5, 1)
    one.begin(5, 1)
    one.fill(5, 1)
    keeper.run()
    assert not is_committed(disk, 5)
    one.complete(5, 1)
    keeper.run()
    assert manifest_of(disk, 5).world_size == 2
    assert [w.ended[0].error for w in (one, two)] == ["", ""]


def test_ranks_that_are_at_different_steps_commit_nothing(keeper, disk):
    one, two = keeper.worker(0, 2), keeper.worker(1, 2)
    one.save(7, 1)
    two.save(9, 1)
    keeper.run()
    assert [w.ended[0].error for w in (one, two)] == ["some ranks save step 7 and others 9"] * 2
    assert not is_committed(disk, 7)
    assert not is_committed(disk, 9)
    assert keeper.saves.idle


def test_a_rank_without_tensors_takes_part(keeper, disk):
    one, two = keeper.worker(0, 2), keeper.worker(1, 2, size=0)
    one.save(5, 1)
    two.begin(5, 1)
    two.complete(5, 1)
    keeper.run()
    assert "rank-00001.safetensors" not in verify(disk, 5).files


def test_a_save_for_memory_alone_says_so(keeper, disk):
    worker = keeper.worker()
    worker.save(5, 1, tiers=("memory",))
    keeper.run()
    assert (worker.ended[0].error, worker.ended[0].tier) == ("", "")
    assert 5 in keeper.books.kept
    assert disk.children() == []
    assert keeper.events == []


def test_at_no_moment_is_there_nothing_to_do_before_the_copies_are_asked_for(keeper):
    idle = []
    keeper.saves._conclusions._on_committed = lambda _: idle.append(keeper.saves.idle)
    keeper.worker().save(5, 1)
    keeper.run()
    assert idle == [False]


# --- ranks that fail ----------------------------------------------------------------------------


def test_a_worker_lost_in_its_copy_voids_the_save_and_later_changes_nothing(keeper, disk):
    worker = keeper.worker()
    worker.begin(5, 1)
    keeper.saves.lost(1, worker.peer)
    keeper.run()
    assert keeper.events == [
        (
            "save_skipped",
            {"durable": False, "attempt": 1, "step": 5}
            | {"reason": "rank 0 was lost during its copy"},
        )
    ]
    worker.save(6, 2)
    keeper.saves.lost(1, worker.peer)
    keeper.saves.nobody_is_left()
    keeper.run()
    assert is_committed(disk, 6)


def test_a_worker_lost_before_it_began_voids_the_save_of_the_others(keeper):
    one, two = keeper.worker(0, 2), keeper.worker(1, 2)
    one.begin(5, 1)
    keeper.saves.lost(1, two.peer)
    keeper.run()
    assert one.ended[0].error == "rank 1: rank 1 was lost during its copy"


def test_the_end_of_an_old_connection_does_not_touch_the_new_one(keeper, disk):
    worker = keeper.worker()
    worker.begin(5, 1)
    keeper.saves.lost(1, FakePeer(0))  # of the same rank, from before
    worker.fill(5, 1)
    worker.complete(5, 1)
    keeper.run()
    assert is_committed(disk, 5)


def test_a_rank_that_comes_after_the_save_has_failed_hears_of_it(keeper):
    one, two = keeper.worker(0, 2), keeper.worker(1, 2)
    before = keeper.worker(1, 2, peer=two.peer)
    keeper.books.kept[4] = Kept(files={"rank-00001.safetensors": (before.arena, 1)}, small={})
    one.absent(5, 1)
    keeper.run()
    two.begin(5, 1, arena=before.arena)
    assert two.ended[0].error == "rank 0: nothing to give"
    assert 4 not in keeper.books.kept  # the worker writes there, whatever has come of the save
    two.fill(5, 1)
    two.complete(5, 1)
    keeper.run()
    assert keeper.saves.idle


def test_a_void_snapshot_names_its_tensors(keeper):
    one, two = keeper.worker(0, 2), keeper.worker(1, 2)
    for worker in (one, two):
        worker.begin(5, 1)
    two.void(5, 1, ("b",))
    keeper.run()
    assert one.ended[0].void == ("b",)
    assert keeper.events == []  # it is taken again; who takes it says so


def test_replicas_that_differ_are_not_committed(keeper, disk):
    one, two = keeper.worker(0, 2), keeper.worker(1, 2)
    for worker, digest in ((one, "a"), (two, "b")):
        worker.begin(5, 1)
        worker.fill(5, 1)
        worker.complete(5, 1, {"w[0]": digest})
    keeper.run()
    assert one.ended[0].void == ("w[0]",)
    assert not is_committed(disk, 5)


def test_a_save_left_unfinished_ends_when_its_rank_begins_the_next(keeper, disk):
    worker = keeper.worker()
    worker.begin(5, 1)
    worker.save(6, 2)
    keeper.run()
    assert "began another snapshot" in worker.ended[0].error
    assert is_committed(disk, 6)


@pytest.mark.parametrize("blocks", [[], [0], [1], [0, 7], [0, 0]])
def test_a_snapshot_that_is_called_whole_too_early_is_refused(keeper, disk, blocks):
    worker = keeper.worker(size=BLOCK_BYTES + 1)
    worker.begin(5, 1)
    worker.fill(5, 1, blocks)
    worker.complete(5, 1)
    keeper.run()
    assert "called whole before" in worker.ended[0].error
    assert not is_committed(disk, 5)
    assert keeper.saves.idle


def test_a_block_that_is_reported_twice_is_written_once(keeper, disk):
    worker = keeper.worker(size=BLOCK_BYTES + 1)
    worker.begin(5, 1)
    for blocks in ([0, 0], [1, 0], [1]):
        worker.fill(5, 1, blocks)
    worker.complete(5, 1)
    keeper.run()
    verify(disk, 5)


def test_a_new_attempt_does_not_wait_for_workers_of_the_old_one(keeper, disk):
    one, two = keeper.worker(0, 2), keeper.worker(1, 2)
    one.save(5, 1)
    two.begin(5, 1)
    keeper.saves._pool.run()
    keeper.saves.wait_for_earlier(2, 0.0)
    keeper.run()
    assert keeper.saves.idle
    assert not is_committed(disk, 5)
    assert keeper.events[0][1]["reason"] == "its attempt ended before the commit"


# --- several machines ---------------------------------------------------------------------------


def part_of_rank_1(keeper, disk, step):
    """What another machine's keeper would report."""
    other = keeper.worker(1, 2)
    disk.put(f"{step_name(step)}/rank-00001.json", b"{}")
    files = {"rank-00001.json": FileEntry(size=2, xxh3_128=("0" * 32,))}
    del other
    return msgspec.json.encode(Part(files=files))


@pytest.mark.parametrize("part_first", [True, False])
def test_another_machines_part_may_come_before_rank_0_begins(keeper, disk, part_first):
    one = keeper.worker(0, 2)
    message = wire.Part(step=5, serial=1, rank=1)
    data = part_of_rank_1(keeper, disk, 5)
    if part_first:
        keeper.saves.relayed(one.peer, 1, 2, message, data)
    one.save(5, 1)
    if not part_first:
        keeper.saves.relayed(one.peer, 1, 2, message, data)
    keeper.run()
    assert is_committed(disk, 5)
    (outcome,) = one.peer.of(wire.Outcome)
    assert outcome.error == ""


def test_rank_0s_refusal_may_come_before_this_machine_begins(keeper):
    two = keeper.worker(1, 2)
    outcome = wire.Outcome(step=5, serial=1, error="rank 0: no space", void=())
    keeper.saves.decided(two.peer, 1, 2, outcome, b"")
    keeper.run()
    two.save(5, 1)
    keeper.run()
    assert [ended.error for ended in two.ended] == ["rank 0: no space"]
    assert keeper.events == []  # the keeper of rank 0 has it on record
    assert keeper.saves.idle


def test_the_other_machine_follows_rank_0s_commit(keeper, disk, monkeypatch, tmp_path):
    two = keeper.worker(1, 2)
    two.save(5, 1)
    keeper.run()
    (part,) = two.peer.of(wire.Part)
    assert (part.rank, two.ended) == (1, [])
    first = FakeKeeper(monkeypatch, {"local": Directory(tmp_path / "first")})
    one = first.worker(0, 2)
    one.save(5, 1)
    first.saves.relayed(one.peer, 1, 2, part, two.peer.sent[0][1])
    first.run()
    data = next(blob for message, blob in one.peer.sent if isinstance(message, wire.Outcome))
    outcome = wire.Outcome(step=5, serial=1, error="", void=())
    keeper.saves.decided(two.peer, 1, 2, outcome, data)
    keeper.run()
    assert two.ended[0].error == ""
    assert disk.read(f"{step_name(5)}/manifest.json") == data
    assert 5 in keeper.books.kept


def test_a_dead_ranks_failure_is_reported_by_one_that_lives(keeper):
    two, three = keeper.worker(1, 3), keeper.worker(2, 3)
    two.begin(5, 1)
    three.begin(5, 1)
    two.peer.is_gone = True
    keeper.saves.lost(1, two.peer)
    assert [part.rank for part in three.peer.of(wire.Part)] == [1]


# --- storage that fails -------------------------------------------------------------------------


def failing(times, operation, suffix, error=EIO):
    left = [times]

    def fail(found, name):
        if found == operation and name.endswith(suffix) and left[0]:
            left[0] -= 1
            return error
        return None

    return fail


@pytest.mark.parametrize("suffix", [".safetensors", "rank-00000.json"])
@pytest.mark.parametrize("complete_first", [True, False])
@pytest.mark.parametrize("times", [1, 2, 3, 9])
def test_a_file_that_fails_is_tried_again(keeper, disk, suffix, complete_first, times):
    watched(keeper, disk, failing(times, "create", suffix))
    worker = keeper.worker()
    worker.begin(5, 1)
    worker.fill(5, 1)
    if not complete_first:
        keeper.pool.run()
    worker.complete(5, 1)
    keeper.run()
    assert is_committed(disk, 5) == (times < 3)
    assert keeper.saves.idle
    if times < 3:
        verify(disk, 5)
    else:
        ((event, fields),) = keeper.events
        assert event == "storage_error"
        assert "Input/output error" in fields["error"]


@pytest.mark.parametrize("times", [1, 2, 9])
def test_a_manifest_that_fails_is_tried_again(keeper, disk, times, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    watched(keeper, disk, failing(times, "put_new", "manifest.json"))
    worker = keeper.worker()
    worker.save(5, 1)
    keeper.run()
    assert is_committed(disk, 5) == (times < 3)
    assert bool(worker.ended[0].error) == (times >= 3)


def test_a_manifest_that_was_put_although_it_failed_is_a_commit(keeper, disk, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    storage = watched(keeper, disk)
    put_new = disk.put_new
    tries = []

    def half_put(name, data):
        done = put_new(name, data)
        tries.append(done)
        if len(tries) == 1:
            raise EIO  # the name is there, its directory could not be made durable
        return done

    storage.put_new = half_put
    worker = keeper.worker()
    worker.save(5, 1)
    keeper.run()
    assert tries == [True, False]
    assert worker.ended[0].error == ""


def test_a_full_disk_says_what_to_do(keeper, disk):
    watched(keeper, disk, lambda op, _: full_disk() if op == "create" else None)
    keeper.worker().save(5, 1)
    keeper.run()
    assert "keep fewer checkpoints" in keeper.events[0][1]["error"]


def test_what_nobody_foresaw_ends_the_save_and_not_the_keeper(keeper, disk):
    worker = keeper.worker()
    keeper.saves._conclusions._on_committed = None  # calling it raises TypeError
    worker.save(5, 1)
    keeper.run()
    assert "TypeError" in worker.ended[0].error
    assert keeper.saves.idle


@pytest.mark.parametrize("fails", [True, False])
def test_a_ring_is_free_again_also_when_the_disk_fails(keeper, disk, fails):
    watched(keeper, disk, lambda op, _: full_disk() if fails and op == "create" else None)
    ring = 4 * BLOCK_BYTES
    worker = keeper.worker(size=6 * BLOCK_BYTES, ring_bytes=ring)
    worker.begin(5, 1)
    for block in range(7):
        worker.fill(5, 1, [block])
        keeper.pool.run()
        written = [message.block for message in worker.peer.of(wire.Written)]
        assert written == list(range(block + 1))  # its place is free: the loop goes on
    worker.complete(5, 1)
    keeper.run()
    assert ("OSError" in worker.ended[0].error) == fails
    assert is_committed(disk, 5) != fails
    assert 5 not in keeper.books.kept  # a ring holds no snapshot


# --- nothing is written too late ----------------------------------------------------------------


def test_a_save_ends_only_when_nobody_writes_its_files(keeper, disk):
    one, two = keeper.worker(0, 2), keeper.worker(1, 2)
    seen = []

    def fail(operation, name):
        if operation == "create" and name.endswith("rank-00000.safetensors") and not seen:
            two.absent(5, 1)  # the save fails while rank 0's file is being made
            keeper.pool.run()  # as another thread of the pool would
            seen.append((len(one.ended), keeper.saves.idle))

    watched(keeper, disk, fail)
    one.begin(5, 1)
    one.fill(5, 1)
    keeper.run()
    assert seen == [(0, False)]
    assert len(one.ended) == 1
    assert not disk.exists(f"{step_name(5)}/rank-00000.safetensors")


def test_a_second_try_is_not_made_for_a_save_that_has_ended(keeper, disk):
    one, two = keeper.worker(0, 2), keeper.worker(1, 2)
    storage = watched(keeper, disk, failing(1, "create", "rank-00000.safetensors"))
    one.save(5, 1)
    two.begin(5, 1)
    keeper.pool.run()
    (again,) = keeper.timers
    two.void(5, 1)
    keeper.pool.run()
    one.save(5, 2)
    two.save(5, 2)
    keeper.pool.run()
    assert is_committed(disk, 5)
    num_created = len([op for op, _ in storage.log if op == "create"])
    again()
    keeper.run()
    assert len([op for op, _ in storage.log if op == "create"]) == num_created
    verify(disk, 5)


def test_memory_that_is_still_to_be_written_from_is_not_believed_once_it_is_reused(keeper, disk):
    old = keeper.worker(attempt=1)
    old.save(5, 1)  # whole, and nothing of it is written yet
    new = keeper.worker(attempt=2)
    new.begin(6, 1, arena=old.arena)
    keeper.run()
    assert not is_committed(disk, 5)
    assert "its memory was taken for step 6" in old.ended[0].error


def test_memory_that_was_reused_after_it_was_written_is_not_listed(keeper, disk):
    one, two = keeper.worker(0, 2), keeper.worker(1, 2)
    one.save(5, 1)
    keeper.pool.run()
    later = keeper.worker(0, 2, attempt=2)
    later.begin(6, 1, arena=one.arena)
    two.save(5, 1)
    keeper.pool.run()
    assert is_committed(disk, 5)
    assert 5 not in keeper.books.kept


def test_memory_given_back_meanwhile_is_not_listed(keeper, disk):
    worker = keeper.worker()
    worker.save(5, 1)
    keeper.books.drop(worker.arena)
    keeper.run()
    assert is_committed(disk, 5)
    assert keeper.books.kept == {}


# --- a step that is there already ---------------------------------------------------------------


def test_a_step_that_was_rejected_is_replaced(keeper, disk):
    worker = keeper.worker()
    worker.save(5, 1)
    keeper.run()
    first = manifest_of(disk, 5)
    worker.save(5, 2)
    keeper.run()
    assert manifest_of(disk, 5).created_t > first.created_t
    disk.put(f"{step_name(5)}/manifest.json", b"torn")
    worker.save(5, 3)
    keeper.run()
    verify(disk, 5)


@pytest.mark.parametrize("change", [{"attempt": 9}, {"job": "another"}])
def test_another_writers_commit_stands(keeper, disk, change):
    worker = keeper.worker()
    worker.save(5, 1)
    keeper.run()
    theirs = encode(msgspec.structs.replace(manifest_of(disk, 5), **change))
    disk.put(f"{step_name(5)}/manifest.json", theirs)
    worker.save(5, 2)
    keeper.run()
    assert "another writer" in worker.ended[-1].error
    assert disk.read(f"{step_name(5)}/manifest.json") == theirs
    with pytest.raises(FileExistsError):
        make_way(disk, 5, "job", 1)
