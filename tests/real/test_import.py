"""``import outlast`` starts nothing, and the quick commands stay quick."""

import json

import pytest

LOOK = """
import gc, json, logging, os, sys, threading

LATE = "LocalUpdates", "SameBits", "Session", "session", "data", "dcp_reader", "dcp_writer"

def look():
    return {
        "threads": threading.active_count(),
        "fds": sorted(os.listdir("/proc/self/fd"))[:-1],
        "handlers": [repr(h) for h in logging.root.handlers],
        "level": logging.root.level,
        "environ": dict(os.environ),
        "hooks": repr((sys.excepthook, threading.excepthook)),
        "children": open(f"/proc/self/task/{os.getpid()}/children").read(),
    }

before = look()
import outlast
after = look()
for name in outlast.__all__:
    if name not in LATE:
        getattr(outlast, name)
named = [name for name in logging.root.manager.loggerDict if name.startswith("outlast")]
print(json.dumps({
    "same": before == after,
    "torch": "torch" in sys.modules,
    "numpy": "numpy" in sys.modules,
    "configured": [n for n in named if logging.getLogger(n).handlers],
    "missing": [n for n in outlast.__all__ if n not in dir(outlast)],
}))
"""


def test_importing_does_nothing(floor):
    process = floor.cold("-c", LOOK)
    assert process.wait() == 0, process.text
    assert json.loads(process.out) == {
        "same": True,
        "torch": False,
        "numpy": False,
        "configured": [],
        "missing": [],
    }
    assert process.err == ""


COMMANDS = {
    "help": ("--help",),
    "version": ("--version",),
    "config": ("config", "--explain"),
    "config as JSON": ("config", "--json"),
    "misspelt": ("cofnig",),
    "plan": ("plan",),
    "plan interval": ("plan", "interval", "--rate", "2/h", "--checkpoint", "3min"),
    "plan deadline": (
        *("plan", "deadline", "--work", "48h", "--deadline", "70h", "--rate", "0.2/h"),
        *("--away", "1h", "--spot", "0.3", "--on-demand", "1"),
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_quick_command_does_not_import_torch(floor, name):
    process = floor.cold("-X", "importtime", "-m", "outlast", *COMMANDS[name])
    assert process.wait() == (2 if name == "misspelt" else 0), process.text
    imported = {line.rpartition("|")[2].strip() for line in process.err.splitlines()}
    assert "outlast.cli" in imported
    assert not {"torch", "numpy", "scipy", "jinja2", "resvg_py"} & imported
    if name == "config as JSON":
        assert json.loads(process.out)["checkpoint.keep"] == {"value": "3", "from": "default"}


# What another system does not have: its name is taken on, and what only Linux has is taken away.
# The libraries are imported before: they would look for that system's own modules.
ELSEWHERE = """
import os, subprocess, sys
import click, jinja2, msgspec, psutil, rich.console
sys.platform = sys.argv[1]
for name in ("memfd_create", "pidfd_open", "posix_fadvise"):
    delattr(os, name)
if sys.platform == "win32":
    sys.modules |= dict.fromkeys(("fcntl", "resource", "termios", "pwd"))
from outlast.cli import _called
import outlast
for words in sys.argv[2:]:
    print(words.split()[0], _called(words.split()), file=sys.stderr)
try:
    outlast.session(model=1)
except outlast.ConfigError as error:
    print(error, file=sys.stderr)
"""
ANYWHERE = ("plan interval --rate 2/h --checkpoint 3min", "init slurm -o -", "config")


@pytest.mark.parametrize(("system", "name"), [("darwin", "macOS"), ("win32", "Windows")])
def test_one_line_says_what_works_on_another_system(floor, system, name):
    commands = (*ANYWHERE, "run train.py", "report", "doctor")
    process = floor.cold("-c", ELSEWHERE, system, *commands)
    assert process.wait() == 0, process.text
    said = process.err.splitlines()
    line = f"this is {name}, and training with outlast needs Linux; here these work: outlast plan, "
    assert said[0].startswith(f"outlast: {line}")
    for one in ("plan", "init", "config"):
        assert f"{one} 0" in said
    for one in ("run", "report", "doctor"):
        assert said[said.index(f"{one} 2") - 1].startswith(f"outlast: outlast {one}: {line}")
    assert said[-1].startswith(f"outlast session: {line}")
    assert sum(line in one for one in said) == 5


@pytest.mark.parametrize("name", ["outlast.keeper.server", "outlast.health.watcher"])
def test_what_runs_beside_training_starts_without_libraries_of_numbers(floor, name):
    """Each job waits for its keeper, and a keeper that has died is missed until the next one."""
    process = floor.cold("-X", "importtime", "-P", "-c", f"import {name}")
    assert process.wait() == 0, process.text
    imported = {line.rpartition("|")[2].strip() for line in process.err.splitlines()}
    assert name in imported
    assert not {"torch", "numpy"} & imported
