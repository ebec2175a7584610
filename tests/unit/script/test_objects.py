"""What a session is given by name: refused in words, checked before anything is changed."""

import copy

import pytest
import torch
from unit_checkpoints import damage, write
from unit_fakes import bits, same

from outlast.checkpoint.reader import open_checkpoint
from outlast.errors import ConfigError, StateMismatch
from outlast.script.objects import Objects
from outlast.storage import Directory


class Counter:
    """Anything with state."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Unwilling(Counter):
    def load_state_dict(self, state):
        raise KeyError("epoch")


def through_disk(objects, path, more=None):
    """What a save and a load make of the objects' state."""
    write(Directory(path), [objects.capture() | (more or {"outlast": {"step": 7}})])
    return open_checkpoint(Directory(path), 7)


def net(width=3, *, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(2, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1)
    ).to(dtype)


def train(model, optimizer, steps=3, *, seed=5):
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.rand(4, 2, generator=generator).to(dtype)).square().sum().backward()
        optimizer.step()


def refusal(objects, loaded):
    with pytest.raises(StateMismatch) as caught:
        objects.check(loaded).settle()
    return str(caught.value)


# --- what is refused at once ---------------------------------------------------------------------


@pytest.mark.parametrize("named", [{}, {"loader": [1, 2]}])
def test_nothing_to_save(named):
    with pytest.raises(ConfigError, match=r"needs something to save, as in outlast\.session\("):
        Objects(named)


@pytest.mark.parametrize("value", [3, "text", 0.5])
def test_a_setting_that_a_session_does_not_have(value):
    with pytest.raises(ConfigError, match=f"size={value!r} is neither an argument of a session"):
        Objects({"model": net(), "size": value})


@pytest.mark.parametrize("value", [None, b"bytes", torch.ones(2), print, object()])
def test_an_object_without_state(value):
    with pytest.raises(
        ConfigError, match=r"lr is a .* without state_dict and load_state_dict; wrap"
    ):
        Objects({"model": net(), "lr": value})


def test_half_of_a_state_is_none():
    half = type("Half", (), {"state_dict": lambda self: {}})()
    with pytest.raises(ConfigError, match="half is a Half without"):
        Objects({"half": half})


@pytest.mark.parametrize("name", ["outlast", "model@rank-00001", "a.b"])
def test_names_that_are_taken(name):
    with pytest.raises(ConfigError, match="is a name that outlast keeps for itself; use another"):
        Objects({name: net()})


def test_iterables_without_state_are_loaders():
    loader = [1, 2]
    objects = Objects({"model": net(), "loader": loader})
    assert objects.loaders == [loader]
    assert set(objects.capture()) == {"model"}


def test_a_loader_of_steps_is_not_saved_a_second_time(tmp_path):
    class Stateful(list):
        def state_dict(self):
            return {"at": 1}

        def load_state_dict(self, state):
            self.append(state["at"])

    loader = Stateful()
    objects = Objects({"model": net(), "loader": loader})
    assert set(objects.capture()) == {"model", "loader"}
    objects.forget_loader(loader)
    assert set(objects.capture()) == {"model"}
    # A later session names it again, and is not told that it is missing.
    Objects({"model": net(), "loader": Stateful()}).check(through_disk(objects, tmp_path))


# --- what fits and what does not -----------------------------------------------------------------


