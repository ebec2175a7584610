import pytest

from outlast.keeper.wire import NO_NONCE


@pytest.fixture(autouse=True)
def _known_names(monkeypatch):
    """What DCP saves has names that tests know."""
    monkeypatch.setattr("outlast.checkpoint.dcp.new_nonce", lambda: NO_NONCE)
