"""What ``make test`` does with tests that fail: nothing that fails by itself passes."""

import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).parents[1] / "second_chance.py"
ONCE = """
def test_once(mark=__import__("pathlib").Path(__file__).with_name("mark")):
    seen = mark.exists()
    mark.touch()
    assert seen
"""
GOOD = "def test_good(): pass\n"
BAD = "def test_bad(): assert False\n"
MANY = "".join(f"def test_bad_{number}(): assert False\n" for number in range(6))
BROKEN = "import nothing_of_this_name\n"
AGAIN = "run again, alone: "
ALONE = "passed only when alone: "


def run(tmp_path, text, *options):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_of_one.py").write_text(text)
    command = [sys.executable, str(RUNNER), ".", "-n", "2", "--dist", "worksteal", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    # Where it runs leaves no cache that another run would read.
    assert not (tmp_path / ".pytest_cache").exists()
    return done.returncode, done.stdout


def test_one_that_passes_alone_passes_and_is_named(tmp_path):
    code, out = run(tmp_path, ONCE + GOOD)
    assert code == 0, out
    assert out.splitlines()[-1] == f"{ALONE}test_of_one.py::test_once"
    assert "1 passed" in out  # the others were not run again


def test_one_that_fails_alone_fails_the_run(tmp_path):
    code, out = run(tmp_path, ONCE + GOOD + BAD)
    assert code == 1, out
    assert out.splitlines()[-1] == f"{ALONE}test_of_one.py::test_once"
    assert f"{ALONE}test_of_one.py::test_bad" not in out


def test_a_file_that_cannot_be_read_fails_the_run(tmp_path):
    code, out = run(tmp_path, BROKEN)
    assert code, out
    assert ALONE not in out


@pytest.mark.parametrize(
    ("text", "options"), [(MANY, []), (ONCE + GOOD, ["-x"])], ids=["many", "stops early"]
)
def test_where_nothing_is_run_again(tmp_path, text, options):
    code, out = run(tmp_path, text, *options)
    assert code, out
    assert AGAIN not in out
    assert ALONE not in out
