"""A state in one file: what comes back, and what is not believed."""

import json
import math
import os

import pytest
import torch
from safetensors.torch import load_file

from outlast.errors import ConfigError
from outlast.integrations import state_file
from outlast.integrations.state_file import FileDamagedError

STATE = {
    "epoch": 3,
    "state_dict": {"a.weight": torch.arange(6.0).view(2, 3), "a.half": torch.ones(3).bfloat16()},
    "optimizer_states": [
        {"state": {0: {"step": torch.tensor(4.0)}}, "param_groups": [{"lr": 0.1}]}
    ],
    "callbacks": {"Stop{'monitor': 'val'}": {"best": math.inf, "pair": (1, 2), "$x": None}},
    "empty": {},
}


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return same(dict(enumerate(one)), dict(enumerate(other)))
    return one == other


def test_it_comes_back_as_it_was(tmp_path):
    path = tmp_path / "a.ckpt"
    state_file.write(path, STATE)
    assert state_file.is_one(path)
    assert same(state_file.read(path), STATE)
    assert list(tmp_path.iterdir()) == [path]


def test_a_stranger_reads_it_with_json_and_safetensors(tmp_path):
    state_file.write(tmp_path / "a.ckpt", STATE)
    tensors = load_file(tmp_path / "a.ckpt")
    text = json.loads(tensors["outlast"].numpy().tobytes()[32:])
    assert text["data"]["epoch"] == 3
    assert torch.equal(tensors["state_dict.a.weight"], STATE["state_dict"]["a.weight"])


def test_torch_alone_reads_what_is_made_for_it(tmp_path):
    state_file.write(tmp_path / "a.ckpt", STATE)
    state_file.to_torch(tmp_path / "a.ckpt", tmp_path / "stock.ckpt")
    assert same(torch.load(tmp_path / "stock.ckpt", weights_only=True), STATE)
    assert same(state_file.read(tmp_path / "stock.ckpt"), STATE)
    assert not state_file.is_one(tmp_path / "stock.ckpt")
    with pytest.raises(FileExistsError):
        state_file.to_torch(tmp_path / "a.ckpt", tmp_path / "stock.ckpt")


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_each_byte_counts(tmp_path, kind):
    path = tmp_path / "a.ckpt"
    state_file.write(path, {"state_dict": STATE["state_dict"], "epoch": 3})
    if kind == "stock":
        state_file.to_torch(path, tmp_path / "stock.ckpt")
        path = tmp_path / "stock.ckpt"
    whole = path.read_bytes()
    wanted = state_file.read(path)
    believed = 0
    for at in range(0, len(whole), 5 if kind == "ours" else 17):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        try:
            assert same(state_file.read(path), wanted)
            believed += 1  # padding, or a field that nothing reads
        except (FileDamagedError, ConfigError):
            pass
    assert believed < len(whole) / 3
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FileDamagedError, match=path.name):
        state_file.read(path)


def test_what_is_no_data_is_refused_by_its_path_and_nothing_is_left(tmp_path):
    with pytest.raises(ConfigError, match=r"callbacks\.Own\.of is a "):
        state_file.write(tmp_path / "a.ckpt", {"callbacks": {"Own": {"of": os.stat_result}}})
    assert not list(tmp_path.iterdir())


def test_what_needs_code_is_refused(tmp_path):
    torch.save({"state_dict": {}, "own": os.path.join}, tmp_path / "a.ckpt")
    with pytest.raises(ConfigError, match="needs pickle"):
        state_file.read(tmp_path / "a.ckpt")
