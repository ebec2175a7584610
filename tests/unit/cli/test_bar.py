"""The line that says how far it is: only for a person, only when it takes a while."""

import pytest

from outlast.cli.checkpoints import survey as room
from outlast.cli.checkpoints.survey import bar


@pytest.fixture(name="clock")
def _clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(room.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("took_s", [1.9, 2.1])
def test_it_appears_when_it_takes_a_while_and_somebody_looks(
    capsys, monkeypatch, clock, terminal, took_s
):
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    monkeypatch.setenv("TERM", "xterm")
    with bar(100) as shown:
        shown.begin("step 1")
        clock[0] = took_s
        shown.advance(50)
        appeared = shown._progress is not None
    assert appeared == (terminal and took_s > 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert ("step 1" in err) == appeared


def test_parts_add_up():
    with bar(100) as shown:
        shown.begin("one")
        shown.part(10, 50)
        shown.part(50, 50)
        shown.begin("two")
        shown.part(20, 50)
        shown.advance(5)
        assert shown._done == 75
