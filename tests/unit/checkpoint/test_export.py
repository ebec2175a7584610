"""Exports: the same bits in other programs' formats, whole or not at all, in bounded memory."""

import collections
import json
import os
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from unit_fakes import WatchedStorage, listing, same, same_tensor
from unit_names import save_name
from unit_saver import written

from outlast.checkpoint import export as export_room
from outlast.checkpoint.export import Exported, export, file_names
from outlast.checkpoint.manifest import Place
from outlast.checkpoint.optimizers import named_state, parameter_names
from outlast.checkpoint.tensors import DTYPES
from outlast.errors import CheckpointInvalid, ConfigError
from outlast.storage import Directory
from whole_reads import load

FORMATS = ["safetensors", "torch", "dcp"]
STEP = save_name(7)
SHARD = f"{STEP}/rank-00000.safetensors"


class Net(torch.nn.Module):
    """Shared parameters, buffers of several kinds, a scalar, an empty one."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(6, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.rand(4, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("turned", torch.rand(3, 5).t())

    def forward(self, ids):
        return self.head(self.norm(self.embed(ids)))


def trained(seed=0):
    model = Net(seed)
    optimizer = torch.optim.AdamW(
        [
            {"params": [model.embed.weight], "lr": 0.1},
            {"params": list(model.norm.parameters()), "lr": 0.01},
        ]
    )
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    model(torch.arange(6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def every_dtype():
    generator = torch.Generator().manual_seed(3)
    raw = torch.randint(0, 256, (4 * 16,), dtype=torch.uint8, generator=generator)
    found = {name: raw.view(dtype) for name, dtype in DTYPES.items() if name != "BOOL"}
    return {**found, "BOOL": raw > 99, "scalar": torch.tensor(-0.0), "nan": torch.tensor(np.nan)}


def state_of(rank=0):
    model, optimizer = trained()
    names = parameter_names(optimizer, {"model": model})
    return {
        "model": model.state_dict(),
        "optimizer": named_state(optimizer, names),
        "dtypes": every_dtype(),
        "scheduler": {"last_epoch": 3, "base_lrs": [0.1], "odd": float("inf")},
        "outlast": {"step": 7, "random": torch.arange(8, dtype=torch.uint8) + rank},
    }


def save(path, state=None, world_size=1):
    states = [state or state_of(rank) for rank in range(world_size)]
    written(Directory(path), states)
    return Directory(path)


@pytest.fixture
def saved(tmp_path):
    """The storage of a checkpoint of two ranks."""
    return save(tmp_path / "ckpt", world_size=2)


# --- safetensors ---------------------------------------------------------------------------------


def test_safetensors_has_a_file_for_each_object_with_its_own_names(saved, tmp_path):
    out = tmp_path / "out"
    done = export(saved, 7, "safetensors", out)
    state = state_of()
    assert done.files == tuple(listing(out))
    assert done.num_bytes == sum((out / name).stat().st_size for name in done.files)
    for key in ("model", "dtypes"):
        found = load_file(out / f"{key}.safetensors")
        assert set(found) == set(state[key])
        assert all(same_tensor(value, found[name]) for name, value in state[key].items())
        assert f"{key}.json" not in done.files
    model = Net(seed=9)
    model.load_state_dict(load_file(out / "model.safetensors"))
    assert same(dict(model.state_dict()), dict(state["model"]))
    with safetensors.safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_what_is_no_tensor_is_in_a_json_file_beside_it(saved, tmp_path):
    out = tmp_path / "out"
    export(saved, 7, "safetensors", out)
    assert json.loads((out / "scheduler.json").read_text()) == {
        "last_epoch": 3,
        "base_lrs": [0.1],
        "odd": {"$": "float", "value": "inf"},
    }
    optimizer = json.loads((out / "optimizer.json").read_text())
    assert optimizer["param_groups"][0]["params"] == ["embed.weight"]
    moment = optimizer["state"]["embed.weight"]["exp_avg"]
    assert moment == {"$": "tensor", "name": "state.embed.weight.exp_avg"}
    assert moment["name"] in load_file(out / "optimizer.safetensors")
    assert not (out / "scheduler.safetensors").exists()


def test_a_large_object_is_split_as_hugging_face_splits(tmp_path):
    state = {"model": {f"layer.{i}": torch.full((100,), float(i)) for i in range(5)}}
    state["model"]["big"] = torch.arange(1000.0)
    storage = save(tmp_path / "ckpt", state)
    out = tmp_path / "out"
    done = export(storage, 7, "safetensors", out, split_bytes=1000)
    parts = [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    assert done.files == (*parts, "model.safetensors.index.json")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 6000}
    assert set(index["weight_map"]) == set(state["model"])
    for name, part in index["weight_map"].items():
        assert same_tensor(load_file(out / part)[name], state["model"][name])
    assert sum(len(load_file(out / part)) for part in parts) == 6


def test_names_of_keys_cannot_lead_out_of_the_directory(tmp_path):
    state = {
        key: {"w": torch.ones(1)}
        for key in ("../../evil", "/etc/x", "Model", "model", "a b", "..", "", "x" * 300, "ä\0")
    }
    storage = save(tmp_path / "ckpt", state)
    done = export(storage, 7, "safetensors", tmp_path / "deep" / "out")
    assert listing(tmp_path / "deep") == ["out"]
    assert len({name.lower() for name in done.files}) == len(state)
    assert all(set(name) & set("/\\ \0") == set() for name in done.files)
    assert all(len(name) < 200 and not name.startswith(".") for name in done.files)
    assert "Model.safetensors" in done.files


def test_plain_keys_keep_their_names():
    assert file_names(["model", "ema-1.0"]) == {"model": "model", "ema-1.0": "ema-1.0"}


def test_a_tensor_that_safetensors_has_no_name_for(tmp_path):
    storage = save(tmp_path / "ckpt", {"m": {"__metadata__": torch.ones(1)}})
    with pytest.raises(ConfigError, match="no place for a tensor named __metadata__"):
        export(storage, 7, "safetensors", tmp_path / "out")
    assert listing(tmp_path) == ["ckpt"]


# --- torch ---------------------------------------------------------------------------------------


def test_torch_loads_it_without_running_anything(saved, tmp_path):
    done = export(saved, 7, "torch", tmp_path / "out")
    assert done.files == ("state.pt",)
    path = tmp_path / "out" / "state.pt"
    state = state_of()
    for mmap in (False, True):
        found = torch.load(path, weights_only=True, mmap=mmap)
        assert list(found) == list(state)
        assert same(found["model"], dict(state["model"]))
        assert same(found["dtypes"], state["dtypes"])
        assert found["scheduler"] == state["scheduler"]
        assert same(found["outlast"], state["outlast"])
    assert zipfile.ZipFile(path).testzip() is None


def test_tensors_of_a_torch_file_do_not_keep_each_other_alive(saved, tmp_path):
    export(saved, 7, "torch", tmp_path / "out")
    found = torch.load(tmp_path / "out" / "state.pt", weights_only=True)
    for tensor in found["dtypes"].values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_an_exported_optimizer_goes_on_as_if_nothing_had_been(saved, tmp_path):
    export(saved, 7, "torch", tmp_path / "out")
    found = torch.load(tmp_path / "out" / "state.pt", weights_only=True)
    model, optimizer = trained()
    assert same(found["optimizer"], optimizer.state_dict())
    other, other_optimizer = trained(seed=5)
    other.load_state_dict(found["model"])
    other_optimizer.load_state_dict(found["optimizer"])
    assert same(optimizer.state_dict(), other_optimizer.state_dict())
    step(model, optimizer)
    step(other, other_optimizer)
    assert same(dict(model.state_dict()), dict(other.state_dict()))


def test_containers_become_plain_and_values_stay(tmp_path):
    odd = {
        "ordered": collections.OrderedDict(a=1),
        "default": collections.defaultdict(list, a=[1]),
        "counter": collections.Counter("aab"),
        "deque": collections.deque([1, 2], 3),
        "set": {1, 2},
        "frozen": frozenset({3}),
        "tuple": (1, (2,)),
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "bytes": b"\x00",
        "bytearray": bytearray(b"\x01"),
        "complex": complex(1, -0.0),
        "array": np.arange(6, dtype=">i4").reshape(2, 3),
        "number": np.float32(0.1),
        3: "integer key",
        "nan": float("nan"),
    }
    storage = save(tmp_path / "ckpt", {"odd": odd})
    export(storage, 7, "torch", tmp_path / "out")
    found = torch.load(tmp_path / "out" / "state.pt", weights_only=True)["odd"]
    assert type(found["ordered"]) is type(found["default"]) is type(found["counter"]) is dict
    assert found["deque"] == [1, 2]
    assert found["frozen"] == {3}
    assert same_tensor(found["array"], torch.arange(6, dtype=torch.int32).reshape(2, 3))
    assert found["number"] == float(np.float32(0.1))
    for name in ("set", "tuple", "size", "dtype", "device", "bytes", "bytearray", "complex", 3):
        assert found[name] == odd[name]
        assert type(found[name]) is type(odd[name])


def test_a_state_that_only_looks_like_an_optimizers(tmp_path):
    state = {"x": {"state": 3, "param_groups": []}, "y": {"state": {"a": 1}, "param_groups": []}}
    storage = save(tmp_path / "ckpt", state)
    export(storage, 7, "torch", tmp_path / "out")
    assert torch.load(tmp_path / "out" / "state.pt", weights_only=True) == state


def test_an_array_that_torch_cannot_hold(tmp_path):
    storage = save(tmp_path / "ckpt", {"m": {"a": np.ones(2, dtype=np.longdouble)}})
    with pytest.raises(ConfigError, match=r"m\.a is an array of float128"):
        export(storage, 7, "torch", tmp_path / "out")


# --- DCP -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("file_bytes", [64, 1 << 20])
def test_stock_dcp_loads_it(saved, tmp_path, file_bytes, monkeypatch):
    monkeypatch.setattr(export_room, "_DCP_FILE_BYTES", file_bytes)
    done = export(saved, 7, "dcp", tmp_path / "out")
    assert ".metadata" in done.files
    assert (sum(name.endswith(".distcp") for name in done.files) > 5) == (file_bytes == 64)
    state = state_of()
    other, other_optimizer = trained(seed=5)
    names = parameter_names(other_optimizer, {"model": other})
    found = {
        "model": dict(other.state_dict()),
        "optimizer": named_state(other_optimizer, names),
        "dtypes": {name: torch.zeros_like(value) for name, value in every_dtype().items()},
        "scheduler": {"last_epoch": 0, "base_lrs": [], "odd": 0},
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*single process.*")
        dcp.load(found, checkpoint_id=tmp_path / "out")
    assert same(found["model"], dict(state["model"]))
    assert same(found["dtypes"], state["dtypes"])
    assert same(found["optimizer"], state["optimizer"])
    assert found["scheduler"] == state["scheduler"]


# --- whole, verified, or not at all --------------------------------------------------------------


@pytest.mark.parametrize("to", FORMATS)
def test_progress_ends_at_all(saved, tmp_path, to):
    told = []
    export(saved, 7, to, tmp_path / "out", lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert len({total for _, total in told}) == 1
    assert told[-1][0] == told[-1][1] > 0


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("place", [0, 4096, -1])
def test_a_flipped_byte_is_refused_and_nothing_is_left_behind(saved, tmp_path, to, place):
    path = tmp_path / "ckpt" / SHARD
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(BaseException, match="does not match its checksum") as caught:
        export(saved, 7, to, tmp_path / "out")
    assert isinstance(caught.value, CheckpointInvalid)
    assert caught.value.reason.startswith("rank-00000.safetensors")
    assert listing(tmp_path) == ["ckpt"]


@pytest.mark.parametrize("to", FORMATS)
def test_a_block_that_is_wrong_in_one_place_comes_from_another(saved, tmp_path, to):
    other = Directory(tmp_path / "copy")
    for path in (tmp_path / "ckpt" / STEP).iterdir():
        other.put(f"{STEP}/{path.name}", path.read_bytes())
    (tmp_path / "ckpt" / SHARD).write_bytes(b"")
    export([Place("fast", saved), Place("slow", other)], 7, to, tmp_path / "out")
    assert (tmp_path / "out").is_dir()


@pytest.mark.parametrize("to", FORMATS)
def test_an_error_while_reading_leaves_nothing_behind(saved, tmp_path, to):
    trouble = OSError(5, "Input/output error")
    storage = WatchedStorage(saved, lambda did, name: trouble if name == SHARD else None)
    with pytest.raises(OSError, match="Input/output"):
        export(storage, 7, to, tmp_path / "out")
    assert listing(tmp_path) == ["ckpt"]


def test_an_interrupted_export_leaves_nothing_behind(saved, tmp_path):
    def interrupt(done, total):
        raise KeyboardInterrupt

    for to in FORMATS:
        with pytest.raises(KeyboardInterrupt):
            export(saved, 7, to, tmp_path / "out", interrupt)
    assert listing(tmp_path) == ["ckpt"]


def test_what_is_there_is_never_written_over(saved, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    for name, message in (("full", "is not empty"), ("file", "is a file"), ("broken", "is a file")):
        told = []
        with pytest.raises(ConfigError, match=message):
            export(saved, 7, "torch", tmp_path / name, lambda *done: told.append(done))  # noqa: B023
        assert not told
    (tmp_path / "empty").mkdir()
    assert isinstance(export(saved, 7, "torch", tmp_path / "empty"), Exported)
    assert (tmp_path / "full" / "x").read_text() == (tmp_path / "file").read_text() == "mine"


def test_a_directory_that_fills_up_meanwhile_is_left_alone(saved, tmp_path):
    out = tmp_path / "out"

    def meddle(done, total):
        out.mkdir(exist_ok=True)
        (out / "x").write_text("mine")

    with pytest.raises(ConfigError, match="is not empty"):
        export(saved, 7, "torch", out, meddle)
    assert listing(tmp_path) == ["ckpt", "out"]
    assert listing(out) == ["x"]


def test_an_unknown_format_and_a_missing_step(saved, tmp_path):
    with pytest.raises(ConfigError, match="'onnx' is not a format; export to safetensors, torch"):
        export(saved, 7, "onnx", tmp_path / "out")
    with pytest.raises(CheckpointInvalid, match=r"manifest\.json is missing"):
        export(saved, 8, "torch", tmp_path / "out")
    assert listing(tmp_path) == ["ckpt"]


@pytest.mark.parametrize("to", FORMATS)
def test_files_are_durable_before_the_name_appears(saved, tmp_path, to, monkeypatch):
    log = []
    fsync, rename = os.fsync, os.rename

    def watched_fsync(fd):
        log.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        fsync(fd)

    def watched_rename(old, new):
        log.append("rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(export_room.os, "rename", watched_rename)
    done = export(saved, 7, to, tmp_path / "out")
    last = len(log) - 1 - log[::-1].index("rename")
    before = {Path(name).name for name in log[:last]}
    assert set(done.files) <= before
    assert log[last + 1 :] == [str(tmp_path)]


def test_the_checkpoint_is_not_touched(saved, tmp_path):
    before = {path: path.read_bytes() for path in (tmp_path / "ckpt" / STEP).iterdir()}
    for to in FORMATS:
        export(saved, 7, to, tmp_path / to)
    assert before == {path: path.read_bytes() for path in (tmp_path / "ckpt" / STEP).iterdir()}
    assert load(saved, 7).manifest.step == 7
