"""torchrun's command line, understood, or refused in one line before anything starts."""

import os
import sys
from pathlib import Path

import pytest
import torch

from outlast.errors import ConfigError
from outlast.launch.arguments import MAX_RESTARTS, Launch


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("PET_") or name == "PYTHON_EXEC":
            monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # a launch sets it; restored after the test
    (tmp_path / "train.py").write_text("")
    (tmp_path / "finetune.py").write_text("")
    (tmp_path / "package").mkdir()


def refusal(*arguments):
    with pytest.raises(ConfigError) as caught:
        Launch(list(arguments))
    return str(caught.value)


def test_a_script_and_its_arguments():
    launch = Launch(["--nproc-per-node", "2", "train.py", "--dir", "theirs", "-x"])
    assert launch.entrypoint == sys.executable
    assert launch.args == ["-u", "-m", "outlast.launch.worker", "train.py", "--dir", "theirs", "-x"]
    assert (launch.directory, launch.one_machine) == (None, True)
    assert (launch.config.nproc_per_node, launch.config.max_restarts) == (2, MAX_RESTARTS)
    assert (launch.config.min_nodes, launch.config.max_nodes) == (1, 1)
    assert launch.config.run_id == "outlast"


def test_our_own_flag():
    assert Launch(["--dir", "/job", "train.py"]).directory == "/job"


@pytest.mark.parametrize(
    ("arguments", "attribute", "value"),
    [
        (["--nproc_per_node=3"], "nproc_per_node", 3),
        (["--max-restarts", "7"], "max_restarts", 7),
        (["--max_restarts=0"], "max_restarts", 0),
        (["--monitor-interval", "0.5"], "monitor_interval", 0.5),
        (["--nnodes", "1:4"], "max_nodes", 4),
        (["--rdzv-id", "mine", "--nnodes", "2"], "run_id", "mine"),
    ],
)
def test_torchruns_flags(arguments, attribute, value):
    assert getattr(Launch([*arguments, "train.py"]).config, attribute) == value


@pytest.mark.parametrize(
    ("arguments", "one"),
    [
        ([], True),
        (["--standalone"], True),
        (["--standalone", "--nnodes", "1"], True),
        (["--nnodes", "1:1"], True),
        (["--nnodes", "2"], False),
        (["--nnodes", "1:2"], False),
        (["--rdzv-backend", "c10d"], False),
        (["--rdzv-endpoint", "host:1"], False),
        (["--master-port", "29501"], False),
    ],
)
def test_whether_another_machine_can_take_part(arguments, one):
    assert Launch([*arguments, "train.py"]).one_machine is one


def test_variables_of_torchrun(monkeypatch):
    monkeypatch.setenv("PET_NPROC_PER_NODE", "4")
    assert Launch(["train.py"]).config.nproc_per_node == 4
    assert Launch(["--nproc-per-node", "2", "train.py"]).config.nproc_per_node == 2
    monkeypatch.setenv("PET_MAX_RESTARTS", "5")
    assert Launch(["train.py"]).config.max_restarts == 5
    monkeypatch.setenv("PET_NNODES", "x")
    assert "--nnodes x" in refusal("train.py")


def test_a_program_that_is_not_python():
    script = Path("run.sh")
    script.touch(mode=0o755)
    launch = Launch(["--no-python", "./run.sh", "a", "-b"])
    ends_with_agent = ["-P", "-m", "outlast.launch.worker", "--no-python"]
    assert launch.args == [*ends_with_agent, "./run.sh", "a", "-b"]
    assert "there is no program nosuch" in refusal("--no-python", "nosuch")


def test_another_interpreter(monkeypatch):
    monkeypatch.setenv("PYTHON_EXEC", "/opt/python")
    assert Launch(["train.py"]).entrypoint == "/opt/python"


@pytest.mark.parametrize("module", ["json", "json.tool", "package", "package.train", "train"])
def test_modules(module):
    launch = Launch(["-m", module, "x"])
    assert launch.args == ["-u", "-m", "outlast.launch.worker", "-m", module, "x"]


@pytest.mark.parametrize("module", ["no_such_module", "no_such.train", ".", ""])
def test_a_module_that_is_none(module):
    assert refusal("-m", module).startswith(f"there is no module {module}")


def test_one_thread_each_where_there_are_several(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    Launch(["train.py"])
    assert "OMP_NUM_THREADS" not in os.environ
    Launch(["--nproc-per-node", "2", "train.py"])
    assert os.environ["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    Launch(["--nproc-per-node", "2", "train.py"])
    assert os.environ["OMP_NUM_THREADS"] == "8"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no script is named; write: outlast run --nproc-per-node 2 train.py"),
        (["-m"], "no script is named"),
        (["missing.json"], "there is no script missing.json; check the path"),
        (["trian.py"], "there is no script trian.py; did you mean train.py?"),
        (["./fintune.py"], "there is no script ./fintune.py; did you mean finetune.py?"),
        (["no/where/train.py"], "there is no script no/where/train.py; check the path"),
        (["package"], "package is a directory; name the script in it"),
        (["--bogus", "train.py"], "unrecognized arguments: --bogus. All flags: outlast run --help"),
        (["--nnodes", "two", "train.py"], "--nnodes two is neither N nor MIN:MAX"),
        (["--nnodes", "1:2:3", "train.py"], "--nnodes 1:2:3 is neither N nor MIN:MAX"),
        (["--nnodes", "2:1", "train.py"], "min_nodes must be > 0 and <= max_nodes"),
        (["--nproc-per-node", "0", "train.py"], "--nproc-per-node 0: there must be a worker"),
        (["--nproc-per-node", "some", "train.py"], "Unsupported nproc_per_node value: some"),
        (["--max-restarts", "many", "train.py"], "invalid int value: 'many'"),
        pytest.param(
            ["--shutdown-timeout", "-1", "train.py"],
            "--shutdown-timeout -1 is below 0",
            marks=pytest.mark.skipif(
                torch.__version__ < "2.12", reason="torch 2.11 has no such flag"
            ),
        ),
        (["--start-method", "fly", "train.py"], "invalid choice: 'fly'"),
        (["--dir"], "expected one argument"),
    ],
)
def test_what_cannot_be_meant(arguments, says):
    assert says in refusal(*arguments)
