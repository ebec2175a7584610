"""A whole session beside a CUDA that notes who asks what: nothing happens on another rank's GPU."""

import time

import pytest
import torch
from lazy_cases import CASES
from lazy_watch import _job  # noqa: F401 - a fixture

import outlast
from fake_cuda import Cuda
from outlast.checkpoint import devices


@pytest.fixture
def cuda(monkeypatch):
    yield Cuda(monkeypatch, current=3)
    devices._rank.devices = ()


def test_every_thread_of_a_session_has_the_rank_s_device(job, cuda):
    """Each registers memory, asks for events or copies; a context on GPU 0 takes its memory."""
    case = CASES["adamw_foreach"]("cpu")
    pending = None
    with outlast.session(dir=job, every="1 h", **case.named) as session:
        for _ in session.steps(range(10**6), until=10**6):
            case.step(session.step)
            session.log(loss=torch.tensor(1.0))
            if pending is None:
                pending = session.save()
            elif pending.wait(0.0) and session.step > 20:
                assert cuda.registered, "the arenas are the driver's"
                break
            time.sleep(0.01)
    assert pending.committed
    assert set(cuda.contexts) == {3}, cuda.contexts
    threads = cuda.contexts[3]
    assert {"outlast-register", "outlast-judging"} <= threads
    assert any(name.startswith("outlast-copy") for name in threads)
    assert cuda.registered == {}
    assert cuda.errors == {}
