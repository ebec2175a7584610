"""What rank 0's agent hears of the sessions, and tells the other machines."""

import types

import pytest

from outlast.attempt.beat import BEATS_VARIABLE, Beat
from outlast.attempt.link import FREE, TIED
from outlast.launch import machines as room
from outlast.launch.machines import Sessions


class Store:
    """An attempt's store, or one that is gone."""

    def __init__(self, **values):
        self.values, self.is_gone = values, False

    def check(self, keys):
        if self.is_gone:
            raise RuntimeError("Broken pipe")
        return all(key in self.values for key in keys)

    def get(self, key):
        return self.values[key]


class Machines:
    are_many = True

    def __init__(self):
        self.told = []

    def data_are_tied(self, tied):
        self.told.append(tied)

    def need(self, seconds):
        self.told.append(seconds)


@pytest.fixture
def machines():
    return Machines()


@pytest.fixture
def clock(monkeypatch):
    now = types.SimpleNamespace(s=100.0)
    monkeypatch.setattr(room, "time", types.SimpleNamespace(monotonic=lambda: now.s))
    return now


@pytest.fixture
def sessions(machines, clock, tmp_path):
    made = Sessions(machines, tmp_path, lambda: 2.0)
    made.begin()
    return made


def group(store, rank=0):
    return types.SimpleNamespace(group_rank=rank, store=store)


def look(sessions, clock, store, rank=0):
    clock.s += 1.0
    sessions.look(group(store, rank))


def test_a_tie_is_told_once_in_each_attempt_and_so_is_its_end(sessions, machines, clock):
    store = Store()
    look(sessions, clock, store)
    assert machines.told == []
    store.values["outlast/data"] = TIED
    look(sessions, clock, store)
    look(sessions, clock, store)
    assert machines.told == [True]
    store.values["outlast/data"] = FREE
    look(sessions, clock, store)
    assert machines.told == [True, False]
    sessions.begin()
    look(sessions, clock, store)
    assert machines.told == [True, False, False]


def test_only_rank_0s_machine_looks_and_a_store_that_is_gone_is_no_crash(sessions, machines, clock):
    store = Store(**{"outlast/data": TIED})
    look(sessions, clock, store, rank=1)
    store.is_gone = True
    look(sessions, clock, store)
    assert machines.told == []


def test_how_long_a_stop_needs_is_the_longest_step_and_a_save(
    sessions, machines, clock, monkeypatch, tmp_path
):
    monkeypatch.setenv(BEATS_VARIABLE, str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    beat, store = Beat(), Store()
    beat.beat(0)
    look(sessions, clock, store)
    sessions.tell_needs()
    assert machines.told == []  # no step yet
    clock.s += 6.0
    beat.beat(1)
    look(sessions, clock, store)
    sessions.tell_needs()
    assert machines.told == [9.0]


def test_nothing_is_told_before_a_save_was_seen(machines, clock, tmp_path):
    sessions = Sessions(machines, tmp_path, lambda: None)
    sessions.begin()
    sessions.tell_needs()
    assert machines.told == []
