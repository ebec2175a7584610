"""Optimizers as they are: whatever their state is made of, and wherever they keep it."""

import collections
import contextlib
import enum
import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from unit_checkpoints import write
from unit_fakes import bits

from outlast.checkpoint.reader import open_checkpoint
from outlast.errors import ConfigError, StateMismatch
from outlast.inprocess.living import Packer, unpack
from outlast.script.objects import Objects
from outlast.storage import Directory
from thorough import examples


class Kept(torch.optim.Optimizer):
    """State as a test wants it: ``make(parameter)`` gives that of one parameter."""

    def __init__(self, params, make=lambda parameter: {}, **defaults):
        super().__init__(params, {"lr": 0.1, **defaults})
        self.make = make

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self.make(parameter)


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3, dtype=dtype)


def objects_of(make, dtype=torch.float32, kind=Kept, **given_to):
    model = net(dtype)
    optimizer = kind(model.parameters(), make, **given_to)
    return Objects({"model": model, "optimizer": optimizer}), optimizer, model


def by_disk(objects, fresh, path):
    write(Directory(path), [objects.capture() | {"outlast": {"step": 7}}])
    fresh.apply(open_checkpoint(Directory(path), 7))


def by_memory(objects, fresh):
    fresh.put(unpack(Packer("state").pack(objects.capture())))


def told(value, names):
    """``value`` to the bit, with types, strides, and which parameter a tensor is or looks into."""
    if id(value) in names:
        return ("parameter", names[id(value)])
    if isinstance(value, torch.Tensor):
        memory = value.untyped_storage().data_ptr()
        owner = next((n for n, p in names.items() if isinstance(n, str) and p == memory), None)
        return (type(value), value.dtype, value.shape, value.stride(), owner, bits(value))
    if isinstance(value, dict):
        pairs = [(told(k, names), told(v, names)) for k, v in value.items()]
        return (type(value), getattr(value, "default_factory", None), pairs)
    if isinstance(value, list | tuple | collections.deque):
        return (type(value), getattr(value, "maxlen", 0), [told(item, names) for item in value])
    if isinstance(value, np.ndarray):
        return (value.dtype, value.shape, value.tobytes())
    return (type(value), repr(value))


def names_of(model):
    named = dict(model.named_parameters())
    found = {id(p): name for name, p in named.items()}
    return found | {name: p.untyped_storage().data_ptr() for name, p in named.items()}


def state_of(optimizer, model):
    names = names_of(model)
    return [(told(key, names), told(value, names)) for key, value in optimizer.state.items()]


# --- whatever it is made of -----------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]


@st.composite
def makers(draw):
    """A function from a parameter to one value: a tensor of some kind, or data."""
    kind = draw(st.sampled_from(["like", "row", "scalar", "turned", "itself", "view", "data"]))
    dtype = draw(st.sampled_from(DTYPES))
    number = draw(st.integers(0, 9))
    if kind == "like":
        return lambda p: torch.full_like(p, 1.2345678 + number, dtype=dtype)
    if kind == "row":
        return lambda p: torch.full((p.shape[0], 1), 1.2345678 + number).to(dtype)
    if kind == "scalar":
        return lambda p: torch.tensor(number).to(dtype)
    if kind == "turned":
        return lambda p: torch.arange(12).to(dtype).reshape(3, 4).t()
    if kind == "itself":
        return lambda p: p
    if kind == "view":
        return lambda p: p.detach()[:2]
    value = draw(
        st.sampled_from(
            [None, True, 3, -0.0, float("nan"), "text", "", b"\x00", np.arange(3.0), (), [], {}]
        )
    )
    return lambda p: value


