"""Saving across ranks in threads, and reading back: each rank gets back what it had, to the bit."""

import builtins
import gc
import json
import pickle
import weakref

import msgspec
import pytest
import torch
from unit_checkpoints import read_flat
from unit_fakes import WatchedStorage, listing, same, same_tensor
from unit_names import save_name, save_of
from unit_saver import Attempt, captured, save_all, share_everything, small_blocks, written

from outlast.checkpoint.manifest import WEIGHTS, decode, encode
from outlast.checkpoint.tensors import ALIGNMENT
from outlast.storage import Directory
from whole_reads import load, verify

STEP = save_name(7)
MANIFEST = f"{STEP}/manifest.json"
DIFFERENT = ("model.running[0]",)


@pytest.fixture(name="_share_everything")
def _sharing(monkeypatch):
    share_everything(monkeypatch)


def state_of(rank, *, seed=0):
    """Replicated weights; batch-norm counters of its own on rank 1; random states of each rank."""
    generator = torch.Generator().manual_seed(seed)
    counters = torch.full((3,), 1.0 if rank != 1 else 5.0)
    return {
        "model": {
            "w": torch.rand(4, 3, generator=generator),
            "large": torch.rand(130, 130, generator=generator),
            "half": torch.ones(3, dtype=torch.bfloat16),
            "running": counters,
            "empty": torch.zeros(0, 2),
            "scalar": torch.tensor(1.5),
        },
        "optimizer": {"state": {"w": {"step": torch.tensor(7.0)}}, "lr": 0.1},
        "outlast": {"step": 7, "random": torch.arange(8, dtype=torch.uint8) + rank, "rank": rank},
    }


def states_of(world_size):
    return [state_of(rank) for rank in range(world_size)]


def loaded_state(storage, rank=0, step=7, **more):
    found = load(storage, step, rank=rank, **more)
    return {key: found.state(key) for key in found.data}


def assert_each_rank_gets_back(path, states):
    for rank, state in enumerate(states):
        assert same(state, loaded_state(Directory(path), rank))
        assert same(state, loaded_state(Directory(path), rank, everything=False))


def own_tensors(manifest):
    return {name for name in manifest.tensors if "@" in name}


def files_of(manifest, name):
    return {chunk.file for chunk in manifest.tensors[name].chunks}


# --- what comes back -----------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_rank_gets_back_what_it_saved(tmp_path, world_size):
    written(Directory(tmp_path), states_of(world_size))
    assert_each_rank_gets_back(tmp_path, states_of(world_size))
    found = verify(Directory(tmp_path), 7)
    assert (found.world_size, found.layout) == (world_size, {"world": world_size})
    assert (found.job, found.attempt, found.step) == ("job", 1, 7)
    assert (found.kind, found.exact) == ("full", True)


def test_what_is_saved_is_the_state_of_the_boundary(tmp_path):
    """What the loop does to it later is no part of it."""
    state = state_of(0)
    with Attempt(Directory(tmp_path), 1) as attempt:
        attempt.agree([captured(state)])
        attempt.savers[0].copy(captured(state))
        state["model"]["w"].zero_()
        attempt.savers[0].complete()
        assert attempt.savers[0].wait().error == ""
    assert same(state_of(0), loaded_state(Directory(tmp_path)))


def test_kind_and_narrow_dtypes_are_in_the_manifest(tmp_path):
    state = {"m": {"w": torch.tensor([1.0, 2.5])}}
    with Attempt(Directory(tmp_path), 1) as attempt:
        attempt.save([state], kind=WEIGHTS, narrow=frozenset({"m.w"}))
    manifest = verify(Directory(tmp_path), 7)
    assert (manifest.kind, manifest.exact, manifest.tensors["m.w"].dtype) == (
        WEIGHTS,
        False,
        "BF16",
    )


def test_small_tensors_are_every_ranks_and_large_ones_are_shared(tmp_path):
    """A comparison of what is smaller than 64 KiB costs more than writing it."""
    written(Directory(tmp_path), states_of(3))
    manifest = read_flat(Directory(tmp_path), 7)
    small = {f"model.{name}" for name in ("w", "half", "running", "empty", "scalar")}
    small.add("optimizer.state.w.step")
    own = {f"{name}@rank-{rank:05d}" for name in small for rank in (1, 2)}
    own |= {f"outlast.random@rank-{rank:05d}" for rank in range(3)}
    assert own_tensors(manifest) == own
    assert set(manifest.tensors) == own | small | {"model.large"}
    assert files_of(manifest, "model.large") == {"rank-00000.safetensors"}
    assert files_of(manifest, "model.running@rank-00001") == {"rank-00001.safetensors"}


