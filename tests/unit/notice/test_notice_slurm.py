"""What scontrol prints is understood exactly; the texts were recorded from Slurm 22.05."""

import itertools
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.notice.slurm import SlurmWatcher, kill_wait_s
from outlast.notice.source import CommandResult
from thorough import examples

BEGIN = 1_795_304_469
END = BEGIN + 3600
# Cut in the middle of the long run of fields that do not matter here.
JOB = (
    "JobId=17 JobName=job.sh UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901759 "
    "Nice=0 Account=(null) QOS=(null) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 "
    "Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:00:00 TimeLimit=01:00:00 TimeMin=N/A "
    f"SubmitTime={BEGIN} EligibleTime={BEGIN} AccrueTime={BEGIN} StartTime={BEGIN} EndTime={END} "
    "Deadline=N/A SuspendTime=None SecsPreSuspend=0 Partition=p NodeList=n1 "
    "Command=/tmp/job.sh WorkDir=/tmp StdErr=/tmp/o StdIn=/dev/null StdOut=/tmp/o Power= \n"
)
CONFIG = (
    "Configuration data as of 1795304469\n"
    "JobRequeue              = 1\n"
    "KillOnBadExit           = 0\n"
    "KillWait                = 45 sec\n"
    "OverTimeLimit           = 0 min\n"
)


class Clock:
    t = float(BEGIN)

    def __call__(self):
        return self.t


class Scontrol:
    """A recorded scontrol: what it prints next, and what it was asked."""

    def __init__(self, said=JOB):
        self.said = said
        self.asked = []

    def __call__(self, command, *, limit_s, max_bytes, environ):
        assert command[0] == "scontrol"
        assert limit_s <= 2
        assert environ["SLURM_TIME_FORMAT"] == "%s"
        self.asked.append(" ".join(command[1:]))
        if isinstance(self.said, Exception):
            raise self.said
        return (
            self.said
            if isinstance(self.said, CommandResult)
            else CommandResult(0, self.said.encode())
        )


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def scontrol():
    return Scontrol()


def watching(clock, scontrol, **environ):
    return SlurmWatcher({"SLURM_JOB_ID": "17"} | environ, clock, scontrol)


@pytest.fixture
def watcher(clock, scontrol):
    return watching(clock, scontrol)


def test_far_from_the_end_there_is_no_notice(watcher, scontrol, clock):
    assert watcher.poll() is None
    clock.t = END - 601
    assert watcher.poll() is None
    assert scontrol.asked == ["show job -o 17"] * 2
    assert watcher.errors == 0


def test_ten_minutes_before_it_is_early_and_two_minutes_before_it_is_hard(watcher, clock):
    clock.t = END - 600
    first = watcher.poll()
    assert (first.source, first.action, first.event) == ("slurm", "time-limit", "17")
    assert (first.early, first.deadline_t, first.heard_t) == (True, END, END - 600)
    clock.t = END - 121
    assert watcher.poll() == first
    clock.t = END - 120
    last = watcher.poll()
    assert (last.early, last.deadline_t) == (False, END)
    clock.t = END + 10
    assert watcher.poll() == last


def test_a_short_job_is_not_told_to_leave_before_it_began(clock, scontrol):
    scontrol.said = JOB.replace(f"EndTime={END}", f"EndTime={BEGIN + 120}")
    watcher = watching(clock, scontrol)
    assert watcher.poll() is None
    clock.t = BEGIN + 60
    assert watcher.poll().early
    clock.t = BEGIN + 90
    assert not watcher.poll().early


def test_scontrol_is_asked_at_most_once_a_minute_and_less_often_far_from_the_end(
    watcher, scontrol, clock
):
    began = []
    while clock.t < END:
        num_asked = len(scontrol.asked)
        watcher.poll()
        if len(scontrol.asked) > num_asked:
            began.append(clock.t)
        clock.t += 1
    gaps = [later - earlier for earlier, later in itertools.pairwise(began)]
    assert min(gaps) == 60
    assert max(gaps) <= 600
    assert gaps[-2:] == [60, 60]


def test_a_limit_that_is_changed_is_heard(watcher, scontrol, clock):
    clock.t = END - 300
    assert watcher.poll().deadline_t == END
    scontrol.said = JOB.replace(f"EndTime={END}", f"EndTime={END + 7200}")
    clock.t += 60
    assert watcher.poll() is None


