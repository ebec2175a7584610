"""What is said of scripts that hear of no notice."""

import pytest

from outlast.notice import desk
from outlast.notice.desk import IMPORT_S, START_S, Deaf


@pytest.fixture(autouse=True)
def _say(monkeypatch):
    monkeypatch.setattr(desk, "say", None)  # Times() puts another one there


class Times:
    def __init__(self, *, deaf):
        self.now_s, self.deaf, self.said = 100.0, deaf, []
        desk.say = self.said.append
        self.it = Deaf(lambda: self.deaf, lambda: self.now_s)
        self.it.begin()

    def pass_(self, seconds):
        self.now_s += seconds


def test_at_the_start_it_is_said_once_and_only_where_notices_come():
    times = Times(deaf=True)
    times.it.look(gives_notices=True)  # it may still import
    times.pass_(START_S)
    times.it.look(gives_notices=False)
    assert times.said == []
    times.it.look(gives_notices=True)
    (line,) = times.said
    assert "would save nothing now: it has no session yet" in line
    assert "outlast.session(" in line
    times.it.begin()
    times.pass_(START_S)
    times.it.look(gives_notices=True)
    assert len(times.said) == 1


def test_a_script_that_listens_hears_nothing_of_it():
    times = Times(deaf=False)
    times.pass_(START_S)
    times.it.look(gives_notices=True)
    times.it.at_notice(object(), left_s=30.0)
    assert times.said == []


@pytest.mark.parametrize(
    ("left_s", "words"), [(None, "it runs on to its end"), (27.4, "until the machine goes in 27 s")]
)
def test_at_a_notice_it_is_said_once_for_each(left_s, words):
    times, notice = Times(deaf=True), object()
    times.it.at_notice(notice, left_s=left_s)
    assert times.said == []
    times.pass_(IMPORT_S)
    for _ in range(3):
        times.it.at_notice(notice, left_s=left_s)
    (line,) = times.said
    assert line.startswith("nothing is saved so far: this script has no session yet")
    assert "Unless it opens one" in line
    assert words in line
    times.it.at_notice(object(), left_s=left_s)
    assert len(times.said) == 2