@pytest.mark.parametrize("machines", [1, 3])
@pytest.mark.usefixtures("_share_everything")
def test_what_is_no_replica_is_found_before_the_commit_and_then_a_ranks_own(tmp_path, machines):
    with Attempt(Directory(tmp_path), 3, machines=machines) as attempt:
        results = attempt.save(states_of(3))
        assert [one.error for one in results] == [""] * 3
        for saver in attempt.savers:
            first, second = saver.ended
            assert (first.void, second.void) == (DIFFERENT, ())
            assert first.error == "not the same on all ranks: model.running[0]"
        events = [name for keeper in attempt.keepers for name, _ in keeper.events]
        assert events == ["commit"]  # a void one is no event
        attempt.save(states_of(3), step=8)
        assert [len(saver.ended) for saver in attempt.savers] == [3] * 3
    manifest = read_flat(Directory(tmp_path), 7)
    assert own_tensors(manifest) == {
        *("model.running@rank-00001", "model.running@rank-00002"),
        *(f"outlast.random@rank-{rank:05d}" for rank in range(3)),
    }
    assert_each_rank_gets_back(tmp_path, states_of(3))


@pytest.mark.usefixtures("_share_everything")
def test_replicas_are_dealt_out_and_written_once(tmp_path):
    """The largest first, each to the rank that has the least to write."""
    states = [{"m": {name: torch.ones(n) for name, n in zip("abcd", (9, 6, 4, 2), strict=True)}}]
    with Attempt(Directory(tmp_path), 2) as attempt:
        attempt.save(states * 2)
        assert [len(saver.ended) for saver in attempt.savers] == [1, 1]
    verify(Directory(tmp_path), 7)
    manifest = read_flat(Directory(tmp_path), 7)
    assert set(manifest.tensors) == {"m.a", "m.b", "m.c", "m.d"}
    files = {name: files_of(manifest, f"m.{name}") for name in "abcd"}
    first, second = {"rank-00000.safetensors"}, {"rank-00001.safetensors"}
    assert files == {"a": first, "b": second, "c": second, "d": first}
    assert_each_rank_gets_back(tmp_path, states * 2)


@pytest.mark.usefixtures("_share_everything")
def test_random_states_are_each_ranks_own_even_if_they_agree(tmp_path):
    """Ranks that were seeded alike; the next save may find them apart."""
    state = {"model": {"w": torch.ones(2)}, "outlast": {"random": torch.arange(8)}}
    written(Directory(tmp_path), [state, state])
    names = set(read_flat(Directory(tmp_path), 7).tensors)
    assert names == {"model.w", "outlast.random@rank-00000", "outlast.random@rank-00001"}
    assert_each_rank_gets_back(tmp_path, [state, state])


@pytest.mark.usefixtures("_share_everything")
def test_a_differing_tensor_may_have_any_name(tmp_path):
    names = ("a[0]", "b[", "]c", "d@rank-00000", "e~chunk-1")
    states = [{"m": {name: torch.ones(2) + rank for name in names}} for rank in range(2)]
    written(Directory(tmp_path), states)
    assert_each_rank_gets_back(tmp_path, states)


@pytest.mark.parametrize("shared", [True, False])
def test_a_tensor_differs_by_one_bit_of_zero(tmp_path, monkeypatch, shared):
    if shared:
        share_everything(monkeypatch)
    states = [{"m": {"w": torch.tensor([0.0])}}, {"m": {"w": torch.tensor([-0.0])}}]
    written(Directory(tmp_path), states)
    assert_each_rank_gets_back(tmp_path, states)


