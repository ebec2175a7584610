"""Notices with any lead, and a clock that jumps: the job hears, drains, and minds no clock."""

import json
import os
import subprocess
import sys
import time

import pytest
from drilled_job import DrilledJob
from test_fault_processes import COSTLY, ends_well

from outlast.drill import at, clock
from outlast.drill.faults.fault import MayLose, Missed


@pytest.mark.parametrize("kind", ["notice", "sigterm"])
def test_a_notice_drains_and_the_next_start_has_none(make, calm, kind):
    aim = at(step=12).on(machine=0)
    planned = aim.notice(lead_s=90) if kind == "notice" else aim.sigterm(lead_s=90)
    assert planned.fault.promise.loses is MayLose.NOTHING
    job = make(planned)
    struck = planned.strike(job)
    first = job.machines[0].started
    assert first.wait() == 75, first.text
    planned.finish(job, lambda: True)
    (notice,) = job.has("notice", struck.t)
    if kind == "notice":
        assert struck.t + 85 < notice["deadline_t"] <= struck.t + 90
    job.machines[0].start()
    assert job.machines[0].started is not first
    ends_well(job, calm, planned, struck)
    assert not [event for event in job.has("notice") if event.t > notice.t]
    drained = job.has("drained")[0]["step"]
    assert job.has("resumed")[-1]["step"] == drained  # nothing is lost


@COSTLY
def test_a_notice_without_time_is_followed_by_the_end(make, calm):
    planned = at(step=12).on(machine=0).sigterm(lead_s=0.0)
    assert planned.fault.promise.loses is MayLose.COMMIT
    job = make(planned)
    struck = planned.strike(job)
    planned.finish(job)
    first = job.machines[0].started
    assert first.wait() in planned.fault.promise.exit_codes
    assert not job.machines[0].processes()
    job.machines[0].start()
    ends_well(job, calm, planned, struck)


@COSTLY
def test_a_later_start_is_not_taken_for_the_one_that_was_told(make):
    planned = at(step=12).on(machine=0).sigterm(lead_s=0.0)
    job = make(planned)
    planned.strike(job)
    assert job.machines[0].started.wait() == 75
    job.machines[0].start()
    planned.finish(job)  # its time is over, and it has gone itself
    assert job.wait() == [0], job.text


@COSTLY
@pytest.mark.parametrize("by_s", [-3600.0, 3600.0])
def test_a_clock_that_jumps(make, calm, by_s):
    planned = at(step=12).jump_clock(by_s, for_s=2.0)
    job = make(planned, "--pause", 0.1)
    struck = planned.strike(job)
    planned.finish(job)
    ends_well(job, calm, planned, struck)
    assert not job.has("restart")
    for rank in range(2):
        ahead = {line["step"]: line["t"] - line["now"] for line in job.lines(rank)}
        jumped = [step for step, seconds in ahead.items() if abs(seconds - by_s) < 100]
        assert len(jumped) > 3
        assert jumped == list(range(jumped[0], jumped[-1] + 1))
        assert abs(ahead[1]) < 1 > abs(ahead[60])
    assert any(off(event, by_s) for event in job.has("commit")), (
        "it is written by the keeper's clock"
    )


def off(event, by_s):
    return abs(event.t - by_s - time.time()) < 600


# --- the clock alone ------------------------------------------------------------------------------

LOOK = """
import json, os, time
print(json.dumps([
    time.time(), time.time_ns() / 1e9, time.clock_gettime(time.CLOCK_REALTIME),
    time.clock_gettime_ns(time.CLOCK_REALTIME) / 1e9,
    time.mktime(time.localtime()), time.mktime(time.strptime(time.ctime())),
    time.mktime(time.strptime(time.strftime("%Y %m %d %H %M %S"), "%Y %m %d %H %M %S")),
    time.monotonic(), os.environ.get("USERS"),
]))
"""


def look(environ):
    done = subprocess.run(
        [sys.executable, "-c", LOOK], env=environ, capture_output=True, text=True, check=True
    )
    assert not done.stderr
    return json.loads(done.stdout)


def test_every_clock_of_python_moves_and_a_users_sitecustomize_runs(tmp_path):
    users = tmp_path / "users"
    users.mkdir()
    (users / "sitecustomize.py").write_text("import os\nos.environ['USERS'] = __file__\n")
    environ = {**os.environ, "PYTHONPATH": str(users)}
    clock.install(tmp_path / "clocks", [os.uname().nodename, "another"], environ)
    clock.move(tmp_path / "clocks", "another", 5.0)
    for ahead in (0.0, 86_400.0, -86_400.0):
        clock.move(tmp_path / "clocks", os.uname().nodename, ahead)
        *wall, monotonic, ran = look(environ)
        assert all(abs(t - time.time() - ahead) < 60 for t in wall), wall
        assert abs(monotonic - time.monotonic()) < 60
        assert ran == str(users / "sitecustomize.py")


def test_two_that_are_put_in_front_both_run(tmp_path):
    environ = dict(os.environ)
    environ.pop("PYTHONPATH", None)
    clock.install(tmp_path / "one", [os.uname().nodename], environ)
    clock.install(tmp_path / "one", [os.uname().nodename], environ)  # once more: no second time
    site = str(tmp_path / "one" / "site")
    assert environ["PYTHONPATH"] == site
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import os\nos.environ['USERS'] = 'other'\n")
    again = {**environ, "PYTHONPATH": str(other)}
    clock.install(tmp_path / "two", [os.uname().nodename], again)
    clock.move(tmp_path / "two", os.uname().nodename, 86_400.0)
    # The directory of the first stands between: its file is of the same kind, and hands on as well.
    front, *behind = again["PYTHONPATH"].split(os.pathsep)
    again["PYTHONPATH"] = os.pathsep.join([front, site, *behind])
    t, *_, ran = look(again)
    assert ran == "other"
    assert abs(t - time.time() - 86_400) < 60


def test_no_agent_no_notice(floor, tmp_path):
    job = DrilledJob(floor, tmp_path / "drilled")
    with pytest.raises(Missed, match="is down"):
        at(step=1).sigterm().fault.inject(job)
    assert at(step=1).on(machine=3).notice().fault.why_not(job).startswith("the job has one mach")
