"""Here the server of warm workers starts as it does for people, where that is what is looked at."""

import floor as real
import pytest


@pytest.fixture
def afresh(tmp_path):
    """The floor, with a server that imports all by itself."""
    started = real.Floor(tmp_path, starts_afresh=True)
    yield started
    started.close()
