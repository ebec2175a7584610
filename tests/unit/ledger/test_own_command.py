"""With what command a process was started, as it tells by itself."""

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import types

import pytest

from outlast.ledger.command import own_command, script_command

SCRIPT = """
import json, sys
ARGV = sys.argv[1:]
sys.argv[1:] = ["taken"]  # as parsers do
from outlast.ledger.command import own_command
found = own_command()
print(json.dumps(found and [found.kind, found.what, found.arguments]))
"""
SPAWNED = """
import multiprocessing, sys
def look():
    import json
    from outlast.ledger.command import own_command
    found = own_command()
    print(json.dumps([found.kind, found.what, found.arguments]))
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=look)
    child.start()
    child.join()
"""


@pytest.fixture(autouse=True)
def _scripts(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "spawned.py").write_text(SPAWNED)
    (tmp_path / "package").mkdir()
    for name in ("__init__", "train", "__main__"):
        (tmp_path / "package" / f"{name}.py").write_text("" if name == "__init__" else SCRIPT)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.py", "--lr", "1"], ["script", "train.py", ["--lr", "1"]]),
        (["-u", "-X", "dev", "./train.py"], ["script", "train.py", []]),
        (["train.py", "train.py", "-m"], ["script", "train.py", ["train.py", "-m"]]),
        (["-m", "package.train", "a"], ["module", "package.train", ["a"]]),
        (["-um", "package", "a"], ["module", "package", ["a"]]),
        (["package", "a"], ["script", "package/__main__.py", ["a"]]),
        (["package/", "a"], ["script", "package/__main__.py", ["a"]]),
        (["spawned.py", "--lr", "1"], ["script", "spawned.py", ["--lr", "1"]]),
        (
            ["-m", "cProfile", "-o", "out", "train.py", "-o", "a"],
            ["script", "train.py", ["-o", "a"]],
        ),
        (["-m", "cProfile", "-o", "out", "-m", "package.train", "a"], None),
        (["-c", SCRIPT, "a"], None),
    ],
)
def test_scripts_and_modules(tmp_path, words, expected):
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    found = json.loads(done.stdout or repr(done.stderr))
    if expected is not None and expected[0] == "script":
        expected = [expected[0], str((tmp_path / expected[1]).resolve()), expected[2]]
    assert found == expected


def test_a_program_of_a_librarys_own_has_none():
    assert own_command() is None  # pytest


@pytest.mark.parametrize("runner", ["profile", "trace", "of a later Python"])
def test_what_runs_a_script_in_its_way_counts_as_the_script(tmp_path, monkeypatch, runner):
    """As these leave the main module, ``sys.argv`` and ``sys.orig_argv``: they are slow."""
    script = tmp_path / "train.py"
    main = types.ModuleType("__main__")
    main.__file__ = importlib.util.find_spec("trace").origin
    main.__spec__ = importlib.util.find_spec("profile" if runner == "profile" else "trace")
    if runner == "of a later Python":
        main.__file__ = str(script)
        main.__spec__ = importlib.machinery.ModuleSpec("__main__", None, origin=str(script))
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", [str(script), "taken"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "trace", "-l", str(script), "a"])
    assert own_command() == script_command(str(script), ["a"])
