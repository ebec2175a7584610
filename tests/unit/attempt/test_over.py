"""The agent's word that the attempt is over."""

import threading

import pytest

from outlast.attempt import over as module
from outlast.attempt.over import AttemptOver, AttemptState


@pytest.fixture(name="over")
def _over(monkeypatch):
    monkeypatch.setattr(module, "ECHO_S", 30.0)
    monkeypatch.setattr(module, "OWN_S", 0.0)
    made = AttemptState()
    made.is_held = True
    return made


def test_nothing_is_raised_while_it_goes_on(over):
    over.raise_if_over()


def test_it_is_raised_once_it_has_happened_and_only_where_it_is_held(over):
    over.happen()
    with pytest.raises(AttemptOver):
        over.raise_if_over()
    over.is_held = False
    over.raise_if_over()


def test_a_loop_that_catches_exceptions_does_not_catch_it():
    assert not issubclass(AttemptOver, Exception)


def test_whoever_watches_is_told_also_when_it_is_late(over):
    told = []
    over.watch(lambda: told.append("early"))
    over.happen()
    over.watch(lambda: told.append("late"))
    assert told == ["early", "late"]


def test_one_that_fails_does_not_keep_others_from_being_told(over):
    told = []
    over.watch(lambda: 1 / 0)
    over.watch(lambda: told.append(True))
    over.happen()
    assert told == [True]


def test_another_attempt_tells_only_those_that_still_watch(over):
    told = []
    tell = lambda: told.append(True)  # noqa: E731
    over.watch(tell)
    over.unwatch(tell)
    over.happen()
    over.begin_again()
    assert not told
    assert not over.is_over


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[pair.cc:537] Read error [127.0.0.1]:4265: Connection reset by peer"),
        ConnectionError("the store is gone"),
        type("DistNetworkError", (RuntimeError,), {})("no words"),
    ],
    ids=["gloo", "the store", "torch's class"],
)
def test_what_looks_like_a_peers_end_is_waited_for(over, error):
    threading.Timer(0.05, over.happen).start()
    assert over.explains(error)


def test_also_where_the_script_has_wrapped_it(over):
    wrapped = ValueError("a bad batch")
    wrapped.__cause__ = RuntimeError("Connection closed by peer")
    threading.Timer(0.05, over.happen).start()
    assert over.explains(wrapped)


def test_a_bug_is_the_scripts_own(over):
    assert not over.explains(ZeroDivisionError("a bug"))


def test_it_is_asked_about_once(over, monkeypatch):
    error = RuntimeError("a bug")
    assert not over.explains(error)
    monkeypatch.setattr(over, "wait", lambda _: pytest.fail("waited for again"))
    assert not over.explains(error)


@pytest.mark.parametrize("error", [SystemExit(75), KeyboardInterrupt()], ids=["exit", "Ctrl-C"])
def test_leaving_on_purpose_is_no_end_of_an_attempt(over, error):
    over.happen()
    assert not over.explains(error)
