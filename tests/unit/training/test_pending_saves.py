"""Saves that were asked for: who may wait for one, and until when."""

import threading

import pytest

from outlast.errors import ConfigError
from outlast.training.saving import Saves


class Loop:
    """A loop whose body runs, ``step`` steps behind it; it may wait for what it has passed."""

    def __init__(self, step):
        self.step = step

    def may_wait(self, step):
        return self.step > step


@pytest.fixture
def saves():
    return Saves()


def test_what_was_agreed_on_for_a_step_that_is_past_is_waited_for(saves):
    pending = saves.add(12, Loop(13).may_wait)
    saves.decided(12)
    threading.Timer(0.05, saves.written, (12, "")).start()
    assert pending.wait()
    assert pending.step == 12


@pytest.mark.parametrize("limit_s", [60, None])
def test_what_was_thought_to_come_at_a_loops_end_and_comes_later_is_not_waited_for(saves, limit_s):
    """It was asked for in a loop's last step; the ranks say behind the loop when it is taken."""
    pending = saves.add(12, Loop(13).may_wait)
    pending.decide(12, agreed=False)
    threading.Timer(0.05, saves.decided, (14,)).start()
    assert not pending.wait(limit_s)
    assert (pending.step, pending.committed) == (14, False)


def test_an_agreed_step_stays_while_another_save_is_agreed_on(saves):
    pending = saves.add(12, Loop(13).may_wait)
    saves.decided(12)
    saves.decided(14)  # asked for by somebody else
    assert pending.step == 12


@pytest.mark.parametrize("limit_s", [60, None])
def test_a_void_snapshot_is_not_waited_for_by_the_loop_that_is_to_take_it_again(saves, limit_s):
    pending = saves.add(12, Loop(13).may_wait)
    saves.decided(12)
    threading.Timer(0.05, saves.void, (12,)).start()
    assert not pending.wait(limit_s)
    saves.decided(14)
    saves.written(14, "")
    assert pending.committed
    assert pending.step == 14


def test_another_thread_waits_for_it_to_be_taken_again(saves):
    pending = saves.add(12)
    saves.decided(12)
    saves.void(12)
    threading.Timer(0.05, saves.written, (14, "")).start()
    assert pending.wait()


def test_who_asks_too_early_is_told_so(saves):
    pending = saves.add(12, Loop(11).may_wait)
    assert not pending.wait(60)
    with pytest.raises(ConfigError, match="before the step boundary"):
        pending.wait()
