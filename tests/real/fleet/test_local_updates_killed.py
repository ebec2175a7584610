"""Replicas that are killed within a round, with exchanges in flight: the same bits at the end."""

import json

import pytest
from floor import SCRIPTS, Job

from thorough import ALL

SCRIPT = SCRIPTS / "local_updates.py"
WORLD, STEPS = 3, 11  # two rounds of four steps, and what comes of them
KINDS = ("diloco", "streaming", "int8")
STRIKES = [[1, 4, 7], [2, 5, 8], [3, 6, 9]]  # a few restarts in each run
CASES = [(kind, strikes) for kind in KINDS for strikes in STRIKES]
DEFAULT = [("streaming", [3, 6]), ("int8", [5])]


def ends(directory, num):
    return [json.loads((directory / f"final-{rank}.json").read_text()) for rank in range(num)]


def calm(floor, tmp_path, kind):
    """How a run ends that nothing happens to."""
    records = tmp_path / "calm"
    records.mkdir()
    ranks = floor.ranks(WORLD, SCRIPT, records, STEPS, kind, env={"OUTLAST_DIR": tmp_path / "j"})
    assert [rank.wait() for rank in ranks] == [0] * WORLD, ranks[0].text
    return ends(records, WORLD)


@pytest.mark.parametrize(("kind", "strikes"), CASES if ALL else DEFAULT)
def test_killed_within_rounds_it_ends_with_the_same_bits(floor, tmp_path, kind, strikes):
    wanted = calm(floor, tmp_path, kind)
    job = Job(tmp_path / "job")
    command = ("run", "--nproc-per-node", WORLD, "--dir", job.directory)
    running = floor.outlast(*command, SCRIPT, job.records, STEPS, kind, *strikes)
    assert running.wait(240) == 0, running.text
    killed = sorted(int(path.name.partition("-")[2]) for path in job.records.glob("killed-*"))
    assert len(killed) == len(strikes), running.text
    assert [event["step"] for event in job.events("resumed")] == [0, *killed], running.text
    assert ends(job.records, WORLD) == wanted, running.text
    assert len({end["own"] for end in wanted}) == WORLD  # each replica was somewhere else
    assert len({end["all"] for end in wanted}) == 1


def test_another_number_of_workers_closes_the_round(floor, tmp_path):
    """Three replicas, and later two: those go on from a mean of their own parameters."""
    job = Job(tmp_path / "job")
    before = floor.ranks(3, SCRIPT, job.records, STEPS, "streaming", 5, env=job.env)
    assert all(rank.wait() for rank in before), before[0].text  # one was killed, the others heard
    (at,) = (int(path.name.partition("-")[2]) for path in job.records.glob("killed-*"))
    after = floor.ranks(2, SCRIPT, job.records, STEPS, "streaming", env=job.env)
    assert [rank.wait() for rank in after] == [0, 0], after[0].text
    (event,) = job.events("round_closed")
    closed = {"local_step": at, "from_replicas": 3, "replicas": 2, "averaged": [0, 1]}
    assert {name: event[name] for name in closed} == closed
    assert event["step"] == at
    assert after[0].err.count("2 replicas in place of 3; the round is closed with the mean") == 1
    first, second = ends(job.records, 2)
    assert first["local_step"] == STEPS
    assert first["all"] == second["all"]
    assert first["own"] != second["own"]
    again = floor.ranks(2, SCRIPT, job.records, STEPS, "streaming", env=job.env)
    assert [rank.wait() for rank in again] == [0, 0], again[0].text
    assert [end["all"] for end in ends(job.records, 2)] == [first["all"]] * 2  # synced only once


def test_replicas_of_several_ranks(floor, tmp_path):
    ranks = floor.ranks(4, SCRIPTS / "local_groups.py", tmp_path)
    assert [rank.wait() for rank in ranks] == [0] * 4, ranks[0].text
    found = [json.loads((tmp_path / f"groups-{rank}.json").read_text()) for rank in range(4)]
    for step in range(6):
        at = [one["digests"][step] for one in found]
        assert at[0] == at[1]  # within a replica, always
        assert at[2] == at[3]
        assert (at[0] == at[2]) is (step in (2, 5))  # between them, where they have exchanged
    for one in found:
        assert "gradients would be averaged in every step" in one["ddp"]
        assert "gradients would be averaged in every step" in one["inside"]
        assert "gradients would be averaged in every step" in one["later"]
        assert "as weight is (FSDP2 or tensor parallel)" in one["fsdp2"]
        assert not any("\n" in one[name] for name in ("ddp", "inside", "later", "fsdp2"))
