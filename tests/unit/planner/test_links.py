"""What a link leaves of the time: bounds that hold for any job, and cases worked by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.planner.links import (
    METHODS,
    PAPER_BITS_PER_S,
    LinkJob,
    bandwidth_for,
    ring_crossing,
    utilisation,
    utilisation_at,
)
from thorough import examples

JOBS = st.builds(
    LinkJob,
    parameters=st.floats(1e6, 1e12),
    layers=st.integers(1, 20),
    step_s=st.floats(0.01, 10),
    sync_steps=st.integers(1, 20),
    fragment_layers=st.integers(1, 8),
    crossing=st.floats(0.5, 2),
)
WIDTHS = np.geomspace(1e6, 1e15, 40)


@examples(40)
@given(job=JOBS, method=st.sampled_from(METHODS))
def test_more_bandwidth_is_never_less_and_the_link_is_a_bound(job, method):
    used = utilisation(job, method, WIDTHS)
    assert np.all(used > 0)
    assert np.all(used <= 1 + 1e-9)
    assert np.all(np.diff(used) >= -1e-9)
    # Over a round the link cannot carry more than it can; later rounds begin with a link in use.
    if method in ("synchronous", "local"):
        assert np.all(used <= job.step_s * WIDTHS / job.bits_per_step(method) * (1 + 1e-9))


@examples(40)
@given(job=JOBS)
def test_local_updates_of_one_step_are_synchronous(job):
    each = LinkJob(parameters=job.parameters, layers=job.layers, step_s=job.step_s, sync_steps=1)
    assert utilisation(each, "local", WIDTHS) == pytest.approx(
        utilisation(each, "synchronous", WIDTHS)
    )


@examples(40)
@given(job=JOBS, method=st.sampled_from(METHODS), latency_s=st.floats(0, 10))
def test_latency_never_helps(job, method, latency_s):
    late = LinkJob(
        parameters=job.parameters,
        layers=job.layers,
        step_s=job.step_s,
        sync_steps=job.sync_steps,
        fragment_layers=job.fragment_layers,
        crossing=job.crossing,
        latency_s=latency_s,
    )
    assert np.all(utilisation(late, method, WIDTHS) <= utilisation(job, method, WIDTHS) + 1e-9)


def test_one_layer_by_hand():
    # Two nodes of half a second; then 16 bits over 16 bit/s: nothing overlaps.
    job = LinkJob(parameters=1, layers=1, step_s=1.0, sync_steps=4)
    assert utilisation_at(job, "synchronous", 16.0) == pytest.approx(1 / 2)
    assert utilisation_at(job, "local", 16.0) == pytest.approx(4 / 5)
    # A step's time to overlap with hides all of it, and a quarter of the bits a part of that.
    assert utilisation_at(job, "overlapped", 16.0) == pytest.approx(1.0)
    assert utilisation_at(job, "overlapped", 8.0) == pytest.approx(4 / 5)
    assert utilisation_at(job, "compressed", 2.0) == pytest.approx(4 / 5)


def test_two_layers_by_hand():
    # Five nodes of 1 s: F0 F1, P1 A1, P0. 2 s of link a layer: layer 1's from 4 to 6, layer 0's
    # from 6 to 8. The next step begins at 8.
    job = LinkJob(parameters=2, layers=2, step_s=5.0)
    assert utilisation_at(job, "synchronous", 8.0) == pytest.approx(5 / 8)


def test_latency_by_hand():
    job = LinkJob(parameters=1, layers=1, step_s=1.0, sync_steps=4, latency_s=2.0)
    assert utilisation_at(job, "synchronous", 16.0) == pytest.approx(1 / 4)
    assert utilisation_at(job, "local", 16.0) == pytest.approx(4 / 7)


def test_bits_on_the_link():
    job = LinkJob(parameters=1e9, layers=24, step_s=1.0, sync_steps=100, crossing=ring_crossing(4))
    assert job.bits("synchronous") == pytest.approx(24e9)
    assert job.bits_per_step("local") == pytest.approx(24e9 / 100)
    assert job.bits_per_step("compressed") == pytest.approx(6e9 / 100)
    assert [ring_crossing(count) for count in (1, 2, 8)] == [0.0, 1.0, 1.75]


def test_no_bandwidth_may_be_enough():
    job = LinkJob(parameters=1e9, layers=24, step_s=0.1)
    found = bandwidth_for(job, "synchronous", 0.5)
    assert found in PAPER_BITS_PER_S
    assert utilisation_at(job, "synchronous", found) >= 0.5
    assert bandwidth_for(job, "synchronous", 0.5, PAPER_BITS_PER_S[:3]) is None
