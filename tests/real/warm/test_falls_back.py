"""Where a fork would not be a fresh start, workers start cold, and one line says why."""

import stat
import sys

import pytest
from floor import Job

RANKS = 2
SAYS = "import os, sys; from pathlib import Path\ndef never():\n    import torch\n"
TELL = (
    "told = Path(os.environ['TOLD'], os.environ['OUTLAST_ATTEMPT'] + os.environ['RANK'])\n"
    "told.write_text(str('torch' in sys.modules))\n"
)
FAIL_ONCE = "if os.environ['OUTLAST_ATTEMPT'] == '1':\n    sys.exit(3)\n"


def run(floor, job, script, *launch, env=None):
    told = job.directory.with_name("told")
    told.mkdir(exist_ok=True)
    started = floor.outlast(
        *("run", "--nproc-per-node", RANKS, *launch, script),
        env=job.env | {"TOLD": told} | (env or {}),
    )
    assert started.wait() == 0, started.text
    lines = [line for line in started.err.splitlines() if "cold" in line]
    return {path.name: path.read_text() == "True" for path in told.iterdir()}, lines


def test_it_starts_warm_and_says_nothing(afresh, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SAYS + TELL)
    warm, lines = run(afresh, Job(tmp_path / "job", RANKS), script)
    assert warm == {"10": True, "11": True}
    assert not lines


def test_a_script_that_imports_next_to_nothing(floor, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SAYS.partition("def")[0] + TELL)
    warm, lines = run(floor, Job(tmp_path / "job", RANKS), script)
    assert (warm, lines) == ({"10": False, "11": False}, [])


def test_the_setting(floor, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SAYS + TELL)
    (tmp_path / "outlast.toml").write_text("[workers]\nwarm = false\n")
    warm, lines = run(floor, Job(tmp_path / "job", RANKS), script)
    assert warm == {"10": False, "11": False}
    assert not lines  # it was asked for


def test_a_program_and_another_interpreter(floor, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SAYS + TELL)
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    other.chmod(other.stat().st_mode | stat.S_IXUSR)
    job = Job(tmp_path / "job", RANKS)
    warm, (line,) = run(floor, job, script, env={"PYTHON_EXEC": other})
    assert warm == {"10": False, "11": False}
    assert line.endswith("because PYTHON_EXEC names another interpreter")
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\n{SAYS}{TELL}")
    program.chmod(0o755)
    warm, (line,) = run(floor, job, program, "--no-python")
    assert warm["20"] is False
    assert line.endswith("(--no-python)")


def test_a_module_that_a_cold_worker_would_find_beside_the_script(afresh, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SAYS + "import sympy\nassert sympy.OURS\n" + TELL)
    (tmp_path / "sympy.py").write_text("OURS = True\n")
    warm, (line,) = run(afresh, Job(tmp_path / "job", RANKS), script)
    assert warm == {"10": False, "11": False}
    assert "sympy.py beside the script has the name of a module that is loaded already" in line


def test_a_variable_that_torch_has_read_already(afresh, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SAYS + TELL + "os.environ['OMP_NUM_THREADS'] = '3'\nimport torch\n")
    warm, (line,) = run(afresh, Job(tmp_path / "job", RANKS), script)
    assert warm == {"10": False, "11": False}
    assert "script.py:6 sets OMP_NUM_THREADS, which imports that are done already have read" in line


def test_a_variable_that_nobody_has_read_yet(afresh, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SAYS + TELL + "os.environ['NCCL_DEBUG'] = 'INFO'\nimport torch\n")
    warm, lines = run(afresh, Job(tmp_path / "job", RANKS), script)
    assert (warm, lines) == ({"10": True, "11": True}, [])


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), 11)", "sys.exit(9)"])
def test_one_that_dies_of_being_warm(floor, tmp_path, how):
    script = tmp_path / "script.py"
    script.write_text(SAYS + TELL + f"if 'torch' in sys.modules:\n    {how}\n")
    warm, lines = run(floor, Job(tmp_path / "job", RANKS), script)
    assert (warm["10"], warm["20"], warm["21"]) == (True, False, False)
    assert not lines  # the loss is told, and what comes of it


def test_one_that_dies_cold_too_is_warm_again(floor, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SAYS + TELL + "if os.environ['OUTLAST_ATTEMPT'] < '3':\n    sys.exit(3)\n")
    warm, lines = run(floor, Job(tmp_path / "job", RANKS), script)
    assert (warm["30"], warm["31"]) == (True, True)
    assert warm.get("20", warm.get("21")) is False
    assert not lines


def test_a_script_with_threads_of_its_own_restarts_warm(floor, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        SAYS + TELL + "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(0.2,)).start()\n"
        "time.sleep(1.1)\n" + FAIL_ONCE
    )
    warm, lines = run(floor, Job(tmp_path / "job", RANKS), script)
    assert warm["20"] is warm["21"] is True
    assert not lines


DROP = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
libc.prctl(28, 3, 0, 0, 0)  # PR_SET_SECUREBITS: being root means nothing
for capability in range(64):
    libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_it_takes_no_privileges(afresh, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"{SAYS}{TELL}status = Path('/proc/self/status').read_text()\n"
        "assert int(status.partition('CapEff:')[2].split()[0], 16) == 0\n"
        "assert 'outlast.launch.worker' in Path('/proc/self/cmdline').read_text()\n"
        "assert 'RANK=' in Path('/proc/self/environ').read_text()\n"
    )
    drop, told = tmp_path / "drop.py", tmp_path / "told"
    drop.write_text(DROP)
    told.mkdir()
    started = afresh.cold(
        *(drop, sys.executable, "-m", "outlast", "run", "--nproc-per-node", RANKS, script),
        env={"TOLD": told, "OUTLAST_DIR": tmp_path / "job"},
    )
    assert started.wait() == 0, started.text
    assert {path.read_text() for path in told.iterdir()} == {"True"}
