"""Aiming: which fault, where, when; and a plan that waits, misses and is healed."""

import doctest

import pytest

import outlast.drill
from outlast.drill.faults import aim
from outlast.drill.faults.aim import PlannedFault, When, at, during
from outlast.drill.faults.fault import Missed, Plain, struck


class Job:
    """A job whose steps go by as it is asked for them."""

    def __init__(self, tmp_path, last=10**9):
        self.directory, self.tiers, self.machines = tmp_path, {}, []
        self.step, self.last, self.over = 0, last, False

    def completed(self):
        self.step = min(self.step + 1, self.last)
        return self.step

    def step_s(self):
        return 0.01

    def is_over(self):
        return self.over or self.completed() >= self.last


class Counted(Plain):
    """A fault that misses its moment some times."""

    name, what = "counted", "counts"

    def __init__(self, misses=0, lasts_s=float("inf")):
        self.misses, self.lasts_s, self.done = misses, lasts_s, []

    def inject(self, target):
        if self.misses:
            self.misses -= 1
            raise Missed("not yet")
        self.done.append("inject")
        return struck(target, "counted in step {step}", "nothing")

    def heal(self, target):
        self.done.append("heal")


def test_the_examples_of_the_docstring():
    failed, tried = doctest.testmod(aim)
    assert (failed, tried > 3) == (0, True)
    assert outlast.drill.at is at
    assert outlast.drill.during is during
    for name in outlast.drill.__all__:
        assert getattr(outlast.drill, name)
    with pytest.raises(AttributeError, match="no attribute 'somewhere'"):
        outlast.drill.somewhere  # noqa: B018


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (lambda: at(step=3).kill(), "kill-worker of rank 0, in the middle of step 4"),
        (lambda: at(step=3).on(rank=2).kill(), "kill-worker of rank 2, in the middle of step 4"),
        (lambda: at(seconds=5).kill("agent"), "kill-agent of machine 0, 5 s after its first step"),
        (lambda: at(step=2).kill("leader"), "kill-leader, in the middle of step 3"),
        (lambda: at(step=2).on(machine=1).stop(), "stop-machine of machine 1, in the middle of"),
        (lambda: at(step=2).stop("keeper", 3), "stop-keeper of machine 0, in the middle of step 3"),
        (lambda: during("save", after=9).kill(), "kill-worker of rank 0, while a checkpoint is"),
        (lambda: at(step=1).jump_clock(5), "clock-jump of all machines, in the middle of step 2"),
        (lambda: at(step=1).on(machine=2).cable("cut-network"), "cut-network of machine 2, in the"),
        (lambda: at(step=1, fraction=0).flip_bit(), "flip-bit, right after step 1"),
        (lambda: at(step=1, seconds=2).nan(), "nan of rank 0, 2 s after step 1"),
    ],
)
def test_plans_in_words(plan, words):
    assert plan().describe().startswith(words)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda: at(step=-1), "no such moment"),
        (lambda: at(fraction=1.5), "no such moment"),
        (lambda: during("lunch"), "there is: save"),
        (lambda: at(step=1).on(), "give a rank or a machine"),
        (lambda: at(step=1).on(rank=1, machine=1), "give a rank or a machine"),
        (lambda: at(step=1).on(rank=-1), "counted from 0"),
        (lambda: at(step=1).on(machine=1).nan(), "aim at a rank"),
        (lambda: at(step=1).kill("boss"), "there are: worker, workers, agent"),
        (lambda: at(step=1).cable("tangle"), "tangle"),
    ],
)
def test_what_cannot_be_aimed_at(wrong, why):
    with pytest.raises((ValueError, KeyError), match=why):
        wrong()


def test_a_plan_waits_for_its_step(tmp_path):
    job, fault = Job(tmp_path), Counted()
    done = PlannedFault(When(step=7, fraction=0.0), fault).strike(job)
    assert done.last_step >= 7
    assert done.what == f"counted in step {done.last_step + 1}"


def test_a_moment_that_was_missed_is_tried_again(tmp_path):
    fault = Counted(misses=3)
    assert PlannedFault(When(), fault).strike(Job(tmp_path)) is not None
    assert (fault.misses, fault.done) == (0, ["inject"])


def test_a_job_that_is_over_is_struck_no_more(tmp_path):
    fault = Counted(misses=10**9)
    assert PlannedFault(When(step=50), fault).strike(Job(tmp_path, last=20)) is None
    assert PlannedFault(When(in_save=True), fault).strike(Job(tmp_path, last=20)) is None
    assert PlannedFault(When(seconds=1000), fault).strike(Job(tmp_path, last=20)) is None
    fault.misses = 0
    assert PlannedFault(When(step=50), fault).strike(Job(tmp_path, last=20)) is None
    assert fault.done == []


def test_a_save_in_the_making_is_a_new_one(tmp_path):
    job, made = Job(tmp_path), iter(range(100))
    old = tmp_path / "checkpoints" / "step-000000000001"
    old.mkdir(parents=True)

    def completed():
        if next(made) == 2:
            (tmp_path / "checkpoints" / "step-000000000002").mkdir()
        return 5

    job.completed = completed
    job.is_over = lambda: completed() == 0
    assert When(in_save=True).wait(job)
    assert next(made) > 2


@pytest.mark.parametrize("end", ["time", "noticed", "over"])
def test_it_is_healed_when_its_time_is_over_or_the_job_has_noticed(tmp_path, end):
    job, fault = Job(tmp_path), Counted(lasts_s=0.0 if end == "time" else float("inf"))
    job.over = end == "over"
    PlannedFault(When(), fault).finish(job, lambda: end == "noticed")
    assert fault.done == ["heal"]
