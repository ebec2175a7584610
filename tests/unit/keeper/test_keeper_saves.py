"""Saves in flight: who may come when, what a failure costs, and that nothing comes too late."""

from types import SimpleNamespace

import msgspec
import pytest
import xxhash
from keeper_fakes import FakeKeeper, FakePeer, full_disk, hello
from unit_checkpoints import flat
from unit_fakes import WatchedStorage
from unit_names import committed, save_name, save_of

from outlast.checkpoint.catalog import remove_save
from outlast.checkpoint.manifest import BLOCK_BYTES, MANIFEST, PartEntry
from outlast.checkpoint.transfer import read_manifest
from outlast.keeper import protocol, wire
from outlast.keeper.flight import RankOutcome
from outlast.keeper.memory import KeptSnapshot
from outlast.keeper.saves import LOST
from outlast.storage import Directory
from whole_reads import verify

EIO = OSError(5, "Input/output error")


def manifest_of(disk, step):
    return read_manifest(disk, step)


def is_committed(disk, step):
    return step in committed(disk)


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
    assert flat(disk, verify(disk, 5)).files.keys() == {"rank-00000.json", "rank-00000.safetensors"}
    assert keeper.books.kept[save_name(5)].files == {"rank-00000.safetensors": (worker.arena, 1064)}
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
    assert "rank-00001.safetensors" not in flat(disk, verify(disk, 5)).files


def test_a_save_for_memory_alone_says_so(keeper, disk):
    worker = keeper.worker()
    worker.save(5, 1, tiers=("memory",))
    keeper.run()
    assert (worker.ended[0].error, worker.ended[0].tier) == ("", "")
    assert save_name(5) in keeper.books.kept
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


@pytest.mark.parametrize("is_first", [True, False], ids=["then", "before"])
def test_nobody_waits_for_a_rank_that_has_begun_a_later_save(keeper, disk, is_first):
    """It had begun the earlier one with a keeper that died, and has tried again."""
    ahead, behind = keeper.worker(0, 2), keeper.worker(1, 2)
    if is_first:
        behind.save(5, 2)
    ahead.save(5, 3)
    if not is_first:
        behind.save(5, 2)
    keeper.run()
    assert behind.ended[0].error == "rank 0: rank 0 has begun a later one without it"
    assert behind.ended[0].void  # so that its worker takes it again
    behind.save(5, 3)
    keeper.run()
    assert (ahead.ended[-1].error, behind.ended[-1].error) == ("", "")
    assert is_committed(disk, 5)


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
    keeper.books.kept[save_name(4)] = KeptSnapshot(
        files={"rank-00001.safetensors": (before.arena, 1)}, small={}
    )
    one.absent(5, 1)
    keeper.run()
    two.begin(5, 1, arena=before.arena)
    assert two.ended[0].error == "rank 0: nothing to give"
    assert (
        save_name(4) not in keeper.books.kept
    )  # the worker writes there, whatever has come of the save
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


def part_of_rank_1(disk, step, serial=1, **more):
    """What another machine's keeper would report."""
    disk.put(f"{save_name(step, serial=serial)}/rank-00001.json", b"{}")
    return RankOutcome(entry=PartEntry(2, ("0" * 32,), 0, 2), num_files=2, **more)


def report(keeper, rank, part, *, step=5, serial=1, world_size=2, source=None):
    message = protocol.PartReport(step=step, serial=serial, rank=rank)
    keeper.saves.reported(hello(1, world_size), message, part, source)


def decide(keeper, *, error="", void=(), data=b""):
    message = protocol.SaveOutcome(
        step=5,
        serial=1,
        error=error,
        manifest=xxhash.xxh3_128_hexdigest(data) if data else "",
        size=len(data),
    )
    keeper.saves.decided(hello(), message, void)
    keeper.run()


@pytest.mark.parametrize("part_first", [True, False])
def test_another_machines_part_may_come_before_rank_0_begins(keeper, disk, part_first):
    side = keeper.meet([0])
    one = keeper.worker(0, 2)
    part = part_of_rank_1(disk, 5)
    if part_first:
        report(keeper, 1, part)
    one.save(5, 1)
    if not part_first:
        report(keeper, 1, part)
    keeper.run()
    assert is_committed(disk, 5)
    ((ended, data, to),) = side.told
    assert (ended.error, to) == ("", None)
    assert data == disk.read(f"{save_name(5)}/manifest.json")
    report(keeper, 1, part, source="who comes back")  # it has not heard of it
    assert side.told[1:] == [(ended, data, "who comes back")]
    assert keeper.saves.manifest_of(1, 1) == data


