"""Real processes on a loaded machine: what fails beside other tests is run once more, alone.

    python tests/second_chance.py ARGUMENTS-OF-PYTEST

A test of real processes may fail for want of a core, when it shares two of them with another one,
or with somebody else's work. So those that failed are run again, one after the other, and that
run's exit code counts. Each one that passed only then is named in the last lines: it still needs to
be looked at.

Guarantees: a test that fails alone fails the run. Nothing is run again where more than ``MAX``
failed (that is no noise), where pytest itself had trouble, or where it was told to stop early
(what it has not run would be taken for passed).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

MAX: Final = 5
FAILED: Final = 1  # pytest's exit code
ALONE: Final = ("-n", "0", "--dist", "no", "--last-failed", "--last-failed-no-failures", "none")
STOPS_EARLY: Final = re.compile("-[lqsv]*x|--exitfirst|--maxfail|--sw|--stepwise")


def main(arguments: list[str]) -> int:
    """Run pytest with these arguments, a second time if that may help; the exit code."""
    with tempfile.TemporaryDirectory() as place:
        cache = Path(place, "cache")
        command = [sys.executable, "-m", "pytest", *arguments, "-o", f"cache_dir={cache}"]
        code = subprocess.call(command)
        failed = _failed(cache)
        if code != FAILED or not failed or any(map(STOPS_EARLY.match, arguments)):
            return code
        if len(failed) > MAX:
            print(f"{len(failed)} tests failed: more than {MAX} are not run again", flush=True)
            return code
        print(f"run again, alone: {', '.join(sorted(failed))}", flush=True)
        code = subprocess.call([*command, *ALONE])
        if code not in (0, FAILED):  # it has not said of each that it passes
            return code
        for name in sorted(failed - _failed(cache)):
            print(f"passed only when alone: {name}", flush=True)
        return code


def _failed(cache: Path) -> set[str]:
    try:
        return set(json.loads((cache / "v" / "cache" / "lastfailed").read_text()))
    except FileNotFoundError:
        return set()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
