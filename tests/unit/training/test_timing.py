"""What a step's time was spent on, with a clock and collectives that the test holds."""

import types

import pytest
import torch

from outlast.attempt.beat import BEATS_VARIABLE, UNDER_WAY_S, Beat, BeatReader, Phase
from outlast.reduce.losses import listeners, waiting
from outlast.training import timing
from outlast.training.timing import Meter, Samples, kind_of


@pytest.fixture
def now(monkeypatch):
    """Time goes on where the test says so."""
    time = types.SimpleNamespace(s=100.0)
    fake = types.SimpleNamespace(monotonic=lambda: time.s)
    monkeypatch.setattr(timing, "time", fake)
    return time


@pytest.fixture
def loop(tmp_path, monkeypatch, now):
    """A meter, what is heard of it, and a step made of given seconds."""
    monkeypatch.setenv(BEATS_VARIABLE, str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    state = types.SimpleNamespace(saving=False)
    meter = Meter(Beat(), Samples(None, 1), alone=False, is_saving=lambda: state.saving)
    state.meter, state.heard, state.step = meter, BeatReader(tmp_path, 0), 0

    def step(boundary=0.0, data=0.0, body=lambda: None):
        now.s += boundary
        meter.loading()
        now.s += data
        meter.stepping()
        body()
        state.step += 1
        meter.ended(state.step)

    state.make = step
    yield state
    meter.close()
    assert listeners == []


def spend(now, seconds):
    now.s += seconds


def test_each_second_is_of_one_kind(loop, now):
    def body():
        spend(now, 3.0)
        with waiting():
            spend(now, 4.0)
            with waiting():  # inside another: counted once
                spend(now, 0.5)
        loop.meter.updating(0.25)
        spend(now, 0.25)
        spend(now, 1.0)

    loop.meter.open([torch.nn.Linear(2, 2)])
    loop.make()
    loop.make(boundary=0.125, data=2.0, body=body)
    (one,) = loop.heard.timings(-1)
    assert one.step == 2
    assert one[2:] == (10.875, 4.0, 4.5, 2.0, 0.375)
    assert sum(one[3:]) == one.whole_s


def test_a_short_boundary_is_no_stall_and_a_save_under_way_is_one(loop):
    loop.meter.open([])
    loop.make()
    loop.make(boundary=1e-4)
    loop.saving = True
    loop.make(boundary=1e-7)
    assert [one.stall_s for one in loop.heard.timings(-1)] == pytest.approx([0.0, UNDER_WAY_S])


def test_phases_are_said(loop, now):
    seen = []

    def note():
        seen.append(loop.heard.phase.phase)

    def body():
        note()
        with waiting():
            note()
        note()
        loop.meter.updating(0.0)
        note()

    loop.meter.open([])
    note()
    loop.make(body=body)
    note()
    loop.meter.close()
    note()
    loop.meter.updating(0.0)  # an optimizer outside of the loop
    note()
    assert seen == [
        Phase.STARTING,
        Phase.STEPPING,
        Phase.REDUCING,
        Phase.STEPPING,
        Phase.UPDATING,
        Phase.SAVING,
        Phase.OUTSIDE,
        Phase.OUTSIDE,
    ]


def test_what_fails_is_switched_off_and_the_loop_goes_on(loop, monkeypatch, caplog):
    loop.meter.open([torch.nn.Linear(2, 2)])
    loop.make()
    monkeypatch.setattr(loop.meter._waits, "begin_step", lambda: 1 / 0)
    for _ in range(3):
        loop.make()
    assert loop.heard.timings(-1) == []
    assert len(caplog.records) == 1


def test_a_worker_alone_measures_its_steps_and_hooks_nothing(tmp_path, monkeypatch, now):
    monkeypatch.setenv(BEATS_VARIABLE, str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    meter = Meter(Beat(), Samples(None, 1), alone=True, is_saving=lambda: False)
    model, work = torch.nn.Linear(2, 2), torch._C._distributed_c10d.Work.wait
    meter.open([model])
    assert listeners == []
    assert torch._C._distributed_c10d.Work.wait is work
    for step in (1, 2, 3):
        meter.loading()
        spend(now, 0.5)
        meter.stepping()
        model(torch.ones(1, 2)).sum().backward()
        spend(now, 2.0)
        meter.ended(step)
    assert not [p for p in model.parameters() if p._post_accumulate_grad_hooks]
    found = BeatReader(tmp_path, 0).timings(-1)
    assert [one.step for one in found] == [2, 3]
    assert [one[2:6] for one in found] == [(2.5, 2.0, 0.0, 0.5)] * 2
    meter.close()


def test_a_worker_that_nobody_hears_measures_nothing(monkeypatch):
    monkeypatch.delenv(BEATS_VARIABLE, raising=False)
    meter = Meter(Beat(), Samples(None, 1), alone=False, is_saving=lambda: False)
    meter.open([torch.nn.Linear(2, 2)])
    assert listeners == []


def backward(model, now):
    """One second of computing, and four for others' gradients, as DDP waits for them."""

    def last_is_ready(_):
        torch.autograd.Variable._execution_engine.queue_callback(lambda: spend(now, 4.0))

    first = next(model.parameters())
    hook = first.register_post_accumulate_grad_hook(last_is_ready)
    loss = model(torch.ones(1, 2)).sum()
    spend(now, 1.0)
    loss.backward()
    hook.remove()


def test_backwards_end_is_a_wait_and_hooks_go(loop, now):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].bias.requires_grad_(False)
    loop.meter.open([model])
    for _ in range(3):
        loop.make(body=lambda: backward(model, now))
    assert [one[3:5] for one in loop.heard.timings(-1)] == [(1.0, 4.0)] * 2
    loop.meter.close()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_parameter_without_a_gradient_is_given_up_for_another(loop, now):
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])  # one: unused
    loop.meter.open([model])
    for _ in range(5):
        loop.make(body=lambda: backward(model[0], now))
    assert [one.wait_s for one in loop.heard.timings(-1)] == [0.0, 4.0, 4.0, 4.0]
    assert loop.meter._waits.unsure == []