def test_everything_comes_back_to_the_bit(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    train(model, optimizer)
    scheduler.step()
    objects = Objects(
        {"model": model, "optimizer": optimizer, "scheduler": scheduler, "counter": Counter(4)}
    )
    loaded = through_disk(objects, tmp_path)
    other = net(seed=1)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    other_scheduler = torch.optim.lr_scheduler.StepLR(other_optimizer, 2)
    counter = Counter()
    fresh = Objects(
        {
            "model": other,
            "optimizer": other_optimizer,
            "scheduler": other_scheduler,
            "counter": counter,
        }
    )
    fresh.check(loaded)
    fresh.apply(loaded)
    assert same(fresh.capture(), objects.capture())
    assert counter.value == 4
    train(model, optimizer, seed=6)
    train(other, other_optimizer, seed=6)
    assert same(fresh.capture()["model"], objects.capture()["model"])


def test_the_count_of_batch_norm_is_restored(tmp_path):
    model = net()
    train(model, torch.optim.SGD(model.parameters(), 0.1), steps=3)
    loaded = through_disk(Objects({"model": model}), tmp_path)
    other = net(seed=1)
    Objects({"model": other}).apply(loaded)
    assert other[1].num_batches_tracked == 3
    assert bits(other[1].running_var) == bits(model[1].running_var)


def test_checking_changes_nothing(tmp_path):
    loaded = through_disk(Objects({"model": net()}), tmp_path)
    other = net(seed=1)
    before = copy.deepcopy(other.state_dict())
    Objects({"model": other}).check(loaded)
    refusal(Objects({"model": other, "more": Counter()}), loaded)
    assert same(dict(before), dict(other.state_dict()))


def test_a_name_on_one_side_only(tmp_path):
    loaded = through_disk(Objects({"model": net(), "ema": Counter()}), tmp_path)
    says = refusal(Objects({"model": net()}), loaded)
    assert says.startswith("step 7 holds 'ema', which this session does not name; add ema=…")
    says = refusal(Objects({"model": net(), "ema": Counter(), "scaler": Counter()}), loaded)
    assert says.startswith("step 7 does not hold 'scaler', which this session names; remove it")
    assert "--dir" in says


def test_a_shape_names_the_tensor_and_both(tmp_path):
    loaded = through_disk(Objects({"model": net(3)}), tmp_path)
    says = refusal(Objects({"model": net(4)}), loaded)
    assert says.startswith("model.0.bias has shape (3,) in step 7 and (4,) in the model; build")


def test_a_dtype_names_the_tensor_and_both(tmp_path):
    loaded = through_disk(Objects({"model": net()}), tmp_path)
    says = refusal(Objects({"model": net(dtype=torch.bfloat16)}), loaded)
    assert says.startswith(
        "model.0.bias has dtype torch.float32 in step 7 and torch.bfloat16 in the model"
    )


def test_a_tensor_on_one_side_only(tmp_path):
    small, large = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1)
    loaded = through_disk(Objects({"model": large}), tmp_path / "a")
    assert "model.bias is only in step 7" in refusal(Objects({"model": small}), loaded)
    before = copy.deepcopy(dict(small.state_dict()))
    with pytest.raises(StateMismatch, match=r"model\.bias is only in step 7"):
        Objects({"model": small}).apply(loaded)
    assert same(before, dict(small.state_dict()))
    loaded = through_disk(Objects({"model": small}), tmp_path / "b")
    assert "model.bias is only in the model" in refusal(Objects({"model": large}), loaded)


def test_a_name_that_was_another_kind_of_object(tmp_path):
    loaded = through_disk(Objects({"thing": Counter([1])}), tmp_path)
    model = net()
    assert "thing" in refusal(Objects({"thing": model}), loaded)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert "thing" in refusal(Objects({"thing": optimizer}), loaded)
    loaded = through_disk(
        Objects({"thing": type("L", (Counter,), {"state_dict": list})()}), tmp_path
    )
    for value in (model, optimizer):
        assert "thing" in refusal(Objects({"thing": value}), loaded)


def test_an_object_that_refuses_its_state_is_named(tmp_path):
    loaded = through_disk(Objects({"counter": Counter()}), tmp_path)
    with pytest.raises(StateMismatch, match="counter does not take the state of step 7: KeyError"):
        Objects({"counter": Unwilling()}).apply(loaded)


# --- wrapped models ------------------------------------------------------------------------------


class Compiled(torch.nn.Module):
    """As torch.compile wraps."""

    def __init__(self, inner):
        super().__init__()
        self._orig_mod = inner


def test_a_checkpoint_does_not_depend_on_how_a_model_was_wrapped(tmp_path):
    model = net()
    wrapped = Compiled(Compiled(model))
    objects = Objects({"model": wrapped})
    assert list(objects.capture()["model"]) == list(model.state_dict())
    other = net(seed=1)
    Objects({"model": other}).apply(through_disk(objects, tmp_path))
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    state = Objects({"model": wrapped, "optimizer": optimizer}).capture()["optimizer"]
    assert state["param_groups"][0]["params"][0] == "0.weight"


# --- optimizers ----------------------------------------------------------------------------------


def adam(model, **more):
    return torch.optim.AdamW(model.parameters(), lr=0.1, **more)


