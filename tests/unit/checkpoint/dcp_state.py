"""State to save with DCP, and ways to save, load and damage it, for the tests of DCP."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from unit_names import save_name
from unit_saver import written

import outlast
from outlast.checkpoint.tensors import DTYPES
from outlast.storage import Directory

STEP = save_name(7, attempt=0)
SHARD = f"{STEP}/rank-00000.safetensors"


def every_dtype():
    """A tensor of every dtype, with patterns that arithmetic would not keep."""
    generator = torch.Generator().manual_seed(3)
    raw = torch.randint(0, 256, (4 * 16,), dtype=torch.uint8, generator=generator)
    found = {name: raw.view(dtype) for name, dtype in DTYPES.items() if name != "BOOL"}
    return {**found, "BOOL": raw > 99}


def state_of(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shared = torch.rand(3, generator=generator)
    return {
        "model": {
            "w": torch.rand(4, 3, generator=generator),
            "turned": torch.rand(5, 7, generator=generator).t(),
            "every.other": torch.arange(10)[::2],
            "conjugate": torch.rand(3, dtype=torch.complex64, generator=generator).conj(),
            "tied": shared,
            "tied.too": shared,
            "empty": torch.zeros(0, 2),
            "scalar": torch.tensor(1.5 + seed),
            **every_dtype(),
        },
        "optimizer": {
            "state": {"w": {"step": torch.tensor(7.0), "exp_avg": torch.ones(4, 3)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["w"]}],
        },
        "odd": {
            "nan": float("-inf"),
            "bytes": b"\x00\xff",
            "pair": (1, torch.arange(3)),
            "n": None,
        },
        "list": [torch.ones(2), {"deep": [1, 2]}],
    }


def blank(state):
    """``state`` with other values of the same shapes."""
    other = copy.deepcopy(state)

    def clear(value):
        if isinstance(value, torch.Tensor):
            value.zero_()
        elif isinstance(value, dict):
            for key, inner in value.items():
                if isinstance(inner, torch.Tensor | dict | list):
                    clear(inner)
                else:
                    value[key] = 0
        elif isinstance(value, list):
            for inner in value:
                clear(inner)

    clear(other)
    return other


def saved_state(path, step=7, seed=0, **more):
    state = state_of(seed)
    dcp.save(state, storage_writer=outlast.dcp_writer(path, step, **more))
    return state


def loaded_state(path, like=None, **more):
    state = blank(like or state_of())
    dcp.load(state, storage_reader=outlast.dcp_reader(path, **more))
    return state


def cause(caught):
    """What went wrong on the first rank of a CheckpointException."""
    (error, _) = next(iter(caught.value.failures.values()))
    return error


def refused(act):
    with pytest.raises(dcp.CheckpointException) as caught:
        act()
    return cause(caught)


def flip(path, place, bit=1):
    data = bytearray(path.read_bytes())
    data[place] ^= bit
    path.write_bytes(data)


def saved_by_ranks(path, states):
    """A checkpoint as a session writes it."""
    written(Directory(path), states)
