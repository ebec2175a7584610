"""Two `outlast run` on this machine as two machines: how each of them ends."""

import os
import signal
import time

import pytest
from certificates import machines
from floor import Job, until

from outlast.ledger.file import read_events
from outlast.report.facts import facts

SCRIPT = """
import os, pathlib, sys, time
here = pathlib.Path(sys.argv[1])
rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
word = here / f"rank{rank}-of-{world}.tmp"
word.write_text(os.environ["OUTLAST_AGENT_PID"])
word.rename(word.with_suffix(""))
if rank != "0":
    if (here / "bug").exists():
        raise ValueError("a bug")
    if not (here / "stay").exists():
        sys.exit(0)
while not (here / "end").exists():
    time.sleep(0.01)
sys.exit(int((here / "end").read_text()))
"""


class Two:
    """Two agents of one job."""

    def __init__(self, floor, directory):
        self.floor, self.here = floor, directory
        self.job = Job(directory / "job", 2)
        self.script = directory / "script.py"
        self.script.write_text(SCRIPT)
        self.agents = []

    def start(self, *, nnodes="1:2", workers=(1, 1), env=({}, {})):
        self.agents = [
            self.floor.outlast(
                *("run", "--nnodes", nnodes, "--nproc-per-node", count),
                *("--local-addr", "127.0.0.1", "--dir", self.job.directory),
                *(self.script, self.here),
                env={"OUTLAST_WORKERS_WARM": "false", "OUTLAST_MEMBERSHIP_SILENCE": "1 s", **own},
            )
            for count, own in zip(workers, env, strict=True)
        ]

    def of(self, rank, world=2):
        """The agent of a rank, once that runs."""
        word = self.here / f"rank{rank}-of-{world}"
        until(word.exists, f"rank {rank} of {world}", running=self.agents[0])
        return next(agent for agent in self.agents if agent.pid == int(word.read_text()))

    def say(self, name, text=""):
        word = self.here / f"{name}.tmp"
        word.write_text(str(text))
        word.rename(word.with_suffix(""))

    def codes(self):
        found = [agent.wait() for agent in self.agents]
        for agent in self.agents:
            assert "Traceback (most" not in agent.err.replace("ValueError: a bug", ""), agent.text
        return found


@pytest.fixture
def two(floor, tmp_path):
    return Two(floor, tmp_path)


def test_agents_meet_under_tls(two, tmp_path):
    files = machines(tmp_path, ["one", "other"])
    settings = [
        {
            f"OUTLAST_PEER_TLS_{name.upper()}": str(getattr(one, name))
            for name in ("cert", "key", "ca")
        }
        for one in files
    ]
    two.start(nnodes="2", env=settings)
    two.of(1)
    two.of(0)
    two.say("end", 0)
    assert two.codes() == [0, 0]


def test_one_that_had_finished_ends_as_the_job_does(two):
    two.start()
    two.of(1)
    two.of(0)
    two.say("end", 2)
    assert two.codes() == [2, 2]


def test_one_that_had_finished_can_be_sent_away_and_the_job_is_not_over(two):
    two.start()
    leaver, stayer = two.of(1), two.of(0)
    leaver.signal(signal.SIGTERM)
    assert leaver.wait() == 75, leaver.text
    assert stayer.poll() is None
    assert not two.job.events("job_finished")
    two.say("end", 0)
    assert two.codes().count(0) == 1
    assert facts(list(read_events(two.job.directory)), now=None).state == "finished"


def test_a_bug_on_one_machine_ends_all_with_one_reason(two):
    two.say("bug")
    two.start(nnodes="2")
    assert [agent.wait() for agent in two.agents] == [76, 76], two.agents[0].text
    for agent in two.agents:
        assert agent.err.count("a bug in the script (exit 76)") == 1, agent.text


def test_a_notice_as_the_coordinator_dies_is_heard(two):
    two.say("stay")
    two.start()
    coordinator, other = two.of(0), two.of(1)
    coordinator.signal(signal.SIGKILL)
    other.signal(signal.SIGTERM)
    assert other.wait() == 75, other.text
    assert "Traceback" not in other.err, other.text


HANGS_S = 14  # longer than an agent may stand still: ten times the silence of a kernel


def test_an_agent_that_hangs_holds_up_nobody_and_comes_back(two):
    two.say("stay")
    two.start()
    hangs, stays = two.of(1), two.of(0)
    time.sleep(4)  # it has begun, beyond doubt
    hangs.signal(signal.SIGSTOP)
    time.sleep(HANGS_S)
    assert len(two.job.events("attempt_formed")) == 1  # its worker runs on
    os.kill(two.floor.workers()[0], signal.SIGKILL)
    assert two.of(0, world=1) is stays
    (two.here / "rank1-of-2").unlink()
    hangs.signal(signal.SIGCONT)
    assert two.of(1) is hangs
    two.say("end", 0)
    assert two.codes() == [0, 0]


def test_a_coordinator_that_hangs_is_replaced_and_knows_it_when_it_moves(two):
    two.say("stay")
    two.start()
    hangs, other = two.of(0), two.of(1)
    hangs.signal(signal.SIGSTOP)
    assert two.of(0, world=1) is other
    for rank in range(2):
        (two.here / f"rank{rank}-of-2").unlink()
    hangs.signal(signal.SIGCONT)
    assert two.of(1) is hangs
    assert two.of(0) is other
    assert "another machine coordinates this job by now" in hangs.err
    two.say("end", 0)
    assert two.codes() == [0, 0]


def test_machines_with_different_numbers_of_workers(two):
    two.start(nnodes="2", workers=(2, 1))
    for rank in range(3):
        two.of(rank, 3)
    two.say("end", 0)
    assert two.codes() == [0, 0]