def test_a_save_of_several_machines_needs_no_worker_once_its_copies_are_whole(keeper, disk):
    keeper.meet([0])
    one = keeper.worker(0, 2)
    one.save(5, 1)
    one.peer.is_gone = True
    keeper.saves.lost(1, one.peer)
    keeper.saves.nobody_is_left()
    keeper.run()
    report(keeper, 1, part_of_rank_1(disk, 5))
    keeper.run()
    assert is_committed(disk, 5)


def test_a_machine_whose_workers_are_gone_says_so(keeper):
    side = keeper.meet([1])
    two = keeper.worker(1, 2)
    two.begin(5, 1)
    keeper.saves.nobody_is_left()
    keeper.run()
    ((_, _, rank, part),) = side.reports
    assert (rank, part.error) == (1, "its workers ended before the snapshot was whole")
    assert keeper.saves.idle
    assert [one[2:] for one in keeper.saves.unanswered(1)] == [(1, part)]  # it may not have come
    decide(keeper, error=f"rank 1: {part.error}")
    assert keeper.saves.unanswered(1) == []
    assert side.over == [1, 1]


def test_a_step_that_is_kept_asks_no_storage_and_says_what_all_have_copied(monkeypatch, disk):
    """Of the newest save that every machine has a copy of elsewhere all others are told."""
    # Its claims cannot be asked.
    gate = SimpleNamespace(told=lambda *_: None, refused=lambda _: "")
    keeper = FakeKeeper(monkeypatch, {"local": disk}, gate)
    keeper.saves._copied = lambda attempt: 80 if attempt == 1 else 0
    side = keeper.meet([0])
    one = keeper.worker(0, 2)
    one.save(5, 81, tiers=(), each_step=True)
    part = RankOutcome(entry=PartEntry(2, ("0" * 32,), 0, 2), num_files=2, held=64)
    report(keeper, 1, part, serial=81)
    keeper.run()
    ((ended, data, _),) = side.told
    assert (ended.error, ended.tier, ended.held) == ("", "", 64)
    assert data
    assert [one.held for one in one.ended] == [64]
    (committed,) = keeper.committed
    assert (committed.each_step, committed.held) == (True, 64)
    assert disk.children() == []


def test_a_step_of_an_attempt_that_is_known_to_be_overtaken_is_not_kept(monkeypatch, disk):
    why = {1: "attempt 2 has begun without this machine"}
    gate = SimpleNamespace(told=lambda *_: None, refused=lambda attempt: why.get(attempt, ""))
    keeper = FakeKeeper(monkeypatch, {"local": disk}, gate)
    one = keeper.worker(0, 1)
    one.save(5, 81, tiers=(), each_step=True)
    keeper.run()
    assert [one.error for one in one.ended] == [why[1]]
    assert not keeper.committed
    assert not keeper.books.kept


def test_steps_that_are_kept_push_no_checkpoint_s_manifest_out(keeper):
    side = keeper.meet([0])
    one = keeper.worker(0, 2)
    part = RankOutcome(entry=PartEntry(2, ("0" * 32,), 0, 2), num_files=2)
    for serial in range(1, 22):
        tiers = ("local",) if serial == 1 else ()
        one.save(serial, serial, tiers=tiers, each_step=serial > 1)
        report(keeper, 1, part, step=serial, serial=serial)
        keeper.run()
    assert len(side.told) == 21
    past = keeper.saves.table.past
    assert [bool(past[1, serial].manifest) for serial in range(1, 22)] == (
        [True] + [False] * 4 + [True] * 16
    )


def test_what_is_held_is_passed_on_by_the_keepers_of_other_machines(keeper):
    side = keeper.meet([1])
    keeper.saves._copied = lambda attempt: 79
    two = keeper.worker(1, 2)
    two.save(5, 1, tiers=(), each_step=True)
    keeper.run()
    assert [one[3].held for one in side.reports] == [79]
    message = protocol.SaveOutcome(step=5, serial=1, manifest="?", size=1, held=64)
    keeper.saves.decided(hello(), message, ())
    keeper.run()
    assert side.wanted == [(5, 1)]
    assert keeper.saves.table.open[1, 1].held == 64


def test_rank_0s_refusal_may_come_before_this_machine_begins(keeper):
    side = keeper.meet([1])
    two = keeper.worker(1, 2)
    decide(keeper, error="rank 0: no space")
    two.save(5, 1)
    keeper.run()
    assert [ended.error for ended in two.ended] == ["rank 0: no space"]
    assert keeper.events == []  # the keeper of rank 0 has it on record
    assert keeper.saves.idle
    assert side.over == [1]