def test_a_clock_that_is_set_back_does_not_stop_the_asking(watcher, scontrol, clock):
    watcher.poll()
    clock.t -= 86_400
    watcher.poll()
    assert len(scontrol.asked) == 2


def test_the_environment_s_end_counts_until_scontrol_answers(clock, scontrol):
    scontrol.said = FileNotFoundError()
    watcher = watching(
        clock, scontrol, SLURM_JOB_START_TIME=str(BEGIN), SLURM_JOB_END_TIME=str(END)
    )
    assert watcher.poll() is None
    assert watcher.last_error == (
        "Slurm's job 17: there is no scontrol here to ask for the time limit"
    )
    clock.t = END - 30
    assert watcher.poll().deadline_t == END
    scontrol.said = JOB.replace(f"EndTime={END}", f"EndTime={END + 7200}")
    clock.t += 60
    assert watcher.poll() is None
    scontrol.said = CommandResult(1, b"")
    clock.t += 660
    assert watcher.poll() is None  # what scontrol said last still holds


@pytest.mark.parametrize(
    "text",
    [
        JOB.replace(f"EndTime={END}", "EndTime=Unknown"),
        JOB.replace("JobName=job.sh", f"JobName=x EndTime={BEGIN}"),
        JOB.replace("JobId=17 ", "JobId=16 ").replace(str(END), str(BEGIN)) + JOB,
    ],
)
def test_no_limit_a_telling_name_and_another_job_are_no_notice(watcher, scontrol, text):
    scontrol.said = text
    assert watcher.poll() is None
    assert watcher.errors == 0


def test_times_without_a_zone_are_this_machine_s(watcher, scontrol, clock, monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        local = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(END))
        scontrol.said = JOB.replace(f"EndTime={END}", f"EndTime={local}")
        clock.t = END - 60
        assert watcher.poll().deadline_t == END
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_job_of_an_array_is_asked_for_by_its_place(clock, scontrol):
    watching(clock, scontrol, SLURM_ARRAY_JOB_ID="12", SLURM_ARRAY_TASK_ID="5").poll()
    assert scontrol.asked == ["show job -o 12_5"]


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (FileNotFoundError(), "there is no scontrol here"),
        (TimeoutError(), "scontrol took over 2 s"),
        (PermissionError("not allowed"), "not allowed"),
        (CommandResult(1, JOB.encode()), "scontrol exited with 1"),
        (CommandResult(-9, JOB.encode()), "scontrol exited with -9"),
        ("", "does not say when the job ends"),
        (JOB.replace("EndTime", "Ended"), "does not say when the job ends"),
        (JOB.replace(f"EndTime={END}", "EndTime=soon"), "times cannot be read"),
        (JOB.replace(f"EndTime={END}", "EndTime=99999-01-01"), "times cannot be read"),
    ],
)
def test_what_cannot_be_understood_is_an_error_once_a_minute(
    watcher, scontrol, clock, said, problem
):
    clock.t = END - 60
    scontrol.said = said
    for _ in range(60):
        assert watcher.poll() is None
        clock.t += 1
    assert watcher.errors == 1
    assert problem in watcher.last_error


@pytest.mark.parametrize("job", ["", "17; reboot", "-v"])
def test_a_job_s_number_is_a_number(clock, scontrol, job):
    watcher = SlurmWatcher({"SLURM_JOB_ID": job}, clock, scontrol)
    assert watcher.poll() is None
    assert "SLURM_JOB_ID is not" in watcher.last_error
    assert scontrol.asked == []


def test_kill_wait(scontrol):
    scontrol.said = CONFIG
    assert kill_wait_s({}, scontrol) == 45
    for said in (
        OSError(),
        TimeoutError(),
        CommandResult(1, CONFIG.encode()),
        "",
        "KillWait = ? sec",
    ):
        scontrol.said = said
        assert kill_wait_s({}, scontrol) == 30


@examples(200)
@given(st.binary())
def test_no_bytes_are_a_notice_or_raise(output):
    clock = Clock()
    clock.t = END - 60.0
    assert watching(clock, Scontrol(CommandResult(0, output))).poll() is None
    assert kill_wait_s(os.environ, Scontrol(CommandResult(0, output))) == 30
