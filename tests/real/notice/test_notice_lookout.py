"""The loop of ``outlast watch`` with sources that say what no real server here can say."""

import os
import signal
import subprocess
import threading
import time

import pytest

from outlast.notice import Notice, lookout
from outlast.notice.lookout import Lookout, NotifyCommand, Process

INTERVAL_S = 0.01


def notice(early=False, action="terminate", heard_t=0.0):
    return Notice(
        source="script",
        action=action,
        deadline_t=heard_t + 120.0,
        heard_t=heard_t,
        detail="a detail",
        early=early,
    )


class Script:
    """A source that says one thing after the other, and then the last for ever."""

    def __init__(self, *said, name="script", until=None):
        self.name = name
        self.said = list(said)
        self.until = until or (lambda: True)

    def poll(self):
        if len(self.said) == 1 or not self.until():
            return self.said[0]
        return self.said.pop(0)


class Silent:
    """A source that does not come back before the test is over."""

    name = "silent"

    def __init__(self):
        self.over = threading.Event()

    def poll(self):
        self.over.wait()


@pytest.fixture(name="silent")
def _silent():
    source = Silent()
    yield source
    source.over.set()


@pytest.fixture(name="counter")
def _counter(tmp_path):
    """A process that writes a line for each SIGUSR1, and the file of its lines."""
    path = tmp_path / "lines"
    script = f"trap 'echo told >> {path}' USR1; touch {path}; while :; do sleep 0.02; done"
    process = subprocess.Popen(["sh", "-c", script])
    while not path.exists():
        time.sleep(0.01)
    yield process, lambda: path.read_text().split()
    process.kill()
    process.wait()


def look_out(recipients=(), watchers=(), command=None, *, pass_early=False, once=False):
    with Lookout(list(recipients), command, pass_early=pass_early) as it:
        return it.run(list(watchers), "as set", interval_s=INTERVAL_S, once=once)


def soon(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_early_notice_is_said_and_waited_past(counter, capfd):
    process, told = counter
    job = Process(process.pid, signal.SIGUSR1)
    outcome = look_out([job], [Script(notice(early=True), None, notice(), None)])
    assert (outcome.outcome, outcome.exit_code) == ("told", 0)
    assert (outcome.early, outcome.notice) == ([notice(early=True)], notice())
    assert (len(outcome.told), outcome.told_early) == (1, [])
    soon(told)
    assert told() == ["told"]
    first, second, third = capfd.readouterr().err.splitlines()
    assert first.partition(" ")[2].startswith(
        "outlast: early notice from script: terminate in 0 s (a detail)"
    )
    assert second.partition(" ")[2].startswith("outlast: notice from script: terminate")
    assert third.partition(" ")[2] == f"outlast: SIGUSR1 sent to process {process.pid}"


def test_an_early_notice_is_passed_on_where_that_is_wanted(counter):
    process, told = counter
    job = Process(process.pid, signal.SIGUSR1)
    # Two signals that come together are one: the second waits for the first to be taken.
    source = Script(notice(early=True), notice(), until=told)
    outcome = look_out([job], [source], pass_early=True)
    assert (len(outcome.told), len(outcome.told_early)) == (1, 1)
    soon(lambda: told() == ["told", "told"])


def test_the_first_of_several_sources_counts(counter, silent):
    process, told = counter
    job = Process(process.pid, signal.SIGUSR1)
    outcome = look_out([job], [Script(None), silent, Script(notice(), name="loud")])
    assert (outcome.outcome, outcome.notice) == ("told", notice())
    soon(told)


def test_a_hard_notice_does_not_wait_for_what_runs_for_an_early_one(tmp_path):
    script = tmp_path / "script"
    script.write_text(
        '[ -z "$OUTLAST_NOTICE_EARLY" ] && { echo hard > $0.done; exit; }\n'
        "echo $$ > $0.new; mv $0.new $0.pid; exec sleep 600\n"
    )
    pid, done = tmp_path / "script.pid", tmp_path / "script.done"
    source = Script(notice(early=True), notice(), until=pid.exists)
    outcome = look_out((), [source], NotifyCommand(f"sh {script}"), pass_early=True)
    os.kill(int(pid.read_text()), signal.SIGKILL)  # it was still running
    assert outcome.outcome == "told"
    assert done.read_text() == "hard\n"
    assert [one.what for one in outcome.told] == [f"sh {script} left with exit code 0"]
    assert outcome.told_early == []


def test_once_does_not_wait_for_a_source_that_hangs(silent, monkeypatch, capfd):
    monkeypatch.setattr(lookout, "ONCE_LIMIT_S", 0.2)
    outcome = look_out((), [silent], once=True)
    assert (outcome.outcome, outcome.exit_code) == ("unanswered", 1)
    assert "silent could not be asked: no answer within 0.2 s" in capfd.readouterr().err
    outcome = look_out((), [silent, Script(None)], once=True)
    assert (outcome.outcome, outcome.exit_code) == ("nothing", 3)


def test_once_does_not_wait_for_others_when_one_has_said_it(silent):
    outcome = look_out((), [silent, Script(notice())], once=True)
    assert (outcome.outcome, outcome.notice) == ("heard", notice())


def test_once_with_an_early_notice(tmp_path):
    early = Script(notice(early=True))
    outcome = look_out((), [early], once=True)
    assert (outcome.outcome, outcome.exit_code, outcome.early) == ("nothing", 3, early.said)
    trace = tmp_path / "trace"
    outcome = look_out((), [early], NotifyCommand(f"touch {trace}"), pass_early=True, once=True)
    assert (outcome.outcome, outcome.exit_code, len(outcome.told_early)) == ("told", 0, 1)
    assert trace.exists()
    outcome = look_out((), [early], NotifyCommand("false"), pass_early=True, once=True)
    assert (outcome.outcome, outcome.exit_code) == ("not_told", 1)
