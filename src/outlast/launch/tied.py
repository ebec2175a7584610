"""Becomes a program that is no Python script (``--no-python``), and dies with the agent.

    python -P -m outlast.launch.tied PROGRAM [ARGUMENT…]

The kernel's promise outlives the exec. It is made for this one process: what the program starts
itself is ended by the agent's watcher. What can go wrong: a program with more rights than its
starter (set-user-id) is not bound by it.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from outlast.health.processes import die_with_agent

NOT_FOUND, NOT_RUNNABLE = 127, 126  # as shells have it


def main() -> NoReturn:
    """Become the program on the command line."""
    program, *_ = command = sys.argv[1:]
    die_with_agent()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which the interpreter ignores
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(program, command)  # noqa: S606 - what the user asked for
    except OSError as error:
        sys.stderr.write(f"outlast: {program} cannot be run: {error.strerror}\n")
        is_there = not isinstance(error, FileNotFoundError)
        os._exit(NOT_RUNNABLE if is_there else NOT_FOUND)


if __name__ == "__main__":
    main()
