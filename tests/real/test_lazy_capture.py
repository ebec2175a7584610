"""A state that was saved behind the loop's back is the state at its boundary, bit for bit.

On a machine with a GPU: ``make gpu``.
"""

import time

import pytest
import torch
from lazy_cases import CASES, DEVICE_ONLY
from lazy_watch import PACES, _job, _watch  # noqa: F401 - fixtures
from state_bits import copy_of, difference, held

import outlast
from outlast.ledger.file import read_events
from outlast.storage import Directory
from whole_reads import load

LIMIT_S = 120.0
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
cuda = pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])


def train(job, case, watch, num_saves=4):
    """Train until so many saves have ended; the states at the boundaries, by step."""
    at = {}
    until_s = time.monotonic() + LIMIT_S
    with outlast.session(dir=job, every="1 h", keep=100, **case.named) as session:
        pending = []
        for _ in session.steps(range(10**6), until=10**6):
            # Nothing has been computed since the boundary: this is the state that was saved there.
            if pending and not pending[-1].committed:
                at[session.step] = copy_of(case.named)
            assert time.monotonic() < until_s, "the saves do not end"
            if session.step >= 2 and (not pending or pending[-1].wait(0.0)):
                if len(pending) == num_saves:
                    break
                watch.pace = PACES[len(pending) % 3]
                pending.append(session.save())
            case.step(session.step)
            time.sleep(watch.rng.random() * 0.01)
    assert all(one.committed for one in pending)
    return at, [one.step for one in pending]


def voids(job):
    return [e for e in read_events(job) if e.event == "save_skipped"]


@pytest.mark.parametrize("device", ["cpu", cuda])
@pytest.mark.parametrize("name", sorted(CASES))
def test_what_was_copied_behind_the_loop_is_what_was_there_at_the_boundary(
    job, watch, name, device
):
    if DEVICE_ONLY.get(name, device) != device:
        pytest.skip(f"torch offers it on {DEVICE_ONLY[name]} only")
    case = CASES[name](device)
    at, steps = train(job, case, watch)
    for step in steps:
        found = held(load(Directory(job / "checkpoints"), step), case.named)
        assert not difference(at[step], found), f"step {step}: {difference(at[step], found)}"
    skipped = voids(job)
    assert len(skipped) <= case.voids, [dict(event.items()) for event in skipped]
    asked = watch.left[: len(steps) + len(skipped)]  # the session's end may be one more: at once
    lazily = [left for left in asked if left]
    if case.is_lazy:
        assert len(lazily) >= (1 if case.skips else len(asked) - len(skipped))
        assert device == "cuda" or any(watch.left_at_hook), "nothing was ever left for the hook"
    else:
        assert not lazily
