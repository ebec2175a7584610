"""``kill -9`` anywhere: every resume goes on from the newest commit, and nothing is changed.

Each life of the job is a process of its own that is killed at a random moment: while it starts,
resumes, trains, or writes a checkpoint. Half of the kills are aimed at a save in flight.
"""

import itertools
import time

from floor import LIMIT_S, TRAIN, Job, until

from outlast.errors import CheckpointInvalid
from thorough import ALL
from whole_reads import verify

KILLS = 50 if ALL else 10
KILLS_IN_SAVES_MIN = KILLS // 10
STEPS = 2500 if ALL else 1000
LIFE_S = 0.45


def start(floor, job):
    return floor.warm(TRAIN, job.records, STEPS, env=job.env)


def kill_somewhere(life, job, rng, *, aimed):
    """Kill the process at its moment; whether it was still running."""
    moment = time.monotonic() + rng.uniform(0, LIFE_S)
    until(lambda: time.monotonic() > moment or life.poll() is not None, "the moment to strike")
    if aimed:
        old = job.unfinished()
        deadline = time.monotonic() + LIMIT_S
        while life.poll() is None and not job.unfinished() - old:
            assert time.monotonic() < deadline, life.text
    running = life.poll() is None
    life.kill()
    assert running or life.poll() == 0, life.text
    return running


def check_checkpoints(job):
    """Whatever has a manifest is whole; returns the newest step of those."""
    for step in job.steps().committed:
        try:
            verify(job.storage, step)
        except CheckpointInvalid:
            if step in job.steps().committed:
                raise  # otherwise the keeper, which goes on, has pruned it meanwhile
    return job.newest()


def check_resumes(job, seen, expected):
    """A life that came as far as resuming went on from the newest commit; how many there are.

    That is ``expected``, seen right after the kill, or what the keeper has committed since.
    """
    resumes = job.events("resumed")
    for event in resumes[seen:]:
        newest = max((one["step"] for one in job.events("commit") if one.t <= event.t), default=0)
        assert event["step"] == newest >= expected
        assert event["skipped"] == []
    assert len({event.attempt for event in resumes}) == len(resumes)
    return len(resumes)


def test_killed_anywhere_it_goes_on_from_the_newest_commit(floor, rng, tmp_path):
    calm = Job(tmp_path / "calm")
    assert start(floor, calm).wait() == 0
    kills = kills_in_saves = lives = 0
    for number in itertools.count():
        job = Job(tmp_path / f"killed-{number}")
        expected = seen = 0
        while True:
            life = start(floor, job)
            lives += 1
            if kills < KILLS:
                kills += (killed := kill_somewhere(life, job, rng, aimed=bool(kills % 2)))
                kills_in_saves += killed and bool(job.unfinished())
            else:
                assert life.wait() == 0, life.text
            seen = check_resumes(job, seen, expected)
            expected = check_checkpoints(job)
            if life.poll() == 0:
                break
        assert expected == STEPS
        assert job.final()["hash"] == calm.final()["hash"]
        assert job.consumed() == calm.consumed()
        if kills >= KILLS:
            break
    print(f"{kills} kills in {lives} lives of {number + 1} jobs, {kills_in_saves} during a save")
    assert kills_in_saves >= KILLS_IN_SAVES_MIN
