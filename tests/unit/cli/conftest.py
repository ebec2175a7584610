"""A job with two tiers, made without training; and the command line as a person calls it."""

import pytest
from cli_job import MadeJob

from outlast.cli import main
from outlast.config import _KEYS, variable_name


@pytest.fixture(name="job")
def _job(tmp_path, monkeypatch):
    """A job in the working directory: tiers fast (keep 3) and slow (keep 2), no checkpoint yet."""
    monkeypatch.chdir(tmp_path)
    for key in _KEYS:
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
