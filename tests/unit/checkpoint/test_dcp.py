"""DCP on Outlast's checkpoints, in one process: what it gives back, and from where."""

import builtins
import json
import pickle

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
    saved_by_ranks,
    saved_state,
    state_of,
)
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from unit_fakes import same, same_tensor
from unit_names import save_name

import outlast
from outlast.checkpoint.dcp import StorageReader, StorageWriter
from outlast.checkpoint.export import export
from outlast.checkpoint.load import load, verify
from outlast.checkpoint.manifest import encode, write_hashed
from outlast.checkpoint.transfer import read_manifest
from outlast.errors import CheckpointInvalid, ConfigError
from outlast.storage import Directory

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
