"""With what command this process was started, where nobody of ours has started it.

Known for a script (``python train.py``, torchrun, a console script), for a directory or zip file
with a ``__main__.py``, and for the script's own module (``python -m train``), also where Python's
profilers, its tracer or its debugger run the script. A notebook, ``python -c`` and an interactive
session have none. Neither have other programs of Python's or a library's own that call the script
in their way: pytest, a notebook's kernel and Ray's workers are given other arguments at each start.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from outlast.data.generators import is_users
from outlast.ledger.command import Command, module_command, script_command

# They stay the main module, and leave to the script the arguments that are its own.
_RUNNERS: Final = frozenset({"cProfile", "profile", "trace"})


def own_command() -> Command | None:
    """The script of this process and its arguments; None where it has none."""
    main = sys.modules.get("__main__")
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if spec is not None and spec.name in _RUNNERS:
        file, spec = sys.argv[0], None
        if not Path(file).is_file():  # a module that the runner was told to run
            return None
    if not isinstance(file, str) or not is_users(file):
        return None
    if spec is not None and spec.loader is None:  # a script that a newer profiler runs
        spec = None
    if spec is not None and spec.name == "__main__":  # of a directory, or of a zip file
        return script_command(file, _arguments(str(Path(file).parent)))
    if spec is not None:
        return module_command(spec.name, _arguments(spec.name.removesuffix(".__main__")))
    return script_command(file, _arguments(file))


def _arguments(what: str) -> list[str]:
    """What the interpreter was given behind ``what``: scripts take from ``sys.argv``.

    Where it was given something else (in a child of ``multiprocessing``) ``sys.argv`` tells.
    """
    name = Path(what).name
    for at, given in enumerate(sys.orig_argv[1:], 2):
        if given == what or Path(given).name == name:
            return sys.orig_argv[at:]
    return sys.argv[1:]
