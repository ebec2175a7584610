"""A checkpoint is damaged and read: the resume goes on from one that is whole, or refuses."""

import pytest
from test_fault_processes import COSTLY, ends_well

from outlast.drill import at
from outlast.drill.faults.aim import PlannedFault, When
from outlast.drill.faults.damage import FILES, FileDamage, Harm
from outlast.errors import Exit
from thorough import some

CASES = [(harm, files) for harm in ("flip_bit", "truncate", "delete") for files in FILES]


@pytest.mark.parametrize(("harm", "files"), some(CASES, 1))
def test_the_newest_checkpoint(make, calm, harm, files):
    planned = getattr(at(step=18), harm)(files, place=0.6)
    job = make(planned)
    struck = planned.strike(job)
    newest = max(event["step"] for event in job.has("commit") if event.t < struck.t)
    assert f"step-{newest:012d}" in struck.what
    planned.finish(job, lambda: True)
    ends_well(job, calm, planned, struck)
    resumed = job.has("resumed", struck.t)[0]
    assert resumed["step"] < newest, "it went on from what is damaged"
    if struck.event == "verify_failed":
        assert resumed["skipped"][0]["step"] == newest


@COSTLY
def test_the_two_newest(make, calm):
    planned = at(step=18).flip_bit(age=1)
    job = make(planned)
    struck = planned.strike(job)
    planned.finish(job)
    ends_well(job, calm, planned, struck)
    skipped = [one["step"] for one in job.has("resumed", struck.t)[0]["skipped"]]
    assert len(skipped) == 2


@COSTLY
def test_nothing_is_left(make):
    planned = PlannedFault(When(18), FileDamage(Harm.FLIP, every=True))
    job = make(planned)
    struck = planned.strike(job)
    planned.finish(job)
    assert job.wait()[-1] == Exit.REFUSED, job.text
    assert planned.fault.promise.refuses
    assert job.has("verify_failed", struck.t)
    assert str(planned.fault.promise) == "refuses to go on, with exit code 78"
