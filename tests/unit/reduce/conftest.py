"""One worker, whatever started the tests, and its threads as they were."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
