"""How far a resume is, where it takes long."""

import io
import sys

import pytest

from outlast.data.epochs import going_through


class Terminal(io.StringIO):
    def isatty(self):
        return True


def go(seconds_each, total, monkeypatch, stream):
    now = [0.0]
    monkeypatch.setattr(sys, "stderr", stream)
    with going_through("batches", total, clock=lambda: now[0]) as done:
        for number in range(total):
            now[0] += seconds_each
            done(number + 1)
    return stream.getvalue()


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_what_is_quick_says_nothing(monkeypatch, stream):
    assert go(0.001, 1000, monkeypatch, stream()) == ""


def test_a_line_now_and_then_with_the_time_left(monkeypatch):
    said = go(1.0, 100, monkeypatch, io.StringIO()).splitlines()
    assert said[0].endswith("going through the loader's batches again: 2 of 100, 98 s left")
    assert len(said) == 4


def test_on_a_terminal_one_line_that_goes(monkeypatch):
    said = go(1.0, 10, monkeypatch, Terminal())
    assert "\n" not in said
    assert "5 of 10, 5 s left" in said
    assert said.endswith("\r\x1b[K")
