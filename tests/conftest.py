"""What holds for every test: the process that runs them is left as it was found."""

import gc
import os
import signal

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from thorough import ALL, SEED, examples

# A loaded machine takes longer for an example than any limit that would find a slow one.
settings.register_profile("outlast", examples(100), deadline=None)
settings.load_profile("outlast")

# Hypothesis also draws the numbers and words that stand in whatever modules of ours are loaded. So
# what a property test tries would depend on the tests that ran before it in its process, and change
# with any constant anywhere: a rare fault would be found by chance, and not be found again.
if not ALL:
    _NO_CONSTANTS = providers.Constants()
    providers._get_local_constants = lambda: _NO_CONSTANTS

# What a shell starts behind "&" ignores what a keyboard sends, and so would all that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_collection_finish():
    """A look for garbage passes over what was imported: it would take half a second of a core."""
    gc.freeze()


_LISTENED_TO = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


@pytest.fixture(autouse=True)
def _signals_as_found():
    """A session that leaves after a notice ignores signals; the next test's processes would too."""
    before = {number: signal.getsignal(number) for number in _LISTENED_TO}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _environment_as_found():
    """What runs here in a test sets variables for its children; the next test's session reads them.

    One is OUTLAST_FORMED: with it a session takes its attempt from a job that is long over.
    """
    before = _ours()
    yield
    for name in _ours().keys() | before.keys():
        os.environ.pop(name, None)
    os.environ.update(before)


def _ours():
    return {n: v for n, v in os.environ.items() if n.startswith("OUTLAST_") and n != SEED}
