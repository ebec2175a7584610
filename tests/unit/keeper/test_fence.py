"""Nothing is committed by machines that the job has gone on without."""

import threading

import pytest

from outlast.keeper.fence import Fence
from outlast.peer.numbers import name_of
from outlast.storage import Directory


@pytest.fixture(name="storage")
def _storage(tmp_path):
    return Directory(tmp_path)


def test_one_machine_is_never_refused():
    assert Fence(None).refuses(1) == ""


def test_the_newest_attempt_may_commit(storage):
    storage.put(name_of(4), b"{}")
    assert Fence(storage).refuses(4) == ""
    assert Fence(storage).refuses(5) == ""


def test_an_attempt_that_went_on_elsewhere(storage):
    storage.put(name_of(5), b"{}")
    refused = Fence(storage, told_s=0.0).refuses(4)
    assert refused.startswith("attempt 5 has begun without this machine")


def test_what_an_attempt_has_left_is_committed_in_the_next(storage):
    storage.put(name_of(5), b"{}")
    fence = Fence(storage, told_s=60.0)
    teller = threading.Timer(0.05, fence.told, [5])
    teller.start()
    assert fence.refuses(4) == ""
    teller.join()
    storage.put(name_of(6), b"{}")
    assert Fence(storage, told_s=0.0).refuses(5)


def test_storage_that_fails_refuses_nothing(storage, monkeypatch, caplog):
    def fail(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(storage, "children", fail)
    assert Fence(storage).refuses(4) == ""
    assert "cannot be looked up" in caplog.text
