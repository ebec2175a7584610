"""Puts this directory on the path: ``keeper_fakes``."""

import keeper_fakes
import pytest

from outlast.storage import Directory


@pytest.fixture(name="disk")
def _disk(tmp_path):
    return Directory(tmp_path / "tier")


@pytest.fixture(name="keeper")
def _keeper(monkeypatch, disk):
    return keeper_fakes.FakeKeeper(monkeypatch, {"local": disk})