def test_work_wait_is_watched_in_the_loop_alone(loop):
    work = torch._C._distributed_c10d.Work
    original = work.wait
    loop.meter.open([])
    assert work.wait is not original
    loop.meter.close()
    assert work.wait is original


class Event:
    """A device's event, which passes when the test says so."""

    now_ms, passed_ms = 0.0, 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        self.at_ms = Event.now_ms

    def query(self):
        return self.at_ms <= Event.passed_ms

    def elapsed_time(self, end):
        return end.at_ms - self.at_ms


def test_on_a_device_its_own_time_counts_and_nothing_is_waited_for(loop, now, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "training")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    loop.meter.open([])
    on_device = timing.DeviceClock(torch.device("cuda"))
    loop.meter._device, loop.meter._waits._clock = timing._Device(on_device), on_device

    def body():
        Event.now_ms += 20.0
        with waiting():
            Event.now_ms += 5.0

    for _ in range(3):
        Event.now_ms += 1.0  # nothing to do
        loop.make(data=0.5, body=body)  # the host waits for long: the device had work meanwhile
    assert loop.heard.timings(-1) == []  # the device has not come so far
    Event.passed_ms = Event.now_ms
    loop.make(body=body)
    (two, three) = loop.heard.timings(-1)
    assert (two.step, three.step) == (2, 3)
    assert three[2:] == pytest.approx((0.026, 0.020, 0.005, 0.001, 0.0))
    assert len(on_device._free) > 4  # events are used again


def test_kinds_differ_where_the_work_does():
    one, same = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    other = torch.nn.Linear(2, 3)
    assert kind_of([one]) == kind_of([same]) != kind_of([other])
    assert kind_of([]) != 0
