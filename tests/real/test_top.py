"""``outlast top`` beside a real job: in a pseudo-terminal, in a pipe, as another user."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from floor import TRAIN, Job, until

STEPS = 600
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
NOBODY = 65534
# Twice, and the second time as another user: by then all is imported that user may not read.
AS_ANOTHER = """
import os, sys
from outlast.cli import cli
arguments = ["top", sys.argv[1], "--json"]
cli.main(arguments, standalone_mode=False)
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
cli.main(arguments, standalone_mode=False)
"""


class Terminal:
    """``outlast top`` in a pseudo-terminal, and all that it has shown."""

    def __init__(self, floor, directory, rows=24, columns=80):
        self.master, slave = pty.openpty()
        self.resize(rows, columns)
        self.before = termios.tcgetattr(slave)
        # What says how large a terminal is, whatever it is: a test run's own workers have it.
        said = ("COLUMNS", "LINES")
        environ = {name: value for name, value in floor.environ.items() if name not in said}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "outlast", "top", str(directory)],
            env=environ | {"TERM": "xterm-256color"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        self.slave, self.shown = slave, ""

    def resize(self, rows, columns):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def look(self):
        """What it has shown, without its escapes."""
        while select.select([self.master], [], [], 0)[0]:
            self.shown += os.read(self.master, 1 << 16).decode(errors="replace")
        return ESCAPES.sub("", self.shown)

    def lines(self):
        """The newest screen."""
        self.look()
        return ESCAPES.sub("", self.shown.split("\x1b[H")[-1]).splitlines()

    def type(self, keys):
        os.write(self.master, keys)

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(20)
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture(name="running")
def _running(floor, tmp_path):
    job = Job(tmp_path / "job", 2)
    process = floor.outlast(
        *("run", "--nproc-per-node", 2, "--dir", job.directory, TRAIN, job.records, STEPS),
        *("--light", "--every", "20 steps", "--pause", "0.03"),
    )
    until((job.directory / "ledger.jsonl").exists, "a ledger", running=process)
    return job, process


@pytest.mark.timeout(180)
def test_a_kill_and_the_end_are_seen_on_a_terminal(floor, running):
    job, process = running
    with contextlib.closing(Terminal(floor, job.directory)) as terminal:
        until(lambda: "own work" in terminal.look(), "ranks, by their memory")
        until(lambda: f"of {STEPS}" in terminal.look(), "how far it is")
        until(lambda: job.newest() >= 20, "a commit", running=process)
        os.kill(floor.workers()[1], signal.SIGKILL)
        until(lambda: "was killed by SIGKILL" in terminal.look(), "the incident")
        until(lambda: "attempt 2" in terminal.look(), "the next attempt")
        until(lambda: "over · cost" in terminal.look(), "what it has cost")
        terminal.shown = ""
        terminal.resize(24, 40)
        until(lambda: re.search(r"attempt 2[^\n]*\n", terminal.look()), "a narrow screen")
        until(lambda: 0 < max(map(len, terminal.lines()), default=0) <= 40, "it fits")
        assert process.wait() == 0, process.text
        until(lambda: "finished" in terminal.look(), "the end")
        assert terminal.process.poll() is None  # until it is left
        terminal.type(b"q")
        assert terminal.process.wait(20) == 0
        assert termios.tcgetattr(terminal.slave) == terminal.before
        assert "Traceback" not in terminal.look()


@pytest.mark.timeout(180)
def test_the_steps_of_a_worker_alone(floor, tmp_path):
    job = Job(tmp_path / "job", 1)
    process = floor.outlast(
        *("run", "--nproc-per-node", 1, "--dir", job.directory, TRAIN, job.records, STEPS),
        *("--light", "--every", "20 steps", "--pause", "0.03"),
    )

    def ranks():
        shown = floor.outlast("top", job.directory, "--json")
        assert shown.wait() == 0, shown.text
        return json.loads(shown.out)["ranks"]

    until(lambda: job.newest() >= 40, "a commit", running=process)
    (rank,) = until(lambda: [one for one in ranks() if one["own_s"]], "its steps", running=process)
    assert (rank["rank"], rank["wait_s"], rank["age_s"]) == (0, 0.0, None)
    assert rank["step_s"] >= rank["own_s"] >= 0.03
    until(lambda: job.events("rank_steps"), "a line of the ledger", running=process)
    assert process.wait() == 0, process.text
    line = job.events("rank_steps")[0]
    assert line["ranks"] == [0]
    assert line["own_s"][0] >= 0.03


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM)]
)
def test_however_it_is_ended_the_terminal_is_as_before(floor, running, number, code):
    job, _ = running
    with contextlib.closing(Terminal(floor, job.directory)) as terminal:
        until(lambda: "Next: " in terminal.look(), "a screen")
        terminal.process.send_signal(number)
        assert terminal.process.wait(20) == code
        assert termios.tcgetattr(terminal.slave) == terminal.before
        terminal.look()
        assert "\x1b[?1049l" in terminal.shown  # the screen that was there before
        assert "Traceback" not in terminal.shown


def test_in_a_pipe_it_is_a_log_that_ends_when_nobody_runs_the_job(floor, running):
    job, process = running
    top = floor.outlast("top", job.directory)
    until(lambda: "running" in top.out, "a line", running=top)
    until(lambda: job.newest() >= 20, "a commit", running=process)
    process.kill()
    assert top.wait() == 1, top.text
    lines = top.out.splitlines()
    assert "\x1b" not in top.out
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ", line) for line in lines)
    assert "DEAD" in lines[-1]
    shown = floor.outlast("top", job.directory, "--json")
    assert shown.wait() == 1
    found = json.loads(shown.out)
    assert (found["state"], found["is_over"]) == ("gone", True)
    assert found["saved_step"] >= 20
    assert "--nproc-per-node 2" in found["command"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_sees_it_and_touches_nothing(floor, running, tmp_path):
    job, process = running
    until(lambda: job.newest() >= 20, "a commit", running=process)
    for place in [job.directory, *job.directory.parents][:-2]:
        place.chmod(place.stat().st_mode | 0o555)
    done = subprocess.run(
        [sys.executable, "-c", AS_ANOTHER, str(job.directory), str(NOBODY)],
        env=floor.environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["state"] == "running"
    assert found["saved_step"] >= 20
    assert not [path for path in Path(job.directory).rglob("*") if path.stat().st_uid == NOBODY]
    assert process.wait() == 0, process.text
