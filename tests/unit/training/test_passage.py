"""What is sent between a session's opening and its loop, and between two loops."""

import types

import pytest

from outlast.attempt.groups import groups
from outlast.attempt.over import over
from outlast.errors import ConfigError, NotInProcess
from outlast.training import passage
from outlast.training.passage import Passage, WayToLoop


@pytest.fixture(name="wire")
def _wire(monkeypatch):
    """How much was sent, and of it in barriers; ``barriers`` of ours, each as it was made."""
    wire = types.SimpleNamespace(sent=0, barriers=0)

    def barrier():
        wire.barriers += 1
        speak(wire)

    monkeypatch.setattr(passage, "num_sent", lambda: wire.sent)
    monkeypatch.setattr(passage.dist, "barrier", barrier)
    monkeypatch.setattr(groups, "num_barriers", 0)
    yield wire
    groups.skips_barriers = False


def speak(wire, *, barrier=False):
    wire.sent += 1
    groups.num_barriers += barrier


def loop(wire, one):
    """Whether nothing is sent on the way to it; much is in it."""
    is_silent = one.is_silent()
    one.gather()
    one.loop_begins()
    wire.sent += 7
    one.loop_ends()
    return is_silent


def test_a_loop_that_nothing_was_sent_before(wire):
    one = WayToLoop(joins=False)
    assert all([loop(wire, one), loop(wire, one)])
    assert not wire.barriers


def test_words_between_two_loops_are_on_the_way_to_all_that_follow(wire):
    one = WayToLoop(joins=False)
    assert loop(wire, one)
    speak(wire)
    assert not loop(wire, one)
    assert not loop(wire, one)


def test_words_in_finished_epochs_are_not(wire):
    one = WayToLoop(joins=False)
    for _ in range(3):
        one.epoch_begins()
        assert loop(wire, one)
        speak(wire)
    one.epochs_end(are_left=False)
    assert loop(wire, one)
    assert wire.barriers == 2 * 3  # two for each loop that words came before
    speak(wire)
    one.epoch_begins()
    assert not loop(wire, one)


def test_words_in_the_epoch_under_way_are(wire):
    one = WayToLoop(joins=False)
    one.epoch_begins()
    speak(wire)
    assert not loop(wire, one)
    one.epoch_begins()
    assert loop(wire, one)
    speak(wire)
    assert not loop(wire, one)


def test_an_epoch_that_was_left_may_be_gone_on_with(wire):
    one = WayToLoop(joins=False)
    one.epoch_begins()
    assert loop(wire, one)
    speak(wire)
    one.epochs_end(are_left=True)
    assert not loop(wire, one)


def test_barriers_are_left_out_by_who_joins_until_it_is_there(wire):
    one = WayToLoop(joins=False)
    speak(wire, barrier=True)
    assert loop(wire, one)
    assert wire.barriers == 2
    one = WayToLoop(joins=True)
    assert groups.skips_barriers
    assert loop(wire, one)
    assert not groups.skips_barriers


def test_all_come_to_a_loop_before_any_notes_its_beginning(wire):
    one = WayToLoop(joins=False)
    speak(wire)
    one.is_silent()
    one.gather()
    assert wire.barriers == 1
    one.loop_begins()
    assert wire.barriers == 2


@pytest.fixture(name="joined")
def _joined():
    """The passage of a process that has joined an attempt of others."""
    objects = types.SimpleNamespace(optimizers=list)
    over.begin_again()
    over.is_held = True
    yield Passage(None, objects, types.SimpleNamespace(record=None), None, None)
    over.is_held = False
    over.begin_again()


def test_an_attempt_that_ends_before_the_loop_is_said_in_one_line(joined):
    over.happen()
    with pytest.raises(NotInProcess, match="on its way to the loop"), joined.opens_loop():
        raise ConnectionError("connection reset by peer")


def test_what_is_wrong_with_a_loader_is_said_as_ever(joined):
    with pytest.raises(ConfigError, match="no loader"), joined.opens_loop():
        raise ConfigError("no loader")