def test_state_goes_under_the_names_of_parameters():
    model = net()
    optimizer = adam(model)
    train(model, optimizer, 1)
    state = Objects({"model": model, "optimizer": optimizer}).capture()["optimizer"]
    assert list(state["state"]) == [name for name, _ in model.named_parameters()]
    two = Objects({"a": model, "b": net(), "optimizer": optimizer}).capture()["optimizer"]
    assert next(iter(two["state"])) == "a.0.weight"
    alone = Objects({"optimizer": optimizer}).capture()["optimizer"]
    assert next(iter(alone["state"])) == "#0"


def round_trip(tmp_path, build):
    """Train, save, build anew, load; what the two hold must be the same."""
    model, optimizer = build()
    train(model, optimizer)
    objects = Objects({"model": model, "optimizer": optimizer})
    loaded = through_disk(objects, tmp_path)
    torch.manual_seed(99)
    again, again_optimizer = build()
    fresh = Objects({"model": again, "optimizer": again_optimizer})
    fresh.check(loaded)
    fresh.apply(loaded)
    assert same(fresh.capture(), objects.capture())
    train(model, optimizer, seed=8)
    train(again, again_optimizer, seed=8)
    assert same(fresh.capture(), objects.capture())
    return objects.capture()


def test_groups_and_frozen_and_shared_parameters(tmp_path):
    def build():
        model = net().append(torch.nn.Linear(1, 1))
        model.tied = torch.nn.Linear(1, 1, bias=False)
        model.tied.weight = model[3].weight
        model[0].bias.requires_grad_(False)
        groups = [
            {"params": [model[0].weight, model[0].bias], "lr": 0.1},
            {"params": [*model[1].parameters(), *model[2].parameters()], "lr": 0.01},
            {"params": list(model[3].parameters()), "weight_decay": 0.5},
        ]
        return model, torch.optim.AdamW(groups)

    state = round_trip(tmp_path, build)["optimizer"]
    assert "0.bias" not in state["state"]  # frozen: it never got a state
    assert state["param_groups"][0]["params"] == ["0.weight", "0.bias"]
    assert state["param_groups"][2]["params"] == ["3.weight", "3.bias"]


@pytest.mark.parametrize(
    "build",
    [
        lambda m: torch.optim.SGD(m.parameters(), 0.1),
        lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9),
        lambda m: torch.optim.Adam(m.parameters(), amsgrad=True),
        lambda m: torch.optim.AdamW(m.parameters(), fused=True),
        lambda m: torch.optim.AdamW(m.named_parameters()),
        lambda m: torch.optim.Adagrad(m.parameters()),
        lambda m: torch.optim.RMSprop(m.parameters(), centered=True),
        lambda m: torch.optim.LBFGS(m.parameters()),
    ],
    ids=["sgd", "momentum", "amsgrad", "fused", "named", "adagrad", "rmsprop", "lbfgs"],
)
def test_optimizers(tmp_path, build):
    def both():
        model = net()
        return model, build(model)

    if isinstance(both()[1], torch.optim.LBFGS):  # wants a closure to step
        model, optimizer = both()
        objects = Objects({"model": model, "optimizer": optimizer})
        objects.check(through_disk(objects, tmp_path))
        return
    round_trip(tmp_path, both)


def test_full_precision_state_of_bf16_parameters_is_not_rounded(tmp_path):
    model = net(dtype=torch.bfloat16)
    optimizer = adam(model)
    train(model, optimizer, 1)
    for number, state in enumerate(optimizer.state.values()):
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.full_like(state[name], 1 / 3 + number, dtype=torch.float32)
    objects = Objects({"model": model, "optimizer": optimizer})
    other = net(dtype=torch.bfloat16, seed=1)
    fresh = Objects({"model": other, "optimizer": adam(other)})
    fresh.apply(through_disk(objects, tmp_path))
    state = fresh.capture()["optimizer"]["state"]
    assert state["0.weight"]["exp_avg"].dtype == torch.float32
    assert same(fresh.capture(), objects.capture())


