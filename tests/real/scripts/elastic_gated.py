"""ONE of the elastic scripts, with a beginning that may take long: [its options] --one ONE.

With ``GATE`` in the environment it waits for that file, and writes its process id beside it.
"""

import importlib
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    place = sys.argv.index("--one")
    _, name = sys.argv[place : place + 2]
    del sys.argv[place : place + 2]
    if os.environ.get("GATE"):
        gate = Path(os.environ["GATE"])
        with gate.with_suffix(".pids").open("a") as pids:
            pids.write(f"{os.getpid()}\n")
        while not gate.exists():
            time.sleep(0.01)
    importlib.import_module(name).main()
