"""What holds for every test: the process that runs them is left as it was found."""

import signal

import pytest

_LISTENED_TO = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@pytest.fixture(autouse=True)
def _signals_as_found():
    """A session that leaves after a notice ignores signals; the next test's processes would too."""
    before = {number: signal.getsignal(number) for number in _LISTENED_TO}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
