"""Which imports are done ahead: each is tried in a fork first, and what is not safe is declined."""

import json
import os
import signal

import psutil
import pytest
from floor import SCRIPTS, Job, until

from thorough import some

MODULES = {
    "quiet": "X = 1\n",
    "sets_a_variable": "import os\nos.environ['SET_BY_IMPORT'] = '1'\n",
    "threads": (
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    ),
    "ends": "import os\nos._exit(3)\n",
    "crashes": "import ctypes\nctypes.string_at(0)\n",
    "leaves": "import sys\nsys.exit(1)\n",
    "fails": "1 / 0\n",
    "reads_the_rank": "import os\nrank = os.environ.get('LOCAL_RANK', 0)\n",
    "reads_everything": "import os\nall = dict(os.environ)\n",
    "reads_its_id": "import os\nmine = os.getpid()\n",
    "draws": "import random\nfirst = random.random()\n",
    "draws_from_numpy": "import numpy\nnumpy.random.seed(0)\n",
    "draws_from_torch": "import torch\nfirst = torch.rand(1)\n",
    "is_random": "import numpy.random\nrng = numpy.random.default_rng()\n",
    "starts_processes": "import subprocess\np = subprocess.Popen(['sleep', '60'])\n",
    "opens": "f = open(__file__)\n",
    "handles": "import signal\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)\n",
    "moves": "import os\nos.chdir('/')\n",
    "brings_another": "import threads\n",
}
PROBLEMS = {
    "threads": "an import has started 1 thread",
    "ends": "it ends the process",
    "crashes": "it ends the process",
    "leaves": "it fails: SystemExit",
    "fails": "it fails: ZeroDivisionError",
    "reads_the_rank": "it looks at LOCAL_RANK",
    "reads_everything": "it looks at the whole environment",
    "reads_its_id": "it looks at the process id",
    "draws": "it changes Python's random numbers",
    "draws_from_numpy": "it changes NumPy's random numbers",
    "draws_from_torch": "it changes torch's random numbers",
    "is_random": "it looks at fresh randomness",
    "starts_processes": "it starts processes",
    "opens": "it changes an open descriptor",
    "handles": "it changes a signal's handler",
    "moves": "it changes the working directory",
    "brings_another": "an import has started 1 thread",
}


def test_what_is_safe_and_what_is_not(afresh, tmp_path):
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    run = afresh.cold(SCRIPTS / "try_imports.py", tmp_path, 120, *MODULES, "quiet:X", "none")
    assert run.wait() == 0, run.text
    found = json.loads(run.out)
    assert found["safe"] == ["quiet", "sets_a_variable", "quiet"]
    assert found["declined"] == PROBLEMS | {"none": "it fails: ModuleNotFoundError"}
    assert found["here"] == []  # nothing of it happened in the process itself


def test_there_is_an_end_to_trying(afresh, tmp_path):
    (tmp_path / "first.py").write_text("X = 1\n")
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(1000)\n")
    run = afresh.cold(SCRIPTS / "try_imports.py", tmp_path, 5, "first", "hangs", "first:X")
    assert run.wait() == 0, run.text
    found = json.loads(run.out)
    assert found["safe"] == ["first"]
    assert found["declined"] == {"hangs": "it takes longer than 5 s"}


AHEAD = (
    "import json, os, pathlib, sys, time\n"
    "ahead = sorted({'yaml', 'jsonschema'} & set(sys.modules))\n"
    "import jsonschema\n"
    "from yaml import safe_load\n"
    "attempt = os.environ['OUTLAST_ATTEMPT']\n"
)


def test_an_attempt_finds_them_done(afresh, tmp_path):
    """They are imported behind the first attempt, which is killed once they are."""
    script = tmp_path / "script.py"
    script.write_text(
        AHEAD + "told = pathlib.Path(os.environ['TOLD'])\n"
        "(told / attempt).write_text(json.dumps([os.getpid(), ahead]))\n"
        "while attempt == '1': time.sleep(0.1)\n"
    )
    job = Job(tmp_path / "job")
    run = afresh.outlast("run", "--nproc-per-node", 1, script, env=job.env | {"TOLD": tmp_path})
    first = tmp_path / "1"
    pid, ahead = json.loads(
        until(lambda: first.exists() and first.read_text(), "an attempt", running=run)
    )
    assert ahead == []
    parent = psutil.Process(psutil.Process(pid).ppid())
    until(lambda: "_yaml" in str(parent.memory_maps()), "the imports", running=run)
    os.kill(pid, signal.SIGKILL)
    assert run.wait() == 0, run.text
    assert "yaml" in json.loads((tmp_path / "2").read_text())[1]


@pytest.mark.parametrize("where", some(["beside", "elsewhere"], 1))
def test_own_modules_are_imported_by_the_worker_alone(afresh, tmp_path, where):
    (tmp_path / "own.py").write_text(
        "import os\n"
        "with open(os.environ['TOLD'] + '/imports', 'a') as f:\n"
        "    f.write(os.environ.get('RANK', 'none') + ' ')\n"
    )
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, time, own, torch\n"
        "attempt = os.environ['OUTLAST_ATTEMPT']\n"
        "pathlib.Path(os.environ['TOLD'], attempt).write_text(str(os.getpid()))\n"
        "while attempt == '1': time.sleep(0.1)\n"
    )
    env = {"TOLD": tmp_path, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    job = Job(tmp_path / "job")
    run = afresh.outlast(
        *("run", "--nproc-per-node", 1, script),
        env=job.env | (env if where == "elsewhere" else {"TOLD": tmp_path}),
    )
    first = tmp_path / "1"
    pid = until(lambda: first.exists() and first.read_text(), "an attempt", running=run)
    os.kill(int(pid), signal.SIGKILL)
    assert run.wait() == 0, run.text
    assert (tmp_path / "imports").read_text() == "0 0 "
