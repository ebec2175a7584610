"""Here the server of warm workers starts as it does for people."""

import floor as real
import pytest


@pytest.fixture(name="floor")
def _floor(tmp_path):
    started = real.Floor(tmp_path, starts_afresh=True)
    yield started
    started.close()
