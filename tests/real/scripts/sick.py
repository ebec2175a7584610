"""The job of ``elastic.py``, with machines that fail: RECORDS STEPS [options], RECORDS/sick.json.

That file has, for a machine's name or "*", a message, an exit code (negative: a signal; 0: it
hangs) and the number of steps after which it fails in each attempt.
"""

import json
import os
import random
import signal
import socket
import sys
from pathlib import Path

import elastic


def fail(message, code):
    if not code:
        signal.pause()
    if code < 0:
        os.kill(os.getpid(), -code)
    numbers = random.Random()
    message = "".join(str(numbers.randrange(10**4)) if one == "%" else one for one in message)
    if not message:
        os._exit(code)
    name, _, words = message.partition(": ")
    module, _, name = name.rpartition(".")
    raise type(name, (Exception,), {"__module__": module or "builtins"})(words)


def main():
    try:
        sick = json.loads((Path(sys.argv[1]) / "sick.json").read_text())
    except FileNotFoundError:
        sick = {}
    how = sick.get(socket.gethostname()) or sick.get("*")
    if how:
        message, code, after = how
        step, left = elastic.Exact.step, iter(range(after))

        def failing(optimizer, samples):
            if next(left, None) is None:
                fail(message, code)
            return step(optimizer, samples)

        elastic.Exact.step = failing
        if not after:
            fail(message, code)
    elastic.main()


if __name__ == "__main__":
    main()
