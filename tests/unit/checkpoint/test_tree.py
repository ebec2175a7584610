"""State → data and tensors → JSON text → state: what went in comes out, in value and in kind.

A state that is flattened again gives what it gives the first time.
"""

import collections
import enum
import json
import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from unit_fakes import same

from outlast.checkpoint.plan import structure
from outlast.checkpoint.tree import Flattener, flatten, tensor_names, unflatten
from outlast.errors import ConfigError
from thorough import examples


def round_trip(state, name="state"):
    data, tensors = flatten(state, name)
    text = json.dumps(data, allow_nan=False)
    return unflatten(json.loads(text), tensors)


@pytest.mark.parametrize(
    "state",
    [
        None,
        True,
        0,
        -(2**200),
        10**300,
        1.5,
        -0.0,
        math.nan,
        math.inf,
        -math.inf,
        5e-324,
        1.7976931348623157e308,
        complex(-0.0, math.inf),
        "",
        "ünï\u2028 \ud800 \x00",
        b"",
        bytes(range(256)),
        bytearray(b"abc"),
        [],
        {},
        (),
        set(),
        frozenset(),
        [[], {}, (), [()]],
        (1, (2, [3, (4,)])),
        {1, 2, "3", (4, 5)},
        frozenset({1.5, None}),
        collections.deque(),
        collections.deque([1, 2], maxlen=2),
        collections.deque([1, (2,)], maxlen=None),
        collections.Counter("abracadabra"),
        collections.Counter(),
        collections.OrderedDict([("b", 1), ("a", 2)]),
        collections.OrderedDict(),
        collections.defaultdict(list, {"a": [1]}),
        collections.defaultdict(int),
        collections.defaultdict(None, {1: 2}),
        {1: "int", "1": "str", 1.5: "float", None: "none", (1, 2): "tuple", True + 1: "two"},
        {True: 1, False: 0},
        {"$": 1},
        {"$": "tensor", "name": "state"},
        {"$": "nonsense"},
        {"a": {"$kind": {"$": [{"$": "float", "value": "nan"}]}}},
        {"": {"": ""}},
        {math.inf: 1, b"k": 2},
        torch.Size([]),
        torch.Size([2, 3]),
        torch.bfloat16,
        torch.float64,
        torch.device("cpu"),
        torch.device("cuda", 3),
        np.float64(1.5),
        np.float32(math.nan),
        np.int8(-3),
        np.bool_(True),
        np.complex64(1 + 2j),
        np.array(3.0),
        np.array([], dtype=np.int64),
        np.arange(6, dtype=">i2").reshape(2, 3),
        np.arange(6).reshape(2, 3).T,
        np.zeros((0, 3), dtype=bool),
        {np.int64(1): np.float16(2)},
        np.random.default_rng(3).bit_generator.state,
        np.random.RandomState(3).get_state(),
    ],
    # A set's words are in another order in each process.
    ids=lambda state: (
        type(state).__name__ + ("" if isinstance(state, set) else f"-{str(state)[:20]!a}")
    ),
)
def test_data_comes_back(state):
    assert same(state, round_trip(state))
    assert same({"deep": [state]}, round_trip({"deep": [state]}))


