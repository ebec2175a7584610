"""Which steps the ledger gets to see, and what is said of them, on a clock of the test's."""

import pytest
import torch

from outlast.training import timing as module
from outlast.training.timing import Samples


class World:
    """A clock, and what was written."""

    def __init__(self):
        self.now_s = 100.0
        self.written = []
        self.ends = []

    def monotonic(self):
        return self.now_s

    def append(self, name, *, durable=True, **fields):
        assert durable is (name == "session_ended")
        {"step": self.written, "session_ended": self.ends}[name].append(fields)

    def train(self, samples, steps, step_s):
        for step in steps:
            self.now_s += step_s
            samples.completed(step)

    @property
    def steps(self):
        return [one["step"] for one in self.written]


@pytest.fixture(name="world")
def _world(monkeypatch):
    world = World()
    monkeypatch.setattr(module, "time", world)
    return world


def test_the_first_step_then_one_a_second(world):
    samples = Samples(world, 0)
    samples.start(7)
    world.train(samples, range(8, 30), 0.25)
    assert world.steps == [8, 12, 16, 20, 24, 28]
    assert [one["seconds"] for one in world.written] == [0.25, *[1.0] * 5]


def test_seldomer_in_a_long_job_but_never_seldomer_than_a_limit(world):
    samples = Samples(world, 0)
    samples.start(0)
    world.train(samples, range(1, 3601), 1.0)
    gaps = [later - earlier for earlier, later in zip(world.steps, world.steps[1:], strict=False)]
    assert gaps[0] == 1
    assert gaps == sorted(gaps)
    assert gaps[-1] == module.MAX_S


def test_the_end_is_written_whenever_it_comes_and_once(world):
    samples = Samples(world, 0)
    samples.start(0)
    world.train(samples, [1, 2], 0.1)
    samples.write(force=True)
    samples.write(force=True)
    assert world.steps == [1, 2]


def test_stalls_and_scalars_go_with_the_next_one(world):
    samples = Samples(world, 0)
    samples.start(0)
    samples.stalled(0.5)
    samples.stalled(0.25)
    samples.log({"loss": torch.ones(1, requires_grad=True), "what": object})
    world.train(samples, [1], 1.0)
    world.train(samples, [2], 1.0)
    assert [one["stalled_s"] for one in world.written] == [0.75, 0.0]
    assert world.written[0]["scalars"] == {"loss": 1.0, "what": str(object)}


def test_other_ranks_write_none(world):
    samples = Samples(world, 1)
    samples.start(0)
    world.train(samples, range(1, 10), 2.0)
    samples.write(force=True)
    assert world.steps == []


def script_s(world):
    return [one["script_s"] for one in world.written]


def test_what_passes_before_and_between_loops_is_the_scripts_own(world):
    samples = Samples(world, 0)
    samples.start(0)
    world.now_s += 3.0
    samples.enter_loop()
    world.train(samples, [1, 2], 1.0)
    samples.leave_loop()
    world.now_s += 5.0  # an evaluation
    samples.enter_loop()
    world.train(samples, [3, 4], 1.0)
    assert script_s(world) == [3.0, 0.0, 5.0, 0.0]
    assert [one["seconds"] for one in world.written] == [4.0, 1.0, 6.0, 1.0]


def test_a_sample_between_loops_has_what_has_passed_and_the_next_one_the_rest(world):
    samples = Samples(world, 0)
    samples.start(0)
    samples.enter_loop()
    world.train(samples, [1], 1.0)
    world.train(samples, [2], 0.5)
    samples.leave_loop()
    world.now_s += 2.0
    samples.write(force=True)
    world.now_s += 1.0
    samples.enter_loop()
    world.train(samples, [3], 1.0)
    assert script_s(world) == [0.0, 2.0, 1.0]


def test_what_checkpoints_take_outside_of_loops_is_not_the_scripts(world):
    samples = Samples(world, 0)
    samples.start(0)
    samples.enter_loop()
    samples.stalled(0.25)  # within: none of what is outside
    world.train(samples, [1], 1.0)
    samples.leave_loop()
    with samples.all_stalled():
        world.now_s += 4.0
    world.now_s += 2.0
    samples.enter_loop()
    world.train(samples, [2], 1.0)
    assert script_s(world) == [0.0, 2.0]
    assert [one["stalled_s"] for one in world.written] == [0.25, 4.0]


def test_within_a_checkpoint_nothing_is_counted_twice(world):
    samples = Samples(world, 0)
    samples.start(0)
    samples.enter_loop()
    with samples.all_stalled():
        world.now_s += 1.0
        samples.stalled(0.75)  # as a part of it says of itself
    world.train(samples, [1], 1.0)
    assert world.written[0]["stalled_s"] == 1.0


def test_the_end_of_a_session_has_the_last_steps_and_the_wait_behind_them(world):
    samples = Samples(world, 0)
    samples.start(0)
    samples.enter_loop()
    world.train(samples, [1, 2], 0.5)
    samples.stalled(0.25)
    samples.end()
    assert world.steps == [1, 2]
    assert [one["stalled_s"] for one in world.written] == [0.0, 0.25]
    assert world.ends == [{"step": 2, "stalled_s": 0.0}]

    samples.stalled(1.5)  # the commit of the end, behind the last sample
    samples.end()
    assert world.steps == [1, 2]
    assert world.ends[1:] == [{"step": 2, "stalled_s": 1.5}]


def test_of_other_ranks_sessions_no_end_is_written(world):
    samples = Samples(world, 1)
    samples.start(0)
    world.train(samples, [1], 1.0)
    samples.end()
    assert world.ends == []
