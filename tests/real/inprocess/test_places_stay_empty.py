"""Workers are lost, and the others train on without them until their places are taken again.

Where the bits are the same at any number of workers (``outlast.SameBits``). What is looked at is
the state at each step's end, the samples of each step and who made it; never how long it took.
200 drawn kills: ``OUTLAST_TEST_ALL=1 pytest -n 0 -s tests/real/inprocess -k drawn_kills``.
"""

import collections
import contextlib
import itertools
import math
import os
import signal
import time

import losses
import pytest
from floor import SCRIPTS, Job, until

from thorough import ALL

SCRIPT = SCRIPTS / "inprocess.py"
WORKERS, CALM_WORKERS = 4, 2
KILLS = 200 if ALL else 6
STEPS_A_KILL = 20
STEPS = 6 * STEPS_A_KILL  # one job that nothing happens to is what most are compared with
SIZES = [WORKERS - 1, WORKERS]
CALM: dict[tuple, Job] = {}  # by number of steps, and options


@pytest.fixture(name="calm", scope="module")
def _calm(tmp_path_factory):
    """The records of a job of so many steps that nothing happens to."""

    def make(steps, *options):
        if (steps, *options) not in CALM:
            place = tmp_path_factory.mktemp("calm")
            asked = (steps, "--same-bits", *options)
            CALM[steps, *options] = losses.by_ranks(SCRIPT, place, *asked, workers=CALM_WORKERS)
        return CALM[steps, *options]

    yield make
    CALM.clear()


def start(floor, tmp_path, steps, *options):
    place = tmp_path / "job"
    return losses.start(SCRIPT, floor, place, "--same-bits", *options, steps=steps)


def made(job):
    """All steps that were recorded: (attempt, step) → its lines."""
    found = collections.defaultdict(list)
    for place in range(WORKERS):
        for line in job.lines(place):
            found[line["attempt"], line["step"]].append(line)
    return found


def compare(job, calm, running):
    """Each step's end, its loss and its samples are those of the job that nothing happened to."""
    expected = {line["step"]: line for line in calm.lines(0)}
    ids = collections.defaultdict(list)
    for rank in range(CALM_WORKERS):
        for line in calm.lines(rank):
            ids[line["step"]] += line["ids"]
    for (_, step), lines in made(job).items():
        for line in lines:
            assert line["state"] == expected[step]["state"], (line, running.text)
            # Where others had completed the step its body is not run again, and has summed nothing.
            assert line["loss"] in (expected[step]["loss"], pytest.approx(math.nan, nan_ok=True))
        if len(lines) == lines[0]["world"]:
            assert sorted(itertools.chain(*(line["ids"] for line in lines))) == sorted(ids[step])
    assert {final["hash"] for final in job.finals()} == {calm.final(0)["hash"]}, running.text
    assert "Traceback" not in running.err, running.text
    audit = job.audit()
    assert audit["proved"], audit["faults"]


def no_completed_step_was_made_again(job, running):
    """Of those who lived on, and of the job: but for steps that only a lost one had ended."""
    attempts = made(job)
    survived = {event.attempt: event["ranks"] for event in job.events("survived")}
    for event in job.events("resumed"):
        before = event.attempt - 1
        done = [
            step
            for (attempt, step), lines in attempts.items()
            if attempt == before and any(line["rank"] in survived.get(before, ()) for line in lines)
        ]
        if done:
            assert event["step"] >= max(done), (event, running.text)
    for place in range(WORKERS):
        for _, lines in itertools.groupby(job.lines(place), key=lambda line: line["pid"]):
            steps = [line["step"] for line in lines]
            assert steps == sorted(set(steps)), (place, steps)


def sizes(job):
    """Numbers of workers of the attempts, in order."""
    return [event["world_size"] for event in job.events("attempt_formed")]


def test_the_others_train_on_until_the_place_is_taken(floor, tmp_path, calm):
    """The script's beginning takes two seconds; nobody waits for it."""
    options = ("--pause", 0.05, "--beginning", 2.0, "--do", "1:20:forward:die")
    job, running = start(floor, tmp_path, STEPS, *options)
    assert running.wait() == 0, running.text
    compare(job, calm(STEPS), running)
    no_completed_step_was_made_again(job, running)
    assert sizes(job) == [WORKERS, *SIZES], running.text
    (lost,) = job.events("worker_lost")
    assert lost.rank == 1
    without = [step for (attempt, step), _ in made(job).items() if attempt == 2]
    assert len(without) > 10, running.text
    moves = [event["moves"] for event in job.events("survived")]
    assert moves == [False, True], running.text
    pids = [{line["pid"] for line in job.lines(place)} for place in range(WORKERS)]
    assert [len(one) for one in pids] == [1, 2, 1, 1], running.text


