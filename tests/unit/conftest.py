"""Puts this directory on the path: ``unit_fakes`` is for all rooms' tests."""

import pytest

from outlast.ledger import narrator

pytest.register_assert_rewrite("storage_contract")  # asserted by tests of several rooms


@pytest.fixture(autouse=True)
def _lines_without_time(monkeypatch):
    """Tests of what is said compare whole lines; test_narrator.py has one of the time."""
    monkeypatch.setattr(narrator, "log_time", lambda t: "")
