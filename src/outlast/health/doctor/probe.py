"""A probe's process: one line of JSON in, one line of JSON out; it ends with whoever started it."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
from typing import Final

import msgspec

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
