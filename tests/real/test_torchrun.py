"""A session without our agent: stock torchrun, and plain python that lacks what it needs."""

import os
import signal

import msgspec
from floor import TRAIN, Job, until

from outlast.ledger.file import read_events
from outlast.ledger.job import Prediction, keep_plan
from outlast.report.facts import to_json

RANKS = 2
STEPS = 120
PLAN = Prediction(
    planned_t=1e9,
    failures_per_h=0.5,
    failures_low_per_h=0.25,
    failures_high_per_h=1.0,
    rate_source="given as 0.5/h",
    productive_fraction=0.9,
    interval_s=600.0,
    checkpoint_s=20.0,
)


def torchrun(floor, job):
    arguments = ("--standalone", "--nproc-per-node", RANKS, "--max-restarts", 0)
    script = (TRAIN, job.records, STEPS, "--light", "--pause", "0.02")
    return floor.torchrun(*arguments, *script, env=job.env)


# Without restarts by torchrun itself: it reuses one store for all attempts, and the second often
# reads the addresses of the first (see launch/machines.py).
def test_drained_and_killed_it_resumes_under_stock_torchrun(floor, rng, tmp_path):
    job, calm = (Job(tmp_path / name, RANKS) for name in ("job", "calm"))
    keep_plan(PLAN, job.directory)
    first = torchrun(floor, job)
    at = rng.randrange(5, 40)
    until(lambda: job.begun() >= at, "steps", running=first)
    os.kill(job.lines(rng.randrange(RANKS))[-1]["pid"], signal.SIGTERM)
    assert first.wait() == 1, first.text  # torchrun's own: it has no 75
    assert "exitcode  : 75" in first.err
    drained = job.events("drained")[-1]
    assert (drained["step"], drained["committed"]) == (job.newest(), True)
    assert [max(job.consumed(rank)) for rank in range(RANKS)] == [job.newest()] * RANKS

    killed = torchrun(floor, job)
    until(lambda: job.newest() > drained["step"], "a checkpoint", running=killed)
    os.kill(job.lines(rng.randrange(RANKS))[-1]["pid"], signal.SIGKILL)
    assert killed.wait() == 1, killed.text
    newest = job.newest()
    keep_plan(msgspec.structs.replace(PLAN, productive_fraction=0.8), job.directory)

    # As torchrun would start them, but for its seconds.
    again = floor.ranks(RANKS, TRAIN, job.records, STEPS, "--light", env=job.env)
    assert [rank.wait() for rank in again] == [0, 0], again[0].text
    assert [event["step"] for event in job.events("resumed")] == [0, drained["step"], newest]
    ranks = floor.ranks(RANKS, TRAIN, calm.records, STEPS, "--light", env=calm.env)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].text
    # What was planned at each start, and the newest of that beside what came.
    shares = [event["productive_fraction"] for event in job.events("planned")]
    assert shares == [0.9, 0.9, 0.8]
    forecast = to_json(list(read_events(job.directory)))["forecast"]
    assert forecast["plan"]["productive_fraction"] == 0.8
    assert [final["hash"] for final in job.finals()] == [final["hash"] for final in calm.finals()]
    assert [job.consumed(rank) for rank in range(RANKS)] == [calm.consumed(r) for r in range(RANKS)]


def test_several_ranks_without_a_process_group(floor, tmp_path):
    job = Job(tmp_path / "job", RANKS)
    ranks = floor.ranks(RANKS, TRAIN, job.records, STEPS, "--no-group", "--light", env=job.env)
    for rank in ranks:
        assert rank.wait() == 2, rank.text
        (line,) = rank.err.splitlines()
        assert "call torch.distributed.init_process_group() before outlast.session()" in line
    assert job.begun() == 0
