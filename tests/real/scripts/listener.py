"""Notes each signal that it gets: ``listener.py RECORD [RECORD_OF_A_CHILD]``."""

import signal
import subprocess
import sys
from pathlib import Path

record = Path(sys.argv[1])
numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP)


def note(number, frame):
    with record.open("a") as file:
        file.write(f"{signal.Signals(number).name}\n")


for number in numbers:
    signal.signal(number, note)
if len(sys.argv) > 2:
    subprocess.Popen([sys.executable, __file__, sys.argv[2]])
record.write_text("ready\n")
while True:
    signal.pause()
