"""A notice that is there at each start: the job stays longer each time, and gives up in the end."""

import signal

import pytest
from floor import TRAIN, Job, until

from outlast.errors import Exit
from outlast.ledger.file import Ledger
from outlast.ledger.job import read_job
from outlast.policy.drain import IDLE_MOST


@pytest.fixture(name="job")
def _job(tmp_path):
    job = Job(tmp_path / "job")
    (tmp_path / "leave").touch()  # somebody has forgotten it
    job.notice = {"OUTLAST_NOTICE_FILE": tmp_path / "leave", "OUTLAST_NOTICE_PLATFORM": "file"}
    return job


def start(floor, job, **env):
    arguments = ("--dir", job.directory, TRAIN, job.records, 100_000, "--light", "--pause", "0.02")
    return floor.outlast("run", *arguments, env=job.notice | env)


def ended(job):
    return [(event["exit_code"], event.get("idle")) for event in job.events("job_finished")]


def already(job, idle):
    """As if it had been drained so often."""
    ledger = Ledger(job.directory, job=read_job(job.directory).id)
    ledger.append("job_finished", exit_code=int(Exit.DRAINED), reason="", kind=None, idle=idle)
    ledger.close()


def test_it_stays_longer_each_time_until_a_signal_comes_and_gives_up_in_the_end(floor, job):
    first = start(floor, job)
    assert first.wait() == Exit.DRAINED, first.text
    assert "staying" not in first.err  # any machine may have its notice before a first step
    second = start(floor, job, OUTLAST_RESTART_BACK_OFF="1 s")
    assert second.wait() == Exit.DRAINED, second.text
    assert "drained 2 times in a row without a new checkpoint: staying for 1 s" in second.err
    assert ended(job) == [(75, 1), (75, 2)]
    assert not job.events("commit")
    already(job, IDLE_MOST - 1)
    third = start(floor, job, OUTLAST_RESTART_BACK_OFF="24 h")
    until(lambda: "staying for 86400 s" in third.err, "its word", running=third)
    third.signal(signal.SIGTERM)
    assert third.wait() == Exit.DRAINED, third.text
    last = start(floor, job)
    assert last.wait() == Exit.GAVE_UP, last.text
    assert "drained 21 times in a row without a new checkpoint: the notice comes back" in last.err
    assert "leave is there" in last.err
    assert ended(job)[-1] == (76, None)


def test_a_signal_and_a_checkpoint_do_not_count(floor, job):
    job.notice = {"OUTLAST_NOTICE_PLATFORM": "none"}
    process = start(floor, job)
    until(lambda: job.begun() >= 5, "steps", running=process)
    process.signal(signal.SIGTERM)
    assert process.wait() == Exit.DRAINED, process.text
    already(job, IDLE_MOST)
    process = start(floor, job)
    # A person who knows what he does: before its first step, on a job that has left so often.
    until(lambda: len(job.events("attempt_formed")) == 2, "its attempt", running=process)
    process.signal(signal.SIGTERM)
    assert process.wait() == Exit.DRAINED, process.text
    already(job, IDLE_MOST)
    process = start(floor, job)
    seen = job.begun()
    until(lambda: job.begun() >= seen + 3, "steps", running=process)
    process.signal(signal.SIGTERM)
    assert process.wait() == Exit.DRAINED, process.text
    assert ended(job)[-1] == (75, None)
