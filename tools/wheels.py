"""Build the wheel and the sdist, install the wheel into clean environments, and use it there.

    python tools/wheels.py [--python 3.11 …] [--torch 2.11.0 …] [--find-links PLACE …]

In each environment, of one Python and one torch, made for this and removed:

- the wheel is installed with what it asks for, and nothing else;
- its files are there: the marker of its types, and each template;
- a script with types (``tests/typed_client.py``) is checked by mypy against the installed package;
- ``outlast init`` writes a file, and ``outlast demo`` trains through its faults and proves it.

What is printed is a table, a row for each. The exit code is 1 if one fails, or if a Python that was
asked for is not there. An environment takes 6 GB while it is there: torch brings CUDA's libraries.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
TORCHES = ("2.11.0", "2.15.0")  # the oldest and the newest that are supported
_LEFT_OVER = shutil.ignore_patterns("*.egg-info", "__pycache__")
SHOWN = 15  # lines of what failed


def main() -> int:
    """Do it; the exit code."""
    parser = argparse.ArgumentParser(description="Install the wheel into clean environments.")
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="3.N")
    parser.add_argument("--torch", nargs="+", default=TORCHES, metavar="VERSION")
    parser.add_argument("--find-links", nargs="*", default=[], help="places of wheels for pip")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="what was built")
    parser.add_argument("--build", action="store_true", help="build, and install nothing")
    options = parser.parse_args()
    wheel = build(options.dist)
    if options.build:
        return 0
    rows, has_failed = [], False
    for python in options.python:
        for torch in options.torch:
            began_s = time.monotonic()
            try:
                found = tried(wheel, python, torch, options.find_links)
            except subprocess.CalledProcessError as error:
                has_failed = True
                print(*(error.stdout or "").splitlines()[-SHOWN:], sep="\n")
                found = f"FAILED: {' '.join(map(str, error.cmd))[:60]}"
            except LookupError as error:
                has_failed = True
                found = f"NOT TRIED: {error}"
            row = (
                f"Python {python:<5} torch {torch:<7} {time.monotonic() - began_s:4.0f} s  {found}"
            )
            print(row, flush=True)
            rows.append(row)
    print(f"\n{wheel.name}", *rows, sep="\n")
    return int(has_failed)


def build(place: Path) -> Path:
    """The sdist, and the wheel from that: what an sdist lacks, the wheel lacks too.

    Without an environment of its own, which would want a registry: what builds it is here, in the
    version that all of make uses. Of a copy: setuptools would pack what an earlier build has listed
    beside the source, also where it is asked for no longer.
    """
    shutil.rmtree(place, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="outlast-wheel-") as text:
        copy = Path(text)
        shutil.copytree(ROOT / "src", copy / "src", ignore=_LEFT_OVER)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, copy)
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", place, copy)
    (wheel,) = place.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    wanted = {
        str(file.relative_to(source))
        for file in source.rglob("*")
        if file.suffix in (".py", ".typed", ".j2") and "egg-info" not in str(file)
    }
    if missing := wanted - names:
        sys.exit(f"the wheel lacks {', '.join(sorted(missing))}")
    print(f"built {', '.join(sorted(one.name for one in place.iterdir()))}", flush=True)
    return wheel


def interpreter(python: str) -> str:
    """The program of a Python, on the path or of pyenv.

    Raises:
        LookupError: there is none.
    """
    places = sorted(Path.home().glob(f".pyenv/versions/{python}.*/bin/python"), reverse=True)
    for one in [shutil.which(f"python{python}"), *map(str, places)]:
        if (
            one
            and subprocess.run([one, "-c", ""], capture_output=True, check=False).returncode == 0
        ):
            return one
    raise LookupError(f"there is no Python {python} here")


def tried(wheel: Path, python: str, torch: str, places: list[str]) -> str:
    """What came of one environment, in words.

    Raises:
        subprocess.CalledProcessError: something failed.
        LookupError: there is no such Python.
    """
    program = interpreter(python)
    with tempfile.TemporaryDirectory(prefix="outlast-wheel-") as text:
        place = Path(text)
        run(program, "-m", "venv", place / "venv")
        own = place / "venv/bin/python"
        found = [word for one in places for word in ("--find-links", one)]
        pip = (own, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-input")
        run(*pip, "--no-cache-dir", *found, f"torch=={torch}", wheel)
        run(own, "-P", "-c", LOOK, cwd=place)
        run(place / "venv/bin/outlast", "init", "slurm", "-o", "-", cwd=place)
        outcome = run(place / "venv/bin/outlast", "demo", "--json", cwd=place)
        demo = json.loads(outcome.strip().splitlines()[-1])
        if demo["holds"] is not True:
            raise subprocess.CalledProcessError(1, ["outlast", "demo"], outcome)
        run(*pip, *found, "mypy")
        shutil.copy(ROOT / "tests/typed_client.py", place)
        command = ("-m", "mypy", "--strict", "--follow-imports=silent", "typed_client.py")
        run(own, *command, cwd=place)
        return f"demo {demo['seconds']:.0f} s, {len(demo['checks'])} checks hold; types hold"


LOOK = """
import pathlib, sys, outlast
place = pathlib.Path(outlast.__file__).parent
assert "site-packages" in str(place), place
assert (place / "py.typed").exists()
assert "torch" not in sys.modules
for name in outlast.__all__:
    getattr(outlast, name)
"""


def run(*command: object, cwd: Path | None = None) -> str:
    """What a command printed; of what it inherits, nothing points to the source."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith(("OUTLAST_", "PET_"))
    }
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**environ, "OUTLAST_NOTICE_PLATFORM": "none"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, list(map(str, command)), done.stdout)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
