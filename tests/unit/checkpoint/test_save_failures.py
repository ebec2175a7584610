"""Something fails in the middle of a save: all hear why, and the older checkpoint stands."""

import threading

import pytest
import torch
from unit_checkpoints import read_flat
from unit_fakes import WatchedStorage, listing, same
from unit_names import save_name
from unit_saver import (
    MAX_TRIES,
    Attempt,
    captured,
    errors_of,
    failing,
    how_often,
    no_pauses,
    save_all,
    share_everything,
    written,
)

from outlast.errors import CheckpointInvalid
from outlast.keeper import flight as files_room
from outlast.keeper import shared_saves
from outlast.storage import Directory
from whole_reads import load, verify

STEP = save_name(7)
MANIFEST = f"{STEP}/manifest.json"
NO_SPACE = "OSError: [Errno 28] No space left on device; free space there, keep fewer checkpoints"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    no_pauses(monkeypatch)


def state_of(rank, *, seed=0):
    """A tensor that is shared, small ones of each rank."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "m": {
            "large": torch.rand(130, 130, generator=generator),
            "small": torch.rand(3, generator=generator),
        },
        "outlast": {"random": torch.arange(8) + rank, "rank": rank},
    }


def states_of(world_size, **more):
    return [state_of(rank, **more) for rank in range(world_size)]


def loaded_state(path, rank=0, step=7):
    found = load(Directory(path), step, rank=rank)
    return {key: found.state(key) for key in found.data}


# --- the storage ---------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("operation", ["create", "write", "finish"])
@pytest.mark.parametrize("kind", ["safetensors", "json"])
def test_a_rank_that_cannot_write_leaves_no_manifest(tmp_path, world_size, operation, kind):
    did = "write_at" if (operation, kind) == ("write", "safetensors") else operation
    for failed in range(world_size):
        path = tmp_path / str(failed)
        file = f"rank-{failed:05d}.{kind}"
        storage = failing(path, file, did)
        results = save_all(storage, states_of(world_size))
        (error,) = errors_of(results)
        who = f"rank {failed}: " if world_size > 1 else ""
        assert error.startswith(who + NO_SPACE)
        assert how_often(storage, did, file) == 3
        assert not (path / MANIFEST).exists()
        if (path / STEP).exists():
            assert file not in listing(path / STEP)
        with pytest.raises(CheckpointInvalid, match=r"manifest\.json is missing"):
            load(Directory(path), 7)


@pytest.mark.parametrize("kind", ["safetensors", "json"])
def test_the_other_machines_hear_of_it_too(tmp_path, kind):
    for failed in range(4):
        path = tmp_path / str(failed)
        storage = failing(path, f"rank-{failed:05d}.{kind}", "create")
        with Attempt(storage, 4, machines=2) as attempt:
            (error,) = errors_of(attempt.save(states_of(4)))
            assert error.startswith(f"rank {failed}: {NO_SPACE}")
            first, second = [keeper.events for keeper in attempt.keepers]
        assert [(name, fields["error"]) for name, fields in first] == [("storage_error", error)]
        assert second == []  # the ledger is one: what it is told twice is counted twice
        assert not (path / MANIFEST).exists()


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_manifest_that_cannot_be_put_fails_every_rank(tmp_path, world_size):
    storage = failing(tmp_path, "manifest", "put_new")
    (error,) = errors_of(save_all(storage, states_of(world_size)))
    assert error.startswith(NO_SPACE)
    assert how_often(storage, "put_new", "manifest") == 3
    assert not (tmp_path / MANIFEST).exists()


@pytest.mark.parametrize(
    ("where", "operation"),
    [
        ("save.json", "put"),
        ("manifest", "put_new"),
        ("rank-00001.safetensors", "create"),
        ("rank-00001.safetensors", "write_at"),
        ("rank-00001.safetensors", "finish"),
        ("rank-00001.json", "create"),
        ("rank-00001.json", "write"),
        ("rank-00001.json", "finish"),
    ],
)
@pytest.mark.parametrize("times", [1, 2])
def test_what_fails_for_a_moment_is_done_again(tmp_path, where, operation, times):
    storage = failing(tmp_path, where, operation, OSError(5, "Input/output error"), times=times)
    with Attempt(storage, 2) as attempt:
        assert errors_of(attempt.save(states_of(2))) == {""}
        assert [name for name, _ in attempt.keepers[0].events] == ["commit"]
    verify(Directory(tmp_path), 7)
    for rank in range(2):
        assert same(state_of(rank), loaded_state(tmp_path, rank))
    assert listing(tmp_path / STEP) == [
        "manifest.json",
        *(
            f"rank-{rank:05d}.{kind}"
            for rank in range(2)
            for kind in ("json", "part.json", "safetensors")
        ),
        "save.json",
    ]


def test_between_tries_there_is_time_for_it_to_get_better(tmp_path, monkeypatch):
    pauses = []

    def later(delay_s, act):
        pauses.append(delay_s)
        threading.Thread(target=act, daemon=True).start()

    monkeypatch.setattr(files_room, "RETRY_S", (0.2, 1.0))
    monkeypatch.setattr(files_room, "later", later)
    (error,) = errors_of(save_all(failing(tmp_path, "safetensors", "finish"), states_of(1)))
    assert error.startswith(NO_SPACE)
    assert pauses == [0.2, 1.0]


def test_a_manifest_that_is_there_although_putting_it_failed_is_the_commit(tmp_path):
    """The answer was lost on the way: the bytes that lie there are ours."""

    class Loses(Directory):
        def put_new(self, name, data):
            if super().put_new(name, data):
                raise TimeoutError("no answer")
            return False

    with Attempt(Loses(tmp_path), 2) as attempt:
        assert errors_of(attempt.save(states_of(2))) == {""}
        assert [name for name, _ in attempt.keepers[0].events] == ["commit"]
    verify(Directory(tmp_path), 7)


def test_another_writer_who_was_faster_is_not_written_over(tmp_path):
    class Late(Directory):
        def put_new(self, name, data):
            super().put(name, b"theirs")
            return super().put_new(name, data)

    storage = WatchedStorage(Late(tmp_path))
    (error,) = errors_of(save_all(storage, states_of(2)))
    assert "another manifest is there already" in error
    assert how_often(storage, "put_new", "manifest") == 1
    assert (tmp_path / MANIFEST).read_bytes() == b"theirs"


@pytest.mark.parametrize("failed", [0, 1, 2])
@pytest.mark.parametrize("kind", ["safetensors", "json"])
@pytest.mark.parametrize("error", [MemoryError("no"), ValueError("no"), RuntimeError("no")])
def test_whatever_a_rank_fails_with_nobody_waits_for_it(tmp_path, failed, kind, error):
    storage = failing(tmp_path, f"rank-{failed:05d}.{kind}", "create", error)
    results = save_all(storage, states_of(3))
    assert errors_of(results) == {f"rank {failed}: {type(error).__name__}: no"}
    assert not (tmp_path / MANIFEST).exists()


@pytest.mark.parametrize("machines", [1, 2])
@pytest.mark.parametrize("where", ["rank-00000.json", "rank-00001.json"])
def test_an_error_whose_path_is_not_utf8_is_told_too(tmp_path, where, machines):
    error = FileNotFoundError("No such file or directory: /data/\udcff")
    storage = failing(tmp_path, where, "create", error)
    (told,) = errors_of(save_all(storage, states_of(2), machines=machines))
    assert told.endswith("No such file or directory: /data/\\udcff")


@pytest.mark.parametrize("machines", [1, 2])
def test_a_commit_that_fails_in_an_unexpected_way_is_nobodys_commit(tmp_path, machines):
    storage = failing(tmp_path, "manifest", "put_new", MemoryError())
    results = save_all(storage, states_of(2), machines=machines)
    assert errors_of(results) == {"MemoryError: "}
    assert not (tmp_path / MANIFEST).exists()


def test_the_ledger_has_the_storages_errors(tmp_path):
    with Attempt(failing(tmp_path, "rank-00001.json", "create"), 2, attempt=4) as attempt:
        (error,) = errors_of(attempt.save(states_of(2)))
        assert attempt.keepers[0].events == [
            (
                "storage_error",
                {
                    "attempt": 4,
                    "operation": "save",
                    "path": str(tmp_path),
                    "error": error,
                    "step": 7,
                },
            )
        ]


def test_a_save_ends_only_when_none_of_its_files_is_written_any_more(tmp_path):
    """The next one may be of the same step, and what comes late would replace its files."""
    is_slow, go_on, all_tried = threading.Event(), threading.Event(), threading.Event()
    tries = []

    def fail(did, name):
        if did == "finish" and name.endswith("rank-00000.safetensors"):
            is_slow.set()
            assert go_on.wait(20)
        if did == "create" and name.endswith("rank-00001.json"):
            tries.append(name)
            if len(tries) == 3:
                all_tried.set()
            return OSError(5, "Input/output error")
        return None

    with Attempt(WatchedStorage(Directory(tmp_path), fail), 2) as attempt:
        savers, (keeper,) = begun(attempt, [0, 1]), attempt.keepers
        assert is_slow.wait(20)
        savers[1].complete()
        assert all_tried.wait(20)
        for _ in range(2):  # until the other thread of the pool has done all that follows from it
            turn = threading.Event()
            keeper.pool.put(turn.set)
            assert turn.wait(20)
        assert not keeper.saves.idle
        go_on.set()
        assert errors_of([saver.wait() for saver in savers]) == {
            "rank 1: OSError: [Errno 5] Input/output error"
        }
        assert keeper.saves.idle
    assert not (tmp_path / MANIFEST).exists()


# --- ranks ---------------------------------------------------------------------------------------


def begun(attempt, ranks):
    """These ranks have begun to copy; nothing is whole."""
    given = [captured(state) for state in states_of(len(attempt.savers))]
    attempt.agree(given)
    for rank in ranks:
        attempt.savers[rank].copy(given[rank])
    return [attempt.savers[rank] for rank in ranks]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_rank_that_is_lost_during_its_copy_is_named(tmp_path, lost):
    with Attempt(Directory(tmp_path), 3) as attempt:
        savers = begun(attempt, range(3))
        for saver in savers:
            if saver.rank != lost:
                saver.complete()
        savers[lost].die()
        results = [saver.wait() for saver in savers if saver.rank != lost]
        assert errors_of(results) == {f"rank {lost}: rank {lost} was lost during its copy"}
        assert [name for name, _ in attempt.keepers[0].events] == ["save_skipped"]
    assert not (tmp_path / MANIFEST).exists()


def test_a_rank_that_is_lost_before_it_begins_is_named(tmp_path):
    with Attempt(Directory(tmp_path), 3) as attempt:
        savers = begun(attempt, [0, 1])
        attempt.savers[2].die()
        assert errors_of([saver.wait() for saver in savers]) == {
            "rank 2: rank 2 was lost during its copy"
        }
    assert not (tmp_path / MANIFEST).exists()


def test_a_rank_that_is_lost_after_its_copy_has_lost_nothing(tmp_path):
    with Attempt(Directory(tmp_path), 3) as attempt:
        savers = begun(attempt, range(3))
        for saver in savers:
            saver.complete()
            saver.die()
        attempt.keepers[0].saves.nobody_is_left()
        assert errors_of([saver.wait() for saver in savers]) == {""}
    for rank in range(3):
        assert same(state_of(rank), loaded_state(tmp_path, rank))


@pytest.mark.parametrize("began", [[0], [1], [1, 2]])
def test_ranks_that_never_begin_are_not_waited_for_when_nobody_is_left(tmp_path, began):
    with Attempt(Directory(tmp_path), 3) as attempt:
        savers = begun(attempt, began)
        for saver in savers:
            saver.complete()
        attempt.keepers[0].saves.nobody_is_left()
        assert errors_of([saver.wait() for saver in savers]) == {
            "its workers ended before the snapshot was whole"
        }
        assert attempt.keepers[0].saves.idle
    assert not (tmp_path / MANIFEST).exists()


def test_the_next_attempt_does_not_wait_for_ranks_of_the_one_before(tmp_path):
    with Attempt(Directory(tmp_path), 2) as attempt:
        savers = begun(attempt, [0])
        attempt.keepers[0].saves.wait_for_earlier(2, 20.0)
        assert errors_of([saver.wait() for saver in savers]) == {
            "its attempt ended before the commit"
        }


@pytest.mark.parametrize("machines", [1, 3])
@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_rank_without_a_snapshot_tells_why(tmp_path, machines, who):
    with Attempt(Directory(tmp_path), 3, machines=machines) as attempt:
        others = begun(attempt, [rank for rank in range(3) if rank != who])
        for saver in others:
            saver.complete()
        attempt.savers[who].refuse(7, "its GPU is on fire")
        results = [saver.wait() for saver in attempt.savers]
        assert errors_of(results) == {f"rank {who}: its GPU is on fire"}
    assert not (tmp_path / MANIFEST).exists()


@pytest.fixture(name="_short")
def _short_timeouts(monkeypatch):
    limits = shared_saves.SaveLimits(gone_s=0.1, absent_s=0.1, stall_s=0.2, late_s=0.3)
    monkeypatch.setattr(shared_saves.SaveLeader, "limits", limits)
    monkeypatch.setattr(shared_saves, "LOOK_S", 0.05)


@pytest.mark.usefixtures("_short")
def test_another_machine_that_is_never_heard_of_is_named(tmp_path):
    with Attempt(Directory(tmp_path), 2, machines=2) as attempt:
        (saver,) = begun(attempt, [0])
        saver.complete()
        (error,) = errors_of([saver.wait()])
        assert error == "rank 1: it has not got on for 0 s"
    assert not (tmp_path / MANIFEST).exists()


@pytest.mark.usefixtures("_short")
def test_rank_0_is_never_heard_of(tmp_path):
    with Attempt(Directory(tmp_path), 2, machines=2) as attempt:
        (saver,) = begun(attempt, [1])
        saver.complete()
        (error,) = errors_of([saver.wait()])
        assert error == "rank 0: it has not got on for 0 s"
    assert not (tmp_path / MANIFEST).exists()


# --- snapshots that are void ---------------------------------------------------------------------


@pytest.mark.parametrize("machines", [1, 2])
def test_a_tensor_that_changes_under_the_copy_is_never_committed(tmp_path, machines):
    """The snapshot is taken again, and then nothing is left for later."""
    states = states_of(2)
    given = [captured(state) for state in states]
    touched = states[1]["m"]["large"]
    given[1] = given[1]._replace(lazy=frozenset({"m.large"}), between=lambda: touched.add_(1.0))
    with Attempt(Directory(tmp_path), 2, machines=machines) as attempt:
        attempt.agree(given)
        for saver, one in zip(attempt.savers, given, strict=True):
            saver.begin(one)
        for saver in attempt.savers:
            ended = saver.wait()
            assert ended.void == ("m.large",)
            assert ended.error == "rank 1: m.large changed under the copy"
        assert not (tmp_path / MANIFEST).exists()
        assert [keeper.events for keeper in attempt.keepers] == [[]] * machines
        states[0]["m"]["large"].add_(1.0)
        again = [one._replace(between=None) for one in given]
        assert errors_of(attempt.save(again)) == {""}
    for rank in range(2):
        assert same(states[rank], loaded_state(tmp_path, rank))


def test_what_goes_on_changing_is_given_up(tmp_path):
    state = state_of(0)
    given = captured(
        state,
        lazy=frozenset({"m.large"}),
        between=lambda: state["m"]["large"].add_(1.0),
    )
    with Attempt(Directory(tmp_path), 1) as attempt:
        attempt.agree([given])
        (saver,) = attempt.savers
        for _ in range(MAX_TRIES):
            saver.begin(given)
            assert saver.wait().void == ("m.large",)
    assert not (tmp_path / MANIFEST).exists()


def test_a_replica_that_goes_its_own_way_later_is_found(tmp_path, monkeypatch):
    """Also when it was the same in the saves before."""
    share_everything(monkeypatch)
    with Attempt(Directory(tmp_path), 2) as attempt:
        attempt.save(states_of(2), step=6)
        states = states_of(2)
        states[1]["m"]["large"][0, 0] += 1
        assert errors_of(attempt.save(states)) == {""}
        assert [one.void for one in attempt.savers[0].ended] == [(), ("m.large[0,0]",), ()]
    for rank in range(2):
        assert same(states[rank], loaded_state(tmp_path, rank))
    assert "m.large@rank-00001" in read_flat(Directory(tmp_path), 7).tensors
    assert "m.large@rank-00001" not in read_flat(Directory(tmp_path), 6).tensors


# --- what lies there already ---------------------------------------------------------------------


@pytest.mark.parametrize("machines", [1, 2])
def test_the_same_step_again_after_a_failure(tmp_path, machines):
    troubles = {"rank-00001.safetensors"}

    def fail(did, name):
        if did == "finish" and name.rpartition("/")[2] in troubles:
            return OSError(5, "Input/output error")
        return None

    with Attempt(WatchedStorage(Directory(tmp_path), fail), 2, machines=machines) as attempt:
        (error,) = errors_of(attempt.save(states_of(2)))
        assert "Input/output error" in error
        troubles.clear()
        assert errors_of(attempt.save(states_of(2, seed=1))) == {""}
    for rank in range(2):
        assert same(state_of(rank, seed=1), loaded_state(tmp_path, rank))


def test_the_older_commit_stands_when_the_newer_one_fails(tmp_path):
    written(Directory(tmp_path), states_of(2), step=3)
    results = save_all(failing(tmp_path, "rank-00001.json", "create"), states_of(2), step=7)
    assert "" not in errors_of(results)
    assert same(state_of(1), loaded_state(tmp_path, 1, step=3))
    verify(Directory(tmp_path), 3)


@pytest.mark.parametrize("lies", [None, b"", b"torn", b'{"format": 99}'])
def test_a_step_that_is_saved_again_is_the_new_save_and_leaves_the_old_one(tmp_path, lies):
    written(Directory(tmp_path), states_of(3))
    if lies is not None:
        (tmp_path / MANIFEST).write_bytes(lies)
    before = contents(tmp_path / STEP)
    written(Directory(tmp_path), states_of(2, seed=1), attempt=2)
    for rank in range(2):
        assert same(state_of(rank, seed=1), loaded_state(tmp_path, rank))
    assert verify(Directory(tmp_path), 7).world_size == 2
    assert contents(tmp_path / STEP) == before


@pytest.mark.parametrize("where", ["rank-00001.safetensors", "rank-00000.json", "manifest"])
def test_when_saving_a_step_again_fails_the_save_before_is_the_steps(tmp_path, where):
    written(Directory(tmp_path), states_of(2))
    before = contents(tmp_path / STEP)
    operation = "put_new" if where == "manifest" else "finish"
    storage = failing(tmp_path, where, operation)
    assert errors_of(save_all(storage, states_of(2, seed=1), attempt=2)) != {""}
    assert contents(tmp_path / STEP) == before
    for rank in range(2):
        assert same(state_of(rank), loaded_state(tmp_path, rank))


@pytest.mark.parametrize("machines", [1, 2])
def test_what_a_later_attempt_has_committed_is_not_touched_by_an_older_one(tmp_path, machines):
    written(Directory(tmp_path), states_of(2), attempt=3)
    name = save_name(7, attempt=3)
    before = contents(tmp_path / name)
    written(Directory(tmp_path), states_of(2, seed=1), attempt=2, machines=machines)
    assert contents(tmp_path / name) == before
    for rank in range(2):
        assert same(state_of(rank), loaded_state(tmp_path, rank)), "the later attempt's counts"


def contents(path):
    return {name: (path / name).read_bytes() for name in listing(path)}