@pytest.mark.usefixtures("_share_everything")
def test_views_are_compared_as_what_they_show(tmp_path):
    """One rank's is transposed in memory, the other's is not: they are replicas all the same."""
    base = torch.rand(3, 4)
    states = [{"m": {"w": base.t()}}, {"m": {"w": base.t().contiguous()}}]
    with Attempt(Directory(tmp_path), 2) as attempt:
        assert [one.error for one in attempt.save(states)] == ["", ""]
        assert [one.void for one in attempt.savers[0].ended] == [()]
    assert_each_rank_gets_back(tmp_path, states)


@pytest.mark.usefixtures("_share_everything")
def test_ranks_with_other_names_keep_them(tmp_path):
    states = [
        {"m": {"a": torch.ones(2), "shape": torch.zeros(4), "kind": torch.zeros(4)}},
        {"m": {"b": torch.ones(3), "shape": torch.zeros(2, 2), "kind": torch.zeros(4).int()}},
    ]
    written(Directory(tmp_path), states)
    assert_each_rank_gets_back(tmp_path, states)
    manifest = read_flat(Directory(tmp_path), 7)
    assert own_tensors(manifest) == {"m.shape@rank-00001", "m.kind@rank-00001"}


@pytest.mark.usefixtures("_share_everything")
def test_a_rank_that_has_nothing_to_write_writes_no_tensors(tmp_path):
    states = [{"m": {"w": torch.ones(2)}, "n": rank} for rank in range(2)]
    written(Directory(tmp_path), states)
    assert listing(tmp_path / STEP) == [
        "manifest.json",
        "rank-00000.json",
        "rank-00000.part.json",
        "rank-00000.safetensors",
        "rank-00001.json",
        "rank-00001.part.json",
        "save.json",
    ]
    assert_each_rank_gets_back(tmp_path, states)


def test_state_without_tensors(tmp_path):
    (result,) = written(Directory(tmp_path), [{"counter": {"n": (1, 2)}}])
    assert result.num_files == 2
    assert loaded_state(Directory(tmp_path)) == {"counter": {"n": (1, 2)}}


@pytest.mark.parametrize("saved_by", [1, 2, 3])
@pytest.mark.parametrize("read_by", [1, 2, 5])
def test_another_number_of_ranks_reads_in_turn(tmp_path, saved_by, read_by):
    storage = Directory(tmp_path)
    written(storage, states_of(saved_by))
    for rank in range(read_by):
        found = load(storage, 7, rank=rank)
        assert found.source_rank == rank % saved_by
        assert same(state_of(rank % saved_by)["model"], found.state("model"))


def test_numbers_of_a_commit(tmp_path):
    results = written(Directory(tmp_path), states_of(2))
    files = [path for path in (tmp_path / STEP).iterdir() if path.name.startswith("rank-")]
    for result in results:
        assert result.num_files == len(files) + 1
        assert result.num_bytes == sum(path.stat().st_size for path in files)
        assert result.tier == "local"
        assert {"copy_s", "hash_s", "write_s", "sync_s", "commit_s"} <= set(result.timings)


def test_what_follows_a_commit_is_told_of_it_and_so_is_the_ledger(tmp_path):
    with Attempt(Directory(tmp_path), 2, attempt=3) as attempt:
        (ended, _) = attempt.save(states_of(2))
        (keeper,) = attempt.keepers
        (told,) = keeper.commits
        ((name, fields),) = keeper.events
    assert (sorted(told.ranks), told.tier, told.by_us) == ([0, 1], "local", True)
    assert told.data == (tmp_path / save_name(7, attempt=3) / "manifest.json").read_bytes()
    assert told.manifest == decode(told.data, save_of(7, attempt=3))
    assert name == "commit"
    assert (fields["attempt"], fields["step"], fields["kind"]) == (3, 7, "full")
    assert fields["save"] == save_name(7, attempt=3)
    assert (fields["tier"], fields["bytes"]) == (ended.tier, ended.num_bytes)
    assert fields["files"] == ended.num_files


def test_a_sharded_tensor_is_put_together(tmp_path):
    """Whatever the order in which the manifest names its chunks."""
    storage = Directory(tmp_path)
    written(storage, [{"m": {"w": torch.arange(12.0).view(4, 3)}}])
    manifest = read_flat(storage, 7)
    entry = manifest.tensors["m.w"]
    (whole,) = entry.chunks
    halves = [
        msgspec.structs.replace(
            whole,
            offsets=(row, 0),
            shape=(2, 3),
            start=whole.start + row * 12,
            end=whole.start + row * 12 + 24,
        )
        for row in (2, 0)
    ]
    entry = msgspec.structs.replace(entry, chunks=tuple(halves))
    storage.put(MANIFEST, encode(msgspec.structs.replace(manifest, tensors={"m.w": entry})))
    assert same_tensor(torch.arange(12.0).view(4, 3), load(storage, 7).tensor("m.w"))


