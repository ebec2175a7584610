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

    def monotonic(self):
        return self.now_s

    def append(self, name, *, durable, **fields):
        assert name == "step"
        assert not durable
        self.written.append(fields)

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
