"""One line for each thing that matters, from the ledger alone."""

import io
import socket
import time

import pytest

from outlast.ledger import narrator as room
from outlast.ledger.events import EVENT_NAMES, Event, raised
from outlast.ledger.file import Ledger
from outlast.ledger.narrator import Narrator, log_time, say, sentence


def event(name, *, rank=None, attempt=1, on=socket.gethostname(), **fields):  # noqa: B008
    return Event(
        t=0.0, mono=0.0, job="j", attempt=attempt, node=on, rank=rank, event=name, fields=fields
    )


@pytest.mark.parametrize(
    ("one", "says"),
    [
        (event("attempt_formed", world_size=1), "attempt 1: 1 worker"),
        (event("attempt_formed", attempt=3, world_size=8), "attempt 3: 8 workers"),
        (event("attempt_formed", world_size=8, nodes=1), "attempt 1: 8 workers"),
        (event("attempt_formed", world_size=8, nodes=2), "attempt 1: 8 workers on 2 machines"),
        (event("preflight", machine="b", fit=True), ""),
        (
            event(
                "preflight",
                machine="b",
                fit=False,
                findings=[{"name": "clock", "status": "failed", "seen": "30 s ahead"}],
            ),
            "b does not take part: clock: 30 s ahead",
        ),
        (event("node_lost", on="b"), "machine b was lost"),
        (event("node_lost", on="b", reason="has ended"), "machine b was lost (it has ended)"),
        (
            event("notice", on="b", source="aws", action="stop"),
            "notice from aws on b: stop; draining",
        ),
        (event("resumed", step=0, skipped=[]), "no checkpoint yet: starting at step 0"),
        (event("resumed", step=200, read_s=0.123), "resumed from step 200 in 0.12 s"),
        (
            event("resumed", step=200, source="", skipped=[]),
            "going on at step 200, from the framework's own checkpoint",
        ),
        (
            event("resumed", step=200, read_s=1, skipped=[{"step": 300, "reason": "x is missing"}]),
            "step 300 is not valid: x is missing; resumed from step 200 in 1.00 s",
        ),
        (
            event("worker_lost", rank=3, exit_code=-9, error="signal 9 (SIGKILL)", step=7),
            "rank 3 was lost after step 7: signal 9 (SIGKILL)",
        ),
        (event("worker_lost", rank=3, exit_code=1), "rank 3 was lost: exit code 1"),
        (
            event("worker_lost", rank=0, exit_code=1, step=0, error="Traceback\nValueError: x"),
            "rank 0 was lost after step 0: ValueError: x",
        ),
        (
            event("notice", source="signal", action="terminate", deadline_t=None),
            "notice from signal: terminate; draining",
        ),
        (
            event("notice", source="aws", action="stop", deadline_t=1.0),
            "notice from aws: stop in 0 s; draining",
        ),
        (event("restart", reason="rank 1 failed", restarts=1), "restarting: rank 1 failed"),
        (event("drained", step=7, committed=True), "drained after step 7, committed"),
        (event("drained", step=7, committed=False), "drained after step 7, not committed"),
        (event("cadence", interval_s=30.0, before_s=None), ""),
        (
            event(
                "cadence",
                interval_s=40.2,
                before_s=80.0,
                reason="the job fails more often",
                failures_per_h=0.25,
                cost_s=0.2,
            ),
            (
                "saving every 40 s in place of 80 s: the job fails more often (0.25 failures an "
                "hour, 0.2 s a checkpoint)"
            ),
        ),
        (event("step", step=7), ""),
        (event("snapshot", step=7), ""),
        (event("commit", step=7), ""),
        (event("of_the_future"), ""),
    ],
    ids=lambda value: value.event if isinstance(value, Event) else "",
)
def test_sentences(one, says):
    assert sentence(one) == says


def test_a_notice_says_how_long_there_is():
    one = event("notice", source="aws", action="terminate", deadline_t=time.time() + 119.9)
    assert sentence(one) == "notice from aws: terminate in 120 s; draining"


@pytest.mark.parametrize("code", [2, 77, 78])
def test_a_worker_that_left_on_purpose_is_not_lost(code):
    assert sentence(event("worker_lost", rank=0, exit_code=code, error="why")) == ""


