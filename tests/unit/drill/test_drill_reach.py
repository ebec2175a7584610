"""What a script's names reach: found, and brought into another place."""

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
        *("scale", "holder.count", "holder.average", "holder.history[0]"),
        *("holder.history[1]['best']", "holder.stream", "holder.draws", "holder.noise"),
    }


def test_what_is_saved_is_left_out_and_what_a_saved_module_has_besides_is_not(main):
    main.model = Averaged(5)
    known = [main.model, *main.model.parameters()]
    assert [path for path in found(known) if "weight" in path or "bias" in path] == []
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
