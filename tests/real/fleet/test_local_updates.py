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