@pytest.mark.parametrize("name", sorted(EVENT_NAMES))
def test_an_event_without_its_fields_does_no_harm(name):
    assert isinstance(sentence(event(name)), str)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "is_answer", "is_dated"),
    [
        (io.StringIO, False, True),
        (io.StringIO, True, True),
        (Terminal, False, True),
        (Terminal, True, False),  # to a person who has just typed the command
    ],
)
def test_a_line_that_may_be_read_a_week_later_has_its_time(
    monkeypatch, stream, is_answer, is_dated
):
    monkeypatch.setattr(room, "log_time", log_time)
    monkeypatch.setattr(room.time, "time", lambda: 1_764_158_400.9)
    monkeypatch.setattr(room.sys, "stderr", stream())
    say("a line", is_answer=is_answer)
    expected = "2025-11-26T12:00:00Z outlast: a line\n" if is_dated else "outlast: a line\n"
    assert room.sys.stderr.getvalue() == expected


def test_it_tells_what_is_new_and_what_is_left_at_the_end(tmp_path, capfd):
    ledger = Ledger(tmp_path, job="j", attempt=1)
    ledger.append("attempt_formed", world_size=5)
    narrator = Narrator(tmp_path)
    narrator.start()
    ledger.append("step", step=1)
    ledger.append("restart", reason="rank 1 failed")
    narrator.stop()
    ledger.close()
    captured = capfd.readouterr()
    assert captured.err == "outlast: restarting: rank 1 failed\n"
    assert captured.out == ""


def test_a_notice_that_several_hear_is_told_once_and_other_lines_each_time(tmp_path, capfd):
    ledger = Ledger(tmp_path, job="j", attempt=1)
    narrator = Narrator(tmp_path)
    for _ in range(3):
        ledger.append("notice", source="SIGUSR1", action="terminate", deadline_t=None)
    for _ in range(2):
        ledger.append("let_in", node="b")
    narrator.start()
    narrator.stop()
    ledger.close()
    failed = "outlast: machine b takes part again\n"
    assert capfd.readouterr().err == (
        f"outlast: notice from SIGUSR1: terminate; draining\n{failed}{failed}"
    )


# --- a loss, in two lines -------------------------------------------------------------------------


def told(*events, each_s=0.1, wait_s=0.0):
    """What is said of these, each so long after the one before; and then after a wait."""
    telling = room.Telling()
    lines = [line for n, one in enumerate(events) for line in telling.take(one, n * each_s)]
    now_s = len(events) * each_s + wait_s
    return [*lines, *(telling.overdue(now_s) if wait_s else telling.rest())]


FORMED = event("attempt_formed", world_size=2)
AGAIN = event("attempt_formed", attempt=2, world_size=2)
RESUMED = event("resumed", attempt=2, step=200, read_s=0.123)
NEXT = "attempt 2: 2 workers; resumed from step 200 in 0.12 s"


def killed(rank, step=7, error="ended by SIGKILL"):
    return event("worker_lost", rank=rank, exit_code=0, step=step, error=error)


def restart(*, on=socket.gethostname(), **more):  # noqa: B008
    fields = {"reason": "rank 1 failed (ended by SIGKILL)", "kind": "killed", "action": "restart"}
    return event("restart", on=on, **{**fields, **more})


ANSWER = "[killed from outside, nobody knows by whom: restart]"


WAITS = "; it waits 3.0 s, 2 attempts in a row without progress"


def test_a_lost_worker_is_told_in_two_lines():
    assert told(FORMED, killed(1), restart(), AGAIN, RESUMED) == [
        "attempt 1: 2 workers",
        f"rank 1 was lost after step 7: ended by SIGKILL {ANSWER}",
        NEXT,
    ]


def test_workers_that_were_lost_alike_are_named_together():
    (line,) = told(killed(0), killed(1), killed(3, step=6), restart())
    assert line == (
        "ranks 0 and 1 were lost after step 7: ended by SIGKILL; "
        f"rank 3 was lost after step 6: ended by SIGKILL {ANSWER}"
    )
    (line,) = told(*(killed(rank) for rank in range(512)))
    assert line.startswith("ranks 0, 1, 2, 3, 4, 5, 6, 7 and 504 more were lost after step 7: ")


