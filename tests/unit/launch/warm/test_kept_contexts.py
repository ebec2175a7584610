"""An attempt's context where some workers go on from the attempt before."""

from types import SimpleNamespace

import pytest

from outlast.health.processes import AGENT_VARIABLE, MARK_VARIABLE, Marks
from outlast.launch.ending import Crew
from outlast.launch.warm.starts import ColdContext

NEW = SimpleNamespace(proc=SimpleNamespace(pid=78))


class Kept:
    def __init__(self):
        self.handler = SimpleNamespace(proc=SimpleNamespace(pid=77))
        self.told = None

    def go(self, environ, stdout, stderr):
        self.told = environ, stdout, stderr


@pytest.fixture(name="context")
def _context(monkeypatch):
    monkeypatch.setenv("OUTLAST_ATTEMPT", "5")
    monkeypatch.setenv(AGENT_VARIABLE, "1")
    monkeypatch.setenv("SOMEBODY_ELSES", "x")
    made = object.__new__(ColdContext)
    made.nprocs = 3
    made.envs = {rank: {"RANK": str(10 + rank), "SOMEBODY_ELSES": "y"} for rank in range(3)}
    made.stdouts, made.stderrs = dict.fromkeys(range(3), "/out"), dict.fromkeys(range(3), "")
    made.started, made._marks = [], Marks()
    made._start_new = lambda ranks: made.started.extend(ranks) or dict.fromkeys(ranks, NEW)
    return made


def test_only_those_that_are_missing_are_started(context):
    one = Kept()
    context._crew = Crew(kept={1: one})
    context._start()
    assert context.started == [0, 2]
    assert context.subprocess_handlers == {0: NEW, 1: one.handler, 2: NEW}
    marks = [context.envs[rank].get(MARK_VARIABLE) for rank in range(3)]
    assert marks[1] is None  # it has one already, and so has what it started
    assert None not in (marks[0], marks[2])
    assert marks[0] != marks[2]


def test_one_that_is_kept_is_told_what_is_different_for_it(context):
    one = Kept()
    context._crew = Crew(kept={1: one})
    context._start()
    environ, stdout, stderr = one.told
    assert (environ["RANK"], environ["OUTLAST_ATTEMPT"], stdout, stderr) == ("11", "5", "/out", "")
    assert not {"SOMEBODY_ELSES", AGENT_VARIABLE, MARK_VARIABLE} & environ.keys()


def test_nobody_is_started_where_all_are_kept(context):
    context._crew = Crew(kept={rank: Kept() for rank in range(3)})
    context._start()
    assert context.started == []


def test_one_that_stands_by_already_is_neither_started_nor_told(context):
    one, waits = Kept(), SimpleNamespace(proc=SimpleNamespace(pid=79))
    context._crew = Crew(kept={0: one, 2: Kept()}, standing={1: waits})
    context._start()
    assert context.started == []
    assert context.subprocess_handlers[1] is waits
