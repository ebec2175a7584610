"""One launcher's term over a job: numbers, who is passed over, who is waited for, who ends."""

import os
import socket
import subprocess
import threading
import time
from pathlib import Path

import msgspec
import pytest
from unit_fakes import at_once

from outlast.errors import ConfigError, StorageError
from outlast.peer import claims as room
from outlast.peer.claims import Claim, Claims, SignOfLife, Term, is_alive, pid_of, this_process
from outlast.storage import Directory


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Everything that is waited for takes a hundredth."""
    for name in ("ALIVE_S", "AGAIN_S"):
        monkeypatch.setattr(room, name, getattr(room, name) / 100)
    monkeypatch.setattr(room, "STRANGER_S", 0.12)


@pytest.fixture(name="make")
def _make(tmp_path):
    made = []

    def make(storage=None, *, alone=False, said=None):
        say = (lambda _: None) if said is None else said.append
        made.append(Term(storage or Directory(tmp_path), "JOB", alone=alone, say=say))
        return made[-1]

    yield make
    for term in made:
        term.close(0)


def soon(condition):
    until_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.002)


def newest(tmp_path):
    return Claims(Directory(tmp_path)).newest()


def from_afar(tmp_path, number=4, **fields):
    """A claim of a process that this kernel knows nothing of."""
    claim = Claim(
        attempt=number, node="x", host="far", address="", term="x", process="b/1/7/9", **fields
    )
    assert Claims(Directory(tmp_path)).take(claim, number - 1)
    return claim


def test_the_first_attempt_is_claimed_before_anything_and_those_after_it_meanwhile(make, tmp_path):
    term = make()
    assert term.open(0) == 1
    claim = newest(tmp_path)
    assert (claim.attempt, claim.term, claim.host) == (1, term.name, socket.gethostname())
    assert is_alive(claim.process)
    assert term.begin() == 1
    assert term.begin() == 2
    soon(lambda: newest(tmp_path).attempt == 2)
    assert newest(tmp_path).term == term.name
    assert not term.overtaken


def test_the_number_is_larger_than_the_ledgers_and_than_any_that_was_claimed(make, tmp_path):
    from_afar(tmp_path, 4)
    assert make(alone=True).open(2) == 5
    assert make(alone=True).open(40) == 41


def test_one_that_has_ended_is_followed_at_once(make, monkeypatch):
    monkeypatch.setattr(room, "STRANGER_S", 1000.0)
    first = make()
    assert first.open(0) == 1
    first.begin()
    first.begin()
    soon(lambda: not first._is_due)
    first.close(75, "drained")
    monkeypatch.setattr(room, "this_process", lambda: "another/1/2/3")
    monkeypatch.setattr(room, "is_alive", lambda _: None)  # it was on another machine
    assert make().open(2) == 3


def test_one_whose_process_has_ended_here_is_followed_at_once(make, tmp_path, monkeypatch):
    monkeypatch.setattr(room, "STRANGER_S", 1000.0)
    process = subprocess.Popen(["sleep", "100"])
    ours = this_process().split("/")
    stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    word = "/".join([*ours[:2], str(process.pid), stat[19]])
    assert is_alive(word)
    assert pid_of(word) == process.pid
    claim = Claim(attempt=1, node="x", host="h", address="", term="x", process=word)
    assert Claims(Directory(tmp_path)).take(claim, 0)
    with pytest.raises(ConfigError, match=rf"JOB is running already \(process {process.pid}\)"):
        make().open(1)
    with pytest.raises(ConfigError, match="running already"):
        make(alone=True).open(1)  # whatever the lock says
    process.kill()
    soon(lambda: not is_alive(word))  # nobody has waited for it yet
    assert make().open(1) == 2
    process.wait()
    other = "/".join([*ours[:2], str(os.getpid()), "1"])  # the number of a process that has ended
    assert is_alive(other) is False


def test_one_under_our_lock_on_a_file_system_of_this_kernel_is_followed_at_once(make, tmp_path):
    from_afar(tmp_path)
    said = []
    assert make(alone=True, said=said).open(4) == 5
    assert said == []


def test_one_that_is_silent_is_waited_for_and_said(make, tmp_path):
    from_afar(tmp_path)
    said, since_s = [], time.monotonic()
    assert make(said=said).open(4) == 5
    assert time.monotonic() - since_s > 0.12
    assert len(said) == 1
    assert "begun on far" in said[0]
    assert "has not said that it ended" in said[0]


def test_one_that_lives_elsewhere_is_waited_for_and_then_ours_is_refused(
    make, tmp_path, monkeypatch
):
    monkeypatch.setattr(room, "WAIT_S", 0.5)
    monkeypatch.setattr(room, "STRANGER_S", 60.0)
    from_afar(tmp_path)
    claims, is_over, said = Claims(Directory(tmp_path)), threading.Event(), []

    def live():
        count = 0
        while not is_over.wait(0.01):
            count += 1
            claims.say_alive(SignOfLife(attempt=4, node="x", count=count))

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(StorageError, match=r"is running on far in JOB \(last sign of life 0 s"):
            make(said=said).open(4)
    finally:
        is_over.set()
        thread.join()
    assert newest(tmp_path).term == "x"
    assert "is running on far" in said[-1]
    assert len(said) <= 2


def test_one_that_is_passed_over_ends_and_commits_nothing_more(make, tmp_path):
    term = make(alone=True)
    term.open(0)
    term.begin()
    from_afar(tmp_path, 2)
    soon(lambda: term.overtaken)
    assert term.overtaken.startswith("attempt 2 of this job was begun on far meanwhile: this one")
    term.begin()
    term.close(77)
    claims = Claims(Directory(tmp_path))
    assert claims.newest().term == "x"
    assert claims.alive() is None  # it does not say of the other one that it is over


@pytest.mark.parametrize("alone", [True, False])
def test_signs_of_life_are_left_only_where_the_lock_does_not_tell(make, tmp_path, alone):
    term = make(alone=alone)
    term.open(0)
    term.begin()
    term.begin()
    soon(lambda: not term._is_due)
    claims = Claims(Directory(tmp_path))
    if alone:
        assert claims.alive() is None
    else:
        count = claims.alive().count
        soon(lambda: claims.alive().count > count + 2)
    term.close(0)
    assert claims.alive().over


class Failing:
    """A directory that fails, or hangs, until it is mended."""

    def __init__(self, path, how):
        self.inner, self.how, self.mended = Directory(path), how, threading.Event()

    def __getattr__(self, name):
        act = getattr(self.inner, name)

        def guarded(*arguments):
            if self.how == "hangs":
                self.mended.wait(20)
            elif not self.mended.is_set():
                raise OSError(5, "Input/output error")
            return act(*arguments)

        return act if name == "describe" else guarded


def test_a_claim_that_fails_is_said_once_and_that_it_is_there(make, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(room, "CLAIM_S", 0.1)
    storage = Failing(tmp_path, "fails")
    term = make(storage)
    num_tries = []
    failed = room.CounterWatch.failed
    monkeypatch.setattr(
        room.CounterWatch, "failed", lambda sign: (num_tries.append(1), failed(sign))
    )
    term.open(6)
    soon(lambda: len(num_tries) > 2)
    storage.mended.set()
    soon(lambda: len(caplog.records) > 1)
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "the attempts of JOB cannot be claimed: Input/output error",
        "attempt 7 of JOB is claimed now",
    ]


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_storage_that_does_not_answer_is_waited_for_a_second(make, tmp_path, how, monkeypatch):
    monkeypatch.setattr(room, "CLAIM_S", 0.1)
    storage = Failing(tmp_path, how)
    term = make(storage)
    assert term.open(6) == 7
    assert term.begin() == 7
    assert term.begin() == 8
    assert newest(tmp_path) is None
    storage.mended.set()
    soon(lambda: (found := newest(tmp_path)) is not None and found.attempt == 8)
    assert not term.overtaken


def test_a_number_that_another_has_meanwhile_ends_the_one_without_a_claim(
    make, tmp_path, monkeypatch
):
    monkeypatch.setattr(room, "CLAIM_S", 0.1)
    storage = Failing(tmp_path, "fails")
    term = make(storage, alone=True)
    term.open(3)
    term.begin()
    from_afar(tmp_path, 4)
    storage.mended.set()
    soon(lambda: term.overtaken)


def test_of_many_at_once_each_has_a_number_of_its_own(make):
    """Those that come second find the first alive, in this process: so each counts as another's."""
    terms = [make(alone=True) for _ in range(4)]
    numbers = at_once(4, lambda number: terms[number].open(0))
    assert sorted(numbers) == [1, 2, 3, 4]


def test_a_claim_of_an_older_outlast_is_read(tmp_path):
    old = {"attempt": 3, "node": "n", "host": "h", "address": "h:1", "reign": "r", "members": ["n"]}
    Directory(tmp_path).put_new("membership/attempt-000000000003.json", msgspec.json.encode(old))
    assert newest(tmp_path).process == ""


def test_a_keeper_is_told_of_each_attempt_once_it_is_claimed(make, tmp_path):
    term, told = make(alone=True), []
    term.on_claimed = lambda number: told.append((number, newest(tmp_path).attempt))
    term.open(3)
    time.sleep(0.1)
    assert told == []  # it has not begun
    for number in (4, 5, 6):
        assert term.begin() == number
        soon(lambda number=number: told and told[-1][0] == number)
    assert told == [(4, 4), (5, 5), (6, 6)]
