"""A slow rank is named, by what it is slow, and nobody else; on four real workers.

Names, causes and steps are looked at, never how long anything took.
"""

from pathlib import Path

import pytest
from floor import Job

from outlast.ledger.file import read_events
from outlast.report.facts import facts
from thorough import ALL

# Cores that others use make ranks slow, and they are named for it.
pytestmark = pytest.mark.alone
SCRIPT = Path(__file__).parent / "pace_script.py"
ONSET = 40
WITHIN = 30


@pytest.fixture
def train(floor, tmp_path):
    """Train to the end, four workers; what the ledger says of slow ranks."""

    def run(*options, steps=ONSET + 45, workers=4, env=None, **more):
        job = Job(tmp_path / "job", workers)
        agent = floor.outlast(
            *("run", "--nproc-per-node", workers, SCRIPT, job.records, steps, *options),
            env={**job.env, **(env or {})},
        )
        assert agent.wait() == 0, agent.text
        return job, agent

    return run


def named(job):
    return [
        event for event in job.events("straggler") if not event["over"] or event["cause"] == "burst"
    ]


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("compute", 1.2), ("loader", 1.5), *([("compute", 4.0)] if ALL else [])],
    ids=str,
)
def test_a_slow_rank_is_named_and_nobody_else(train, kind, factor):
    job, agent = train("--slow", 2, kind, factor, ONSET, 10_000)
    (event,) = named(job)
    assert (event.rank, event["cause"]) == (2, kind)
    assert abs(event["since_step"] - ONSET) <= 6
    assert event["step"] - ONSET <= WITHIN
    assert not event["over"]
    assert "rank 2 on " in agent.err


def test_what_each_ranks_steps_were_spent_on_is_in_the_ledger_and_in_the_report(train):
    steps = 450
    job, _ = train("--slow", 2, "compute", 1.8, 0, 10_000, steps=steps)
    lines = job.events("rank_steps")
    assert lines
    for line in lines:
        assert (line.rank, line["ranks"], len(line["kinds"])) == (None, [0, 1, 2, 3], 1)
        assert line["own_s"].index(max(line["own_s"])) == 2
        assert line["wait_s"].index(min(line["wait_s"])) == 2
        assert all(a >= b for a, b in zip(line["longest_s"], line["step_s"], strict=True))
    assert all(0 < sum(line["num"][rank] for line in lines) <= steps for rank in range(4))
    found = facts(read_events(job.directory)).ranks
    (slow,) = [one for one in found if one.slow_factor is not None]
    assert (slow.rank, slow.place) == (2, 2)


def test_a_rank_that_recovers_is_said_to(train):
    job, agent = train("--slow", 1, "compute", 2.0, ONSET, ONSET + 40, steps=ONSET + 85)
    assert [(e.rank, e["cause"], e["over"]) for e in job.events("straggler")] == [
        (1, "compute", False),
        (1, "compute", True),
    ]
    assert "as quick as the others again" in agent.err


def test_a_burst_is_named_as_one(train):
    job, _ = train("--slow", 3, "compute", 2.0, ONSET, ONSET + 11)
    (event,) = job.events("straggler")
    assert (event.rank, event["cause"], event["of"]) == (3, "burst", "compute")


@pytest.mark.parametrize("way", ["explicit", "real"])
def test_other_ways_to_wait(train, way):
    options = {"workers": 2} if way == "real" else {}
    job, _ = train("--way", way, "--slow", 1, "compute", 2.0, ONSET, 10_000, **options)
    assert [(e.rank, e["cause"]) for e in named(job)] == [(1, "compute")]


def test_a_healthy_job_blames_nobody(train):
    job, _ = train(
        "--noise", 0.1, steps=200 if ALL else 120, env={"OUTLAST_CHECKPOINT_EVERY": "20 steps"}
    )
    assert job.events("straggler") == []
