"""DCP on Outlast's checkpoints, in one process: what it gives back, what it saves and refuses."""

import builtins
import copy
import json
import pickle
import threading

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_state import (
    SHARD,
    STEP,
    blank,
    flip,
    loaded_state,
    refused,
    saved_by_ranks,
    saved_state,
    state_of,
)
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from unit_fakes import WatchedStorage, same, same_tensor
from unit_names import save_name

import outlast
from outlast.checkpoint.dcp import StorageReader, StorageWriter
from outlast.checkpoint.export import export
from outlast.checkpoint.manifest import encode, write_hashed
from outlast.checkpoint.transfer import read_manifest
from outlast.errors import CheckpointInvalid, ConfigError, StorageError
from outlast.storage import Directory
from whole_reads import load, verify

pytestmark = pytest.mark.filterwarnings("ignore:.*single process.*")  # DCP says so each time


# --- what comes back -----------------------------------------------------------------------------


def test_what_dcp_saves_dcp_loads_to_the_bit(tmp_path):
    state = saved_state(tmp_path)
    assert same(state, loaded_state(tmp_path))


def test_what_dcp_saves_is_an_outlast_checkpoint(tmp_path):
    state = saved_state(tmp_path)
    storage = Directory(tmp_path)
    manifest = verify(storage, 7)
    assert (manifest.world_size, manifest.step) == (1, 7)
    found = load(storage, 7)
    assert same(state, {key: found.state(key) for key in found.data})
    tensors = load_file(tmp_path / SHARD)
    assert same_tensor(tensors["model.BF16"], state["model"]["BF16"])
    assert (tmp_path / STEP).joinpath("rank-00000.json").is_file()


def test_a_state_dict_without_levels(tmp_path):
    state = {"layers.0.w": torch.ones(3), "n": 3, "$": torch.zeros(2)}
    dcp.save(state, storage_writer=outlast.dcp_writer(tmp_path, 1))
    other = {"layers.0.w": torch.zeros(3), "n": 0, "$": torch.ones(2)}
    dcp.load(other, storage_reader=outlast.dcp_reader(tmp_path))
    assert same(state, other)


def test_an_empty_target_is_built_from_the_metadata(tmp_path):
    state = saved_state(tmp_path)

    def plan(_):
        return _load_state_dict_from_keys(storage_reader=outlast.dcp_reader(tmp_path))

    found = plan(None)
    assert same(state["optimizer"], found["optimizer"])
    assert same_tensor(state["model"]["w"], found["model"]["w"])


def test_only_what_is_asked_for_is_read(tmp_path):
    saved_state(tmp_path)
    target = {"model": {"w": torch.zeros(4, 3)}}
    dcp.load(target, storage_reader=outlast.dcp_reader(tmp_path))
    assert same_tensor(target["model"]["w"], state_of()["model"]["w"])


def test_a_target_of_another_dtype_and_stride_is_filled_by_value(tmp_path):
    state = saved_state(tmp_path)
    target = {"model": {"w": torch.zeros(3, 4, dtype=torch.float64).t()}}
    dcp.load(target, storage_reader=outlast.dcp_reader(tmp_path))
    assert torch.equal(target["model"]["w"], state["model"]["w"].double())


