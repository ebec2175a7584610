"""torchrun's command line, understood, or refused in one line before anything starts."""

import os
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import run as torchrun

from outlast.errors import ConfigError
from outlast.launch import arguments as room
from outlast.launch.arguments import MAX_RESTARTS, command_of, parse


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
        parse(list(arguments))
    return str(caught.value)


def Launch(arguments):  # noqa: N802 - of a command line
    return room.Launch(parse(arguments))


def test_a_script_and_its_arguments():
    launch = Launch(["--nproc-per-node", "2", "train.py", "--dir", "theirs", "-x"])
    assert launch.entrypoint == sys.executable
    assert launch.args == ["-u", "-m", "outlast.launch.worker", "train.py", "--dir", "theirs", "-x"]
    assert launch.one_machine
    assert (launch.config.nproc_per_node, launch.config.max_restarts) == (2, MAX_RESTARTS)
    assert (launch.config.min_nodes, launch.config.max_nodes) == (1, 1)
    assert launch.config.run_id == "outlast"


def test_our_own_flag():
    assert parse(["--dir", "/job", "train.py"]).dir == "/job"


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
        (["--bogus", "train.py"], "arguments: --bogus. All flags: outlast run --help-all"),
        (["--nproc-per-nod2=2", "train.py"], "did you mean --nproc-per-node? All flags"),
        (["--nnodes", "two", "train.py"], "--nnodes two is neither N nor MIN:MAX"),
        (["--nnodes", "1:2:3", "train.py"], "--nnodes 1:2:3 is neither N nor MIN:MAX"),
        (["--nnodes", "2:1", "train.py"], "--nnodes 2:1: at least one machine, and MIN is at"),
        (["--nnodes", "0", "train.py"], "--nnodes 0: at least one machine"),
        (
            ["--nnodes", "2", "--rdzv-endpoint", "h:1", "--rdzv-backend", "outlast", "train.py"],
            "an",
        ),
        (["--nproc-per-node", "0", "train.py"], "--nproc-per-node 0: there must be a worker"),
        (["--nproc-per-node", "some", "train.py"], "--nproc-per-node some is no number of workers"),
        (["--max-restarts", "many", "train.py"], "invalid int value: 'many'"),
        (["--max-restarts", "-1", "train.py"], "--max-restarts -1 is below 0"),
        (["-r", "4", "train.py"], "--redirects 4: write 1 (standard output), 2 (standard error)"),
        (["--tee", "0:3,1", "train.py"], "--tee 0:3,1: write 1"),
        (["--local-ranks-filter", "a", "train.py"], "--local-ranks-filter a: write 0,2,3"),
        (["--log-dir", "train.py", "train.py"], "--log-dir train.py is not a directory"),
        (["--no-python", "-m", "ls"], "--no-python and --module"),
        (["--rdzv-conf", "x", "train.py"], "--rdzv-conf x: write KEY=VALUE,…"),
        (["--rdzv-conf", "a=1,join_timeout=soon", "train.py"], "join_timeout is not a number"),
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


# --- torchrun's parser, without torch -------------------------------------------------------------


def described(parser):
    """Everything that its options are."""
    names = ("option_strings", "dest", "nargs", "const", "default", "choices", "help")
    return [
        [*(getattr(one, name) for name in names), getattr(one.type, "__name__", None)]
        for one in parser._actions
    ]


def test_it_is_torchs_own_parser():
    taken = room._taken_parser()
    assert taken is not torchrun.get_args_parser
    assert described(taken()) == described(torchrun.get_args_parser())


def test_torch_is_asked_where_its_source_has_another_form(monkeypatch):
    monkeypatch.setattr(room, "_SOURCES", {"distributed/run.py": {"get_args_parser": "x"}})
    assert described(room.torch_parser()) == described(torchrun.get_args_parser())


def test_a_variable_that_is_no_switch(monkeypatch):
    monkeypatch.setenv("PET_STANDALONE", "yes")
    assert refusal("train.py").startswith("a PET_… variable is no value for its option")


def test_variables_of_torchruns_count(monkeypatch):
    monkeypatch.setenv("PET_MODULE", "1")
    assert command_of(parse(["json", "x"])).kind == "module"


def test_a_device_of_a_plugin_is_torchs_to_judge(monkeypatch):
    monkeypatch.setattr(room.importlib.metadata, "entry_points", lambda group: [group])
    assert parse(["--nproc-per-node", "npu", "train.py"]).nproc_per_node == "npu"
    with pytest.raises(ConfigError, match="Unsupported nproc_per_node value: npu"):
        Launch(["--nproc-per-node", "npu", "train.py"])


def help_of(capsys, *arguments):
    with pytest.raises(SystemExit) as left:
        parse(list(arguments))
    assert left.value.code == 0
    return capsys.readouterr().out


def test_help_has_our_options_first_and_torchruns_where_they_are_asked_for(capsys):
    short = help_of(capsys, "--help")
    assert short.index("--dir") < short.index("--nproc-per-node") < short.index("--help-all")
    assert "--rdzv-backend" not in short
    assert len(short.splitlines()) < 30
    whole = help_of(capsys, "--help-all")
    assert whole.index("--preflight") < whole.index("torchrun's options") < whole.index("--nnodes")
    options = {one for a in torchrun.get_args_parser()._actions for one in a.option_strings}
    assert not [one for one in options if "_" not in one and one not in whole]
    assert max(map(len, whole.splitlines())) <= 80
    assert help_of(capsys, "-h") == short
