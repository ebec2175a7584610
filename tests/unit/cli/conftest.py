"""A job with two tiers, made without training; and the command line as a person calls it."""

import json
import shlex

import pytest
from cli_job import MadeJob
from click.testing import CliRunner

from outlast.cli import cli, main
from outlast.config import SETTINGS, variable_name


@pytest.fixture(name="job")
def _job(tmp_path, monkeypatch):
    """A job in the working directory: tiers fast (keep 3) and slow (keep 2), no checkpoint yet."""
    monkeypatch.chdir(tmp_path)
    for key in SETTINGS:
        monkeypatch.delenv(variable_name(key), raising=False)
    monkeypatch.delenv("OUTLAST_CONFIG", raising=False)
    return MadeJob(tmp_path)


@pytest.fixture(name="outlast")
def _outlast(job, capsys):
    """``outlast ARGUMENTS`` → (exit code, standard output, standard error)."""

    def run(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, err

    return run


@pytest.fixture(name="ask")
def _ask():
    """``outlast plan …`` → the object that --json prints."""

    def ask(line):
        result = CliRunner().invoke(
            cli,
            ["plan", *shlex.split(line), "--json"],
            catch_exceptions=False,
            standalone_mode=False,
        )
        return json.loads(result.output)

    return ask


@pytest.fixture(name="say")
def _say():
    """``outlast plan …`` → what it prints."""

    def say(line):
        result = CliRunner().invoke(
            cli, ["plan", *shlex.split(line)], catch_exceptions=False, standalone_mode=False
        )
        return result.output

    return say


@pytest.fixture(name="refused")
def _refused(outlast):
    """``outlast plan …`` → the one line that refuses it."""

    def refused(line):
        code, out, err = outlast("plan", *shlex.split(line))
        assert (code, out) == (2, ""), err
        assert err.count("\n") == 1, err
        assert "Traceback" not in err
        return err

    return refused
