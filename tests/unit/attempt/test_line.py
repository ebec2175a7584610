"""What an agent and a worker that recovers in its process say to each other."""

import os
import socket

import pytest

from outlast.attempt.over import (
    LINE_VARIABLE,
    MAX_BYTES,
    AgentLine,
    AttemptEnded,
    NextAttempt,
    Prepared,
    Stays,
    Unwound,
    dial,
    listen,
)
from outlast.ipc import peer_credentials


@pytest.fixture(name="ends")
def _ends():
    pair = [AgentLine(one) for one in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
    yield pair
    for one in pair:
        one.close()


@pytest.mark.parametrize(
    "message",
    [
        AttemptEnded(),
        Unwound(),
        Prepared(step=7),
        Stays(reason="so it is"),
        NextAttempt(environ={"RANK": "1"}, stdout="/a", stderr=""),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_come_as_they_were_said(ends, message):
    assert ends[0].send(message)
    assert ends[1].receive() == message


def test_messages_do_not_run_together(ends):
    for step in (1, 2):
        ends[0].send(Prepared(step=step))
    assert [ends[1].receive().step for _ in range(2)] == [1, 2]


def test_an_end_that_is_gone_is_none_and_false(ends):
    ends[0].close()
    assert ends[1].receive() is None
    assert not ends[1].send(AttemptEnded())


def test_what_could_not_be_heard_whole_is_not_said(ends):
    ours, theirs = ends
    assert not ours.send(NextAttempt(environ={"A": "x" * MAX_BYTES}))
    assert ours.send(AttemptEnded())
    assert theirs.receive() == AttemptEnded()


def test_what_is_not_understood_is_an_end(ends):
    ends[0].sock.send(b"\xc1 no message")
    assert ends[1].receive() is None


def test_the_agent_knows_who_has_called(tmp_path, monkeypatch):
    listener = listen(tmp_path / "line", 4)
    monkeypatch.setenv(LINE_VARIABLE, str(tmp_path / "line"))
    mine = dial()
    theirs = AgentLine(listener.accept()[0])
    assert peer_credentials(theirs.sock)[0] == os.getpid()
    assert (tmp_path / "line").stat().st_mode & 0o77 == 0
    for one in (mine, theirs, listener):
        one.close()


def test_nobody_is_called_where_no_agent_wants_it(monkeypatch, tmp_path):
    monkeypatch.delenv(LINE_VARIABLE, raising=False)
    assert dial() is None
    monkeypatch.setenv(LINE_VARIABLE, str(tmp_path / "nobody"))
    assert dial() is None
