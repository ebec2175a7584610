"""Aiming: which fault, where, when; and a plan that waits, misses and is healed."""

import doctest
from types import SimpleNamespace

import pytest

import outlast.drill
from outlast.drill.faults import aim, cables
from outlast.drill.faults.aim import PlannedFault, When, at, during
from outlast.drill.faults.fault import Missed, Plain, struck
from outlast.drill.faults.ordered import OomKill
from outlast.drill.faults.processes import Kill, Victim


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


AT = at(step=1)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda: at(step=-1), "step=-1 is no number: steps are counted from 0"),
        (lambda: at(step=1.5), "step=1.5 is no number: steps are counted"),
        (lambda: at(step="4"), "step='4' is no number: steps are counted"),
        (lambda: at(fraction=1.5), "fraction=1.5: give 0 to 1, as a fraction"),
        (lambda: at(fraction=float("nan")), "fraction=nan: give"),
        (lambda: at(seconds=-1), "seconds=-1 is no time: give seconds, 0 or more"),
        (lambda: at(seconds=float("inf")), "seconds=inf is no time"),
        (lambda: during("lunch"), "there is: save"),
        (lambda: during("save", after=-3), "step=-3 is no number: steps are counted"),
        (AT.on, "give a rank or a machine"),
        (lambda: AT.on(rank=1, machine=1), "give a rank or a machine"),
        (lambda: AT.on(rank=-1), "rank=-1 is no number: ranks are counted from 0"),
        (lambda: AT.on(rank=True), "rank=True is no number: ranks are counted"),
        (
            lambda: AT.on(machine="machine1"),
            "machine='machine1' is no number",
        ),
        (lambda: AT.on(machine=1).nan(), "aim at a rank"),
        (lambda: AT.on(machine=1).kill("worker"), "aim at a rank"),
        (lambda: AT.on(rank=1).kill("agent"), r"aim at one, \.on\(machine=0\)"),
        (lambda: AT.on(rank=1).notice(), "this happens to a machine"),
        (lambda: AT.on(rank=1).cable("cut-network"), "this happens to a machine"),
        (lambda: AT.on(rank=1).jump_clock(5), "this happens to a machine"),
        (lambda: AT.on(rank=1).kill("workers"), "kill-workers happens to the whole job: leave"),
        (lambda: AT.on(machine=1).stop("leader"), "stop-leader happens to the whole job"),
        (lambda: AT.on(machine=1).fill_storage(), "fill-storage happens to the whole job"),
        (lambda: AT.on(rank=0).flip_bit(), "flip-bit happens to the whole job"),
        (lambda: AT.kill("boss"), "there are: worker, workers, agent"),
        (lambda: AT.stop(for_s=-1), "for_s=-1 is no time: give seconds, 0 or more, or FOR_GOOD"),
        (lambda: AT.stop("agent", "3 s"), "for_s='3 s' is no time"),
        (lambda: AT.hold_gil(0), "seconds=0 is no time: give seconds, more than 0"),
        (lambda: AT.slow(-0.5), "seconds=-0.5 is no time"),
        (lambda: AT.slow(0.5, float("nan")), "for_s=nan is no time"),
        (lambda: AT.slow_storage(0.0), "seconds=0.0 is no time"),
        (lambda: AT.break_storage(float("inf")), "for_s=inf is no time"),
        (lambda: AT.fill_storage(None), "for_s=None is no time"),
        (lambda: AT.read_only_storage(-2), "for_s=-2 is no time"),
        (lambda: AT.flip_bit(""), "files='' names none; give a pattern"),
        (lambda: AT.flip_bit("../*"), "names none; give a pattern"),
        (lambda: AT.truncate(place=2), "place=2: give 0 to 1"),
        (lambda: AT.delete(age=-1), "age=-1 is no number"),
        (lambda: AT.cable("tangle"), "'tangle' is nothing that a cable has; there are: cut-net"),
        (lambda: AT.cable("lose-packets"), "lose-packets of value=0.0: give 1 to 99, percent"),
        (lambda: AT.cable("throttle-network", -4), "throttle-network of value=-4: give 0.01 to"),
        (
            lambda: AT.cable("delay-network", 0),
            "of value=0: give 0.001 to 60, seconds",
        ),
        (lambda: AT.cable("lose-packets", "many"), "lose-packets of value='many'"),
        (lambda: AT.jump_clock("an hour"), "by_s='an hour' is no time"),
        (lambda: AT.cable("cut-network", for_s=-1), "for_s=-1 is no time"),
        (lambda: AT.notice(-5), "lead_s=-5 is no time"),
        (lambda: AT.sigterm(float("nan")), "lead_s=nan is no time"),
        (lambda: AT.jump_clock(float("inf")), "by_s=inf is no time"),
        (lambda: Kill(Victim.MACHINE, -1), "machine=-1 is no number: machines are counted"),
        (lambda: OomKill(-2), "rank=-2 is no number: ranks are counted"),
    ],
)
def test_what_cannot_be_aimed_at_is_said_in_one_line(wrong, why):
    with pytest.raises(ValueError, match=why) as caught:
        wrong()
    assert len(str(caught.value).splitlines()) == 1


def test_a_cable_counts_the_steps_that_end_while_it_is_being_cut(tmp_path, monkeypatch):
    job = Job(tmp_path)
    place = SimpleNamespace(name="machine1", cable=object(), number=0)
    job.machines = [place]

    class Slow:
        def inject(self):
            job.step += 5

    kind = cables.KINDS["cut-network"]._replace(make=lambda cable, value: Slow())
    monkeypatch.setitem(cables.KINDS, "cut-network", kind)
    done = cables.BadCable("cut-network").inject(job)
    assert done.last_step > job.step - 2 > 4


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
