"""A model comes back as it was, whatever its modules and tensors are, or is refused by name.

Each kind is trained for three steps, saved, restored into a new one, and trained on beside the
first: from a checkpoint, and from the memory of a survivor.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from test_objects import through_disk
from test_put import state_of
from torch import nn
from torch.ao import quantization
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from unit_fakes import same

from outlast.errors import ConfigError, StateMismatch
from outlast.script.objects import Objects
from outlast.script.restore import put

# torch's quantization says that another package follows it.
pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))

    def forward(self, x):
        return self.net(x)


def quantized():
    """Ranges of weights have no shape before the first batch."""
    model = nn.Sequential(quantization.QuantStub(), Net(), quantization.DeQuantStub())
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(model.train())


class Observed(Net):
    def __init__(self):
        super().__init__()
        self.rows = quantization.MovingAveragePerChannelMinMaxObserver(ch_axis=1)
        self.all = quantization.HistogramObserver()

    def forward(self, x):
        self.rows(x.detach())
        self.all(x.detach())
        return super().forward(x) * self.rows.max_val.mean()


class Extra(Net):
    """A number and a tensor, by torch's own door."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + self.calls / 10)

    def get_extra_state(self):
        return {"calls": self.calls, "twice": torch.tensor(2 * self.calls)} if self.calls else None

    def set_extra_state(self, state):
        self.calls = state["calls"]


class Custom(Extra):
    """The same by hand."""

    get_extra_state, set_extra_state = nn.Module.get_extra_state, nn.Module.set_extra_state

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.calls:
            destination[f"{prefix}calls"] = torch.tensor(self.calls)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.calls = int(state_dict.pop(f"{prefix}calls"))
        super()._load_from_state_dict(state_dict, prefix, *args)


class Growing(Net):
    """A buffer that is longer after each step, and loads so."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones(1))

    def forward(self, x):
        self.seen = torch.cat([self.seen, x.detach().mean()[None]])
        return super().forward(x) * (1 + self.seen.sum())

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.seen = torch.empty_like(state_dict[f"{prefix}seen"])
        super()._load_from_state_dict(state_dict, prefix, *args)


class Late(Net):
    """Buffers that hold nothing before the first batch; torch alone would not load them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", None)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x):
        mean = x.detach().mean()
        self.mean = mean if self.mean is None else 0.9 * self.mean + mean
        self.seen = torch.cat([self.seen, mean[None]])
        return super().forward(x) * (1 + self.mean + self.seen.sum())