TENSORS = {
    "zero_dim": torch.tensor(3.0),
    "empty": torch.zeros(0),
    "empty_2d": torch.zeros(3, 0, dtype=torch.int32),
    "nan": torch.tensor([math.nan, -0.0, math.inf]),
    "bf16": torch.ones(2, dtype=torch.bfloat16),
    "strided": torch.arange(12.0).view(3, 4).t()[1:],
    "expanded": torch.tensor([7.0]).expand(3, 2),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "conj": torch.tensor([1 + 2j]).conj(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_come_back(name):
    state = {"t": TENSORS[name], "list": [TENSORS[name], (TENSORS[name],)]}
    assert same(state, round_trip(state))
    _, tensors = flatten(state, "x")
    assert sorted(tensors) == ["x.list.0", "x.list.1.0", "x.t"]
    assert all(tensor is TENSORS[name] for tensor in tensors.values())


def test_a_tensor_is_named_by_its_path_and_not_copied():
    weight = torch.ones(2)
    data, tensors = flatten({"layers": [{"weight": weight}]}, "model")
    assert list(tensors) == ["model.layers.0.weight"] == list(tensor_names(data))
    assert tensors["model.layers.0.weight"].data_ptr() == weight.data_ptr()


@pytest.mark.parametrize(
    "keys",
    [
        {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}},
        {"a": {"b": torch.tensor(2)}, "a.b": torch.tensor(1)},
        {1: torch.tensor(1), "1": torch.tensor(2)},
        {"a": [torch.tensor(1)], "a.0": torch.tensor(2), "a.0~1": torch.tensor(3)},
        {"a.0~1": torch.tensor(3), "a": [torch.tensor(1)], "a.0": torch.tensor(2)},
    ],
    ids=str,
)
def test_keys_that_spell_the_same_path_stay_apart(keys):
    _, tensors = flatten(keys, "x")
    assert sorted(tensor.item() for tensor in tensors.values()) == list(range(1, len(tensors) + 1))
    assert same(keys, round_trip(keys))


def test_names_of_tensors_are_found_wherever_they_are():
    state = {"a": [torch.zeros(1)], 2: (torch.zeros(1), {"$": collections.deque([torch.zeros(1)])})}
    data, tensors = flatten(state, "x")
    assert sorted(tensor_names(json.loads(json.dumps(data)))) == sorted(tensors)
    assert len(tensors) == 3


# --- what is refused -----------------------------------------------------------------------------


class Thing:
    pass


class Colour(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        lambda: 0,
        print,
        Thing,
        Thing(),
        Colour.RED,
        Point(1, 2),
        collections.defaultdict(lambda: 0),
        collections.defaultdict(Thing),
        np.array([Thing()], dtype=object),
        np.array(["text"]),
        np.datetime64("2026-01-01"),
        memoryview(b"abc"),
        range(3),
        torch.Generator(),
        slice(1),
        ...,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_data_is_refused_by_its_path(value):
    with pytest.raises(ConfigError, match=r"model\.a\.1\.b") as caught:
        flatten({"a": [1, {"b": value}]}, "model")
    assert "cannot be saved as data" in str(caught.value)


@pytest.mark.parametrize(
    "tensor", [torch.eye(2).to_sparse(), torch.empty(2, device="meta")], ids=["sparse", "meta"]
)
def test_a_tensor_that_is_not_dense_is_refused_by_its_path(tensor):
    with pytest.raises(ConfigError, match=r"model\.a is a .*only dense ones"):
        flatten({"a": tensor}, "model")


def test_a_key_that_is_no_data_is_refused():
    with pytest.raises(ConfigError, match=r"model \(key\) is a .*Thing"):
        flatten({Thing(): 1}, "model")


def test_state_that_holds_itself_is_refused_and_does_not_end_the_training():
    state = {"a": []}
    state["a"].append(state)
    with pytest.raises(ConfigError, match="model"):
        flatten(state, "model")


@pytest.mark.parametrize(
    "data",
    [
        {"$": "function", "value": "os.system"},
        {"$": "tensor", "name": "not there"},
        {"$": "tensor"},
        {"$": ["tensor"]},
        {"$": "dtype", "value": "save"},
        {"$": "default", "factory": "eval", "pairs": []},
        {"$": "array", "dtype": "O", "shape": [1], "value": ""},
        {"$": "bytes", "value": 3},
    ],
    ids=str,
)
def test_what_flatten_never_writes_is_not_decoded(data):
    with pytest.raises((ValueError, KeyError, TypeError)):
        unflatten(data, {})


# --- anything nested -----------------------------------------------------------------------------

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary(max_size=8)
    | st.floats(width=32).map(np.float32)
    | st.floats(width=32).map(torch.tensor)
    | st.lists(st.integers(-5, 5), max_size=3).map(lambda items: torch.tensor(items).float())
)
keys = (
    st.text(alphabet="$.a0~", max_size=3)
    | st.integers(0, 3)
    | st.booleans()
    | st.tuples(st.integers(0, 2), st.text(max_size=1))
    | st.none()
)
hashable = st.integers() | st.text(max_size=3) | st.tuples(st.integers(0, 3))


def containers(inner):
    return (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict)
        | st.dictionaries(keys, inner, max_size=3).map(lambda d: collections.defaultdict(dict, d))
        | st.lists(inner, max_size=3).map(lambda items: collections.deque(items, maxlen=5))
        | st.sets(hashable, max_size=4)
        | st.frozensets(hashable, max_size=3)
    )


