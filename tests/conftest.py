"""What holds for every test: the process that runs them is left as it was found.

`make test` runs several processes side by side (pytest-xdist), since most tests wait more than they
compute. A file's tests stay together, in their order: they share what is costly to set up.
"""

import signal

import pytest
from hypothesis import settings

# A loaded machine takes longer for an example than any limit that would find a slow one.
settings.register_profile("outlast", deadline=None)
settings.load_profile("outlast")

# What a shell starts behind "&" ignores Ctrl-C, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_LISTENED_TO = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# Begun first, so that the last process to end does not end long after the others.
_LONG = (
    *("tests/real/slurm/", "tests/real/test_exit_codes", "tests/real/checkpoint/test_dcp_ranks"),
    *("tests/real/test_demo", "tests/real/storage/", "tests/real/keeper/", "tests/real/"),
)


def pytest_collection_modifyitems(items):
    """Put the long ones first."""
    items.sort(key=_rank)  # stable: a file's tests keep their order


def _rank(item):
    return next(
        (place for place, start in enumerate(_LONG) if item.nodeid.startswith(start)), len(_LONG)
    )


@pytest.fixture(autouse=True)
def _signals_as_found():
    """A session that leaves after a notice ignores signals; the next test's processes would too."""
    before = {number: signal.getsignal(number) for number in _LISTENED_TO}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
