"""``outlast watch``: what is no notice, asking once, how it is ended, and bad arguments."""

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from floor import LIMIT_S, until
from watch_floor import FAULTS, NO_PID, asked, lines, watching

from outlast.drill.metadata_server import ACTION_PATH, AnswerFault

# --- what is no notice ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_not_understood_signals_nobody(listen, server, watch, name):
    job = listen()
    server.inject(FAULTS[name], method="GET")
    process = watch("--pid", job.pid)
    until(lambda: asked(server, 5), "it is asked again", running=process)
    assert job.heard == []
    assert len([line for line in lines(process) if "no notice can be heard" in line]) == 1
    server.inject(AnswerFault())
    server.preempt()
    assert process.wait() == 0, process.text
    until(lambda: job.heard, "the real one is passed on")
    assert job.heard == ["SIGUSR1"]


# --- once ----------------------------------------------------------------------------------------


def test_once_with_nothing_announced(listen, server, watch):
    job = listen()
    process = watch("--once", "--json", "--pid", job.pid)
    assert process.wait() == 3, process.text
    found = json.loads(process.out)
    assert (found["outcome"], found["exit_code"], found["notice"]) == ("nothing", 3, None)
    assert lines(process)[1:] == ["no notice is announced"]
    assert sum(request.path == ACTION_PATH for request in server.requests) == 1
    assert job.heard == []


def test_once_with_a_notice(listen, server, watch):
    job = listen()
    server.preempt()
    process = watch("--once", "--pid", job.pid)
    assert process.wait() == 0, process.text
    until(lambda: job.heard, "it is told")


@pytest.mark.parametrize("name", FAULTS)
def test_once_without_an_answer(listen, server, watch, name):
    job = listen()
    server.inject(FAULTS[name], method="GET")
    process = watch("--once", "--json", "--pid", job.pid)
    assert process.wait() == 1, process.text
    assert json.loads(process.out)["outcome"] == "unanswered"
    _, why = lines(process)
    assert why.startswith("aws could not be asked: ")
    assert job.heard == []


# --- how it is ended -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"]
)
def test_it_is_ended_quietly(listen, server, watch, number, code):
    job = listen()
    process = watch("--pid", job.pid, "--json")
    watching(server, process)
    process.signal(number)
    assert process.wait() == code, process.text
    assert len(lines(process)) == 1
    found = json.loads(process.out)
    assert (found["outcome"], found["exit_code"]) == ("stopped", code)
    assert job.heard == []


def test_it_is_ended_by_a_signal_that_another_of_its_threads_was_given(server, watch):
    process = watch("--json")
    watching(server, process)
    others = [int(one.name) for one in Path(f"/proc/{process.pid}/task").iterdir()]
    others.remove(process.pid)
    assert ctypes.CDLL(None).tgkill(process.pid, others[0], signal.SIGTERM) == 0
    assert process.wait() == 128 + signal.SIGTERM, process.text


def test_with_nobody_named_only_a_notice_is_a_success(server, watch):
    """``outlast watch && ./save.sh`` must not save because somebody ended the watch."""
    process = watch("--json")
    watching(server, process)
    process.signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM, process.text
    assert json.loads(process.out)["outcome"] == "stopped"


def test_what_a_shell_starts_in_the_background_does_not_end_with_ctrl_c(server, watch):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited
    try:
        process = watch("--json")
    finally:
        signal.signal(signal.SIGINT, before)
    watching(server, process)
    process.signal(signal.SIGINT)
    until(lambda: asked(server, 5), "it goes on", running=process)
    server.preempt()
    assert process.wait() == 0, process.text
    assert json.loads(process.out)["outcome"] == "heard"


@pytest.mark.parametrize("by_terminal", [False, True], ids=["SIGTERM", "Ctrl-C"])
def test_a_command_that_runs_outlives_us(floor, server, watch, by_terminal):
    begun, go, saved = (floor.directory / name for name in ("begun", "go", "saved"))
    waits = f"touch {begun}; while [ ! -e {go} ]; do sleep 0.05; done; touch {saved}"
    server.preempt()
    process = watch("--command", f"sh -c '{waits}'")
    until(begun.exists, "the command runs", running=process)
    if by_terminal:  # which signals the whole group that it has in front
        os.killpg(os.getpgid(process.pid), signal.SIGINT)
    else:
        process.signal(signal.SIGTERM)
    assert process.wait() == (130 if by_terminal else 0), process.text
    go.touch()
    until(saved.exists, "it saves")


