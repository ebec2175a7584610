"""``outlast watch``: a metadata server, real processes, and who is told of what."""

import json
import os
import signal
import subprocess
import sys

import pytest
from floor import TRAIN, Job, until
from watch_floor import NO_PID, asked, lines, watching

from outlast.config import NOTICE_VARIABLES

# --- who is told ---------------------------------------------------------------------------------


def test_the_process_that_was_named_is_told_and_its_sibling_is_not(listen, server, watch):
    job, sibling = listen("job"), listen("sibling")
    process = watch("--pid", job.pid)
    watching(server, process)
    assert job.heard == []
    server.preempt(in_s=120.0)
    assert process.wait() == 0, process.text
    until(lambda: job.heard, "the job is told")
    assert (job.heard, sibling.heard) == (["SIGUSR1"], [])
    found, notice, told = lines(process)
    assert found == f"notices from aws at {server.url} (120 s ahead): as set"
    assert notice.startswith("notice from aws: terminate in 1")
    assert told == f"SIGUSR1 sent to process {job.pid}"
    assert process.out == ""


def test_several_are_told_by_another_signal(listen, server, watch):
    jobs = [listen(name) for name in ("a", "b", "c")]
    pidfile = jobs[2].record.with_name("c.pid")
    pidfile.write_text(f"{jobs[2].pid}\n")
    named = ("--pid", jobs[0].pid, "--pid", jobs[1].pid, "--pidfile", pidfile)
    process = watch(*named, "--signal", "sigterm", "--json")
    watching(server, process)
    deadline_t = server.preempt(action="stop")
    assert process.wait() == 0, process.text
    for job in jobs:
        until(lambda job=job: job.heard, "the job is told")
        assert job.heard == ["SIGTERM"]
    found = json.loads(process.out)
    assert (found["outcome"], found["exit_code"], found["early"]) == ("told", 0, [])
    notice = found["notice"]
    assert (notice["source"], notice["action"], notice["deadline_t"]) == ("aws", "stop", deadline_t)
    assert [(one["pid"], one["told"]) for one in found["told"]] == [(j.pid, True) for j in jobs]


def test_it_does_not_go_to_a_group_of_processes(floor, listen, server, watch):
    job = listen(with_child=True)
    assert os.getpgid(job.pid) == job.pid
    process = watch("--pid", job.pid)
    watching(server, process)
    server.preempt()
    assert process.wait() == 0, process.text
    until(lambda: job.heard, "it is told")
    assert job.child_record.read_text() == "ready\n"
    job.process.kill()
    for child in floor.offspring():
        child.kill()


def test_a_process_that_ended_is_said_and_the_others_are_told(listen, server, watch):
    gone, job = listen("gone"), listen("job")
    process = watch("--pid", gone.pid, "--pid", job.pid, "--json")
    watching(server, process)
    gone.process.kill()
    until(lambda: "has ended" in process.err, "its end is seen", running=process)
    server.preempt()
    assert process.wait() == 1, process.text
    until(lambda: job.heard, "the other is told")
    assert f"no process {gone.pid}: nothing was signalled" in lines(process)
    assert [one["told"] for one in json.loads(process.out)["told"]] == [False, True]


def test_one_that_nobody_has_waited_for_counts_as_gone(floor, listen, server, watch):
    """A zombie takes signals; saying that it was told would be a lie."""
    job = listen()
    zombie = subprocess.Popen(["sleep", "600"])
    try:
        process = watch("--pid", zombie.pid, "--pid", job.pid)
        watching(server, process)
        zombie.kill()
        until(lambda: "has ended" in process.err, "its end is seen", running=process)
        server.preempt()
        assert process.wait() == 1, process.text
        assert f"no process {zombie.pid}: nothing was signalled" in lines(process)
    finally:
        zombie.wait()


