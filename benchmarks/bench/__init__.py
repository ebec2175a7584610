"""What the benchmarks share: a model to train, ways to save it, clocks, tables.

Workers of other libraries run with this package on their path in virtual environments of their
own; nothing in here imports more than torch before it is needed. Stand-ins that tests and
benchmarks have in common lie in ``tests/``.
"""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2] / "tests"
if str(TESTS) not in sys.path:
    sys.path.append(str(TESTS))
