"""A notice that one rank hears stops all of them at one step, committed, at any moment.

The ranks are started as torchrun would start them; the agreement goes over their own link.
"""

import contextlib
import os
import signal
import time

from floor import SCRIPTS, TRAIN, Job, until

from outlast.drill.metadata_server import AwsMetadataServer
from outlast.ledger.file import read_events
from outlast.ledger.incidents import incidents
from thorough import ALL

MOMENTS = (["a step"] * 2 + ["a save"] * 2 + ["before the first step"]) * (2 if ALL else 1)
RANKS = 2
STEPS = 400
PAUSE = ("--pause", "0.006")


def undisturbed(floor, job, *arguments):
    calm = Job(job.directory.with_name("calm"), RANKS)
    arguments = (calm.records, *arguments, "--every", "1000 steps")
    ranks = floor.ranks(RANKS, TRAIN, *arguments, env=calm.env)
    assert [rank.wait() for rank in ranks] == [0] * RANKS, ranks[0].text
    return calm


def assert_equal(job, calm):
    assert [final["hash"] for final in job.finals()] == [final["hash"] for final in calm.finals()]
    assert all(job.consumed(rank) == calm.consumed(rank) for rank in range(RANKS))


def last_steps(job, before):
    """The newest step that each rank has begun; ``before`` for one that has begun none."""
    return [
        max([line["step"] for line in job.lines(rank)], default=before) for rank in range(RANKS)
    ]


def give_notice(rng, job, ranks, gate, moment):
    """Signal one rank at its moment, then perhaps another one, or the same again."""
    since, old, later = job.begun(), job.unfinished(), rng.randrange(1, 12)
    waiting = [gate.with_suffix(f".{rank}") for rank in range(RANKS)]
    until(lambda: all(path.exists() for path in waiting), "sessions", running=ranks[0])
    if moment != "before the first step":
        gate.touch()
        until(lambda: job.begun() >= since + later, "steps", running=ranks[0])
    if moment == "a save":
        until(lambda: job.unfinished() - old, "a save", running=ranks[0])
    hits = [rng.choice(ranks) for _ in range(rng.randrange(1, 4))]
    for rank in hits:
        if rank.poll() is None:
            rank.signal(rng.choice([signal.SIGTERM, signal.SIGUSR1]) if rank is hits[0] else 10)
    gate.touch()


def test_notices_to_one_rank_at_many_moments(floor, rng, tmp_path):
    job = Job(tmp_path / "job", RANKS)
    in_saves = 0
    for number, moment in enumerate(rng.sample(MOMENTS, len(MOMENTS))):
        gate = tmp_path / f"gate-{number}"
        before = job.newest()
        arguments = (job.records, STEPS, *PAUSE, "--gate", gate)
        ranks = floor.ranks(RANKS, TRAIN, *arguments, env=job.env)
        give_notice(rng, job, ranks, gate, moment)
        assert [rank.wait() for rank in ranks] == [75, 75], (moment, ranks[0].text, ranks[1].text)
        stopped = last_steps(job, before)
        assert stopped == [job.newest()] * RANKS, (moment, stopped, job.newest())
        drained = job.events("drained")[-1]
        assert (drained["step"], drained["committed"]) == (job.newest(), True), moment
        assert job.events("resumed")[-1]["step"] == before
        in_saves += moment == "a save"
    ranks = floor.ranks(RANKS, TRAIN, job.records, STEPS, env=job.env)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].text
    assert len(job.events("drained")) == len(MOMENTS)
    print(f"stopped at {[event['step'] for event in job.events('drained')]}")
    assert_equal(job, undisturbed(floor, job, STEPS))


def test_signals_that_do_not_stop_change_nothing(floor, tmp_path):
    job = Job(tmp_path / "job", RANKS)
    ranks = floor.ranks(RANKS, TRAIN, job.records, STEPS, *PAUSE, env=job.env)
    until(lambda: job.begun() >= 3, "steps", running=ranks[0])

    def signalled():
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.signal(signal.SIGTERM)
        return all(rank.poll() is not None for rank in ranks)

    until(signalled, "the end of both ranks")
    assert [rank.wait() for rank in ranks] == [75, 75], ranks[0].text
    assert last_steps(job, 0) == [job.newest()] * RANKS
    assert len(job.events("drained")) == 1


