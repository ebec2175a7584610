"""``benchmarks/storm_beside.py``: what it counts, whom it kills, and a short run of it."""

import importlib
import json
import os
import subprocess
import sys
from argparse import Namespace
from itertools import pairwise
from pathlib import Path

import pytest

from thorough import ALL

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def beside(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("storm_beside")


def line(beside, t, step, rank, world=2):
    return beside.Line(t=t, step=step, world=world, rank=rank, pid=1, node="here")


def test_all_launchers_of_a_seed_are_killed_alike(beside):
    options = Namespace(minutes=10.0, every_s=8.0, workers=2)
    kills = beside.drawn(options, 1)
    gaps = [later - earlier for (earlier, _), (later, _) in pairwise(kills)]
    assert kills == beside.drawn(options, 1) != beside.drawn(options, 2)
    assert {rank for _, rank in kills} == {0, 1}
    assert min(gaps) >= 4.0
    assert max(gaps) <= 12.0


def test_a_step_made_before_the_first_kill_and_again_behind_it_counts_as_made_twice(beside):
    earlier = [line(beside, t, t, rank) for t in (1, 2, 3) for rank in (0, 1)]
    later = [line(beside, t, t - 2, rank) for t in (5, 6, 7, 8) for rank in (0, 1)]
    found = beside.under_fire([*earlier, *later], [], 4.0, 8.0, 2)
    assert found["made_twice"] == pytest.approx(2 / 8)  # step 3 of both
    assert found["rate"] == pytest.approx((6 - 3) / 4)
    assert found["missed"] == 0


def test_steps_without_a_replica_and_steps_not_committed_are_counted(beside):
    alone = [line(beside, t, t, 0, world=1) for t in (1, 2, 3)]
    found = beside.under_fire([*alone, line(beside, 4, 4, 0)], [2.5, 9.0], 0.0, 4.0, 2)
    assert found["made_twice"] == pytest.approx(1 / 5)
    assert found["missed"] == pytest.approx(3 / 8)
    assert found["batches_rate"] == pytest.approx(5 / 8)


def test_the_longest_gap_reaches_from_the_first_kill_to_the_return(beside):
    lines = [line(beside, t, step, 0) for step, t in enumerate((1.0, 2.0, 5.0), 1)]
    assert beside.longest_gap(lines, 0.0, 6.0) == pytest.approx(3.0)
    assert beside.longest_gap(lines, 0.0, 9.5) == pytest.approx(4.5)


@pytest.mark.parametrize("is_of_the_job", [False, True])
def test_only_a_process_of_the_job_is_killed(beside, tmp_path, is_of_the_job):
    with (tmp_path / "log").open("w") as log:
        turn = beside.Turn(place=tmp_path, world=1, log=log)
        turn.records.mkdir()
        mark = turn.mark if is_of_the_job else "another job"
        environ = {**os.environ, beside.processes.MARK: mark}
        with subprocess.Popen(["sleep", "60"], env=environ) as process:
            (turn.records / "pid-0").write_text(str(process.pid))
            assert beside.kill(turn, 0) is is_of_the_job
            assert not beside.kill(turn, 1)
            process.kill()


# What is compared is shown by test_exit_codes.py (workers killed again and again under our agent)
# and by test_torchrun.py.
@pytest.mark.skipif(not ALL, reason="a run of a benchmark: make test-all")
def test_both_launchers_that_need_no_other_library_end_with_an_undisturbed_runs_bits(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "storm_beside.py"), "--quick", "--every", "3s"]
    done = subprocess.run(
        [*command, "--dir", str(tmp_path), "--log", str(tmp_path / "log")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    found, _ = json.JSONDecoder().raw_decode(done.stdout)
    storms = {one["launcher"]: one for one in found["storms"]}
    assert list(storms) == ["outlast run", "torchrun, tuned"]
    assert all(one["same_bits"] for one in storms.values()), done.stderr
    assert all(one["kills"][0] for one in storms.values())
    assert storms["outlast run"]["made_twice"] < 1
    assert "torchft | not run: no --peers-dir" in done.stdout