def test_nobody_who_reads_is_needed_for_a_job_to_be_told(floor, listen, server):
    """``outlast watch 2>&1 | head -1``: what cannot be said is not a reason to be silent."""
    job = listen()
    asked = ("--platform", "aws", "--base-url", server.url, "--poll", "100 ms", "--pid", job.pid)
    process = subprocess.Popen(
        [sys.executable, "-m", "outlast", "watch", *map(str, asked)],
        env=floor.environ,
        cwd=floor.directory,
        stderr=subprocess.PIPE,
    )
    try:
        assert b"notices from aws" in process.stderr.readline()
        process.stderr.close()
        server.preempt()
        assert process.wait(LIMIT_S) == 0
        until(lambda: job.heard, "it is told")
    finally:
        process.kill()
        process.wait()


def test_what_cannot_be_said_does_not_go_to_standard_output(floor, listen, server):
    job = listen()
    server.preempt()
    asked = f"--platform aws --base-url {server.url} --json --pid {job.pid}"
    line = f"exec {sys.executable} -m outlast watch {asked} 2>&-"
    process = floor.cold("-c", line, program="/bin/sh")
    assert process.wait() == 0, process.text
    assert json.loads(process.out)["outcome"] == "told"


# --- the command line ----------------------------------------------------------------------------

WRONG = {
    "pid is no number": (["--pid", "python"], "'python' is not the id of a process"),
    "pid is a group": (["--pid", "-4711"], "'-4711' is not the id of a process"),
    "pid is every process": (["--pid", "-1"], "'-1' is not the id of a process"),
    "pid 0": (["--pid", "0"], "'0' is not the id of a process"),
    "pid 1": (["--pid", "1"], "process 1 keeps the machine going"),
    "signal": (["--pid", NO_PID, "--signal", "USR3"], "did you mean USR"),
    "signal KILL": (["--pid", NO_PID, "--signal", "KILL"], "SIGKILL cannot be handled"),
    "signal for nobody": (["--signal", "USR1"], "nobody would get it"),
    "early for nobody": (["--early", "signal"], "nobody is told"),
    "early": (["--early", "yes"], "'yes' is not one of"),
    "both": (["--pid", NO_PID, "--command", "true"], "give one of them"),
    "command": (["--command", "nobody-has-it now"], "there is no program nobody-has-it"),
    "command's quotes": (["--command", "echo 'a"], "cannot be split"),
    "poll": (["--poll", "often"], "notice.poll (from argument): 'often' is not"),
    "platform": (["--platform", "asw"], "notice.platform (from argument): 'asw' is not"),
    "address": (["--base-url", "nowhere"], "notice.base_url (from argument): 'nowhere' is not"),
    "nobody to ask": (["--platform", "none"], "There is nobody to ask"),
    "nobody answers": (
        ["--platform", "auto", "--base-url", "http://127.0.0.1:9"],
        "no metadata service answers",
    ),
    "option": (["--pids", "4711"], "No such option"),
    "argument": (["4711"], "4711"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_arguments_are_one_line(floor, server, name):
    arguments, expected = WRONG[name]
    asked = [] if "--platform" in arguments else ["--platform", "aws"]
    process = floor.cold("-m", "outlast", "watch", *asked, *arguments)
    assert process.wait() == 2, process.text
    assert process.out == ""
    (line,) = lines(process)
    assert expected in line
    assert not server.requests


def test_it_starts_without_torch(floor, server):
    asked = ("--platform", "aws", "--base-url", server.url, "--once")
    process = floor.cold("-X", "importtime", "-m", "outlast", "watch", *asked)
    assert process.wait() == 3, process.text
    imported = {line.rpartition("|")[2].strip() for line in process.err.splitlines()}
    assert "outlast.notice.lookout" in imported
    assert not {"torch", "numpy", "rich", "psutil"} & imported
