"""Means over replicas: every element, the same bits, in the order of the ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from unit_replicas import together, wires

from outlast.fleet import averaging
from outlast.fleet.averaging import (
    BLOCK,
    BandwidthLimit,
    ExchangeThread,
    compress,
    compressed_mean,
    decoded,
    in_blocks,
    mean,
    own_blocks,
)
from thorough import examples


def vectors(size, length, seed=0):
    torch.manual_seed(seed)
    return [torch.randn(length) * 10 ** torch.randint(-6, 6, (length,)) for _ in range(size)]


def in_order(values):
    total = values[0].clone()
    for value in values[1:]:
        total = total + value
    return total / len(values)


def means(own, pace=lambda: None, who=None):
    ends = wires(len(own))
    return together(len(own), lambda rank: mean(ends[rank], own[rank], who, pace())), ends


@examples(60)
@given(
    size=st.integers(1, 4),
    length=st.integers(0, 70),
    segment=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_every_element_is_the_sum_in_the_order_of_the_ranks(size, length, segment, seed):
    own = vectors(size, length, seed)
    bandwidth = 40 * segment * 2 * max(size - 1, 1)  # segments of so many elements
    quick = lambda: BandwidthLimit(bandwidth, clock=lambda: 0.0, pause=lambda _: None)  # noqa: E731
    least, averaging.LEAST_BYTES = averaging.LEAST_BYTES, 1
    try:
        found, _ = means(own, quick)
    finally:
        averaging.LEAST_BYTES = least
    wanted = in_order(own)
    assert all(one.equal(wanted) for one in found)


def test_who_does_not_count_gives_nothing():
    own = vectors(3, 11)
    own[1].fill_(float("nan"))
    found, _ = means(own, who=[True, False, True])
    assert all(one.equal(in_order([own[0], own[2]])) for one in found)


@examples(40)
@given(size=st.integers(1, 4), length=st.integers(0, 5 * BLOCK), seed=st.integers(0, 99))
def test_int8_means_are_alike_and_what_is_rounded_off_comes_later(size, length, seed):
    own = vectors(size, length, seed)
    ends, rounds = wires(size), 3

    def exchange(rank):
        residual = torch.zeros_like(in_blocks(own[rank]))
        feedback = torch.zeros(own_blocks(length, size), BLOCK)
        found = []
        for _ in range(rounds):
            values = in_blocks(own[rank]) + residual
            rows, worth = compress(values)
            residual = values - worth
            got, feedback = compressed_mean(ends[rank], rows, feedback)
            found.append(got)
        return found, residual, feedback

    done = together(size, exchange)
    assert all(
        one.equal(other)
        for found, _, _ in done
        for one, other in zip(found, done[0][0], strict=True)
    )
    # All that was to be sent has come, but for what rounding has kept back.
    total = sum(got.double() for got in done[0][0])
    kept = sum(residual.double() for _, residual, _ in done) / size
    kept += torch.cat([feedback for _, _, feedback in done])[: len(kept)]
    wanted = sum(in_blocks(vector).double() for vector in own) / size * rounds
    limit = wanted.abs().amax() * 1e-5 if length else 0.0
    assert torch.allclose(total + kept, wanted, rtol=1e-4, atol=float(limit))


def test_int8_is_within_a_254th_of_the_blocks_largest_element():
    values = in_blocks(vectors(1, 3 * BLOCK)[0])
    rows, worth = compress(values)
    assert rows.dtype == torch.uint8
    assert decoded(rows).equal(worth)
    limits = values.abs().amax(1, keepdim=True) / 254 * 1.0001
    assert ((values - worth).abs() <= limits).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_hidden(bad):
    values = torch.ones(2, BLOCK)
    values[1, 3] = bad
    worth = compress(values).values
    assert worth[0].isfinite().all()
    assert not worth[1].isfinite().any()


@pytest.mark.parametrize("tiny", [0.0, 1e-45, 1e-40])
def test_the_smallest_numbers_stay_numbers(tiny):
    assert compress(torch.full((1, BLOCK), tiny)).values.isfinite().all()


def test_a_bandwidth_is_kept_to_and_sent_in_small_pieces():
    """By a clock that moves only while somebody pauses."""
    own = vectors(3, 30_000)
    clocks = []

    class Clock:
        now_s = 0.0
        longest_s = 0.0

        def pause(self, seconds):
            self.now_s += seconds
            self.longest_s = max(self.longest_s, seconds)

    def pace():
        clocks.append(clock := Clock())
        return BandwidthLimit(1_000_000, lambda: clock.now_s, clock.pause)

    found, ends = means(own, pace)
    assert found[0].equal(in_order(own))
    for wire in ends:
        assert wire.sent_bytes == pytest.approx(2 * 2 / 3 * 30_000 * 4, rel=0.01)
        for clock in clocks:
            assert clock.now_s == pytest.approx(wire.sent_bytes / 1_000_000)
            assert clock.longest_s <= averaging.BURST_S * 1.01


def test_int8_sends_about_a_quarter():
    own = vectors(3, 64 * BLOCK)
    _, plain = means(own)
    ends = wires(3)
    feedback = torch.zeros(own_blocks(64 * BLOCK, 3), BLOCK)
    rows = [compress(in_blocks(one)).rows for one in own]
    together(3, lambda rank: compressed_mean(ends[rank], rows[rank], feedback.clone()))
    assert ends[0].sent_bytes / plain[0].sent_bytes == pytest.approx(0.25, abs=0.02)


def test_a_lane_keeps_the_order_and_hands_errors_on():
    lane, done = ExchangeThread(), []
    first = lane.submit(lambda: done.append(1))
    second = lane.submit(lambda: 1 // 0)
    third = lane.submit(lambda: done.append(3) or "end")
    assert third.result(30) == "end"
    assert done == [1, 3]
    assert first.result() is None
    with pytest.raises(ZeroDivisionError):
        second.result()