def test_optimizers_and_models_as_torch_hands_them_out(tmp_path):
    def built():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer

    def step(model, optimizer):
        model(torch.ones(2, 3) * torch.arange(2)[:, None]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = built()
    step(model, optimizer)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save(
        {"model": weights, "optimizer": moments}, storage_writer=outlast.dcp_writer(tmp_path, 1)
    )
    other, other_optimizer = built()
    weights, moments = get_state_dict(other, other_optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, storage_reader=outlast.dcp_reader(tmp_path))
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    step(model, optimizer)
    step(other, other_optimizer)
    assert same(dict(model.state_dict()), dict(other.state_dict()))


def test_each_rank_reads_what_was_its_own(tmp_path):
    states = [
        {"model": {"w": torch.ones(3)}, "outlast": {"rng": torch.arange(4) + rank, "n": rank}}
        for rank in range(2)
    ]
    saved_by_ranks(tmp_path, states)
    for rank in range(4):
        found = blank(states[0])
        dcp.load(found, storage_reader=outlast.dcp_reader(tmp_path, rank=rank))
        assert same(states[rank % 2], found)


def test_layers_that_only_another_rank_has_are_there_for_all(tmp_path):
    states = [
        {
            "model": {f"layer.{rank}": torch.full((3,), float(rank))},
            "optimizer": {"state": {}, "param_groups": [{"lr": 0.1, "params": [f"layer.{rank}"]}]},
        }
        for rank in range(2)
    ]
    saved_by_ranks(tmp_path, states)
    for rank in range(2):
        found = {"model": {f"layer.{other}": torch.zeros(3) for other in range(2)}}
        found["optimizer"] = {"param_groups": [{"lr": 0, "params": []}]}
        dcp.load(found, storage_reader=outlast.dcp_reader(tmp_path, rank=rank))
        assert [found["model"][f"layer.{other}"][0].item() for other in range(2)] == [0.0, 1.0]
        group = found["optimizer"]["param_groups"][0]
        assert sorted(group["params"]) == ["layer.0", "layer.1"]


def test_what_was_stored_narrower_comes_back_in_its_own_dtype(tmp_path):
    half = torch.ones(3, dtype=torch.bfloat16)
    state = {"m": {"v": half, "pair": (half,)}}
    dcp.save(state, storage_writer=outlast.dcp_writer(tmp_path, 7))
    storage = Directory(tmp_path)
    path = tmp_path / STEP / "rank-00000.json"
    small = json.loads(path.read_bytes())
    for node in (small["state"]["m"]["v"], small["state"]["m"]["pair"]["items"][0]):
        node["dtype"] = "float32"
    entry = write_hashed(storage, f"{STEP}/rank-00000.json", [json.dumps(small).encode()])
    manifest = read_manifest(storage, 7)
    files = manifest.files | {"rank-00000.json": entry}
    storage.put(f"{STEP}/manifest.json", encode(msgspec.structs.replace(manifest, files=files)))
    found = _load_state_dict_from_keys(storage_reader=outlast.dcp_reader(tmp_path))
    assert same(found["m"], {"v": torch.ones(3), "pair": (torch.ones(3),)})
    export(storage, 7, "torch", tmp_path / "out")
    found = torch.load(tmp_path / "out" / "state.pt", weights_only=True)
    assert same(found["m"], {"v": torch.ones(3), "pair": (torch.ones(3),)})


# --- which checkpoint ----------------------------------------------------------------------------


def test_the_newest_that_verifies_is_read_unless_a_step_is_given(tmp_path, caplog):
    for step in (1, 2, 3):
        saved_state(tmp_path, step=step, seed=step)
    assert same(state_of(3), loaded_state(tmp_path))
    assert same(state_of(2), loaded_state(tmp_path, step=2))
    assert same(state_of(1), loaded_state(tmp_path / save_name(1, attempt=0)))
    flip(tmp_path / save_name(3, attempt=0) / "manifest.json", 60)
    assert same(state_of(2), loaded_state(tmp_path))
    assert "step 3 is not valid" in caplog.text


def test_nothing_to_read_is_said_in_words(tmp_path):
    with pytest.raises(ConfigError, match="there is no checkpoint in"):
        outlast.dcp_reader(tmp_path)
    with pytest.raises(CheckpointInvalid, match=r"manifest\.json is missing"):
        outlast.dcp_reader(tmp_path, step=3)
    with pytest.raises(ConfigError, match="not a job's directory, so it has no tier 'local'"):
        outlast.dcp_reader(tmp_path, tier="local")


def test_a_jobs_tiers_and_other_tiers(tmp_path, monkeypatch):
    from outlast import config
    from outlast.checkpoint.catalog import open_job

    job = tmp_path / "job"
    tiers = "".join(
        f'[[tier]]\nname = "{name}"\nurl = "{tmp_path / name}"\n' for name in ("fast", "slow")
    )
    (tmp_path / "outlast.toml").write_text(tiers)
    monkeypatch.chdir(tmp_path)
    opened = open_job(job, config.load({"dir": str(job)}))
    saved_state(job, step=7)
    assert read_manifest(Directory(tmp_path / "fast"), 7).job == opened.id
    dcp.save(
        state_of(8), storage_writer=StorageWriter(Directory(tmp_path / "slow"), 8, job=opened.id)
    )
    saved_state(tmp_path / "slow", step=9, seed=9)
    assert same(state_of(8), loaded_state(job)), "step 9 is not this job's"
    assert same(state_of(0), loaded_state(job, tier="fast"))
    with pytest.raises(ConfigError, match=r"'nowhere' is not a tier .* known: fast, slow"):
        outlast.dcp_reader(job, tier="nowhere")
    # Beside another job's settings it is still found where it was saved to.
    (tmp_path / "outlast.toml").write_text(f'[[tier]]\nname = "fast"\nurl = "{tmp_path / "its"}"\n')
    assert same(state_of(8), loaded_state(job))


def test_another_path_in_the_load_call(tmp_path):
    for step in (1, 2):
        saved_state(tmp_path / str(step), step=step, seed=step)
    reader = outlast.dcp_reader(tmp_path / "1")
    found = blank(state_of())
    dcp.load(found, storage_reader=reader, checkpoint_id=tmp_path / "2")
    assert same(state_of(2), found)
    assert StorageReader.validate_checkpoint_id(tmp_path)


# --- no pickle -----------------------------------------------------------------------------------


def test_saving_uses_no_pickle(tmp_path, monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("pickle was used")

    for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, forbidden)
    monkeypatch.setattr(torch, "load", forbidden)
    monkeypatch.setattr(torch, "save", forbidden)
    monkeypatch.setattr(builtins, "eval", forbidden)
    saved_state(tmp_path)
    outlast.dcp_reader(tmp_path).read_metadata()


def test_nothing_that_is_read_is_unpickled(tmp_path, monkeypatch):
    """torch's planner wants torch.save's bytes: only those that were made in memory are loaded."""
    made, load_pickle = [], torch.load
    save_pickle = torch.save
    monkeypatch.setattr(torch, "save", lambda value, to: (made.append(to), save_pickle(value, to)))

    def watched(source, **more):
        assert any(source is one for one in made)
        return load_pickle(source, **more)

    state = saved_state(tmp_path)
    monkeypatch.setattr(torch, "load", watched)
    assert same(state, loaded_state(tmp_path))
    assert made


# --- saving ---------------------------------------------------------------------------------------


# --- what is refused -----------------------------------------------------------------------------


REFUSED = {
    "an object": ({"m": {"f": threading.Lock()}}, "m.f is a _thread.lock, which cannot be saved"),
    "a dtype": ({"m": torch.ones(2, dtype=torch.complex128)}, "m has dtype torch.complex128"),
    "a sparse tensor": ({"m": torch.ones(2, 2).to_sparse()}, "m is a torch.sparse_coo tensor"),
    "a name": ({"m@rank-00001": torch.ones(2)}, "kept for a rank's own"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_saved_is_refused_in_a_line(tmp_path, what):
    state, message = REFUSED[what]
    error = refused(lambda: dcp.save(state, storage_writer=outlast.dcp_writer(tmp_path, 7)))
    assert isinstance(error, ConfigError)
    assert message in str(error)
    assert "\n" not in str(error)
    assert not (tmp_path / STEP / "manifest.json").exists()


@pytest.mark.parametrize("step", [-1, True, 1.0, 10**12])
def test_what_is_not_a_step(tmp_path, step):
    with pytest.raises(ConfigError, match="is not the number of a step"):
        outlast.dcp_writer(tmp_path, step)


def test_a_committed_step_is_not_saved_over_unless_asked(tmp_path):
    state = saved_state(tmp_path)
    error = refused(lambda: saved_state(tmp_path, seed=1))
    assert isinstance(error, ConfigError)
    assert "is committed already" in str(error)
    assert same(state, loaded_state(tmp_path))
    other = saved_state(tmp_path, seed=1, overwrite=True)
    assert same(other, loaded_state(tmp_path))


def test_what_a_writer_does_not_do(tmp_path):
    state = {"m": torch.ones(1)}
    writer = outlast.dcp_writer(tmp_path, 7)
    with pytest.raises(ConfigError, match="leave checkpoint_id out"):
        dcp.save(state, storage_writer=writer, checkpoint_id="elsewhere")
    with pytest.raises(ConfigError, match="use_collectives=False"):
        dcp.save(state, storage_writer=writer, use_collectives=False)
    assert not StorageWriter.validate_checkpoint_id(tmp_path)


def test_a_planner_that_keeps_its_state_to_itself(tmp_path):
    class Closed(dcp.DefaultSavePlanner):
        lookup_object = None

    error = refused(
        lambda: dcp.save({"n": 1}, storage_writer=outlast.dcp_writer(tmp_path, 7), planner=Closed())
    )
    assert "Closed does not tell what it saves" in str(error)


def test_a_planner_that_changes_tensors_is_obeyed(tmp_path):
    class Doubling(dcp.DefaultSavePlanner):
        def transform_object(self, write_item, item):
            return item * 2 if isinstance(item, torch.Tensor) else item

    state = {"m": torch.arange(3.0), "n": 3}
    writer = outlast.dcp_writer(tmp_path, 7)
    dcp.save(state, storage_writer=writer, planner=Doubling())
    found = {"m": torch.zeros(3), "n": 0}
    dcp.load(found, storage_reader=outlast.dcp_reader(tmp_path))
    assert found["m"].tolist() == [0.0, 2.0, 4.0]
    assert found["n"] == 3


def test_a_planner_that_does_not_flatten(tmp_path):
    state = state_of()
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, storage_writer=outlast.dcp_writer(tmp_path, 7), planner=planner)
    assert same(state, loaded_state(tmp_path))


# --- the order of things -------------------------------------------------------------------------


def watched_save(storage, state, step=7, **more):
    dcp.save(state, storage_writer=StorageWriter(storage, step, **more))


def test_the_manifest_comes_last_and_all_else_is_durable_before(tmp_path):
    storage = WatchedStorage(Directory(tmp_path))
    watched_save(storage, state_of())
    done = [(op, name) for op, name in storage.log if op in ("finish", "put_new", "put")]
    assert done[-1] == ("put_new", f"{STEP}/manifest.json")
    assert done[0] == ("put", f"{STEP}/save.json")
    assert {name for _, name in done[1:-1]} == {SHARD, f"{STEP}/rank-00000.json"}


def test_what_is_overwritten_stands_until_the_new_one_does_and_goes_then(tmp_path):
    saved_state(tmp_path)
    storage = WatchedStorage(Directory(tmp_path))
    watched_save(storage, state_of(1), overwrite=True)
    new = save_name(7, attempt=0, serial=2)
    changes = [one for one in storage.log if one[0] in ("put", "create", "put_new", "remove")]
    assert changes.index(("put_new", f"{new}/manifest.json")) == len(changes) - 2
    assert changes[-1] == ("remove", f"{STEP}/manifest.json")
    assert Directory(tmp_path).children() == [new]
    assert same(state_of(1), loaded_state(tmp_path))


@pytest.mark.parametrize("what", ["create", "write", "finish", "put_new"])
def test_an_overwrite_that_fails_leaves_what_it_was_to_replace(tmp_path, what):
    state = saved_state(tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / STEP).iterdir()}
    trouble = OSError(28, "No space left on device")
    storage = WatchedStorage(Directory(tmp_path), lambda did, _: trouble if did == what else None)
    assert refused(lambda: watched_save(storage, state_of(1), overwrite=True)) is trouble
    assert before == {path: path.read_bytes() for path in (tmp_path / STEP).iterdir()}
    assert same(state, loaded_state(tmp_path))
    saved_state(tmp_path, seed=2, overwrite=True)
    assert same(state_of(2), loaded_state(tmp_path))
    assert len(Directory(tmp_path).children()) == 1, "what the failed one left is gone as well"


@pytest.mark.parametrize("what", ["create", "write", "finish", "put_new"])
def test_a_save_that_fails_leaves_the_older_commit_in_force(tmp_path, what):
    state = saved_state(tmp_path, step=3)
    trouble = OSError(28, "No space left on device")
    storage = WatchedStorage(Directory(tmp_path), lambda did, _: trouble if did == what else None)
    assert refused(lambda: watched_save(storage, state_of(1))) is trouble
    assert same(state, loaded_state(tmp_path))
    watched_save(Directory(tmp_path), state_of(1))  # what was left behind is in nobody's way
    assert same(state_of(1), loaded_state(tmp_path))


def test_whoever_takes_the_manifests_name_first_is_not_undone(tmp_path):
    class Late(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item):
            (tmp_path / STEP / "manifest.json").write_text("{}")
            return super().resolve_data(write_item)

    writer = outlast.dcp_writer(tmp_path, 7)
    error = refused(lambda: dcp.save({"m": torch.ones(1)}, storage_writer=writer, planner=Late()))
    assert isinstance(error, StorageError)
    assert "taken for an unfinished save" in str(error)


def test_a_plan_that_nobody_carried_out_is_not_committed(tmp_path):
    class Forgetful(dcp.DefaultSavePlanner):
        def finish_plan(self, new_plan):
            import dataclasses

            return dataclasses.replace(new_plan, items=new_plan.items[1:])

    writer = outlast.dcp_writer(tmp_path, 7)
    state = {"a": torch.ones(1), "b": torch.ones(1)}
    error = refused(lambda: dcp.save(state, storage_writer=writer, planner=Forgetful()))
    assert "no rank wrote a" in str(error)
    assert not (tmp_path / STEP / "manifest.json").exists()


@pytest.mark.parametrize(
    ("change", "now"),
    [
        (lambda item: item[:1], r"torch.float32 of shape (1, 3) now"),
        (lambda item: item.t(), r"torch.float32 of shape (3, 2) now"),
        (lambda item: item.int(), r"torch.int32 of shape (2, 3) now"),
    ],
)
def test_a_tensor_that_changes_after_the_plan(tmp_path, change, now):
    class Changing(dcp.DefaultSavePlanner):
        def transform_object(self, write_item, item):
            return change(item)

    writer = outlast.dcp_writer(tmp_path, 7)
    error = refused(
        lambda: dcp.save({"a": torch.ones(2, 3)}, storage_writer=writer, planner=Changing())
    )
    assert f"a was planned as torch.float32 of shape (2, 3) and is {now}" in str(error)


def test_saving_while_training_goes_on(tmp_path):
    state = state_of()
    del state["model"]["conjugate"]  # torch's own staging loses that bit
    expected = copy.deepcopy(state)
    future = dcp.async_save(state, storage_writer=outlast.dcp_writer(tmp_path, 7), no_dist=True)
    state["model"]["w"].zero_()
    future.result(timeout=60)
    assert same(expected, loaded_state(tmp_path, like=expected))


def test_a_writer_can_be_sent_to_another_process(tmp_path):
    writer = outlast.dcp_writer(tmp_path, 7)
    assert "step-000000000007" in writer.checkpoint_id
    writer = pickle.loads(pickle.dumps(writer))
    dcp.save({"m": torch.ones(1)}, storage_writer=writer)
    verify(Directory(tmp_path), 7)