@st.composite
def nests(draw, depth=3):
    if depth == 0 or draw(st.booleans()):
        return draw(makers())
    inner = draw(st.lists(nests(depth=depth - 1), max_size=3))
    kind = draw(st.sampled_from(["list", "tuple", "dict", "ordered", "default", "deque"]))
    keys = ["step", "exp_avg", 3]
    make = {
        "list": list,
        "tuple": tuple,
        "deque": lambda items: collections.deque(items, maxlen=5),
        "dict": lambda items: dict(zip(keys, items, strict=False)),
        "ordered": lambda items: collections.OrderedDict(zip(keys, items, strict=False)),
        "default": lambda items: collections.defaultdict(list, zip(keys, items, strict=False)),
    }[kind]
    return lambda p: make(one(p) for one in inner)


@examples(150)
@given(
    make=st.dictionaries(st.sampled_from(["step", "exp_avg", "nest", 7]), nests(), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    others=st.dictionaries(st.sampled_from(["global_step", "k", ("a", 1)]), nests(), max_size=2),
    has_stepped=st.booleans(),
)
def test_state_of_any_kind_comes_back_as_it_was(tmp_path_factory, make, dtype, others, has_stepped):
    def made(parameter):
        return {key: one(parameter) for key, one in make.items()}

    objects, optimizer, model = objects_of(made, dtype)
    optimizer.step()
    for key, one in others.items():
        optimizer.state[key] = one(model.weight)
    expected = state_of(optimizer, model)
    for way in (by_memory, lambda a, b: by_disk(a, b, tmp_path_factory.mktemp("job"))):
        fresh, again, other = objects_of(made, dtype)
        if has_stepped:
            again.step()
        way(objects, fresh)
        assert state_of(again, other) == expected


def test_what_torch_knows_by_another_dtype_is_left_as_torch_makes_it():
    """A ``step`` that an old torch kept as a number is a tensor by now."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    objects = Objects({"model": model, "optimizer": optimizer})
    state = objects.capture()
    for inner in state["optimizer"]["state"].values():
        inner["step"] = 1.0
    other = net()
    again = torch.optim.Adam(other.parameters())
    Objects({"model": other, "optimizer": again}).put(state)
    assert isinstance(again.state[other.weight]["step"], torch.Tensor)


def test_a_number_as_a_key_is_refused_by_name():
    objects, optimizer, _ = objects_of(lambda p: {})
    optimizer.state[0] = 3
    with pytest.raises(ConfigError, match="optimizer: Kept keeps state under the number 0"):
        objects.capture()


def test_a_state_dict_that_raises_is_one_line():
    class Raises(Kept):
        def state_dict(self):
            return {}["nothing"]

    objects, _, _ = objects_of(lambda p: {}, kind=Raises)
    with pytest.raises(ConfigError, match="optimizer: the state_dict of Raises raises KeyError"):
        objects.capture()


# --- groups ---------------------------------------------------------------------------------------


class Norm(enum.IntEnum):
    SIGN = 1
    SPECTRAL = 2


def halve(value):
    return value / 2


@pytest.mark.parametrize("code", [Norm.SIGN, halve, Norm], ids=["member", "function", "class"])
def test_code_in_a_group_is_the_scripts_own(tmp_path, code):
    objects, _, _ = objects_of(lambda p: {}, code=code)
    fresh, again, _ = objects_of(lambda p: {}, code=code)
    by_disk(objects, fresh, tmp_path)
    assert again.param_groups[0]["code"] is code


def test_other_code_in_a_group_is_told(tmp_path):
    objects, _, _ = objects_of(lambda p: {}, norm=Norm.SIGN)
    fresh, _, _ = objects_of(lambda p: {}, norm=Norm.SPECTRAL)
    with pytest.raises(StateMismatch, match=r"had norm Norm.SIGN and has Norm.SPECTRAL now"):
        by_disk(objects, fresh, tmp_path)


def test_a_class_that_goes_by_position_needs_the_same_order(tmp_path):
    class Positions(Kept):
        def state_dict(self):
            return {"mine": [self.state[p] for p in self.param_groups[0]["params"]]}

        def load_state_dict(self, state):
            for p, value in zip(self.param_groups[0]["params"], state["mine"], strict=True):
                self.state[p] = value

    def made(parameter):
        return {"sum": torch.full_like(parameter, 2.5)}

    objects, optimizer, model = objects_of(made, kind=Positions)
    optimizer.step()
    fresh, again, other = objects_of(made, kind=Positions)
    by_disk(objects, fresh, tmp_path)
    assert state_of(again, other) == state_of(optimizer, model)
    turned = Positions(reversed(list(other.parameters())), made)
    with pytest.raises(StateMismatch, match="in another order at step 7, which Positions"):
        Objects({"model": other, "optimizer": turned}).check(
            open_checkpoint(Directory(tmp_path), 7)
        )


# --- what lies outside of its state ---------------------------------------------------------------


class Helper:
    def __init__(self):
        self.count = 0
        self.average = None


class Attributes(Kept):
    """State wherever an author may put it."""

    def __init__(self, params, make=None, *, rate=0.1):
        super().__init__(params, lambda p: {})
        self.rate, self.flag, self.history, self.helper = rate, False, [], Helper()
        self.table, self.by_id = {}, {}
        self.helpers = {"first": Helper(), "size": 0}
        self.generator = torch.Generator().manual_seed(3)
        self.numbers = np.random.default_rng(3)
        self.chosen = self.param_groups[0]["params"][0]
        self.flat = torch.zeros(3)
        self.part = self.flat[:2]

    def step(self, closure=None):
        super().step()
        self.flag = not self.flag
        self.history.append(float(torch.rand((), generator=self.generator)))
        self.history.append(float(self.numbers.random()))
        self.helper.count += 1
        self.helper.average = torch.full((2,), 1.5 + self.helper.count)
        self.helpers["first"].count += 2
        self.helpers["size"] += 1
        self.flat += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                self.table.setdefault(parameter, []).append(self.helper.count)
                self.by_id[id(parameter)] = torch.full_like(parameter, self.helper.count)

    def all(self):
        names = names_of_optimizer(self)
        own = {k: v for k, v in vars(self).items() if k in ("rate", "flag", "history", "flat")}
        own |= {"table": {names[id(p)]: v for p, v in self.table.items()}}
        own |= {"by_id": {names[i]: v for i, v in self.by_id.items()}}
        own |= {"helper": vars(self.helper), "first": vars(self.helpers["first"])}
        own |= {"size": self.helpers["size"], "draws": [self.numbers.random()]}
        own |= {"torch": torch.rand(2, generator=self.generator)}
        return told(own, {})


def names_of_optimizer(optimizer):
    return {id(p): str(i) for i, p in enumerate(optimizer.param_groups[0]["params"])}


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_attributes_come_back_as_they_were(tmp_path, steps):
    objects, optimizer, _ = objects_of(None, kind=Attributes)
    fresh, again, _ = objects_of(None, kind=Attributes)
    for _ in range(steps):
        optimizer.step()
    by_disk(objects, fresh, tmp_path)
    assert again.all() == optimizer.all()
    assert again.chosen is again.param_groups[0]["params"][0]
    assert again.part.data_ptr() == again.flat.data_ptr()  # what looks into it still does


def test_a_step_back_in_the_same_process_takes_attributes_back(tmp_path):
    objects, optimizer, _ = objects_of(None, kind=Attributes)
    before, _, _ = objects_of(None, kind=Attributes)
    optimizer.step()
    by_disk(before, objects, tmp_path)
    _, untouched, _ = objects_of(None, kind=Attributes)
    assert optimizer.flag is untouched.flag
    assert optimizer.history == untouched.history
    assert optimizer.helper.count == 0


def test_an_argument_that_never_changes_is_todays(tmp_path):
    objects, optimizer, _ = objects_of(None, kind=Attributes, rate=0.1)
    optimizer.step()
    fresh, again, _ = objects_of(None, kind=Attributes, rate=0.7)
    by_disk(objects, fresh, tmp_path)
    assert again.rate == 0.7


def test_an_iterator_is_refused_by_name():
    class Counts(Kept):
        def __init__(self, params, make):
            super().__init__(params, make)
            self.counter = itertools.count()

    with pytest.raises(ConfigError, match=r"optimizer's counter is an iterator .count., which"):
        objects_of(lambda p: {}, kind=Counts)


def test_a_model_in_an_attribute_is_not_saved_twice():
    class Holds(Kept):
        pass

    model = net()
    optimizer = Holds(model.parameters())
    optimizer.model = model
    assert "attributes" not in Objects({"m": model, "o": optimizer}).capture()["o"]


# --- optimizers around optimizers -----------------------------------------------------------------


class Around(Kept):
    """As SAM is often written: what the inner one keeps is in no state_dict."""

    def __init__(self, params, make):
        super().__init__(params)
        self.inner = torch.optim.AdamW(self.param_groups, lr=0.1)
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["old"] = p.detach().clone()
        self.inner.step()


class Delegating(Kept):
    """As Lookahead: everything of the inner one, and its own beside it, in a form of its own."""

    def __init__(self, params, make):
        self.inner = torch.optim.AdamW(params, lr=0.1)
        self._optimizer_step_pre_hooks = self._optimizer_step_post_hooks = {}
        self.state = collections.defaultdict(dict)
        self.defaults = self.inner.defaults

    param_groups = property(lambda self: self.inner.param_groups)

    def state_dict(self):
        slow = {index: dict(self.state[p]) for index, p in enumerate(self._all())}
        return {"slow": slow, "inner": self.inner.state_dict()}

    def load_state_dict(self, state):
        self.inner.load_state_dict(state["inner"])
        for index, p in enumerate(self._all()):  # which rounds what is finer than its parameter
            self.state[p] = {k: v.to(p.dtype) for k, v in state["slow"][index].items()}

    def step(self, closure=None):
        self.inner.step()
        for p in self._all():
            self.state[p]["slow"] = torch.full_like(p, 1.2345678, dtype=torch.float32)

    def _all(self):
        return self.param_groups[0]["params"]


@pytest.mark.parametrize("kind", [Around, Delegating])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizers_around_optimizers_go_on_as_they_were(tmp_path, kind, dtype):
    def train(model, optimizer, steps):
        for number in steps:
            torch.manual_seed(number)
            optimizer.zero_grad()
            model(torch.randn(2, 4, dtype=dtype)).square().sum().backward()
            optimizer.step()

    objects, optimizer, model = objects_of(None, dtype, kind=kind)
    train(model, optimizer, range(3))
    fresh, again, other = objects_of(None, dtype, kind=kind)
    by_disk(objects, fresh, tmp_path)
    for one, its in ((optimizer, model), (again, other)):
        one.param_groups[0]["lr"] = 0.5  # the inner one steps with the outer one's groups
        train(its, one, range(3, 5))
    assert told(dict(other.named_parameters()), {}) == told(dict(model.named_parameters()), {})
    assert state_of(again, other) == state_of(optimizer, model)
    assert state_of(again.inner, other) == state_of(optimizer.inner, model)


def test_a_class_that_does_not_take_its_state_back_is_told(tmp_path):
    class Rounds(Kept):
        def state_dict(self):
            return {"state": {}, "param_groups": super().state_dict()["param_groups"], "k": 1.5}

        def load_state_dict(self, state):
            pass

    objects, _, _ = objects_of(lambda p: {}, kind=Rounds)
    fresh, again, _ = objects_of(lambda p: {}, kind=Rounds)
    by_disk(objects, fresh, tmp_path)
    again.state_dict = None
    Rounds.state_dict = lambda self: {
        "state": {},
        "param_groups": Kept.state_dict(self)["param_groups"],
        "k": 2.5,
    }
    del again.state_dict
    with pytest.raises(
        StateMismatch, match=r"Rounds does not take its state back .*optimizer.k was 1.5 and is 2.5"
    ):
        fresh.apply(open_checkpoint(Directory(tmp_path), 7))


# --- spread over ranks ----------------------------------------------------------------------------


@contextlib.contextmanager
def as_rank(rank, *mesh):
    size = int(np.prod(mesh))
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", mesh)
    finally:
        dist.destroy_process_group()


def spread_net(mesh, placements):
    model = torch.nn.Linear(4, 6, bias=False)
    local = torch.full((3, 4), 1.0) if mesh.size() > 1 else torch.full((6, 4), 1.0)
    whole = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size((6, 4)), stride=(4, 1)
    )
    model.weight = torch.nn.Parameter(whole)
    return model


def rows(parameter):
    """Row and column statistics, a replica, and what each rank has for itself."""
    mesh = parameter.device_mesh
    local = parameter.detach().to_local()
    row = DTensor.from_local(
        *(local.mean(-1, keepdim=True), mesh, [Shard(0)]),
        run_check=False,
        shape=torch.Size((6, 1)),
        stride=(1, 1),
    )
    whole = DTensor.from_local(torch.full((6, 4), 3.0), mesh, [Replicate()], run_check=False)
    return {
        "row": row,
        "nest": [{"row": row + 1}],
        "whole": whole,
        "local": local.clone(),
        "step": torch.tensor(3.0),
    }


def seen(value):
    if isinstance(value, DTensor):
        return (value.placements, value.shape, value.to_local().tolist())
    if isinstance(value, torch.Tensor):
        return (value.shape, value.tolist())
    if isinstance(value, dict):
        return {key: seen(inner) for key, inner in value.items()}
    return [seen(inner) for inner in value]


def whole(value):
    """What one rank holds all of, as the files have it."""
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, dict):
        return type(value)((key, whole(inner)) for key, inner in value.items())
    return [whole(inner) for inner in value] if isinstance(value, list) else value


def test_state_of_another_shape_than_its_parameter_keeps_its_placements(tmp_path):
    with as_rank(0, 1) as mesh:
        model = spread_net(mesh, [Shard(0)])
        optimizer = Kept(model.parameters(), rows)
        optimizer.step()
        objects = Objects({"model": model, "optimizer": optimizer})
        other = spread_net(mesh, [Shard(0)])
        again = Kept(other.parameters(), rows)
        write(Directory(tmp_path), [whole(objects.capture()) | {"outlast": {"step": 7}}])
        fresh = Objects({"model": other, "optimizer": again})
        fresh.apply(open_checkpoint(Directory(tmp_path), 7))
        assert seen(again.state[other.weight]) == seen(optimizer.state[model.weight])
        spread = {k for k, v in again.state[other.weight].items() if isinstance(v, DTensor)}
        assert spread == {"row", "whole"}
    # Over two ranks now, of which this is the second: each has its part of the rows.
    with as_rank(1, 2) as mesh:
        other = spread_net(mesh, [Shard(0)])
        again = Kept(other.parameters(), rows)
        fresh = Objects({"model": other, "optimizer": again})
        fresh.apply(open_checkpoint(Directory(tmp_path), 7))
        row = again.state[other.weight]["row"]
        assert (row.placements, tuple(row.shape)) == ((Shard(0),), (6, 1))
        assert tuple(row.to_local().shape) == (3, 1)
    # On one process without a mesh: whole.
    model = torch.nn.Linear(4, 6, bias=False)
    again = Kept(model.parameters(), rows)
    Objects({"model": model, "optimizer": again}).apply(open_checkpoint(Directory(tmp_path), 7))
    assert type(again.state[model.weight]["row"]) is torch.Tensor


def test_rows_that_were_whole_are_replicas_of_a_spread_parameter(tmp_path):
    model = torch.nn.Linear(4, 6, bias=False)
    optimizer = Kept(model.parameters(), lambda p: {"row": torch.ones(6, 1), "step": 3})
    optimizer.step()
    write(
        Directory(tmp_path),
        [Objects({"model": model, "optimizer": optimizer}).capture() | {"outlast": {"step": 7}}],
    )
    with as_rank(0, 2) as mesh:
        other = spread_net(mesh, [Shard(0)])
        again = Kept(other.parameters(), rows)
        fresh = Objects({"model": other, "optimizer": again})
        fresh.apply(open_checkpoint(Directory(tmp_path), 7))
        assert again.state[other.weight]["row"].placements == (Replicate(),)
