"""Whom a notice is passed on to: what is read from a command line and from a pidfile."""

import os
import signal

import pytest

from outlast import config
from outlast.errors import ConfigError
from outlast.notice import Notice
from outlast.notice.lookout import (
    NotifyCommand,
    PidFile,
    environment,
    parse_pid,
    parse_signal,
    signal_name,
)

SIGNALS = {
    "USR1": signal.SIGUSR1,
    "usr2": signal.SIGUSR2,
    "SIGTERM": signal.SIGTERM,
    " sigint ": signal.SIGINT,
    "HUP": signal.SIGHUP,
    "CONT": signal.SIGCONT,
    "10": 10,
    "40": 40,
    "RTMIN": signal.SIGRTMIN,
    "CLD": signal.SIGCHLD,
}


@pytest.mark.parametrize("text", SIGNALS)
def test_a_signal_is_a_name_or_a_number(text):
    assert parse_signal(text) == SIGNALS[text]


NO_SIGNALS = {
    "USR3": "did you mean USR",
    "SIGTREM": "did you mean TERM",
    "KILL": "SIGKILL cannot be handled by anybody",
    "9": "SIGKILL cannot be handled by anybody",
    "stop": "SIGSTOP cannot be handled by anybody",
    "0": "is not a signal",
    "65": "is not a signal",
    "33": "is not a signal",  # the C library's own
    "-10": "is not a signal",
    "1e1": "is not a signal",
    "": "is not a signal",
    "１０": "is not a signal",
}


@pytest.mark.parametrize("text", NO_SIGNALS)
def test_what_is_no_signal_is_refused_in_one_line(text):
    with pytest.raises(ConfigError) as caught:
        parse_signal(text)
    assert NO_SIGNALS[text] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_signal_without_a_name_has_a_number():
    assert signal_name(signal.SIGUSR1) == "SIGUSR1"
    assert signal_name(40) == "signal 40"


@pytest.mark.parametrize("text", ["4711", " 4711\n", "004711"])
def test_an_id_is_one_positive_number(text):
    assert parse_pid(text) == 4711


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "-4711", "+4711", "4711 4712", "4711.0", "0x10", "self", "４７", "1" * 10],
)
def test_what_is_no_id_is_refused(text):
    with pytest.raises(ConfigError, match="is not the id of a process"):
        parse_pid(text)


def test_neither_the_first_process_nor_this_one_is_signalled():
    with pytest.raises(ConfigError, match="process 1 "):
        parse_pid("1")
    with pytest.raises(ConfigError, match="this command itself"):
        parse_pid(str(os.getpid()))


# --- pidfiles: what is wrong with each, without anybody to signal --------------------------------


def problem_of(path):
    """What is wrong with a pidfile; telling says the same, and signals nobody."""
    file = PidFile(path, signal.SIGUSR1)
    told = file.tell()
    assert (told.told, told.pid) == (False, None)
    assert told.what == f"{file.problem}: nothing was signalled"
    return file.problem


HELD = {
    "empty": b"",
    "words": b"pid\n",
    "two": b"4711\n4712\n",
    "zero": b"0\n",
    "negative": b"-4711\n",
    "group": b"-1",
    "first process": b"1\n",
    "ourselves": str(os.getpid()).encode(),
    "long": b" " * 40 + b"4711",
    "not text": b"\xff\xfe\x00",
    "a program": b"\x7fELF" + bytes(5_000),
}


@pytest.mark.parametrize("name", HELD)
def test_a_pidfile_holds_one_id(tmp_path, name):
    path = tmp_path / "job.pid"
    path.write_bytes(HELD[name])
    problem = problem_of(path)
    assert "not the id of a process that could be meant" in problem
    assert len(problem) < len(str(path)) + 250
    assert problem.isprintable()


def test_a_pidfile_is_a_plain_file_that_is_there(tmp_path):
    missing, directory, link, pipe = (tmp_path / name for name in ("none", "dir", "link", "pipe"))
    directory.mkdir()
    (tmp_path / "real").write_text("4711")
    link.symlink_to("real")
    os.mkfifo(pipe)
    assert "cannot be read (No such file or directory)" in problem_of(missing)
    assert "is not a plain file" in problem_of(directory)
    assert "is not a plain file" in problem_of(pipe)
    assert "is a symbolic link, not a pidfile" in problem_of(link)


# --- commands ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("", "names no program"),
        ("   ", "names no program"),
        ("''", "names no program"),
        ("save 'it", "cannot be split"),
        ("./nowhere.sh now", "there is no program ./nowhere.sh"),
        ("echo-it; true", "there is no program echo-it;"),  # no shell
    ],
)
def test_a_command_that_cannot_be_run_is_refused_at_once(line, why):
    with pytest.raises(ConfigError, match="--command") as caught:
        NotifyCommand(line)
    assert why in str(caught.value)


def notice(**other):
    said = {"source": "aws", "action": "stop", "deadline_t": 1_000.9, "heard_t": 1.0, "detail": "x"}
    return Notice(**{**said, **other})


def test_a_command_reads_the_notice_in_its_environment():
    assert environment(notice(detail="a\n\x1b[2Jb\0", early=True)) == {
        "OUTLAST_NOTICE_SOURCE": "aws",
        "OUTLAST_NOTICE_ACTION": "stop",
        "OUTLAST_NOTICE_DEADLINE_T": "1000",
        "OUTLAST_NOTICE_DETAIL": "a  [2Jb ",
        "OUTLAST_NOTICE_EARLY": "1",
    }
    without = environment(notice(deadline_t=None))
    assert (without["OUTLAST_NOTICE_DEADLINE_T"], without["OUTLAST_NOTICE_EARLY"]) == ("", "")


def test_a_command_of_ours_is_not_confused_by_that_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config.load(environ=environment(notice())) == config.load(environ={})
