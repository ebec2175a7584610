"""What only a GPU can show: on a machine with one, ``make gpu``, or ``pytest tests -m gpu``."""

import threading
import time

import pytest
import torch
from lazy_watch import _job  # noqa: F401 - a fixture
from state_bits import copy_of, difference, held
from torch import nn
from torch.nn.functional import mse_loss

import outlast
from outlast.checkpoint import devices
from outlast.checkpoint.capture import digest_of
from outlast.checkpoint.devices import in_words, sums_of
from outlast.checkpoint.tensors import NAMES
from outlast.storage import Directory
from outlast.training.sharing import SnapshotRoom
from whole_reads import load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]
LIMIT_S = 60.0
MANY = 1 << 20


def large(**options):
    """Enough for the copies to take longer than the host needs to come to the next step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12))).cuda()
    return model, torch.optim.AdamW(model.parameters(), **options)


def large_training():
    """The named objects of a large model's training, and a step of it."""
    model, optimizer = large()
    named = {"model": model, "optimizer": optimizer}
    x = torch.randn(64, 2048, device="cuda")

    def step():
        optimizer.zero_grad()
        mse_loss(model(x), x).backward()
        optimizer.step()

    return named, step


def run(job, named, step, behind=lambda: None):
    """Save once; the state that was there at that boundary, and the number of its step.

    Args:
        job: its directory.
        named: what is saved.
        step: one step.
        behind: called in the step behind that boundary, before anything else is done.
    """
    until_s, pending, there = time.monotonic() + LIMIT_S, None, None
    with outlast.session(dir=job, every="1 h", keep=100, **named) as session:
        for _ in session.steps(range(10**6), until=10**6):
            if pending is not None and pending.step == session.step:
                there = copy_of(named)
                behind()
            step()
            if session.step == 4:
                pending = session.save()
            assert time.monotonic() < until_s, "the save does not end"
            if there is not None and pending.wait(0.0):
                break
    assert pending.committed, pending.error
    return there, pending.step


def check(job, named, there, step):
    found = held(load(Directory(job / "checkpoints"), step), named)
    assert not difference(there, found), difference(there, found)


def test_a_digest_is_the_same_as_on_the_host():
    for dtype in NAMES:
        raw = torch.randint(0, 256, (48 * MANY // 16,), dtype=torch.uint8)
        one = raw > 127 if dtype == torch.bool else raw.view(dtype)
        assert in_words(sums_of(one)) == digest_of(one.cuda())
        turned = raw.view(-1, one.element_size()).flip(0).view(-1)
        other = turned > 127 if dtype == torch.bool else turned.view(dtype)
        assert digest_of(one.cuda()) != digest_of(other.cuda())


def test_the_copies_go_straight_into_memory_of_the_driver_s(job, monkeypatch):
    seen, close = [], SnapshotRoom.close

    def closed(room):
        seen.extend(buffer.is_pinned() for buffer in room._registered)
        close(room)

    monkeypatch.setattr(SnapshotRoom, "close", closed)
    named, step = large_training()

    there, at = run(job, named, step)
    check(job, named, there, at)
    assert seen, "nothing was registered"
    assert all(seen)


def test_a_graph_that_is_captured_while_a_snapshot_is_copied(job):
    """Neither breaks the other: copies are over before the capture begins."""
    model, optimizer = large()
    named = {"model": model, "optimizer": optimizer}
    x = torch.randn(64, 2048, device="cuda")

    def step():
        optimizer.zero_grad(set_to_none=False)
        mse_loss(model(x), x).backward()
        optimizer.step()

    def capture():
        graph, y = torch.cuda.CUDAGraph(), torch.zeros(1000, device="cuda")
        with torch.cuda.graph(graph):
            y.add_(1)
        graph.replay()
        torch.cuda.synchronize()
        assert y.eq(1).all()

    there, at = run(job, named, step, capture)
    check(job, named, there, at)


def test_a_graph_may_be_captured_while_a_thread_of_ours_registers_memory():
    stop, codes = threading.Event(), []
    torch.zeros(1, device="cuda")
    memory = torch.empty(64 << 20, dtype=torch.uint8)

    def register():
        runtime = torch.cuda.cudart()
        while not stop.is_set():
            codes.append(int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 1)))
            codes.append(int(runtime.cudaHostUnregister(memory.data_ptr())))

    thread = devices.Thread(target=register, name="outlast-test")
    thread.start()
    try:
        for _ in range(20):
            graph, y = torch.cuda.CUDAGraph(), torch.zeros(1000, device="cuda")
            with torch.cuda.graph(graph):
                for _ in range(50):
                    y.add_(1)
            graph.replay()
            torch.cuda.synchronize()
            assert y.eq(50).all()
    finally:
        stop.set()
        thread.join()
    assert codes
    assert set(codes) == {0}


def test_what_torch_conjugates_or_negates_as_it_reads_it(job):
    model = nn.Module()
    model.register_parameter(
        "c", nn.Parameter(torch.randn(MANY, dtype=torch.complex64).cuda().conj())
    )
    model.register_parameter(
        "n", nn.Parameter(torch.randn(MANY, dtype=torch.complex64).cuda().conj().imag)
    )
    # Torch's functions for lists of tensors take none that are negated.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    named = {"model": model, "optimizer": optimizer}

    def step():
        optimizer.zero_grad()
        (model.c.abs().sum() + model.n.sum()).backward()
        optimizer.step()

    there, at = run(job, named, step)
    check(job, named, there, at)


def test_memory_that_is_freed_and_used_again_behind_the_boundary(job):
    """The allocator gives it to the next tensor of the stream that freed it."""
    named, step = large_training()

    def replace():
        for parameter in named["model"].parameters():
            shape = parameter.shape
            parameter.data = torch.randn(shape, device="cuda")
            torch.full(shape, 7.0, device="cuda")

    there, at = run(job, named, step, replace)
    check(job, named, there, at)


def test_a_resumed_rank_draws_on_the_gpu_what_it_would_have_drawn(job):
    def drawn(until, last):
        model = nn.Linear(4, 4).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        found = {}
        with outlast.session(dir=job, model=model, optimizer=optimizer) as session:
            for _ in session.steps(range(last), until=until):
                found[session.step] = torch.rand(5, device="cuda").tolist()
                optimizer.step()
        return found

    torch.cuda.manual_seed(7)
    first = drawn(5, 10)
    onward = torch.rand(5, device="cuda").tolist()
    torch.cuda.manual_seed(8)
    assert drawn(10, 10)[5] == onward
    assert len(first) == 5


def test_a_restore_comes_behind_what_the_script_s_stream_has_still_to_do(job):
    """Copies of other threads are on the stream of whoever opens the session."""
    model, optimizer = large()
    with outlast.session(dir=job, model=model) as session:
        for _ in session.steps(range(1), until=1):
            optimizer.step()
    wanted = [parameter.detach().clone() for parameter in model.parameters()]
    other, _ = large()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        torch.cuda._sleep(500_000_000)
        for parameter in other.parameters():
            parameter.fill_(3.0)
        with outlast.session(dir=job, model=other):
            pass
    torch.cuda.synchronize()
    found = list(other.parameters())
    assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))
