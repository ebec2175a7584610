"""Before torch is imported a command line is understood as torch's own parser understands it."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import run as torchrun

from outlast.launch.arguments import Launch
from outlast.launch.first_look import _options, _parse, command_of


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("PET_") or name == "PYTHON_EXEC":
            monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "train.py").write_text("")


def test_the_options_are_torchs():
    known = {
        name: action.nargs == 0
        for action in torchrun.get_args_parser()._actions
        for name in action.option_strings
        if name not in ("-h", "--help")
    }
    assert {name: is_switch for names, is_switch in _options() for name in names} == known


OPTIONS = st.sampled_from(
    [
        *(["--standalone"], ["--nproc-per-node", "2"], ["--nproc_per_node=2"], ["--stand"]),
        *(["--max-restarts", "3"], ["--dir", "train.py"], ["--dir=x"], ["--resume"], ["-t", "3"]),
        *(["--rdzv-conf", "a=b"], ["--virtual-local-rank"], ["-r3"], ["--preflight"], ["--role=x"]),
    ]
)
SCRIPTS = st.sampled_from(
    [["train.py"], ["-m", "json"], ["--module", "json"], ["--no-python", "ls"]]
)
ARGUMENTS = st.lists(st.sampled_from(["--resume", "--dir", "x", "-m", "--", "-h", "--lr=1"]))


@given(st.lists(OPTIONS, max_size=3), SCRIPTS, ARGUMENTS)
def test_a_command_line_is_understood_alike(options, script, arguments):
    words = [word for option in options for word in option] + script + arguments
    launch, early = Launch(words), _parse(words)
    assert early is not None
    assert command_of(early) == launch.command
    assert (early.dir, early.resume) == (launch.directory, launch.resume)


@pytest.mark.parametrize(
    "words", [[], ["--help"], ["-h"], ["--nobody", "x.py"], ["--nproc", "2", "x"]]
)
def test_nothing_is_said_of_what_is_not_understood(words):
    assert _parse(words) is None


def test_variables_of_torchruns_count(monkeypatch):
    monkeypatch.setenv("PET_MODULE", "1")
    assert command_of(_parse(["json", "x"])).kind == "module"
    assert Launch(["json", "x"]).command == command_of(_parse(["json", "x"]))
