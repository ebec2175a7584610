"""Spans in which one thing is ahead: as many as there are, at their ends."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.planner.breakeven import AheadSpan, ahead_spans
from thorough import examples


@examples(60)
@given(
    edges=st.lists(st.integers(-29, 29), max_size=6, unique=True).map(sorted),
    first=st.booleans(),
    also=st.floats(1e-3, 1e3),
)
def test_all_changes_are_found_where_they_are(edges, first, also):
    at = np.array([10 ** (one / 10 + 0.03) for one in edges])

    def ahead(values):
        return (np.searchsorted(at, values) + first) % 2 == 1

    found = ahead_spans(ahead, 1e-3, 1e3, [also])
    wanted = ([0.0] if first else []) + at.tolist()
    wanted += [math.inf] if len(wanted) % 2 else []
    assert [end for one in found for end in (one.low, one.high)] == pytest.approx(wanted, rel=1e-5)
    assert any(one.low <= also <= one.high for one in found) == ahead(np.array([also]))[0]


def test_nothing_and_everything():
    assert ahead_spans(lambda values: values < 0, 1.0, 10.0) == []
    assert ahead_spans(lambda values: values > 0, 1.0, 10.0) == [AheadSpan(0.0, math.inf)]


def test_what_lies_between_two_points_is_found_where_it_is_asked_for():
    def ahead(values):
        return np.abs(values - 5.005) < 1e-3

    assert ahead_spans(ahead, 1.0, 10.0) == []
    (found,) = ahead_spans(ahead, 1.0, 10.0, [5.005])
    assert (found.low, found.high) == pytest.approx((5.004, 5.006), rel=1e-5)