def test_a_key_that_was_not_saved(tmp_path):
    written(Directory(tmp_path), [state_of(0)])
    with pytest.raises(KeyError):
        load(Directory(tmp_path), 7).state("scheduler")


# --- where it goes -------------------------------------------------------------------------------


def test_a_committed_snapshot_is_readable_in_memory_until_the_next_is_copied_over_it(tmp_path):
    with Attempt(Directory(tmp_path), 2) as attempt:
        attempt.save(states_of(2))
        memory = attempt.keepers[0].memory()
        for rank in range(2):
            assert same(state_of(rank), loaded_state(memory, rank))
        for name in set(listing(tmp_path / STEP)) - {"save.json"}:
            assert memory.read(f"{STEP}/{name}") == (tmp_path / STEP / name).read_bytes()
        attempt.agree([captured(state) for state in states_of(2)])
        attempt.savers[0].copy(captured(state_of(0, seed=1), 8))
        assert attempt.keepers[0].memory().children() == []


def test_memory_that_is_given_back_after_a_save_is_gone_at_once(tmp_path):
    """Nothing of the save looks at it, not even until the garbage is collected."""
    with Attempt(Directory(tmp_path), 2) as attempt:
        attempt.save(states_of(2))
        books = attempt.keepers[0].books
        arenas = [weakref.ref(arena) for arena in books.arenas.values()]
        for saver in attempt.savers:
            saver.forget()
        gc.disable()
        try:
            for number in list(books.arenas):
                books.drop(number)
            assert [arena() for arena in arenas] == [None, None]
        finally:
            gc.enable()


@pytest.mark.parametrize("tiers", [None, ()])
def test_a_save_for_no_storage_is_committed_to_memory(tmp_path, tiers):
    storages = {} if tiers is None else {"local": Directory(tmp_path)}
    with Attempt(storages, 2) as attempt:
        results = attempt.save(states_of(2), tiers=tiers)
        assert [(one.error, one.tier) for one in results] == [("", "")] * 2
        assert attempt.keepers[0].events == []  # it would not outlive the machine
        for rank in range(2):
            assert same(state_of(rank), loaded_state(attempt.keepers[0].memory(), rank))
    assert listing(tmp_path) == []


def test_a_save_goes_to_the_fastest_tier_that_it_is_for(tmp_path):
    tiers = {"fast": Directory(tmp_path / "fast"), "slow": Directory(tmp_path / "slow")}
    with Attempt(tiers, 1) as attempt:
        assert attempt.save([state_of(0)], step=7)[0].tier == "fast"
        assert attempt.save([state_of(0)], step=8, tiers=("slow",))[0].tier == "slow"
    assert verify(tiers["fast"], 7).step == 7
    assert verify(tiers["slow"], 8).step == 8
    assert not (tmp_path / "slow" / STEP).exists()


def test_machines_with_disks_of_their_own_have_the_manifest_each_and_their_ranks_files(tmp_path):
    """As the other's files are copied to it later, this is a checkpoint in both places."""
    disks = [Directory(tmp_path / "0"), Directory(tmp_path / "1")]
    with Attempt(disks, 4, machines=2) as attempt:
        assert [one.error for one in attempt.save(states_of(4))] == [""] * 4
        assert [[one.by_us for one in keeper.commits] for keeper in attempt.keepers] == [[True]] * 2
        assert [[name for name, _ in keeper.events] for keeper in attempt.keepers] == [
            ["commit"],
            [],
        ]
    assert (tmp_path / "0" / MANIFEST).read_bytes() == (tmp_path / "1" / MANIFEST).read_bytes()
    for machine in range(2):
        ranks = (2 * machine, 2 * machine + 1)
        names = {
            f"rank-{rank:05d}.{kind}"
            for rank in ranks
            for kind in ("json", "part.json", "safetensors")
        }
        assert set(listing(tmp_path / str(machine) / STEP)) == names | {
            "manifest.json",
            "save.json",
        }