def test_accumulated_gradients_are_made_again_by_fewer(floor, tmp_path, calm):
    """Two are lost in the midst of it, and one where others have completed the optimizer's step."""
    batches, deaths = ("--batches", 4), ("1:22:forward", "0:23:reduced", "2:60:reduced")
    asked = [part for one in deaths for part in ("--do", f"{one}:die")]
    options = ("--pause", 0.02, "--beginning", 0.5, "--every", "10000 steps", *batches, *asked)
    job, running = start(floor, tmp_path, 80, *options)
    assert running.wait() == 0, running.text
    compare(job, calm(80, *batches), running)
    resumed = job.events("resumed")[1:]
    assert all(event["source"].endswith("that survived") for event in resumed), running.text
    assert {event["step"] for event in resumed[:2]} <= {20, 24}, running.text


def test_one_that_dies_while_it_stands_by_is_replaced(floor, tmp_path, calm):
    options = ("--pause", 0.05, "--beginning", 1.0, "--do", "2:20:reduced:die")
    job, running = start(floor, tmp_path, STEPS, *options)
    until(lambda: SIZES[0] in sizes(job), "the others train on", running=running)
    victim = until(
        lambda: next(
            (pid for pid in floor.workers() if pid not in pids(job)),
            None,
        ),
        "one stands by",
        running=running,
    )
    os.kill(victim, signal.SIGKILL)
    assert running.wait() == 0, running.text
    compare(job, calm(STEPS), running)
    no_completed_step_was_made_again(job, running)
    assert sizes(job)[-1] == WORKERS, running.text
    assert len(job.events("worker_lost")) == 2


def test_a_job_that_ends_meanwhile_waits_for_nobody(floor, tmp_path, calm):
    options = ("--beginning", 8.0, "--do", "0:20:backward:die")
    job, running = start(floor, tmp_path, 60, *options)
    assert running.wait() == 0, running.text
    assert sizes(job) == [WORKERS, SIZES[0]], running.text
    expected = {line["step"]: line["state"] for line in calm(STEPS).lines(0)}
    for (_, step), lines in made(job).items():
        assert {line["state"] for line in lines} == {expected[step]}
    ends = {place for place in range(WORKERS) if (job.records / f"final-{place}.json").exists()}
    assert ends == {1, 2, 3}


def gets_on(job):
    """Whether at least three workers have completed a step in the newest attempt."""
    attempt = job.events("attempt_formed")[-1].attempt
    newest = [line for place in range(WORKERS) for line in job.lines(place)[-1:]]
    return sum(line["attempt"] == attempt for line in newest) > WORKERS // 2


def pids(job):
    return {line["pid"] for place in range(WORKERS) for line in job.lines(place)}


@pytest.mark.timeout(1200)
def test_drawn_kills(floor, tmp_path, calm, rng):
    """One, two at once, or another one while groups are made: at any moment, of any rank."""
    steps = KILLS * STEPS_A_KILL
    job, running = start(floor, tmp_path, steps, "--pause", 0.005, "--every", "50 steps")
    until(lambda: job.begun() > 1, "it trains", running=running)
    killed = 0
    while killed < KILLS and running.poll() is None:
        formed = len(sizes(job))
        # Else all who have the state may be lost, and a job that gets on with nothing is given up.
        until(lambda: gets_on(job) or running.poll() is not None, "it gets on", running=running)
        time.sleep(rng.random() * 0.2)
        now = floor.workers()
        if not gets_on(job) or len(now) < WORKERS:
            continue
        for number, victim in enumerate(rng.sample(now, min(rng.choice((1, 1, 1, 2)), len(now)))):
            if number and rng.random() < 0.5:  # in the midst of what the first one has caused
                time.sleep(rng.random() * 0.15)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
                killed += 1
        until(lambda n=formed: len(sizes(job)) > n or running.poll() is not None, "it goes on")
    assert running.wait(600) == 0, running.text
    compare(job, calm(steps), running)
    no_completed_step_was_made_again(job, running)
    print(f"{killed} kills, {len(sizes(job))} attempts, {collections.Counter(sizes(job))}")
    assert killed >= KILLS
