"""One worker: what a step makes of a model's buffers, and which of them are refused."""

import copy

import pytest
import torch
from small_shards import batch, net, step
from unit_fakes import bits

from outlast import SameBits
from outlast.data import Shards
from outlast.errors import ConfigError


def test_batch_norm_takes_one_update_a_step_by_the_mean_of_the_shards():
    model = SameBits(net(torch.nn.BatchNorm1d(4)), shards=4)
    norm = model.module[1]
    step(model, batch())
    before = norm.running_mean.clone(), norm.running_var.clone()
    step(model, batch(position=8))
    hidden = [model.module[0](x).detach() for x in batch(position=8).parts]
    means = torch.stack([h.mean(0) for h in hidden]).mean(0)
    variances = torch.stack([h.var(0) for h in hidden]).mean(0)
    torch.testing.assert_close(norm.running_mean, 0.9 * before[0] + 0.1 * means)
    torch.testing.assert_close(norm.running_var, 0.9 * before[1] + 0.1 * variances)
    assert norm.num_batches_tracked == 2


def test_every_shard_starts_from_the_buffers_of_the_step():
    model = SameBits(net(torch.nn.BatchNorm1d(4)), shards=4)
    seen = []
    for x in model.shards(batch()):
        seen.append(model.module[1].running_mean.clone())
        model.backward(model(x).mean())
    assert {bits(tensor) for tensor in seen} == {bits(torch.zeros(4))}


def test_a_constant_buffer_with_a_nan_in_it_is_not_touched():
    """In its first element only, and yet all others drifted: a mean of equal numbers is another."""
    constant = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    constant[0] = torch.nan
    model = SameBits(Keeps(constant.clone(), lambda own, x: None), shards=3)
    for position in range(20):
        step(model, batch(3, position))
    assert bits(model.module.kept) == bits(constant)


@pytest.mark.parametrize("start", [0.5, torch.nan], ids=["to a nan", "from a nan"])
def test_a_buffer_that_becomes_a_nan_has_changed(start):
    def change(own, x):
        own.kept.data = torch.where(own.kept.isnan(), 0.25, torch.nan)  # past its version counter

    model = SameBits(Keeps(torch.tensor(start), change), shards=4)
    step(model, batch())
    assert bits(model.module.kept) == bits(torch.tensor(0.25 if start != 0.5 else torch.nan))


class Keeps(torch.nn.Module):
    """Changes its buffer by ``change(buffer, x)``."""

    def __init__(self, start, change):
        super().__init__()
        self.register_buffer("kept", start)
        self.register_buffer("constant", torch.full((3,), 0.1))
        self.inner = torch.nn.Linear(3, 1)
        self.change = change

    def forward(self, x):
        self.change(self, x)
        return self.inner(x)


def test_buffers_that_nobody_changes_keep_their_bits():
    model = SameBits(Keeps(torch.zeros(()), lambda own, x: None), shards=3)
    step(model, batch(3))
    assert bits(model.module.constant) == bits(torch.full((3,), 0.1))


def test_a_buffer_that_is_replaced_counts_as_changed():
    def change(own, x):
        own.kept = own.kept + x.mean().detach()

    model = SameBits(Keeps(torch.ones(()), change), shards=4)
    step(model, batch())
    means = torch.stack([x.mean() for x in batch().parts])
    torch.testing.assert_close(model.module.kept, 1 + means.mean())


def test_a_large_buffer_counts_as_changed_when_it_is_written(monkeypatch):
    monkeypatch.setattr("outlast.reduce.parts.COMPARED", 2)

    def change(own, x):
        own.kept.add_(x.mean().detach())

    model = SameBits(Keeps(torch.ones(5), change), shards=4)
    step(model, batch())
    means = torch.stack([x.mean() for x in batch().parts])
    torch.testing.assert_close(model.module.kept, torch.ones(5) + means.mean())
    assert bits(model.module.constant) == bits(torch.full((3,), 0.1))
    model.module.kept.fill_(7.0)  # between two steps: the next one starts from there
    step(model, batch())
    torch.testing.assert_close(model.module.kept, torch.full((5,), 7.0) + means.mean())


def test_whole_numbers_that_differ_are_refused():
    def change(own, x):
        own.kept.add_(int(1000 * x.abs().sum()))

    model = SameBits(Keeps(torch.zeros((), dtype=torch.int64), change), shards=4)
    with pytest.raises(ConfigError, match="kept: a whole number must come out the same"):
        step(model, batch())


def test_arrays_of_whole_numbers_that_change_are_refused():
    model = SameBits(
        Keeps(torch.zeros(3, dtype=torch.int64), lambda own, x: own.kept.add_(1)), shards=4
    )
    with pytest.raises(ConfigError, match=r"kept \(torch.int64, shape \(3,\)\)"):
        step(model, batch())


def test_an_evaluation_between_steps_is_nobodys_business():
    model = SameBits(net(torch.nn.BatchNorm1d(4)), shards=4)
    step(model, batch())
    kept = model.module[1].running_mean.clone()
    model.eval()
    with torch.no_grad():
        model(torch.randn(5, 3))
    model.train()
    assert bits(model.module[1].running_mean) == bits(kept)
    step(model, batch())


class Book(torch.nn.Module):
    """Large, written past its version counter, and known by two names."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("page", torch.zeros(1 << 17))
        self.register_buffer("leaf", self.page)

    def forward(self, x):
        self.page.data += x
        return self.weight * x


def test_a_large_buffer_that_is_written_behind_its_counter_starts_alike_for_each_shard():
    model = SameBits(Book(), shards=4)
    for position in range(2):
        parts = [torch.tensor([float(number)]) for number in range(4)]
        for x in model.shards(Shards(parts, of=4, first=0, position=position)):
            model.backward(model(x).sum())
        assert (model.module.page == 1.5 * (position + 1)).all()  # one update a step, by the mean


def test_buffers_that_come_after_the_wrapping_are_refused():
    def change(own, x):
        if not hasattr(own, "mean"):
            own.register_buffer("mean", torch.zeros(3))
        own.mean.mul_(0.9).add_(0.1 * x.mean(0))

    model = SameBits(Keeps(torch.zeros(()), change), shards=4)
    step(model, batch())
    with pytest.raises(
        ConfigError, match="has got the buffer mean of a Keeps since it was wrapped"
    ):
        step(model, batch(position=1))
    again = SameBits(copy.deepcopy(model.module), shards=4)  # it is complete now
    step(again, batch(position=1))
    again.module.mean = torch.ones(3)  # another tensor by its name is no other buffer
    step(again, batch(position=2))


def test_a_second_name_that_goes_its_own_way_is_a_new_buffer():
    model = SameBits(Book(), shards=1)
    one = Shards([torch.ones(1)], of=1, first=0, position=0)
    for x in model.shards(one):
        model.backward(model(x).sum())
    model.module.leaf = torch.zeros(3)
    with pytest.raises(ConfigError, match="the buffer leaf of a Book"):
        model.shards(one)


@pytest.mark.parametrize("how", ["deleted", "none"])
@pytest.mark.parametrize("when", ["between", "within"])
def test_a_buffer_that_goes_is_refused(how, when):
    def take(own, x=None):
        if how == "deleted":
            del own.kept
        else:
            own.kept = None

    model = SameBits(Keeps(torch.zeros(2), lambda *_: None), shards=4)
    step(model, batch())
    if when == "between":
        take(model.module)
    else:
        model.module.change = take
    with pytest.raises(ConfigError, match="has lost the buffer kept since it was wrapped"):
        step(model, batch(position=1))
