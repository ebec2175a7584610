"""Behind the loop of a job that had finished, or was cut off: whose failure it is."""

import pytest

from outlast.errors import StillToDo
from outlast.script import excepthook

FINISHED_T = 4e9  # this file is older


class Store:
    """A link to the other ranks; what one publishes the others fetch."""

    world_size = 2

    def __init__(self, rank, values=None, *, has_gone=False):
        self.rank, self.values, self.has_gone = rank, {} if values is None else values, has_gone

    def publish(self, key, value):
        if self.has_gone:
            raise ConnectionError("the store is gone")
        self.values[key] = value

    def fetch(self, key, timeout_s):
        if self.has_gone:
            raise ConnectionError("the store is gone")
        if key not in self.values:
            raise TimeoutError(key)
        return self.values[key]


@pytest.fixture(autouse=True)
def _of_this_test(monkeypatch):
    monkeypatch.setattr(excepthook, "_behind", None)
    monkeypatch.setattr(excepthook, "install", lambda: None)


def behind(store, error, *, finished_t=FINISHED_T):
    """What is found of an error in a process that had no step left."""
    return excepthook.no_step_was_left(error, store, finished_t=finished_t, step=9, ends=False)


def unset():
    try:
        for loss in ():  # noqa: B007
            pass
        print(loss)
    except NameError as error:
        return error


def echo():
    return RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:14210")


@pytest.mark.parametrize(("excused", "other"), [(0, 1), (1, 0)])
def test_one_that_waits_for_an_excused_rank_is_excused(excused, other):
    values = {}
    assert behind(Store(excused, values), unset())
    assert behind(Store(other, values), echo())


def test_one_that_waits_for_a_rank_that_failed_is_not():
    values = {}
    assert not behind(Store(0, values), ValueError("of its own"))
    assert not behind(Store(1, values), echo())


def test_an_error_of_its_own_is_its_own_whoever_was_excused():
    values = {}
    assert behind(Store(0, values), unset())
    assert not behind(Store(1, values), ValueError("of its own"))
    assert not behind(Store(1, values), TimeoutError("a server of the script's"))


def test_where_the_store_has_gone_rank_0s_exit_code_says_why():
    assert behind(Store(1, has_gone=True), echo())
    assert not behind(Store(0, has_gone=True), echo())
    assert not behind(Store(1, has_gone=True), ValueError("of its own"))


def test_nobody_is_excused_in_a_job_that_was_cut_off():
    values = {}
    error = unset()
    assert not behind(Store(0, values), error, finished_t=0.0)
    left = excepthook.still_to_do(error)
    assert isinstance(left, StillToDo)
    assert left.exit_code == 76
    assert "set loss at test_excepthook_behind.py" in str(left)
    assert not behind(Store(1, values), echo(), finished_t=0.0)


def test_nothing_is_excused_where_steps_were_left():
    error = unset()
    assert not excepthook.is_forgiven(error)
    assert excepthook.still_to_do(error) is None