def test_a_hang_is_told_in_two_lines():
    hang = event("hang", sentence="rank 1 has not finished step 3", stacks="hangs/1")
    answer = restart(reason="rank 1 hung", kind="hang")
    assert told(FORMED, hang, answer, AGAIN, RESUMED)[1:] == [
        "rank 1 has not finished step 3; stacks of all ranks: hangs/1 [a worker hung: restart]",
        NEXT,
    ]


def test_what_each_machine_writes_down_is_told_once():
    wait = {"wait_s": 3.0, "without_progress": 2}
    others = [restart(on="b"), restart(on="c")]
    assert told(FORMED, killed(1), restart(**wait), *others, AGAIN, RESUMED)[1:] == [
        f"rank 1 was lost after step 7: ended by SIGKILL {ANSWER}{WAITS}",
        NEXT,
    ]
    (own,) = told(restart(on="b", weighed="so it is"), each_s=0)
    assert own.endswith("; this machine takes part on: so it is")


def test_a_lost_machine_is_told_in_two_lines():
    lost = event("node_lost", attempt=1, on="b", reason="has ended")
    assert told(FORMED, lost, AGAIN, RESUMED)[1:] == ["machine b was lost (it has ended)", NEXT]


def test_what_is_lost_again_at_once_is_told_with_its_attempt():
    lines = told(FORMED, killed(1), restart(), AGAIN, killed(1, error="RuntimeError: x"))
    assert lines[2:] == ["attempt 2: rank 1 was lost after step 7: RuntimeError: x"]


def test_a_line_does_not_wait_for_ever_for_its_other_half():
    assert told(killed(1), wait_s=1.0) == []
    assert told(killed(1), wait_s=3.0) == ["rank 1 was lost after step 7: ended by SIGKILL"]
    assert told(FORMED, AGAIN, wait_s=50.0) == ["attempt 1: 2 workers"]
    assert told(FORMED, AGAIN, wait_s=70.0)[1:] == ["attempt 2: 2 workers"]


def test_who_survived_is_part_of_the_loss():
    lives = event("survived", ranks=[0], moves=True)
    assert told(FORMED, lives, killed(1), restart(), AGAIN, RESUMED)[1:] == [
        f"rank 1 was lost after step 7: ended by SIGKILL {ANSWER}; rank 0 goes on in its process",
        NEXT,
    ]
    gone = event("node_lost", on="b")
    assert told(FORMED, lives, gone, AGAIN, RESUMED)[1:] == [
        "machine b was lost; rank 0 goes on in its process",
        NEXT,
    ]
    assert told(lives, AGAIN)[0] == "rank 0 goes on in its process"


def test_what_comes_between_keeps_its_place():
    lines = told(killed(1), event("let_in", node="b"), restart(), AGAIN)
    assert lines[:3] == [
        "rank 1 was lost after step 7: ended by SIGKILL",
        "machine b takes part again",
        f"restarting {ANSWER}",
    ]


FRAMES = 'Traceback (most recent call last):\n  File "t.py", line 6, in <module>\n    f()\n'


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("ValueError: bad batch:\n  of (4, 2)\n  in place of (8, 2)", None),
        (FRAMES + "ValueError: bad batch:\n  of (4, 2)\n  in place of (8, 2)\n", None),
        (FRAMES + "KeyError: 3\n\nDuring it:\n\n" + FRAMES + "ValueError: bad", "ValueError: bad"),
        (FRAMES + "mine.Odd: why", "mine.Odd: why"),
        ("\n", ""),
    ],
)
def test_what_was_raised_keeps_its_type(error, words):
    words = "ValueError: bad batch: of (4, 2) in place of (8, 2)" if words is None else words
    assert raised(error) == words
    said = sentence(event("worker_lost", rank=0, exit_code=1, step=5, error=error))
    assert said.endswith(f"after step 5: {words}")
    assert len(said.splitlines()) == 1