@pytest.mark.parametrize("order", ["reversed", "rotated"])
def test_the_order_of_parameters_may_change(tmp_path, order):
    """Two of one shape: by position, each would get the other's moments, and nobody would see."""
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})

    def optimizer_of(model, parameters):
        return torch.optim.AdamW([{"params": parameters, "lr": 0.1}])

    first = optimizer_of(model, list(model.parameters()))
    (model["a"](torch.ones(1, 2)) + 3 * model["b"](torch.ones(1, 2))).sum().backward()
    first.step()
    objects = Objects({"model": model, "optimizer": first})
    loaded = through_disk(objects, tmp_path)
    parameters = list(model.parameters())
    parameters = parameters[::-1] if order == "reversed" else parameters[1:] + parameters[:1]
    second = optimizer_of(model, parameters)
    fresh = Objects({"model": model, "optimizer": second})
    fresh.check(loaded)
    fresh.apply(loaded)
    now, then = fresh.capture()["optimizer"], objects.capture()["optimizer"]
    assert now["state"].keys() == then["state"].keys()
    assert all(same(now["state"][name], then["state"][name]) for name in then["state"])
    for parameter in model.parameters():
        assert bits(second.state[parameter]["exp_avg"]) == bits(first.state[parameter]["exp_avg"])


def test_named_parameters_in_another_order_keep_their_names(tmp_path):
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    named = list(model.named_parameters())
    first = torch.optim.AdamW(named)
    loaded = through_disk(Objects({"model": model, "optimizer": first}), tmp_path)
    second = torch.optim.AdamW(named[::-1])
    Objects({"model": model, "optimizer": second}).apply(loaded)
    assert second.param_groups[0]["param_names"] == [name for name, _ in named[::-1]]


def test_another_set_of_parameters_is_refused_before_anything_changes(tmp_path):
    model = net()
    loaded = through_disk(Objects({"model": model, "optimizer": adam(model)}), tmp_path)
    fewer = torch.optim.AdamW(list(model.parameters())[:-1])
    says = refusal(Objects({"model": model, "optimizer": fewer}), loaded)
    assert says.startswith(
        "optimizer had 6 parameters at step 7 and has 5 now (only on one side: 2.bias)"
    )


@pytest.mark.parametrize("cut", [1, 3])
def test_other_groups_are_refused_before_anything_changes(tmp_path, cut):
    model = net()
    parameters = list(model.parameters())

    def grouped(*cuts):
        return torch.optim.AdamW(
            [{"params": parameters[a:b]} for a, b in zip((0, *cuts), (*cuts, 6), strict=True)]
        )

    loaded = through_disk(Objects({"model": model, "optimizer": grouped(2)}), tmp_path)
    for optimizer in (grouped(cut), grouped(1, cut + 1), grouped()):
        objects = Objects({"model": model, "optimizer": optimizer})
        assert "groups" in refusal(objects, loaded)
        with pytest.raises(StateMismatch, match="groups"):
            objects.apply(loaded)


def test_what_is_kept_lies_in_memory_of_its_own_as_torch_aligns_it(tmp_path):
    """At another alignment a sum takes another path through the vector unit: other last bits."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
    optimizer = adam(model)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    other = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
    fresh = adam(other)
    loaded = through_disk(Objects({"model": model, "optimizer": optimizer}), tmp_path)
    Objects({"model": other, "optimizer": fresh}).apply(loaded)
    kept = [value for state in fresh.state.values() for value in state.values()]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in kept)
    places = {tensor.untyped_storage().data_ptr() for tensor in kept}
    assert len(places) == len(kept), "none is a view of the file that was read"


def test_another_class_of_optimizer_is_refused(tmp_path):
    model = net()
    loaded = through_disk(Objects({"model": model, "optimizer": adam(model)}), tmp_path)
    other = Objects({"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)})
    with pytest.raises(StateMismatch, match=r"was of class AdamW .* is of class SGD now"):
        other.check(loaded)


# --- where it is read to -------------------------------------------------------------------------


def addresses(model):
    return {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}


def hooked(model):
    model.register_state_dict_post_hook(lambda module, state, prefix, local: None)
    return model


def overriding(model, name):
    """The model with one method of the first layer replaced by one of the user's."""
    layer = type(model[0])

    def method(self, *args, **kwargs):
        return getattr(layer, name)(self, *args, **kwargs)

    model[0].__class__ = type("Own", (layer,), {name: method})
    return model


def replaced(model):
    """One method replaced on the object itself."""
    inner = model[0].load_state_dict
    model[0].load_state_dict = lambda state, **kwargs: inner(dict(state), **kwargs)
    return model


def copying(model):
    """A torch hook whose state is a copy, as FSDP1's is."""

    def hook(module, state, prefix, local):
        for name, tensor in state.items():
            state[name] = tensor.clone()

    hook.__module__ = "torch.distributed.fsdp"
    model._register_state_dict_hook(hook)
    return model


