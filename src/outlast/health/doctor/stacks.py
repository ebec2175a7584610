"""Whether another process's stack can be read here: tried on a process that does nothing."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from outlast.policy.fitness import StackFacts

LIMIT_S: Final = 8.0
_SCOPE: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
_READY_S: Final = "import time; print(flush=True); time.sleep(60)"


def probe() -> StackFacts:
    """Start a process beside and read its stack, as is done with a rank that hangs."""
    scope = None
    with contextlib.suppress(OSError, ValueError):
        scope = int(_SCOPE.read_text())
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None or importlib.util.find_spec("outlast") is None:
        return StackFacts(installed=False, ptrace_scope=scope)
    # The reader is no ancestor of what it reads, as the agent's watcher is none of a rank.
    with subprocess.Popen(
        [sys.executable, "-S", "-c", _READY_S], stdout=subprocess.PIPE
    ) as sleeper:
        assert sleeper.stdout is not None  # noqa: S101 - asked for
        sleeper.stdout.readline()
        command = [program, "dump", "--pid", str(sleeper.pid), "--nonblocking"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as problem:
            return StackFacts(installed=True, error=str(problem), ptrace_scope=scope)
        finally:
            sleeper.kill()
    if done.returncode == 0:
        return StackFacts(installed=True, read=True, ptrace_scope=scope)
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    error = said[0] if said else f"it ended with {done.returncode}"
    return StackFacts(installed=True, error=error, ptrace_scope=scope)
