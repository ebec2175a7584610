"""Buckets: the sums of any number of workers are those of one, bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from unit_fakes import bits

from outlast.reduce.exchange import Bucket, ReductionPlan, cut, group
from thorough import examples

SHAPES = [(3, 4), (5,), (), (2, 3, 4, 4)]


def values(num_shards, dtype=torch.float32, seed=0):
    """Gradients that bracket differently: of many magnitudes, with zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)

    def one(shape):
        noise = torch.randn(shape, generator=generator)
        scale = 2.0 ** torch.randint(-12, 12, shape, generator=generator)
        kind = torch.randint(0, 12, shape, generator=generator)
        found = torch.where(kind == 0, -torch.zeros(shape), noise * scale)
        return found.to(dtype)

    return [[one(shape) for shape in SHAPES] for _ in range(num_shards)]


def reference(shards, first, stop, wide):
    """The sum of one tensor's shards in the tree's order, by recursion."""
    if stop - first == 1:
        return shards[first].to(wide).clone()
    left, right = cut((first, stop), len(shards))
    return reference(shards, *left, wide) + reference(shards, *right, wide)


def expected(shards, wide=torch.float32):
    columns = zip(*shards, strict=True)
    return [
        (reference(column, 0, len(column), wide) / len(column)).to(column[0].dtype)
        for column in columns
    ]


def together(shards, world_size):
    """What the workers come to; chunks are handed over by hand."""
    tensors = [tensor.clone() for tensor in shards[0]]
    plans = [ReductionPlan(len(shards), rank, world_size) for rank in range(world_size)]
    buckets = [Bucket(tensors, plan) for plan in plans]
    for plan, bucket in zip(plans, buckets, strict=True):
        for number, shard in enumerate(plan.held):
            bucket.take([tensor.clone() for tensor in shards[shard]], number)
    sent = [
        [[bucket.piece(flat, rank).clone() for flat in bucket.nodes] for bucket in buckets]
        for rank in range(world_size)
    ]
    owned = [buckets[rank].complete(sent[rank]).clone() for rank in range(world_size)]
    for bucket in buckets:
        bucket.result.copy_(torch.cat(owned))
    return [bucket.results for bucket in buckets]


@pytest.mark.parametrize("num_shards", range(1, 17))
def test_any_number_of_workers_comes_to_the_same(num_shards):
    shards = values(num_shards, seed=num_shards)
    wanted = [bits(tensor) for tensor in expected(shards)]
    for world_size in range(1, num_shards + 2):  # one has nothing to do in the end
        for results in together(shards, world_size):
            assert [bits(tensor) for tensor in results] == wanted, world_size


def test_another_order_would_be_another_sum():
    """These values tell orders apart: otherwise the test above would prove nothing."""
    shards = values(8, seed=8)
    in_a_row = [sum(column[1:], column[0].clone()) / 8 for column in zip(*shards, strict=True)]
    assert [bits(t) for t in in_a_row] != [bits(t) for t in expected(shards)]


@examples(20)
@given(st.integers(1, 16), st.integers(1, 6), st.integers(0, 1000))
def test_half_precision_is_summed_in_single_and_rounded_once(num_shards, world_size, seed):
    shards = values(num_shards, torch.bfloat16, seed)
    wanted = [bits(tensor) for tensor in expected(shards)]
    for results in together(shards, world_size):
        assert results[0].dtype == torch.bfloat16
        assert [bits(tensor) for tensor in results] == wanted


def test_a_missing_gradient_counts_as_zeros_wherever_it_is_missing():
    shards = values(4)
    shards[1][0] = torch.full(SHAPES[0], -0.0)
    plan = ReductionPlan(4, 0, 1)
    bucket = Bucket([tensor.clone() for tensor in shards[0]], plan)
    for number, shard in enumerate(shards):
        bucket.take(
            [t.clone() if (number, i) != (2, 0) else None for i, t in enumerate(shard)], number
        )
    bucket.complete([bucket.own_pieces()])
    shards[2][0] = torch.zeros(SHAPES[0])
    assert [bits(t) for t in bucket.results] == [bits(t) for t in expected(shards)]


def test_results_are_laid_out_like_their_tensors():
    last = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    expanded = torch.randn(3, 1).expand(3, 5)
    bucket = Bucket([last, expanded], ReductionPlan(2, 0, 1))
    assert bucket.results[0].stride() == last.stride()
    assert bucket.results[1].is_contiguous()
    bucket.take([last.clone(), torch.ones(3, 5)], 0)
    bucket.take([last.clone(), torch.ones(3, 5)], 1)
    bucket.complete([bucket.own_pieces()])
    assert torch.equal(bucket.results[0], last)
    assert torch.equal(bucket.results[1], torch.ones(3, 5))


def test_tensors_are_grouped_from_the_last_by_kind():
    kinds = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]
    tensors = [torch.zeros(3, dtype=dtype) for dtype in kinds]
    assert group(tensors) == [[3, 1], [2, 0]]
    assert group([]) == []


def test_the_first_bucket_is_small(monkeypatch):
    monkeypatch.setattr("outlast.reduce.exchange.FIRST_BYTES", 8)
    monkeypatch.setattr("outlast.reduce.exchange.BUCKET_BYTES", 16)
    tensors = [torch.zeros(2) for _ in range(6)]
    assert group(tensors) == [[5], [4, 3], [2, 1], [0]]
