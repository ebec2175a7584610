"""A warm worker sees what a cold one sees: one script writes it down both ways."""

import json
import os
import re
import sys

import pytest
from floor import SCRIPTS

from thorough import ALL, some

RANKS = 2
LOOKS = SCRIPTS / "looks.py"
# What differs from attempt to attempt: ports, and a run's own directory for errors.
VOLATILE = ("MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID")


def looks(floor, directory, *arguments, warm, cwd=None, env=None, launch=(), unusual=False):
    """What each rank saw; of ``unusual`` surroundings, where that is asked for."""
    out = directory / ("warm" if warm else "cold")
    out.mkdir()
    environ = {"OUTLAST_WORKERS_WARM": str(warm).lower(), "OUTLAST_DIR": directory / "job"}
    environ |= {"PYTHONHASHSEED": "7"} | (env or {})
    command = ("run", "--nproc-per-node", RANKS, *launch)
    command += tuple(str(one).replace("OUT", str(out)) for one in arguments)
    around = {"env": environ, "cwd": cwd}
    if unusual:
        run = floor.cold(
            SCRIPTS / "unusual.py", sys.executable, "-m", "outlast", *command, **around
        )
    else:
        run = floor.outlast(*command, **around)
    assert run.wait() == 0, run.text
    assert "start cold" not in run.err
    found = [json.loads((out / f"looks-{rank}.json").read_text()) for rank in range(RANKS)]
    assert [one["ahead"] for one in found] == [warm] * RANKS
    return found, out, run


def without_the_volatile(found, out):
    text = json.dumps(found["same"]).replace(str(out), "OUT")
    same = json.loads(re.sub(r"process-\d+", "process", text))  # the test's files for output
    for name in VOLATILE:
        assert name in same["interpreter"]["environ"]
        same["interpreter"]["environ"][name] = ""
    return same


# What torch makes of the number of threads is one of the things compared.
@pytest.mark.parametrize(("way", "threads"), some([("script", "1"), ("module", "3")], 1))
def test_everything_is_as_in_a_cold_worker(afresh, tmp_path, way, threads):
    (tmp_path / "elsewhere").mkdir()
    env = {"OMP_NUM_THREADS": threads}
    odd = "a b\tc=d"
    if way == "module":
        arguments, cwd = ("-m", "looks", "OUT", odd), SCRIPTS
    else:
        arguments, cwd = (
            (os.path.relpath(LOOKS, tmp_path / "elsewhere"), "OUT", odd),
            tmp_path / "elsewhere",
        )
    around = {"cwd": cwd, "env": env, "unusual": True}
    warm, warm_out, _ = looks(afresh, tmp_path, *arguments, warm=True, **around)
    cold, cold_out, _ = looks(afresh, tmp_path, *arguments, warm=False, **around)
    for rank in range(RANKS):
        ours = without_the_volatile(warm[rank], warm_out)
        theirs = without_the_volatile(cold[rank], cold_out)
        for part in theirs:
            assert ours[part] == theirs[part]
        # The unusual surroundings have come through.
        assert ours["process"]["umask"] == 0o27
        assert ours["process"]["limits"]["RLIMIT_NOFILE"][0] == 700
        assert ours["interpreter"]["argv"][-1] == odd
    # Nobody has asked for a seed: each worker has one of its own, as fresh interpreters do.
    for position in range(3):
        assert len({one["seeds"][position] for one in warm + cold}) == 2 * RANKS


def test_without_a_hash_seed_the_workers_agree(afresh, tmp_path):
    """The one thing that is said to be different: it could only be the same if it were set."""
    warm, _, _ = looks(afresh, tmp_path, LOOKS, "OUT", warm=True, env={"PYTHONHASHSEED": "random"})
    assert len({one["same"]["interpreter"]["hash"] for one in warm}) == 1


# Each start of a cold worker imports torch: both flags at once are what there is time for.
@pytest.mark.parametrize(
    "launch",
    [("--tee", "3"), ("--redirects", "0:1,1:2"), ("--redirects", "3")]
    if ALL
    else [("--tee", "0:3", "--redirects", "1:2")],
    ids=" ".join,
)
def test_log_files_are_as_torchs(afresh, tmp_path, launch):
    shown = {}
    for warm in (True, False):
        logs = tmp_path / f"logs-{warm}"
        launched = (*launch, "--log-dir", logs)
        _, _, run = looks(afresh, tmp_path, LOOKS, "OUT", warm=warm, launch=launched)
        files = {
            "/".join(path.parts[-2:]): path.read_text() for path in sorted(logs.rglob("*.log"))
        }
        lines = [line for line in run.err.splitlines() if not line.startswith("outlast:")]
        shown[warm] = files, sorted(run.out.splitlines()), sorted(lines)
    assert shown[True] == shown[False]
    assert any("out 0" in text for text in shown[True][0].values())
