"""Shards that a late worker does not make: the mean is that of those that are there."""

import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from small_shards import batch, net, step
from unit_fakes import bits

from outlast import SameBits
from outlast.data import Shards
from outlast.data.order import ranges_of
from outlast.errors import ConfigError
from outlast.reduce import losses
from outlast.reduce.exchange import Fold, ReductionPlan
from outlast.reduce.parts import rescale


class Stops:
    """A watch that lets so many shards be made."""

    may_leave_out = True

    def __init__(self, num_made):
        self._num_made = num_made
        self.told = []

    def is_of(self, model):
        return True

    def begins(self, batch):
        pass

    def goes_on(self, num_made):
        return num_made < self._num_made

    def words(self):
        return losses.NO_TIME

    def heard(self, rows):
        assert rows.shape == (1, losses.LATE_WORDS)

    def left_out(self, num_made, num_held):
        self.told.append((list(num_made), list(num_held)))


@pytest.fixture(name="stop")
def _stop():
    def stop(num_made):
        losses.late.append(watch := Stops(num_made))
        return watch

    yield stop
    losses.late.clear()


@pytest.mark.parametrize("num_made", [1, 2, 3, 5])
def test_the_mean_is_over_the_shards_that_were_made(stop, num_made):
    plain = net(torch.nn.BatchNorm1d(4))
    parts = batch(6).parts[:num_made]
    expected = [plain(x).square().mean() for x in parts]
    torch.stack(expected).mean().backward()
    watch = stop(num_made)
    model = SameBits(net(torch.nn.BatchNorm1d(4)), shards=6)
    start = model.module[1].running_mean.clone()
    losses_here = step(model, batch(6))
    assert len(losses_here) == num_made
    assert watch.told == [([num_made], [6])]
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(model.loss, torch.stack(expected).double().mean())
    means = []
    for x in parts:
        other = net(torch.nn.BatchNorm1d(4))
        other(x)
        means.append(other[1].running_mean)
    assert not torch.equal(model.module[1].running_mean, start)
    torch.testing.assert_close(model.module[1].running_mean, torch.stack(means).mean(0))
    assert int(model.module[1].num_batches_tracked) == 1


def test_of_powers_of_two_the_sum_is_divided_once(stop):
    """Eight shards and four: to divide and multiply by eight takes no bit."""
    stop(4)
    model = SameBits(net(), shards=8)
    step(model, batch(8))
    losses.late.clear()
    other = SameBits(net(), shards=4)
    step(other, Shards(batch(8).parts[:4], of=4, first=0, position=0))
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert bits(ours.grad) == bits(theirs.grad)


def test_a_step_after_one_with_shards_left_out_is_whole_again(stop):
    model = SameBits(net(), shards=4)
    step(model, batch())
    whole = [bits(p.grad) for p in model.parameters()]
    watch = stop(2)
    step(model, batch())
    assert [bits(p.grad) for p in model.parameters()] != whole
    watch._num_made = 4
    step(model, batch())
    assert [bits(p.grad) for p in model.parameters()] == whole
    assert len(watch.told) == 1


@given(st.data())
def test_sums_are_the_same_whatever_the_counts(data):
    num_shards = data.draw(st.integers(1, 24))
    world = data.draw(st.integers(1, 6))
    cuts = data.draw(
        st.lists(st.integers(0, num_shards), min_size=world - 1, max_size=world - 1).map(sorted)
    )
    edges = [0, *cuts, num_shards]
    counts = tuple(stop - start for start, stop in itertools.pairwise(edges))
    text = [str(shard) for shard in range(num_shards)]

    def add(left, right):
        left[0] = f"({left[0]}+{right[0]})"

    def folded(leaves, folds):
        fold = Fold(add)
        for leaf, merges in zip(leaves, folds, strict=True):
            fold.push(leaf, merges)
        return fold.pop()

    whole = folded([[one] for one in text], ReductionPlan(num_shards, 0, 1).shard_folds)
    nodes = []
    for rank, shards in enumerate(ranges_of(counts)):
        plan = ReductionPlan(num_shards, rank, world, counts)
        assert plan.held == shards
        assert len(plan.turns) == len(shards)
        fold = Fold(add)
        for shard, turn in zip(shards, plan.turns, strict=True):
            fold.push([text[shard]], turn.merges)
            if turn.node is not None:
                nodes.append(fold.pop())
    assert folded(nodes, ReductionPlan(num_shards, 0, world, counts).upper) == whole


def test_counts_of_other_workers_than_there_are_get_one_line():
    model = SameBits(net(), shards=4)
    given_out = Shards(batch().parts[:2], of=4, first=0, position=0, counts=(2, 2))
    with pytest.raises(ConfigError, match="shared out to 2 workers, and there are 1"):
        model.shards(given_out)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_is_left_out_overflows_no_narrow_sum(dtype):
    """4 · 20,000 is no number of fp16, and 26,667 is."""
    result = torch.tensor([20_000.0, -3.0, 0.1]).to(dtype)
    wanted = (result.to(torch.float64) * 4 / 3).to(dtype)
    rescale(result, 4, 3)
    assert result.dtype == dtype
    assert result.isfinite().all()
    torch.testing.assert_close(result, wanted, rtol=1e-6 if dtype == torch.float32 else 0, atol=0)
