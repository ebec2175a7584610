"""Optimizers that nobody here wrote, killed and resumed; `make zoo` for all of them, and models."""

import json
import subprocess
import sys
from pathlib import Path

from thorough import ALL, seed

ROOT = Path(__file__).parents[2]


def test_a_share_of_the_zoo_is_equal_or_refused_by_name():
    part = "1/1" if ALL else "1/20"
    command = [
        sys.executable,
        ROOT / "benchmarks/zoo",
        "--json",
        "--seed",
        str(seed()),
        "--part",
        part,
    ]
    ended = subprocess.run(
        [*command, "--kinds", "torch,pytorch-optimizer"],
        capture_output=True,
        text=True,
        timeout=280 if not ALL else 3000,
        check=False,
    )
    assert ended.stdout, ended.stderr
    found = json.loads(ended.stdout)
    bad = {
        name: one
        for rows in found["results"].values()
        for name, one in rows.items()
        if one["result"] not in ("equal", "refused")
    }
    assert not bad, bad
    assert found["counts"]["equal"] >= 3
    assert ended.returncode == 0