@given(st.recursive(leaves, containers, max_leaves=20))
@examples(200)
def test_whatever_is_nested_comes_back(state):
    assert same(state, round_trip(state))
    data, tensors = flatten(state, "x")
    assert sorted(tensor_names(data)) == sorted(tensors)


# --- a state flattened again ----------------------------------------------------------------------


def model_state(**more):
    return collections.OrderedDict({"a.weight": torch.randn(2, 3), "a.bias": torch.randn(2)} | more)


def optimizer_state(**more):
    state = {name: {"step": torch.tensor(1.0), "exp_avg": torch.randn(2)} for name in ("p", "q")}
    return {"state": state | more, "param_groups": [{"lr": 0.1, "params": ["p", "q"]}]}


def flattens_alike(found, state, name="m"):
    data, tensors = found
    expected_data, expected = flatten(state, name)
    assert data == expected_data
    assert list(tensors) == list(expected)
    for one, other in zip(tensors.values(), expected.values(), strict=True):
        assert one is other


@pytest.mark.parametrize("make", [model_state, optimizer_state])
def test_again_with_other_tensors(make):
    flattener = Flattener()
    for _ in range(3):
        state = make()
        flattens_alike(flattener(state, "m"), state)


def test_small_state_is_always_that_of_now():
    flattener = Flattener()
    for step in range(3):
        state = optimizer_state()
        state["param_groups"][0]["lr"] = step
        flattens_alike(flattener(state, "m"), state)


OTHER = {
    "another key": lambda: model_state(more=torch.zeros(1)),
    "fewer keys": lambda: collections.OrderedDict([("a.weight", torch.zeros(2, 3))]),
    "another order": lambda: collections.OrderedDict(reversed(model_state().items())),
    "another kind of dict": lambda: dict(model_state()),
    "a number in place of a tensor": lambda: model_state(**{"a.bias": 3}),
    "an optimizer's": optimizer_state,
    "a row more": lambda: optimizer_state(r={"step": torch.zeros(())}),
    "a slot more": lambda: optimizer_state(q={"step": torch.zeros(()), "x": torch.zeros(1)}),
    "an empty row": lambda: optimizer_state(q={}),
    "a number in a row": lambda: optimizer_state(q={"step": 1, "exp_avg": torch.zeros(2)}),
    "a parameter": lambda: model_state(**{"a.bias": torch.nn.Parameter(torch.zeros(2))}),
    "nothing": dict,
}


@pytest.mark.parametrize("before", [model_state, optimizer_state])
@pytest.mark.parametrize("other", OTHER.values(), ids=OTHER)
def test_a_structure_that_changes(before, other):
    flattener = Flattener()
    flattener(before(), "m")
    for state in (other(), other(), before()):
        flattens_alike(flattener(state, "m"), state)


def test_what_cannot_be_saved_is_refused_the_second_time_too():
    flattener = Flattener()
    flattener(model_state(), "m")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"m\.a\.bias is a torch.sparse_coo"):
            structure(flattener(model_state(**{"a.bias": torch.eye(2).to_sparse()}), "m")[1])


def test_names_that_collide_stay_apart():
    flattener = Flattener()
    for _ in range(2):
        state = {"a": {"b": torch.zeros(1)}, "a.b": {"c": torch.ones(1)}, "x": 1}
        state["a"]["b.c"] = torch.full((1,), 2.0)
        state = {"a": {"b.c": torch.zeros(1)}, "a.b": {"c": torch.ones(1)}}
        flattens_alike(flattener(state, "m"), state)