def test_it_ends_with_the_processes_that_it_watches(listen, server, watch):
    jobs = [listen("a"), listen("b")]
    process = watch("--pid", jobs[0].pid, "--pid", jobs[1].pid, "--json")
    watching(server, process)
    jobs[1].process.kill()
    until(lambda: "has ended" in process.err, "the first end is seen", running=process)
    assert process.poll() is None
    jobs[0].process.kill()
    assert process.wait() == 0, process.text
    assert lines(process)[1:] == [f"process {jobs[n].pid} has ended" for n in (1, 0)]
    found = json.loads(process.out)
    assert (found["outcome"], found["notice"], found["told"]) == ("ended", None, [])


def test_a_process_that_is_not_there_is_said_at_once(listen, server, watch):
    job = listen()
    server.preempt()
    process = watch("--pid", job.pid, "--pid", NO_PID, "--json")
    assert process.wait() == 1, process.text
    assert lines(process) == [f"no process {NO_PID}: nothing was signalled"]
    assert json.loads(process.out)["outcome"] == "not_told"
    assert job.heard == []
    assert not server.requests


def test_one_worker_is_told_and_all_drain(floor, server, watch, tmp_path):
    job = Job(tmp_path / "job", 2)
    script = (TRAIN, job.records, 100_000, "--light", "--pause", "0.02")
    ranks = floor.ranks(2, *script, env=job.env)
    pidfile = tmp_path / "rank-0.pid"
    process = watch("--pidfile", pidfile)
    until(lambda: job.begun() >= 5, "steps", running=ranks[0])
    pidfile.write_text(str(job.lines(0)[-1]["pid"]))
    server.preempt()
    assert process.wait() == 0, process.text
    assert [rank.wait() for rank in ranks] == [75, 75], ranks[0].text
    drained = job.events("drained")[-1]
    assert (drained["step"], drained["committed"]) == (job.newest(), True)
    assert [max(job.consumed(rank)) for rank in range(2)] == [job.newest()] * 2


# --- pidfiles ------------------------------------------------------------------------------------


def test_a_pidfile_is_read_when_the_notice_comes(floor, listen, server, watch):
    before, after = listen("before"), listen("after")
    pidfile = floor.directory / "job.pid"
    pidfile.write_text(str(before.pid))
    process = watch("--pidfile", pidfile)
    watching(server, process)
    pidfile.write_text(f"{after.pid}\n")
    before.process.kill()  # its supervisor has started another
    server.preempt()
    assert process.wait() == 0, process.text
    until(lambda: after.heard, "the new one is told")
    assert lines(process)[-1] == f"SIGUSR1 sent to process {after.pid} (of {pidfile})"


def test_a_pidfile_may_be_written_later(floor, listen, server, watch):
    pidfile = floor.directory / "job.pid"
    process = watch("--pidfile", pidfile)
    watching(server, process)
    job = listen()
    pidfile.write_text(str(job.pid))
    server.preempt()
    assert process.wait() == 0, process.text
    until(lambda: job.heard, "it is told")
    assert "cannot be read (No such file or directory); it is read again when" in process.err


def _directory(path, pid):
    path.mkdir()


def _link(path, pid):
    path.with_name("real").write_text(str(pid))
    path.symlink_to("real")


WRONG_PIDFILES = {
    "missing": (lambda path, pid: None, "cannot be read"),
    "directory": (_directory, "is not a plain file"),
    "symbolic link": (_link, "is a symbolic link"),
    "named pipe": (lambda path, pid: os.mkfifo(path), "is not a plain file"),
    "garbage": (lambda path, pid: path.write_bytes(b"\x00\xff pid"), "not the id of a process"),
    "two ids": (lambda path, pid: path.write_text(f"{pid} {pid}"), "not the id of a process"),
    "a group": (lambda path, pid: path.write_text(f"-{pid}"), "not the id of a process"),
    "process 1": (lambda path, pid: path.write_text("1"), "not the id of a process"),
    "no process": (lambda path, pid: path.write_text(str(NO_PID)), f"no process {NO_PID}"),
}