@pytest.mark.parametrize("sees_it", [True, False])
def test_the_other_machine_follows_rank_0s_commit(keeper, disk, monkeypatch, tmp_path, sees_it):
    side = keeper.meet([1])
    two = keeper.worker(1, 2)
    two.save(5, 1)
    keeper.run()
    ((_, _, rank, part),) = side.reports
    assert (rank, two.ended) == (1, [])
    first = FakeKeeper(monkeypatch, {"local": Directory(tmp_path / "first")})
    told = first.meet([0]).told
    one = first.worker(0, 2)
    one.save(5, 1)
    report(first, 1, part)
    first.run()
    ((_, data, _),) = told
    if sees_it:
        disk.put(f"{save_name(5)}/manifest.json", data)
    decide(keeper, data=data)
    assert side.wanted == ([] if sees_it else [(5, 1)])
    if not sees_it:
        assert two.ended == []
        keeper.saves.given(1, protocol.Root(step=5, serial=1), data)
        keeper.run()
    assert two.ended[0].error == ""
    assert disk.read(f"{save_name(5)}/manifest.json") == data
    assert save_name(5) in keeper.books.kept
    assert side.over == [1]


def test_what_was_reported_before_rank_0_was_known_is_reported_then(keeper):
    keeper.saves.know(1, [1])
    two = keeper.worker(1, 2)
    two.save(5, 1)
    keeper.run()
    side = keeper.meet([1])
    assert [rank for _, _, rank, _ in side.reports] == [1]
    ((step, serial, rank, _),) = keeper.saves.unanswered(1)
    assert (step, serial, rank) == (5, 1, 1)


def test_a_machine_that_is_gone_fails_what_it_has_not_reported_at_once(keeper, disk):
    side = keeper.meet([0])
    one = keeper.worker(0, 3)
    one.save(5, 1)
    report(keeper, 1, part_of_rank_1(disk, 5), world_size=3)
    keeper.saves.machine_gone(1, range(1, 3), "its keeper is gone")
    keeper.run()
    assert [ended.error for ended in one.ended] == ["rank 2: its keeper is gone"]
    assert [ended.error for ended, _, _ in side.told] == ["rank 2: its keeper is gone"]
    one.save(6, 2)
    report(keeper, 1, part_of_rank_1(disk, 6, 2), step=6, serial=2, world_size=2)
    keeper.saves.machine_gone(1, range(1, 2), "its keeper is gone")  # all is here: it is not needed
    report(keeper, 2, part_of_rank_1(disk, 6, 2), step=6, serial=2, world_size=3)
    keeper.run()
    assert is_committed(disk, 6)


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "begun"])
@pytest.mark.parametrize("lost", [range(1), range(1, 2)], ids=["of rank 0", "another"])
def test_nobody_waits_for_a_machine_that_is_given_up_for_lost(keeper, lost, is_whole):
    """Its connection is silent, and would be for a while; the next attempt needs what is here."""
    keeper.meet([1 - lost.start])
    mine = keeper.worker(1 - lost.start, 2)
    (mine.save if is_whole else mine.begin)(5, 1)
    keeper.run()
    keeper.saves.machine_lost(1, lost)
    keeper.run()
    (ended,) = mine.ended
    assert ended.error.endswith(LOST)
    assert keeper.saves.idle


def test_nobody_waits_for_a_keeper_of_rank_0_that_does_not_decide(keeper):
    keeper.meet([1])
    two = keeper.worker(1, 2)
    two.begin(5, 1)
    keeper.saves.left_alone(1, "rank 0 is silent")
    keeper.run()
    assert two.ended == []  # nothing is reported yet
    two.fill(5, 1)
    two.complete(5, 1)
    keeper.run()
    keeper.saves.left_alone(1, "rank 0 is silent")
    keeper.run()
    assert [ended.error for ended in two.ended] == ["rank 0 is silent"]
    ((event, fields),) = keeper.events
    assert (event, fields["reason"]) == ("save_skipped", "rank 0 is silent")


@pytest.mark.parametrize("can_ask", [True, False])
def test_only_where_replicas_differ_are_single_digests_asked_for(keeper, disk, can_ask):
    side = keeper.meet([0])
    side.can_ask = can_ask
    one = keeper.worker(0, 4)
    one.layout = msgspec.structs.replace(one.layout, groups={"a[0]": "all", "b[0]": "two"})
    one.begin(5, 1)
    one.fill(5, 1)
    one.complete(5, 1, {"a[0]": "1", "b[0]": "2"})
    keeper.run()
    mine = one.keeper.saves.table.open[1, 1].parts[0].replicas
    assert mine.keys() == {"all", "two"}
    report(keeper, 1, RankOutcome(replicas=mine), world_size=4)
    report(keeper, 2, RankOutcome(replicas={"all": mine["all"], "four": "x"}), world_size=4)
    report(keeper, 3, RankOutcome(replicas={"all": "another", "four": "x"}), world_size=4)
    keeper.run()
    assert side.asked == [(3, ("all",))]
    if can_ask:
        assert one.ended == []
        answer = protocol.Digests(step=5, serial=1, rank=3)
        keeper.saves.detailed(1, answer, {"a[0]": "9"})
        keeper.run()
    (ended,) = one.ended
    assert ended.void == (("a[0]",) if can_ask else ())
    assert ended.error.startswith("not the same on all ranks: ")
    assert not is_committed(disk, 5)


