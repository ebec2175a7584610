"""The first thing that runs in a worker: it runs the user's script as ``python script.py`` would.

    python -u -m outlast.launch.worker [-m] SCRIPT [ARGUMENT…]
    python -P -m outlast.launch.worker --no-python PROGRAM [ARGUMENT…]

It sees to what a script cannot do for itself: the worker dies with its agent (no orphan goes on
training), an exception's traceback reaches the agent, our own errors are one line instead of a
traceback, and leaving takes no interpreter teardown (0.7 s, and with gloo groups it can hang).

A program that is no Python script takes this process' place, and dies with the agent: the kernel's
promise outlives the exec. It is made for this one process: what the program starts itself is ended
by the agent's watcher. What can go wrong: a program with more rights than its starter (set-user-id)
is not bound by it.

Imports nothing heavy: every worker pays for it at every start.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
import types
from pathlib import Path
from typing import Any, Final, NoReturn

from outlast.attempt import trackers
from outlast.attempt.early import spare_torch, watch_groups, watch_models
from outlast.errors import Exit, Leave, OutlastError
from outlast.health import pulse
from outlast.health.processes import die_with_agent

# A script that leaves with one of these by itself has failed, whatever it means by it.
OURS: Final = (Exit.GAVE_UP, Exit.STORAGE, Exit.REFUSED)


STARTS_SCRIPTS: Final = True  # in a module whose frames are no part of a script's traceback
NOT_FOUND, NOT_RUNNABLE = 127, 126  # as shells have it


def main() -> NoReturn:
    """Run the script named on the command line, and leave with its exit code.

    In a fresh interpreter, or in a fork of the server in ``launch.warm``, which looks like one.
    """
    if sys.argv[1] == "--no-python":
        _become(sys.argv[2:])
    as_module = sys.argv[1] == "-m"
    del sys.argv[: 2 if as_module else 1]
    die_with_agent()
    spare_torch()
    watch_groups()
    watch_models()
    trackers.export_here()
    pulse.be_ready()
    pulse.start()
    code = 1
    try:
        if as_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            run_script(sys.argv[0])
        code = 0
    except SystemExit as error:
        code = _exit_code(error)
        if code in OURS and not isinstance(error, Leave):
            words = f"the script left with exit code {code}, which outlast keeps for itself"
            _record(RuntimeError(words), "")
            code = 1
    except OutlastError as error:
        _record(error, "")
        code = int(error.exit_code)
    except BaseException as error:  # noqa: BLE001 - the interpreter's own last resort
        error, text = _in_words(error)
        if _asks("is_forgiven", error):
            code = 0
        elif (ours := _asks("still_to_do", error)) is not None:
            print(text, end="", file=sys.stderr)  # noqa: T201 - the agent's line has no place
            _record(ours, text)
            code = int(ours.exit_code)
        else:
            _record(error, text)
            sys.excepthook(type(error), error, error.__traceback__)
            code = 130 if isinstance(error, KeyboardInterrupt) else 1
    _leave(code)


def _become(command: list[str]) -> NoReturn:
    die_with_agent()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which the interpreter ignores
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606 - what the user asked for
    except OSError as error:
        from outlast.ledger.narrator import say

        say(f"{command[0]} cannot be run: {error.strerror}")
        is_there = not isinstance(error, FileNotFoundError)
        os._exit(NOT_RUNNABLE if is_there else NOT_FOUND)


def run_script(script: str) -> None:
    """Run a file as the main module, as ``python SCRIPT`` does; its arguments are there already."""
    path = Path(script).resolve()
    sys.path[0] = str(path.parent)
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=script, __builtins__=__builtins__)
    # In place for good, not for the duration of the run: threads and exit handlers outlive it.
    sys.modules["__main__"] = module
    exec(compile(path.read_bytes(), script, "exec"), module.__dict__)  # noqa: S102 - the user's


def _asks(what: str, error: BaseException) -> Any:
    """What a session says of an error behind it; None where the script has had none."""
    hook = sys.modules.get("outlast.script.excepthook")  # only a session imports it
    return getattr(hook, what)(error) if hook is not None else None


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    print(error.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
    return 1


def _in_words(error: BaseException) -> tuple[BaseException, str]:
    """What is told, with its traceback.

    A handler of signals may raise while that is written: torch's does when a data worker was
    killed. Then this is what happened, and it has the first one in its own traceback.
    """
    error.__traceback__ = _without_us(error.__traceback__)
    try:
        return error, "".join(traceback.format_exception(error))
    except Exception as later:  # noqa: BLE001 - whatever it is
        return later, "".join(traceback.format_exception(later))


def _without_us(trace: types.TracebackType | None) -> types.TracebackType | None:
    runs = (runpy.__file__, "<frozen runpy>")
    while trace is not None and (
        trace.tb_frame.f_code.co_filename in runs or "STARTS_SCRIPTS" in trace.tb_frame.f_globals
    ):
        trace = trace.tb_next
    return trace


def _record(error: BaseException, text: str) -> None:
    """Tell the agent, in the form that torch's agent reads."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    last = "".join(traceback.format_exception_only(error)).strip()
    message = str(error) if isinstance(error, OutlastError) else last
    extra: dict[str, Any] = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):  # the agent then knows the exit code alone
        # In one piece: torch's agent breaks on a file that its killing of this worker left empty.
        whole = Path(f"{path}.{os.getpid()}")
        whole.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
        whole.replace(path)


def _leave(code: int) -> NoReturn:
    threading._shutdown()  # type: ignore[attr-defined]  # joins the script's own threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    main()
