"""What a script's names reach: found, and brought into another place."""

import collections
import random
import sys

import numpy as np
import pytest
import torch

from outlast.drill.digests import digest_of
from outlast.drill.proof import reach


class Holder:
    def __init__(self, seed):
        self.count = seed
        self.average = torch.full((2,), float(seed))
        self.history = [seed, {"best": seed}]
        self.stream = random.Random(seed)
        self.draws = np.random.default_rng(seed)
        self.noise = torch.Generator().manual_seed(seed)


class Averaged(torch.nn.Linear):
    def __init__(self, seed):
        super().__init__(2, 1)
        self.seen = seed

    def load_state_dict(self, *args, **options):
        return super().load_state_dict(*args, **options)


@pytest.fixture
def main(monkeypatch):
    module = type(sys)("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.setattr(reach, "script_frames", list)
    return module


def found(known=()):
    return {one.path: one for one in reach.values({id(one): one for one in known})}


def test_values_come_under_their_paths(main):
    main.holder, main.scale, main.__hidden__ = Holder(1), 3.0, 4
    main.itself = main.holder.myself = main.holder
    seen = found()
    assert set(seen) == {
        *("scale", "holder.count", "holder.average", "holder.history"),
        *("holder.stream", "holder.draws", "holder.noise"),
    }


def test_which_parameters_are_frozen_is_brought_across(main, tmp_path):
    main.model = Averaged(5)
    known = {id(one): one for one in (main.model, *main.model.parameters())}
    main.model.weight.requires_grad_(False)
    reach.keep(known, tmp_path / "carried.bin")
    main.model.weight.requires_grad_(True)
    chosen = ["model.weight.requires_grad", "model.bias.requires_grad"]
    assert reach.put(known, tmp_path / "carried.bin", chosen) == chosen
    assert [one.requires_grad for one in main.model.parameters()] == [False, True]


def test_a_container_that_holds_more_than_data_is_looked_into(main):
    main.several = [1, Holder(2)]
    main.queue = collections.deque([Holder(3)])
    assert {"several[0]", "several[1].count", "queue[0].history"} <= set(found())
    shared = torch.zeros(2)
    main.tensors = {"saved": shared, "other": 1}
    assert {path for path in found([shared]) if "tensors" in path} == {"tensors['other']"}


def test_a_container_beyond_the_limit_is_looked_into_as_far_as_it_goes(main, monkeypatch):
    monkeypatch.setattr(reach, "WHOLE_MAX", 70)
    main.small, main.large = [0] * 69, [0] * 70
    assert set(found()) == {"small", *(f"large[{number}]" for number in range(reach.ITEMS_MAX))}


@pytest.mark.parametrize(
    ("grown", "fresh"),
    [
        ([1, True, None, 2.5, "a", (3, [4])], []),
        (collections.deque([torch.arange(3), np.arange(2)], maxlen=2), collections.deque(maxlen=2)),
        ({"a", "b"}, {"c"}),
        ({"a": torch.ones(2), "b": {3: np.float32(0.5)}}, {"a": torch.zeros(2)}),
        ({"a": 1}, {"b": 2}),
        ([2**70, -1], [3, 4]),
    ],
    ids=["list", "deque", "set", "dict", "other keys", "as long"],
)
def test_what_has_grown_is_brought_across(main, tmp_path, grown, fresh):
    main.buffer = grown
    wanted = digest_of(grown)
    reach.keep({}, tmp_path / "carried.bin")
    main.buffer = fresh
    assert digest_of(fresh) != wanted
    assert reach.put({}, tmp_path / "carried.bin", ["buffer"]) == ["buffer"]
    assert main.buffer is fresh
    assert digest_of(fresh) == wanted


def test_a_tensor_in_a_container_stays_the_same_one(main, tmp_path):
    main.average = {"weight": torch.ones(2)}
    reach.keep({}, tmp_path / "carried.bin")
    main.average["weight"].zero_()
    held = main.average["weight"]
    reach.put({}, tmp_path / "carried.bin", ["average"])
    assert main.average["weight"] is held
    assert held.tolist() == [1, 1]


def test_what_is_saved_is_left_out_and_what_a_saved_module_has_besides_is_not(main):
    main.model = Averaged(5)
    known = [main.model, *main.model.parameters()]
    assert {path for path in found(known) if "weight" in path or "bias" in path} == {
        *("model.weight.requires_grad", "model.bias.requires_grad"),
    }
    assert found(known)["model.seen"].owner == ""
    assert found()["model.weight"].owner == "model"
    assert found()["model.weight"].kind == "Averaged"


def test_what_was_kept_is_put(main, tmp_path):
    path = tmp_path / "carried.bin"
    main.holder, main.scale = Holder(1), 3.0
    main.holder.stream.random()
    wanted = {name: digest_of(one.value) for name, one in found().items()}
    reach.keep({}, path)
    main.holder, main.scale = Holder(2), 1.0
    average = main.holder.average
    assert {name: digest_of(one.value) for name, one in found().items()} != wanted
    assert sorted(reach.put({}, path, list(wanted))) == sorted(wanted)
    assert {name: digest_of(one.value) for name, one in found().items()} == wanted
    assert main.holder.average is average  # others may hold it, too


def test_only_what_was_chosen_is_put(main, tmp_path):
    main.one, main.other = 1, 1
    reach.keep({}, tmp_path / "carried.bin")
    main.one, main.other = 2, 2
    assert reach.put({}, tmp_path / "carried.bin", ["one"]) == ["one"]
    assert (main.one, main.other) == (1, 2)


def test_a_variable_of_a_function_is_put(tmp_path):
    path = tmp_path / "carried.bin"
    frame = sys._getframe()
    counter = 7
    put = reach._put_local(frame, "counter")
    put(8)
    assert counter == 8
    assert not path.exists()
