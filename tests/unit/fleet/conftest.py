"""Replicas as threads of this process, and one worker as whatever started the tests."""

import pytest
import torch
from unit_replicas import Replicas


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def replicas(monkeypatch):
    return Replicas(monkeypatch)
