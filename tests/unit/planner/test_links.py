"""What a link leaves of the time: bounds that hold for any job, and cases worked by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.planner.links import (
    BITS_LEAST,
    METHODS,
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


def test_the_bandwidth_for_a_share_is_where_it_begins():
    job = LinkJob(parameters=1e9, layers=24, step_s=0.1)
    for method in METHODS:
        found = bandwidth_for(job, method, 0.95)
        assert utilisation_at(job, method, found * 1.00001) >= 0.95
        assert utilisation_at(job, method, found * 0.99999) < 0.95


def test_no_bandwidth_may_be_enough_or_any():
    late = LinkJob(parameters=1e9, layers=24, step_s=0.1, latency_s=1.0)
    assert bandwidth_for(late, "synchronous", 0.5) is None
    tiny = LinkJob(parameters=10, layers=1, step_s=10)
    assert bandwidth_for(tiny, "synchronous", 0.5) == BITS_LEAST


@examples(40)
@given(job=JOBS, method=st.sampled_from(METHODS))
def test_looking_at_some_layers_only_is_the_same_as_walking_all_nodes(job, method):
    width = job.bits(method) / job.step_s / 3
    assert utilisation_at(job, method, width) == pytest.approx(walked(job, method, width))


@pytest.mark.parametrize("sync_steps", [1, 2, 3, 7])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_measured_is_the_steady_state(method, sync_steps):
    job = LinkJob(parameters=1e9, layers=6, step_s=1.0, sync_steps=sync_steps)
    for width in (1e9, 5e9, 16e9, 40e9):
        settled = walked(job, method, width, steps=420)
        assert utilisation_at(job, method, width) == pytest.approx(settled, rel=1e-3)


def walked(job, method, bits_per_s, steps=None):
    """The graph node by node, with plain numbers: computing time over all, of the later half."""
    every = 1 if method == "synchronous" else job.sync_steps
    count = 1
    if method not in ("synchronous", "local"):
        count = max(job.layers // job.fragment_layers, 1)
    sent = {}
    for number in range(count):
        step = every - 1 if count == 1 and method == "local" else every * number // count
        sent.setdefault(step, set()).update(range(number, job.layers, count))
    overlap = 1 if method in ("overlapped", "compressed") else 0
    node_s = job.step_s / (3 * job.layers - 1)
    rounds = max(3, -(-20 // every)) if steps is None else steps // every
    begins = (rounds - rounds // 2) * every
    now_s = free_s = began_s = 0.0
    there_s = {}
    for step in range(rounds * every):
        if step == begins:
            began_s = now_s
        for layer in range(job.layers):
            now_s = max(now_s, there_s.get((step, layer), 0.0)) + node_s
        for layer in reversed(range(job.layers)):
            now_s += node_s * (2 if layer else 1)
            if layer in sent.get(step % every, ()):
                free_s = max(free_s, now_s) + job.bits(method) / job.layers / bits_per_s
                there_s[step + 1 + overlap, layer] = free_s + job.latency_s
    return (rounds * every - begins) * job.step_s / (now_s - began_s)