@pytest.mark.parametrize("machines", [2, 3, 6])
def test_machines_with_a_directory_in_common_commit_once(tmp_path, machines):
    storage = WatchedStorage(Directory(tmp_path))
    written(storage, states_of(6), machines=machines)
    puts = [entry for entry in storage.log if entry[0] == "put_new"]
    assert puts == [("put_new", MANIFEST)]
    assert_each_rank_gets_back(tmp_path, states_of(6))


@pytest.mark.parametrize("shared", [True, False])
def test_what_does_not_fit_into_memory_goes_through_a_ring(tmp_path, monkeypatch, shared):
    small_blocks(monkeypatch, 4096)
    if shared:
        share_everything(monkeypatch)
    ring = 3 * 4096
    with Attempt(Directory(tmp_path), 2, ring_bytes=ring) as attempt:
        results = attempt.save(states_of(2))
        assert [one.error for one in results] == ["", ""]
        assert results[0].num_bytes > 4 * ring
        assert attempt.keepers[0].memory().children() == []  # it is not all there
    assert_each_rank_gets_back(tmp_path, states_of(2))


# --- the order of operations ---------------------------------------------------------------------


def test_the_note_comes_first_and_the_manifest_last(tmp_path):
    storage = WatchedStorage(Directory(tmp_path))
    written(storage, [state_of(0)])
    tensors, small = f"{STEP}/rank-00000.safetensors", f"{STEP}/rank-00000.json"
    assert storage.log == [
        ("put", f"{STEP}/save.json"),
        ("create", tensors),
        ("write_at", tensors),
        ("finish", tensors),
        ("create", small),
        ("write", small),
        ("finish", small),
        ("put_new", MANIFEST),
        ("exists", f"{STEP}/save.json"),  # nobody has pruned it while its writer was paused
    ]


@pytest.mark.parametrize("machines", [1, 3])
def test_the_manifest_comes_after_every_ranks_files_and_the_note_before_any(tmp_path, machines):
    storage = WatchedStorage(Directory(tmp_path))
    written(storage, states_of(3), machines=machines)
    order = [did for did, _ in storage.log if did in ("create", "finish", "put_new", "put")]
    assert order[0] == "put"
    assert order.count("put") >= machines, "each machine's keeper says whose it is"
    assert order[-1] == "put_new"
    assert [order.count(did) for did in ("create", "finish", "put_new")] == [9, 9, 1]


def test_the_small_state_is_written_when_the_copy_is_whole(tmp_path):
    """The shard is on its way before that, block by block."""
    storage = WatchedStorage(Directory(tmp_path))
    small = f"{STEP}/rank-00000.json"
    with Attempt(storage, 1) as attempt:
        given = captured(state_of(0))
        attempt.agree([given])
        attempt.savers[0].copy(given)
        assert ("create", small) not in storage.log
        attempt.savers[0].complete()
        attempt.savers[0].wait()
    assert storage.log.index(("create", small)) < storage.log.index(("put_new", MANIFEST))


# --- no pickle -----------------------------------------------------------------------------------


def test_no_pickle_is_read_or_written(tmp_path, monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("pickle was used")

    for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, forbidden)
    monkeypatch.setattr(torch, "load", forbidden)
    monkeypatch.setattr(torch, "save", forbidden)
    monkeypatch.setattr(builtins, "eval", forbidden)
    results = save_all(Directory(tmp_path), states_of(2))
    assert [(one.step, one.error) for one in results] == [(7, "")] * 2
    assert same(state_of(1), loaded_state(Directory(tmp_path), 1))


def test_everything_on_disk_is_text_or_safetensors(tmp_path):
    written(Directory(tmp_path), states_of(2))
    for path in sorted((tmp_path / STEP).iterdir()):
        data = path.read_bytes()
        if path.suffix == ".json":
            json.loads(data)
        else:
            assert data[8:9] == b"{"
            assert int.from_bytes(data[:8], "little") % ALIGNMENT == ALIGNMENT - 8
    assert decode((tmp_path / MANIFEST).read_bytes(), save_of(7)).step == 7
