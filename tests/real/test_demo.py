"""The demo is the main job's proof: it must hold wherever the faults strike."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.drill.demo import STEPS, STEPS_MIN
from thorough import ALL

SEEDS = [int(seed) for seed in os.environ.get("OUTLAST_TEST_DEMO_SEEDS", "1").split()]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_proof_holds(seed: int, tmp_path: Path) -> None:
    asked = ["--seed", str(seed), "--steps", str(STEPS if ALL else STEPS_MIN), "--json"]
    command = [sys.executable, "-m", "outlast", "demo", *asked]
    ended = subprocess.run(
        [*command, "--dir", str(tmp_path / "demo")], capture_output=True, timeout=380, check=False
    )
    assert ended.returncode == 0, ended.stdout.decode() + ended.stderr.decode()
    found = json.loads(ended.stdout)
    assert found["holds"]
    assert [check["holds"] for check in found["checks"]] == [True] * 4
    what = [recovery["what"] for recovery in found["recoveries"]]
    assert len(what) == 3
    assert "SIGKILL of rank" in what[0]
    assert "SIGKILL of all 2 workers" in what[1]
    assert "EC2" in what[2]
    assert found["recoveries"][2]["lost_steps"] == 0, "a drain loses nothing"


def test_it_does_not_empty_a_directory_that_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    command = [sys.executable, "-m", "outlast", "demo", "--dir", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert b"is not empty and no drill made it" in ended.stderr
    assert (tmp_path / "thesis.tex").exists()
