"""Whoever reads what a command prints may leave at any time: the exit code is still the right one.

What a stream could not write stays in its buffer, the interpreter tries it again at its end, and
leaves with 120 when that fails.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from floor import LIMIT_S, TRAIN, until

from outlast import config
from outlast.checkpoint.catalog import open_job

ENOUGH = 141  # as a shell says of what SIGPIPE ended


def left(floor, *arguments, stdout=None, stderr=None, env=None):
    """The exit code of ``python ARGUMENTS`` where nobody reads one of its streams."""
    reader, nobody = os.pipe()
    os.close(reader)
    pick = {"nobody": nobody, None: subprocess.DEVNULL}
    try:
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            env={**floor.environ, **(env or {})},
            cwd=floor.directory,
            stdin=subprocess.DEVNULL,
            stdout=pick.get(stdout, stdout),
            stderr=pick.get(stderr, stderr),
            start_new_session=True,
        )
    finally:
        os.close(nobody)
    try:
        return process.wait(LIMIT_S)
    finally:
        process.kill()
        process.wait()


def outlast(floor, *arguments, **streams):
    return left(floor, "-m", "outlast", *arguments, **streams)


@pytest.fixture(name="job")
def _job(tmp_path):
    open_job(tmp_path / "job", config.load({}))


ANSWERS = {
    "click": ["config"],
    "rich": ["report", "job"],
    "json": ["report", "job", "--json"],
    "help": ["--help"],
    "init": ["init", "slurm", "-o", "-"],
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_nobody_reads_ends_the_command_as_any_other(floor, job, name):
    assert outlast(floor, *ANSWERS[name], stdout="nobody") == ENOUGH


def test_a_demo_that_nobody_watches_ends(floor):
    assert outlast(floor, "demo", "--dir", "demo", stdout="nobody") == ENOUGH
    until(lambda: not floor.offspring(), "its run has ended")


def test_an_answer_on_a_full_disk_is_an_error(floor, job):
    with open("/dev/full", "wb") as full:
        assert outlast(floor, *ANSWERS["rich"], stdout=full) == 77
        assert outlast(floor, *ANSWERS["click"], stdout=full, stderr=full) == 77


def test_an_error_that_nobody_reads_keeps_its_exit_code(floor):
    assert outlast(floor, "report", "nowhere", stderr="nobody") == 2
    assert outlast(floor, "rum", stderr="nobody") == 2


@pytest.mark.parametrize("way", [["outlast", "run"], []], ids=["run", "python"])
def test_training_of_which_nobody_reads_finishes(floor, way):
    arguments = [*(["-m", *way] if way else []), TRAIN, floor.directory, 3, "--light"]
    env = {"OUTLAST_DIR": str(floor.directory / "trained")}
    assert left(floor, *arguments, env=env, stderr="nobody") == 0


def test_the_house_is_counted_for_head(floor, tmp_path):
    house = Path(__file__).parents[2] / "tools" / "house.py"
    with (tmp_path / "err").open("wb") as err:
        assert left(floor, house, "--names", stdout="nobody", stderr=err) == 0
    assert (tmp_path / "err").read_text() == ""