def test_a_machine_that_is_gone_is_not_waited_for_when_replicas_differ(keeper):
    keeper.meet([0])
    one = keeper.worker(0, 2)
    one.begin(5, 1)
    one.fill(5, 1)
    one.complete(5, 1, {"a[0]": "1"})
    report(keeper, 1, RankOutcome(replicas={"": "another"}))
    keeper.run()
    assert one.ended == []
    keeper.saves.machine_gone(1, range(1, 2), "gone")
    keeper.run()
    assert one.ended[0].error.startswith("not the same on all ranks")


def test_a_machine_names_the_single_digests_of_its_ranks(keeper):
    keeper.meet([1])
    two = keeper.worker(1, 2)
    two.layout = msgspec.structs.replace(two.layout, groups={"a[0]": "all", "b[0]": "two"})
    two.begin(5, 1)
    two.fill(5, 1)
    two.complete(5, 1, {"a[0]": "1", "b[0]": "2"})
    ask = protocol.Detail(step=5, serial=1, rank=1, groups=("two",))
    assert keeper.saves.digests_of(1, ask) == {"b[0]": "2"}


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
        written = [message.block for message in worker.peer.of(wire.BlockWritten)]
        assert written == list(range(block + 1))  # its place is free: the loop goes on
    worker.complete(5, 1)
    keeper.run()
    assert ("OSError" in worker.ended[0].error) == fails
    assert is_committed(disk, 5) != fails
    assert save_name(5) not in keeper.books.kept  # a ring holds no snapshot


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
    assert not disk.exists(f"{save_name(5)}/rank-00000.safetensors")


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
    assert save_name(5) not in keeper.books.kept


def test_memory_given_back_meanwhile_is_not_listed(keeper, disk):
    worker = keeper.worker()
    worker.save(5, 1)
    keeper.books.drop(worker.arena)
    keeper.run()
    assert is_committed(disk, 5)
    assert keeper.books.kept == {}


# --- a step that is there already ---------------------------------------------------------------


def test_a_step_that_is_saved_again_leaves_the_save_before_as_it_is(keeper, disk, tmp_path):
    worker = keeper.worker()
    worker.save(5, 1)
    keeper.run()
    before = files_of(disk, save_name(5))
    worker.begin(5, 2)
    worker.fill(5, 2)
    keeper.run()
    assert read_manifest(disk, 5).serial == 1, "the second has no manifest yet"
    worker.complete(5, 2)
    keeper.run()
    assert read_manifest(disk, 5).serial == 2
    assert files_of(disk, save_name(5)) == before
    verify(disk, save_of(5))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_zombie_of_an_older_attempt_takes_nothing_from_a_newer_one(keeper, disk, when):
    old, new = keeper.worker(attempt=1), keeper.worker(attempt=2)
    old.begin(5, 1)
    old.fill(5, 1)
    if when == "before":
        old.complete(5, 1)
        keeper.run()
    new.save(5, 1)
    keeper.run()
    before = files_of(disk, save_name(5, attempt=2))
    if when == "after":
        old.complete(5, 1)
        keeper.run()
    assert [one.ended[-1].error for one in (old, new)] == ["", ""]
    assert files_of(disk, save_name(5, attempt=2)) == before
    assert verify(disk, 5).attempt == 2
    assert verify(disk, save_of(5, attempt=1)).attempt == 1


def test_a_save_that_is_pruned_while_its_writer_is_paused_is_no_commit(keeper, disk):
    """Its files are gone when the manifest comes, and it may be the only one that is listed."""
    manifest = f"{save_name(5)}/{MANIFEST}"

    def pause(did, name):
        if (did, name) == ("put_new", manifest):
            assert remove_save(disk, save_of(5), is_unfinished=True)

    watched(keeper, disk, pause)
    worker = keeper.worker()
    worker.save(5, 1)
    keeper.run()
    assert [event for event, _ in keeper.events if event == "commit"] == []
    assert "was removed while this process was paused" in worker.ended[-1].error
    assert committed(disk) == []
    assert keeper.committed == []


def files_of(disk, name):
    return {file: disk.read(f"{name}/{file}") for file in disk.children(name)}