class Rebound(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        self.scale = self.scale * 0.9
        return super().forward(x) * self.scale.sum()


def hooked():
    model = Rebound()
    model.calls = 0.0
    model.register_forward_hook(lambda self, _, found: found * (1 + self.calls))

    def save(module, state, prefix, _):
        state[f"{prefix}calls"] = torch.tensor(module.scale.sum().item())

    def load(module, state, prefix, *_):
        module.calls = float(state.pop(f"{prefix}calls"))

    model.register_state_dict_post_hook(save)
    model.register_load_state_dict_pre_hook(load)
    model.register_forward_pre_hook(lambda self, _: setattr(self, "calls", self.scale.sum().item()))
    return model


class Holding(Net):
    """A buffer and a parameter of some make, which the loss and an optimizer change."""

    def __init__(self, make):
        super().__init__()
        self.register_buffer("buffer", make())
        self.parameter = nn.Parameter(make(), requires_grad=False)

    def forward(self, x):
        found = super().forward(x)
        for one in (self.buffer, self.parameter):
            values = torch.view_as_real(one.resolve_conj()).sum(-1) if one.is_complex() else one
            found = found * values.reshape(-1)[:4].clone()
            bare = one.conj() if one.is_conj() else one.data
            bare = torch._neg_view(bare) if bare.is_neg() else bare
            bare.as_strided((len(bare.untyped_storage()) // one.element_size(),), (1,), 0).mul_(0.9)
        return found


def complex_row():
    return torch.complex(torch.arange(1.0, 5), torch.arange(2.0, 6))


MAKES = {
    "negated": lambda: torch._neg_view(torch.arange(1.0, 5)),
    "conjugated": lambda: complex_row().conj(),
    "imaginary": lambda: complex_row().conj().imag,
    "expanded": lambda: torch.ones(1).expand(4),
    "expanded rows": lambda: torch.arange(1.0, 5).expand(3, 4),
    "expanded and negated": lambda: torch._neg_view(torch.ones(1)).expand(4),
    "windows": lambda: torch.arange(1.0, 6).as_strided((3, 3), (1, 1)),
}
KINDS = {
    "qat": quantized,
    "observed": Observed,
    "extra": Extra,
    "custom": Custom,
    "growing": Growing,
    "late": Late,
    "rebound": Rebound,
    "hooked": hooked,
    "inside": lambda: nn.Sequential(nn.Linear(4, 4), Growing(), nn.Sequential(Custom())),
    "compiled inside": lambda: nn.Sequential(torch.compile(Growing(), backend="eager")),
    **{name: lambda make=make: Holding(make) for name, make in MAKES.items()},
}  # fmt: skip
WRAPPERS = {
    "plain": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "ddp": DistributedDataParallel,
}


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def built(kind, wrap, seed):
    torch.manual_seed(seed)
    model = wrap(KINDS[kind]())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    return model, optimizer, Objects({"model": model, "optimizer": optimizer})


def step(model, optimizer, number):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    model(x).sub(x).square().mean().backward()
    optimizer.step()


def goes_on_alike(kind, wrap, restore):
    model, optimizer, objects = built(kind, wrap, 0)
    for number in range(3):
        step(model, optimizer, number)
    again, other, fresh = built(kind, wrap, 1)
    layout = [(t.stride(), t.is_neg(), t.is_conj()) for t in again.state_dict().values()
              if isinstance(t, torch.Tensor) and t.numel()]  # fmt: skip
    assert restore(objects, fresh) == []
    assert same(fresh.capture(), objects.capture())
    if isinstance(again, Holding):
        assert layout == [
            (t.stride(), t.is_neg(), t.is_conj()) for t in again.state_dict().values()
        ]
    for number in range(3, 5):
        step(model, optimizer, number)
        step(again, other, number)
    assert same(fresh.capture(), objects.capture())


@pytest.mark.parametrize("kind", KINDS)
def test_from_a_checkpoint_it_goes_on_as_it_would_have(tmp_path, kind):
    def restore(saved, fresh):
        loaded = through_disk(saved, tmp_path)
        fresh.check(loaded).settle()
        return fresh.apply(loaded)

    goes_on_alike(kind, WRAPPERS["plain"], restore)


@pytest.mark.parametrize("wrapper", ["compiled", "ddp"])
@pytest.mark.parametrize("kind", ["qat", "growing", "late", "extra"])
def test_a_wrapped_one_too(tmp_path, group, kind, wrapper):
    goes_on_alike(
        kind, WRAPPERS[wrapper], lambda saved, fresh: fresh.apply(through_disk(saved, tmp_path))
    )


@pytest.mark.parametrize("kind", KINDS)
def test_from_a_survivor_it_goes_on_as_it_would_have(kind):
    goes_on_alike(
        kind, WRAPPERS["plain"], lambda saved, fresh: fresh.put(copy.deepcopy(state_of(saved)))
    )


@pytest.mark.parametrize("wrap", [nn.Sequential, checkpoint_wrapper])
def test_what_is_around_a_module_with_a_way_of_its_own_is_filled_where_it_lies(tmp_path, wrap):
    saved, fresh = (nn.Sequential(nn.Linear(4, 4), wrap(Growing())) for _ in range(2))
    loaded = through_disk(Objects({"model": saved}), tmp_path)
    targets = {tensor.data_ptr() for _, tensor in Objects({"model": fresh}).check(loaded).targets}
    assert {p.data_ptr() for p in fresh[0].parameters()} <= targets
    assert targets.isdisjoint(p.data_ptr() for p in fresh[1].parameters())


# --- what is refused or said ---------------------------------------------------------------------


class Reshaped(Growing):
    """As ``Growing``, and loads as torch does."""

    _load_from_state_dict = nn.Module._load_from_state_dict


def refused(tmp_path, saved, now):
    loaded = through_disk(Objects({"model": saved}), tmp_path)
    objects = Objects({"model": now})
    with pytest.raises(StateMismatch) as caught:
        objects.apply(loaded)
    return str(caught.value)


def test_a_buffer_of_another_shape_is_refused_with_what_can_be_done(tmp_path):
    saved, now = nn.Sequential(Reshaped()), nn.Sequential(Reshaped())
    saved(torch.ones(2, 4))
    line = refused(tmp_path, saved, now)
    assert "model.0.seen has shape (2,) in step 7 and (1,) in the model" in line
    assert "Reshaped needs a _load_from_state_dict that takes it" in line


def test_an_empty_place_of_another_dtype_is_refused(tmp_path):
    saved, now = Late(), Late().double()
    saved.seen = torch.ones(2)
    assert "model.net.0.bias has dtype" in refused(tmp_path, saved, now)
    now.net.float()
    assert "model.seen has shape (2,)" in refused(tmp_path / "two", saved, now)


def test_a_layer_of_another_width_is_refused_before_a_module_of_its_own_sees_it(tmp_path):
    now = Growing()
    now.net[0] = nn.Linear(4, 5)
    line = refused(tmp_path, Growing(), now)
    assert "model.net.0.bias has shape (6,) in step 7 and (5,) in the model" in line


class Lenient(Net):
    """Takes what it likes."""

    def load_state_dict(self, state_dict, strict=True):
        kept = {name: one for name, one in state_dict.items() if "bias" not in name}
        return super().load_state_dict(kept, strict=False)


def test_what_a_module_leaves_out_is_said(tmp_path):
    saved, now = nn.Sequential(Lenient()), nn.Sequential(Lenient())
    loaded = through_disk(Objects({"model": saved}), tmp_path)
    (line,) = Objects({"model": now}).apply(loaded)
    assert line.startswith("model.0.net.0.bias and 1 more are not what was saved: Lenient loads")
    assert same(now[0].net[0].weight, saved[0].net[0].weight)


def test_a_name_that_a_module_does_not_take_is_refused(tmp_path):
    saved, now = Lenient(), Lenient()
    saved.net.append(nn.Linear(4, 4))
    line = refused(tmp_path, saved, now)
    assert "model (Lenient) loads in a way of its own and does not have model.net.3" in line


def test_a_module_that_refuses_is_named(tmp_path):
    saved, now = nn.Sequential(Custom()), nn.Sequential(Custom())
    line = refused(tmp_path, saved, now)  # it has made no step: there is no number to load
    assert line == "model.0 does not take the state of step 7: KeyError: 'calls'"


def test_elements_that_share_memory_now_and_did_not_are_refused(tmp_path):
    saved, now = nn.Module(), nn.Module()
    saved.register_buffer("b", torch.arange(3.0))
    now.register_buffer("b", torch.zeros(1).expand(3))
    line = refused(tmp_path, saved, now)
    assert "model.b has several values in step 7 where its elements share memory now" in line
    with pytest.raises(StateMismatch, match=r"the elements of model\.b share memory"):
        put("model", now, saved.state_dict())


def test_a_layer_without_a_shape_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"model\.weight has no shape before the first batch"):
        state_of(Objects({"model": nn.LazyLinear(3)}))