def test_a_drain_that_another_rank_breaks_off_is_told(floor, tmp_path):
    job = Job(tmp_path / "job", RANKS)
    ranks = floor.ranks(RANKS, SCRIPTS / "leaves.py", "first", env=job.env)
    assert [rank.wait() for rank in ranks] == [75, 75], ranks[0].text
    assert "while the job was leaving" in ranks[0].err
    (drained,) = job.events("drained")
    assert drained["committed"] is False
    lost = drained["step"]  # the one in hand counts: its backward has run
    assert f"step {lost} could not be committed (RuntimeError came first)" in ranks[0].err


def test_the_metadata_service_gives_notice_to_outlast_run(floor, rng, tmp_path):
    job = Job(tmp_path / "job", RANKS)
    arguments = (120, "--light")
    with AwsMetadataServer() as server:
        env = {"OUTLAST_NOTICE_PLATFORM": "aws", "OUTLAST_NOTICE_BASE_URL": server.url}

        def start():
            return floor.outlast(
                *("run", "--nproc-per-node", RANKS, "--dir", job.directory),
                *(TRAIN, job.records, *arguments, "--pause", "0.05"),
                env=env,
            )

        agent = start()
        at = rng.randrange(2, 30)
        until(lambda: job.begun() >= at, "steps", running=agent)
        server.preempt(in_s=120)
        assert agent.wait() == 75, agent.text
        first = job.newest()
        assert last_steps(job, 0) == [first] * RANKS
        assert job.events("notice")[0]["source"] == "aws"
        assert "notice from aws: terminate in 1" in agent.err
        (incident,) = incidents(read_events(job.directory))
        assert incident.kind == "preemption notice"
        assert incident.began_t == job.events("notice")[0].t

        agent = start()  # on the same machine, whose notice stands: it leaves again, in order
        assert agent.wait() == 75, agent.text
        assert job.newest() >= first
        assert last_steps(job, first) == [job.newest()] * RANKS

        server.withdraw()
        agent = start()
        assert agent.wait() == 0, agent.text
    assert not job.events("worker_lost")
    assert_equal(job, undisturbed(floor, job, *arguments))


def test_a_notice_to_one_worker_under_outlast_run(floor, tmp_path):
    job = Job(tmp_path / "job", RANKS)
    arguments = ("run", "--nproc-per-node", RANKS, "--dir", job.directory)
    agent = floor.outlast(*arguments, TRAIN, job.records, STEPS, "--light", *PAUSE)
    until(lambda: job.begun() >= 5, "steps", running=agent)
    os.kill(job.lines(1)[-1]["pid"], signal.SIGTERM)
    assert agent.wait() == 75, agent.text
    assert last_steps(job, 0) == [job.newest()] * RANKS
    assert not job.events("restart")


def test_signals_that_do_not_stop_do_not_hide_the_exit_code(floor, tmp_path):
    """Whoever ends a group of processes signals more than once, and while we are leaving too."""
    job = Job(tmp_path / "job")
    arguments = ("run", "--dir", job.directory, TRAIN, job.records, STEPS, "--light", *PAUSE)
    agent = floor.outlast(*arguments)
    until(lambda: job.begun() >= 5, "steps", running=agent)

    def signalled():
        with contextlib.suppress(ProcessLookupError):
            agent.signal(signal.SIGTERM)
        time.sleep(0.02)
        return agent.poll() is not None

    until(signalled, "the end of the agent")
    assert agent.wait() == 75, agent.text
    assert "start me again (exit 75)" in agent.err
    assert len(job.events("drained")) == 1


def test_ranks_that_have_nothing_left_to_save_end_together(floor, tmp_path):
    """The end of the loop is saved already; the store that they meet at is rank 0's own."""
    job = Job(tmp_path / "job", RANKS)
    arguments = (job.records, 80, "--light", "--pause", "0.02", "--every", "1 h")
    ranks = floor.ranks(RANKS, TRAIN, *arguments, env=job.env)
    assert [rank.wait() for rank in ranks] == [0] * RANKS, ranks[0].text
    assert [event["reason"] for event in job.events("snapshot")] == ["the loop's end"]
    assert job.newest() == 80
    assert not any("do not agree" in rank.err for rank in ranks)
