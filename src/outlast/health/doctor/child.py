"""Run a probe in a process of its own, and leave it behind at its deadline.

The probe's process (``main``) reads one line of JSON and writes one line of JSON. It ends with
the process that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

ASKED_S: Final = 1.0  # to remove what it has written
KILLED_S: Final = 0.5  # for a killed process to be gone; one in the kernel's hands never is
ERROR_BYTES: Final = 4000
Kind = TypeVar("Kind")
_left_behind: list[subprocess.Popen[bytes]] = []  # to be waited for by nobody, until we end


class Child:
    """One probe.

    Args:
        name: of the probe, see ``PROBES``.
        request: its arguments, as JSON can hold them.
        limit_s: after which it is given up.
        environ: more variables for it.
    """

    def __init__(
        self,
        name: str,
        request: Mapping[str, Any],
        limit_s: float,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.request = request
        self.limit_s = limit_s
        self.started_s = time.monotonic()
        self.timed_out = False
        # Into memory, not through pipes: nothing that a probe prints can hold it up.
        self._out = os.memfd_create("outlast-doctor-out", os.MFD_CLOEXEC)
        self._err = os.memfd_create("outlast-doctor-err", os.MFD_CLOEXEC)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "outlast.health.doctor.child", name],
            stdin=subprocess.PIPE,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
            env={**os.environ, **(environ or {})},
        )
        self.tell(request)

    def tell(self, message: Mapping[str, Any]) -> None:
        """One more line for it; nothing happens when it has ended."""
        stdin = self._process.stdin
        if stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                stdin.write(json.dumps(message).encode() + b"\n")
                stdin.flush()

    def is_over(self) -> bool:
        """Whether it has ended; one whose time is over is ended now."""
        if self._process.poll() is not None:
            return True
        if time.monotonic() - self.started_s > self.limit_s:
            self.timed_out = True
            self._end()
            return True
        return False

    def lines(self) -> list[bytes]:
        """What it has said so far, whole lines only."""
        size = os.fstat(self._out).st_size
        return os.pread(self._out, size, 0).split(b"\n")[:-1]

    def answer(self, kind: type[Kind]) -> Kind | None:
        """Its last word; None where it came to none."""
        with contextlib.suppress(msgspec.MsgspecError, IndexError):
            return msgspec.json.decode(self.lines()[-1], type=kind)
        return None

    def problem(self) -> str:
        """Why it came to none, in words."""
        if self.timed_out:
            return f"it did not end within {self.limit_s:.0f} s"
        said = os.pread(self._err, 1 << 20, 0)[-ERROR_BYTES:].decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), "")
        code = self._process.poll()
        if code is not None and code < 0:
            return f"ended by {signal.Signals(-code).name}"
        return last or f"ended with {code}"

    def close(self) -> None:
        """End it, if it has not ended, and forget what it said."""
        self._end()
        for fd in (self._out, self._err):
            if fd >= 0:
                os.close(fd)
        self._out = self._err = -1

    def ask_to_end(self) -> None:
        """Let it remove what it has written, and end; nothing is waited for."""
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                self._process.terminate()

    def _end(self) -> None:
        """A process that the kernel holds is left behind."""
        self.ask_to_end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ASKED_S)
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            try:
                self._process.wait(KILLED_S)
            except subprocess.TimeoutExpired:
                _left_behind.append(self._process)
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()


PROBES: Final = ("place", "past", "platform", "compute", "stacks", "gpus", "meeting")
_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Run the probe that the command line names."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was written is removed
    name = sys.argv[1]
    if name not in PROBES:
        raise SystemExit(f"there is no probe {name}")
    request = json.loads(sys.stdin.readline() or "null")
    if request is None:
        raise SystemExit("nobody says what to look at")
    # What libraries print must not stand between our lines.
    out = os.dup(1)
    os.dup2(2, 1)
    module = importlib.import_module(f"outlast.health.doctor.{name}")

    def say(answer: object) -> None:
        os.write(out, msgspec.json.encode(answer) + b"\n")

    if name == "meeting":
        module.probe(say=say, **request)
    else:
        say(module.probe(**request))
    os._exit(0)  # threads of clients and of torch need not be waited for


if __name__ == "__main__":
    main()
