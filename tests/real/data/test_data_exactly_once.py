"""A packed, shuffled stream under ``outlast run``, whose number of workers changes on the way; and
a loader in whose steps weights and lengths have a hand.
"""

import collections
import json
import signal
import sys
from pathlib import Path

import pytest
from floor import SCRIPTS, Job, until

OUTLAST = Path(sys.executable).with_name("outlast")
STREAMS = SCRIPTS / "streams.py"
STEPS = 50


def calm_run(floor, place, *options):
    calm = Job(place / "calm")
    (rank,) = floor.ranks(1, STREAMS, calm.records, STEPS, *options, env=calm.env)
    assert rank.wait() == 0, rank.text
    return calm


def run(floor, job, workers, *options):
    return floor.outlast(
        *("run", "--nproc-per-node", workers, "--dir", job.directory),
        *(STREAMS, job.records, STEPS, *options),
    )


def audit(floor, job, *flags, code=0):
    process = floor.outlast("checkpoints", "show", job.directory, *flags, "--json")
    assert process.wait() == code, process.text
    return json.loads(process.out)


def steps_of(job):
    """Step → the tokens of the attempt that counts, all ranks' together in the order of ranks."""
    last = {}
    for rank in range(job.num_ranks):
        for number, line in enumerate(job.lines(rank)):
            step, world = line["step"], line["world"]
            last.setdefault(step, {})[rank] = (world, number, line["ids"])
    found = {}
    for step, by_rank in last.items():
        world = by_rank[0][0]  # rank 0 is in every attempt: its last line is that of the last one
        found[step] = [row for rank in range(world) for row in by_rank[rank][2]]
    return found


@pytest.mark.parametrize("options", [(), ("--drawn",)], ids=["stream", "drawn"])
def test_workers_come_and_go(floor, rng, tmp_path, options):
    calm = calm_run(floor, tmp_path, *options)
    job = Job(tmp_path / "job", 3)
    ended = collections.Counter()
    for workers in (2, 3, 1):
        running = run(floor, job, workers, "--pause", 0.03, "--num-workers", 1, *options)
        since, later = job.begun(), rng.randrange(3, 12)
        until(lambda n=since + later: job.begun() >= n, "steps", running=running)
        if workers == 3:
            running.signal(signal.SIGKILL)  # with what is in flight; its workers die of it
            running.wait()
            until(lambda: not floor.workers(), "the end of the workers")
        else:
            running.signal(signal.SIGTERM)
            assert running.wait() == 75, running.text
        ended[running.poll()] += 1
    last = run(floor, job, 2, *options)
    assert last.wait() == 0, last.text
    assert ended == {75: 2, -signal.SIGKILL: 1}
    assert steps_of(job) == calm.consumed()
    assert job.final(0)["hash"] == job.final(1)["hash"] == calm.final()["hash"]
    samples = sum(map(len, calm.consumed().values()))
    asked = () if options else ("--ids", f"1-{STEPS}")  # those of drawn steps are not recorded
    verdict = audit(floor, job, "--samples", *asked)
    assert (verdict["proved"], verdict["steps"], verdict["samples"]) == (True, STEPS, samples)
    assert [one["world_size"] for one in verdict["stretches"]] == [2, 3, 1, 2]
    if options:
        assert len({*map(len, calm.consumed().values())}) > 3
        return
    assert samples == 8 * STEPS
    assert sorted(i for ids in verdict["ids"].values() for i in ids) == list(range(8 * STEPS))


def test_a_stream_that_repeats_a_batch_is_found(floor, tmp_path):
    job = Job(tmp_path / "job", 2)
    ranks = floor.ranks(2, STREAMS, job.records, 20, "--plant", env=job.env)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].text
    found = audit(floor, job, "--samples", code=1)
    assert not found["proved"]
    assert {fault["step"] for fault in found["faults"][:8]} == {10}
    repeated = sorted(fault["sample"] for fault in found["faults"] if fault["what"] == "repeat")
    assert repeated == list(range(64, 72))
    process = floor.cold("checkpoints", "show", "--samples", job.directory, program=str(OUTLAST))
    assert process.wait() == 1, process.text
    assert "the first step that is not as it should be: 10" in process.out
