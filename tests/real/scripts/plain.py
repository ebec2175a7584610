"""A script that knows nothing of outlast and imports nothing heavy: PLACE BEHAVIOUR [CODE]."""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

LIMIT_S = 100.0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("place", type=Path)
    parser.add_argument("behaviour", choices=["finish", "obey", "ignore", "deaf", "bug"])
    parser.add_argument("code", nargs="?", type=int, default=0)
    options = parser.parse_args()
    note = options.place / f"worker-{os.environ.get('RANK', 'none')}"

    def hear(number, _):
        note.with_suffix(".heard").write_text(signal.Signals(number).name)
        sys.exit(options.code)

    if options.behaviour == "obey":
        signal.signal(signal.SIGTERM, hear)
    if options.behaviour == "ignore":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    with note.open("a") as file:
        file.write(f"{os.getpid()} {__name__} {sys.argv[2]}\n")
    if options.behaviour == "bug":
        raise LookupError("what everybody has typed once")
    if options.behaviour != "finish":
        time.sleep(LIMIT_S)


if __name__ == "__main__":
    main()
