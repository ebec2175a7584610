"""Jobs for the tests of faults, and the run that nothing disturbed."""

import pytest
from drilled_job import SCRIPT, STEPS, DrilledJob
from floor import Floor, Job


@pytest.fixture(name="make")
def _make(floor, tmp_path):
    """``make(planned, *options)``: a job that a fault was prepared for, and started."""
    made = []

    def start(planned, *options, **more):
        job = DrilledJob(floor, tmp_path / "drilled", *options, **more)
        assert planned.fault.why_not(job) == ""
        made.append((planned, job))
        planned.prepare(job)
        return job.start()

    yield start
    for planned, job in made:
        job.given_up = True
        planned.fault.heal(job)
        floor.close()
        planned.fault.release(job)


@pytest.fixture(scope="session", name="calm")
def _calm(tmp_path_factory):
    """Hashes and losses of the run that nothing disturbs, by its options."""
    known = {}

    def of(*options, ranks=2):
        if (ranks, *options) not in known:
            place = tmp_path_factory.mktemp("calm")
            floor, job = Floor(place), Job(place / "job", ranks)
            arguments = (SCRIPT, job.records, STEPS, "--pause", 0, *options)
            started = floor.ranks(ranks, *arguments, env=job.env)
            assert [rank.wait() for rank in started] == [0] * ranks, started[0].text
            floor.close()
            losses = {line["step"]: line["loss"] for line in job.lines()}
            known[ranks, *options] = [final["hash"] for final in job.finals()], losses
        return known[ranks, *options]

    return of