@pytest.mark.parametrize("name", WRONG_PIDFILES)
def test_a_wrong_pidfile_signals_nobody_and_the_next_is_told(floor, listen, server, watch, name):
    make, why = WRONG_PIDFILES[name]
    victim, job = listen("victim"), listen("job")
    wrong, right = floor.directory / "wrong.pid", floor.directory / "right.pid"
    make(wrong, victim.pid)
    right.write_text(str(job.pid))
    server.preempt()
    process = watch("--pidfile", wrong, "--pidfile", right, "--json")
    assert process.wait() == 1, process.text
    until(lambda: job.heard, "the right one is told")
    assert victim.heard == []
    wrongly, rightly = json.loads(process.out)["told"]
    assert not wrongly["told"]
    assert why in wrongly["what"]
    assert wrongly["what"].endswith(": nothing was signalled")
    assert (rightly["told"], rightly["pid"]) == (True, job.pid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files and processes away")
def test_root_does_not_believe_the_pidfile_of_another_user(floor, listen, server, watch):
    job = listen()
    pidfile = floor.directory / "job.pid"
    pidfile.write_text(str(job.pid))
    os.chown(pidfile, 65_534, 65_534)
    server.preempt()
    process = watch("--pidfile", pidfile)
    assert process.wait() == 1, process.text
    assert f"belongs to user 65534 and process {job.pid} does not" in lines(process)[-1]
    assert job.heard == []


AS_NOBODY = """
import os, sys
import outlast.cli.watch
from outlast.cli import main
os.chdir("/")
os.setuid(65534)
main(sys.argv[1:])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_process_of_another_user_is_refused_at_once(floor, listen, server):
    job = listen()
    asked = ("--platform", "aws", "--base-url", server.url)
    process = floor.cold("-c", AS_NOBODY, "watch", *asked, "--pid", job.pid)
    assert process.wait() == 1, process.text
    told = f"process {job.pid} belongs to another user: nothing was signalled"
    assert lines(process) == [told]


# --- commands, and nobody ------------------------------------------------------------------------


def test_a_command_reads_the_notice(floor, server, watch):
    script = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    process = watch("--command", f"{sys.executable} -c '{script}' one 'two words' $HOME ;")
    watching(server, process)
    deadline_t = server.preempt(action="stop")
    assert process.wait() == 0, process.text
    arguments, environ = json.loads(process.out)
    assert arguments == ["one", "two words", "$HOME", ";"]  # no shell in between
    given = {name: environ.get(name) for name in NOTICE_VARIABLES}
    assert given.pop("OUTLAST_NOTICE_DETAIL").startswith("EC2 spot: stop at 20")
    assert given == {
        "OUTLAST_NOTICE_SOURCE": "aws",
        "OUTLAST_NOTICE_ACTION": "stop",
        "OUTLAST_NOTICE_DEADLINE_T": str(int(deadline_t)),
        "OUTLAST_NOTICE_EARLY": "",
    }
    assert environ["REAL_TEST_TAG"] == floor.tag  # and what we had


@pytest.mark.parametrize(
    ("script", "code", "how"),
    [
        ("exit 0", 0, "left with exit code 0"),
        ("exit 3", 1, "left with exit code 3"),
        ("kill -9 $$", 1, "was ended by SIGKILL"),
    ],
)
def test_how_a_command_ends_is_said(server, watch, script, code, how):
    server.preempt()
    process = watch("--json", "--command", f"sh -c 'echo saved; {script}'")
    assert process.wait() == code, process.text
    assert "saved" in process.err.splitlines()  # standard output holds the object alone
    (told,) = json.loads(process.out)["told"]
    assert told["told"] == (code == 0)
    assert told["what"].endswith(how)


def test_a_command_is_not_run_without_a_notice(floor, server, watch):
    trace = floor.directory / "trace"
    process = watch("--command", f"touch {trace}")
    until(lambda: asked(server, 5), "it is asked often", running=process)
    process.signal(signal.SIGTERM)
    assert process.wait() == 0, process.text
    assert not trace.exists()


def test_with_nobody_named_it_ends_when_a_notice_comes(server, watch):
    process = watch("--json")
    until(lambda: asked(server, 3), "it is asked often", running=process)
    assert process.poll() is None
    server.preempt()
    assert process.wait() == 0, process.text
    found = json.loads(process.out)
    assert (found["outcome"], found["told"]) == ("heard", [])
    assert len(lines(process)) == 2