def test_a_model_of_torchs_own_is_filled_where_it_lies(tmp_path):
    model = net()
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    loaded = through_disk(Objects({"model": model}), tmp_path)
    other = net(seed=1)
    before = addresses(other)
    targets = Objects({"model": other}).check(loaded).targets
    assert {tensor.data_ptr() for _, tensor in targets} == set(before.values())
    Objects({"model": other}).apply(loaded)
    assert addresses(other) == before
    assert same(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize(
    "change",
    [
        hooked,
        replaced,
        copying,
        *[
            lambda model, name=name: overriding(model, name)
            for name in ("load_state_dict", "_load_from_state_dict", "_save_to_state_dict")
        ],
    ],
)
def test_a_module_with_ways_of_its_own_goes_through_load_state_dict(tmp_path, change):
    """And what is around it is filled where it lies."""
    model = net()
    loaded = through_disk(Objects({"model": model}), tmp_path)
    other = change(net(seed=1))
    live = addresses(other)
    owned = {
        at for name, at in live.items() if name.startswith("0.") or change in (hooked, copying)
    }
    objects = Objects({"model": other})
    targets = {tensor.data_ptr() for _, tensor in objects.check(loaded).targets}
    assert owned.isdisjoint(targets)
    assert set(live.values()) - owned <= targets
    objects.apply(loaded)
    assert same(dict(other.state_dict()), dict(model.state_dict()))


class Extra(torch.nn.Linear):
    """A module with state that is no tensor, and with a tensor among it."""

    def __init__(self):
        super().__init__(2, 1)
        self.more = None

    def get_extra_state(self):
        return self.more

    def set_extra_state(self, state):
        self.more = state


def test_extra_state_comes_back(tmp_path):
    model, other = Extra(), Extra()
    model.more = {"seen": 3, "sums": [torch.ones(2)]}
    other.more = {"seen": 0}
    objects = Objects({"model": other})
    objects.apply(through_disk(Objects({"model": model}), tmp_path))
    assert same(other.more, model.more)
    assert same(dict(other.state_dict()), dict(model.state_dict()))


def test_strided_parameters_keep_their_layout(tmp_path):
    def convolution(seed):
        torch.manual_seed(seed)
        return torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    model, other = convolution(0), convolution(1)
    strides = other.weight.stride()
    Objects({"model": other}).apply(through_disk(Objects({"model": model}), tmp_path))
    assert other.weight.stride() == strides != torch.empty(4, 3, 3, 3).stride()
    assert bits(other.weight) == bits(model.weight)


def test_nothing_is_read_and_nothing_changed_before_all_fits(tmp_path):
    """The shape is in the manifest; a damaged file is not even looked at."""
    model = net()
    loaded = through_disk(Objects({"model": model, "optimizer": adam(model)}), tmp_path)
    damage(tmp_path, 7, "rank-00000.safetensors")
    other = net(4)
    before = copy.deepcopy(dict(other.state_dict()))
    with pytest.raises(StateMismatch, match="has shape"):
        Objects({"model": other, "optimizer": adam(other)}).apply(loaded)
    assert same(before, dict(other.state_dict()))


def test_moments_that_were_stored_in_fewer_bits_are_of_their_own_dtype(tmp_path):
    model = net()
    optimizer = adam(model)
    train(model, optimizer)
    objects = Objects({"model": model, "optimizer": optimizer})
    names = [
        f"optimizer.state.{name}.{what}"
        for name, _ in model.named_parameters()
        for what in ("exp_avg", "exp_avg_sq")
    ]
    write(Directory(tmp_path), [objects.capture()], narrow=names, exact=False)
    other = net(seed=1)
    fresh = Objects({"model": other, "optimizer": adam(other)})
    fresh.apply(open_checkpoint(Directory(tmp_path), 7))
    now, then = (one.capture()["optimizer"]["state"] for one in (fresh, objects))
    for name, _ in model.named_parameters():
        for what in ("exp_avg", "exp_avg_sq"):
            assert now[name][what].dtype == torch.float32
            assert bits(now[name][what]) == bits(then[name][what].bfloat16().float())


def test_an_optimizer_that_has_stepped_is_filled_where_it_lies(tmp_path):
    model, other = net(), net(seed=1)
    optimizer, fresh = adam(model), adam(other)
    train(model, optimizer)
    train(other, fresh, seed=9)
    before = {id(tensor) for state in fresh.state.values() for tensor in state.values()}
    objects, again = (
        Objects({"model": m, "optimizer": o}) for m, o in ((model, optimizer), (other, fresh))
    )
    again.apply(through_disk(objects, tmp_path))
    assert {id(tensor) for state in fresh.state.values() for tensor in state.values()} == before
    assert same(again.capture(), objects.capture())


@pytest.mark.parametrize("trouble", ["shared", "parameter", "shape", "dtype", "expanded"])
def test_live_state_that_is_no_memory_of_its_own_is_replaced(tmp_path, trouble):
    model, other = net(), net(seed=1)
    optimizer, fresh = adam(model), adam(other)
    train(model, optimizer)
    for number, state in enumerate(optimizer.state.values()):
        state["step"] += number  # what they share now differed then
    train(other, fresh, seed=9)
    step = torch.tensor(1.0)
    for parameter, state in fresh.state.items():
        moments = state["exp_avg"]
        state["step"] = step
        state["exp_avg"] = {
            "shared": moments,
            "parameter": parameter.detach(),
            "shape": torch.zeros(7),
            "dtype": moments.double(),
            "expanded": torch.zeros(1).expand(moments.shape),
        }[trouble]
    objects, again = (
        Objects({"model": m, "optimizer": o}) for m, o in ((model, optimizer), (other, fresh))
    )
    again.apply(through_disk(objects, tmp_path))
    assert same(again.capture(), objects.capture())
    train(model, optimizer, seed=6)
    train(other, fresh, seed=6)
    assert same(again.capture(), objects.capture())


# --- stages of a pipeline ------------------------------------------------------------------------


def stage(*numbers, seed=0):
    torch.manual_seed(seed)
    layers = {str(number): torch.nn.Linear(2, 2 + number) for number in range(4)}
    model = torch.nn.ModuleDict({name: layers[name] for name in map(str, numbers)})
    optimizer = torch.optim.AdamW(list(model.named_parameters()), lr=0.1)
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(100 * seed + 10 * int(name[0]) + len(name))
        parameter.grad = torch.rand(parameter.shape, generator=generator)
    optimizer.step()
    return Objects({"model": model, "optimizer": optimizer})


def staged(path, *stages):
    write(Directory(path), [stage(*numbers, seed=0).capture() for numbers in stages])


def test_other_stages_than_those_that_saved(tmp_path):
    staged(tmp_path, (0, 1), (2, 3))
    whole = stage(0, 1, 2, 3, seed=9)
    whole.apply(open_checkpoint(Directory(tmp_path), 7))
    for numbers, one in (((0, 1), stage(0, 1)), ((2, 3), stage(2, 3))):
        then, now = one.capture(), whole.capture()
        for name, tensor in then["model"].items():
            assert same(tensor, now["model"][name])
            assert same(then["optimizer"]["state"][name], now["optimizer"]["state"][name])
        assert numbers
    group = whole.capture()["optimizer"]["param_groups"][0]
    assert group["params"] == [f"{n}.{what}" for n in range(4) for what in ("weight", "bias")]


def test_a_part_of_a_stage_leaves_the_rest_to_be_settled_with_the_others(tmp_path):
    staged(tmp_path, (0, 1, 2, 3))
    objects, loaded = stage(1, 3, seed=9), open_checkpoint(Directory(tmp_path), 7)
    restore = objects.check(loaded)
    missing = {f"{n}.{what}" for n in (0, 2) for what in ("weight", "bias")}
    assert set(restore.absent) == {f"model.{name}" for name in missing} | {
        f"optimizer/{name}" for name in missing
    }
    claims = stage(0, 2).check(loaded).claims
    with pytest.raises(StateMismatch, match=r"model\.0\.bias is only in step 7"):
        restore.settle(claims - {"model.0.bias"})
    with pytest.raises(StateMismatch, match="had 8 parameters at step 7 and has 4 now"):
        restore.settle(claims - {"optimizer/2.bias"})
    restore.settle(claims)
    restore.apply()
    then, now = stage(1, 3).capture(), objects.capture()
    assert same(then["optimizer"]["state"], now["optimizer"]["state"])


def test_a_stage_that_nobody_saved_is_refused(tmp_path):
    staged(tmp_path, (0,), (1,))
    loaded = open_checkpoint(Directory(tmp_path), 7)
    with pytest.raises(StateMismatch, match=r"model\.2\.bias is only in the model"):
        stage(0, 2).check(loaded)
