"""Several agents' memberships in one process, over real sockets and a real directory."""

import contextlib
import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousError

from outlast.launch.membership import JobOver, Membership, messages
from outlast.peer.claims import Claims
from outlast.policy.membership import MembershipRules
from outlast.storage import Directory

LIMIT_S = 60


class Job:
    """Some agents of one job."""

    def __init__(self, folder):
        self.folder, self.storage = folder, Directory(folder)
        self.agents = []
        self.pool = ThreadPoolExecutor(32)

    def add(self, count, *, min_nodes, max_nodes=16, expect_s=1.0, **more):
        rules = MembershipRules(
            min_nodes=min_nodes, max_nodes=max_nodes, gather_s=0.5, expect_s=expect_s
        )
        new = [
            Membership(
                str(self.folder),
                rules,
                run_id="job",
                host="127.0.0.1",
                silence_s=1.0,
                timeout_s=LIMIT_S,
                **more,
            )
            for _ in range(count)
        ]
        self.agents += new
        return new

    def form(self, agents):
        """All of them wait for the next attempt; the attempt that they are all in."""
        waits = [self.pool.submit(agent.next_rendezvous) for agent in agents]
        infos = [wait.result(LIMIT_S) for wait in waits]
        goes = [agent.attempt for agent in agents]
        assert len({go.attempt for go in goes}) == 1, goes
        assert sorted(info.rank for info in infos) == list(range(len(agents)))
        assert all(go.members == goes[0].members for go in goes)
        return goes[0]

    def first(self, go):
        """The agent of rank 0, which coordinates."""
        return next(agent for agent in self.agents if agent.me.node == go.members[0].node)

    def crash(self, agent):
        """Its process ends without a word."""
        self.agents.remove(agent)
        agent._hub.close()
        agent._clerk.close(5)


@pytest.fixture(params=[64, 2], ids=["whole lists", "changes"])
def job(request, tmp_path, monkeypatch):
    monkeypatch.setattr(messages, "MEMBERS_MANY", request.param)
    one = Job(tmp_path)
    yield one
    for agent in one.agents:
        agent.shutdown()
    one.pool.shutdown(cancel_futures=True)


# What lists are like does not matter here.
ONE_WAY = pytest.mark.parametrize("job", [2], indirect=True, ids=["changes"])


def halted(agents):
    deadline = time.monotonic() + LIMIT_S
    while any(agent.num_nodes_waiting() == 0 for agent in agents):
        assert time.monotonic() < deadline, [agent.halt for agent in agents]
        time.sleep(0.01)


def test_losses_and_newcomers(job):
    agents = job.add(4, min_nodes=2)
    go = job.form(agents)
    other = next(agent for agent in agents if agent is not job.first(go))
    job.crash(other)
    halted(job.agents)
    smaller = job.form(job.agents)
    assert smaller.attempt > go.attempt
    assert len(smaller.members) == 3
    (new,) = job.add(1, min_nodes=2)
    joining = job.pool.submit(new.next_rendezvous)
    halted(job.agents[:-1])
    waits = [job.pool.submit(agent.next_rendezvous) for agent in job.agents[:-1]]
    for wait in [joining, *waits]:
        wait.result(LIMIT_S)
    assert {len(agent.attempt.members) for agent in job.agents} == {4}


def test_coordinators_are_lost_one_after_the_other(job):
    job.add(4, min_nodes=1)
    go = job.form(job.agents)
    for left in (3, 2, 1):
        job.crash(job.first(go))
        halted(job.agents)
        go = job.form(job.agents)
        assert len(go.members) == left
    assert Claims(job.storage).newest().attempt == go.attempt


@ONE_WAY
@pytest.mark.parametrize("last", [1, 2], ids=["in the middle", "at the end"])
def test_an_heir_knows_who_died_with_the_coordinator(job, last):
    agents = job.add(3, min_nodes=1, expect_s=10 * LIMIT_S)
    go = job.form(agents)
    by_node = {agent.me.node: agent for agent in agents}
    first, middle, end = (by_node[member.node] for member in go.members)
    survivor, other = (middle, end) if last == 2 else (end, middle)
    time.sleep(0.5)  # they have connected to each other
    job.crash(first)
    job.crash(other)
    halted([survivor])
    assert len(job.form([survivor]).members) == 1


def test_all_workers_fail_at_once_and_one_attempt_follows(job):
    """Words that cross each other on their way must not stop what has just begun."""
    job.add(4, min_nodes=4)
    go = job.form(job.agents)
    for _ in range(10):
        following = job.form(job.agents)
        assert following.attempt == go.attempt + 1
        go = following
        time.sleep(0.05)
        assert not any(agent.num_nodes_waiting() for agent in job.agents)


def test_the_end_of_the_job_reaches_those_who_were_not_told(job):
    job.add(3, min_nodes=3)
    go = job.form(job.agents)
    for agent in job.agents:
        agent.done()
    for agent in job.agents:
        assert agent.wait_until_over_or_halted(LIMIT_S)
        assert agent.over.exit_code == 0
    deaf = next(agent for agent in job.agents if agent is not job.first(go))
    agents = [agent for agent in job.agents if agent is not deaf]
    told = threading.Event()

    def forget():
        """As if the word had been lost with the connection."""
        deaf._mail.over, deaf._node._over, deaf._node._is_over = None, None, False
        deaf._node._peer.close()
        deaf._node._coordinator_lost("has ended", True)
        told.set()

    deaf._hub.call(forget)
    assert told.wait(LIMIT_S)
    with pytest.raises(JobOver):
        deaf.next_rendezvous()
    assert all(agent.over for agent in agents)


@ONE_WAY
@pytest.mark.parametrize("who", ["an heir", "another"])
def test_an_end_that_is_said_while_nobody_coordinates_is_kept(job, who):
    job.add(3, min_nodes=1)
    go = job.form(job.agents)
    by_node = {agent.me.node: agent for agent in job.agents}
    first, second, third = (by_node[member.node] for member in go.members)
    ends, other = (second, third) if who == "an heir" else (third, second)
    # It follows nobody, and nobody has noticed: the others would go on without it, in an attempt
    # that its word does not end.
    ends._hub.call(lambda: setattr(ends._node, "_peer", None))
    ends.finish(76, "a bug in the script")
    job.crash(first)
    ends._hub.call(lambda: ends._node._coordinator_lost("has ended", True))
    assert ends.wait_until_over(LIMIT_S)
    job.agents.remove(ends)
    ends.shutdown()
    # One that takes over may form an attempt before it has read in storage that the job has ended.
    with contextlib.suppress(JobOver):
        other.next_rendezvous()
    assert other.wait_until_over(LIMIT_S)
    assert other.over.exit_code == 76
    assert "a bug in the script" in other.over.reason


@ONE_WAY
@pytest.mark.parametrize("lost", ["a member", "the coordinator"])
def test_data_that_are_tied_to_three_machines_wait_for_a_third(job, lost):
    words = []
    job.add(3, min_nodes=1, say=words.append)
    go = job.form(job.agents)
    first = job.first(go)
    first.data_are_tied(True)
    others = [agent for agent in job.agents if agent is not first]
    told_by_s = time.monotonic() + LIMIT_S
    while any(agent._node._fixed != 3 for agent in others):
        assert time.monotonic() < told_by_s
        time.sleep(0.01)
    job.crash(first if lost == "the coordinator" else others[0])
    halted(job.agents)
    waits = [job.pool.submit(agent.next_rendezvous) for agent in job.agents]
    time.sleep(4.0)  # more than whoever is left would be given in a job that is not tied
    assert not any(wait.done() for wait in waits)
    assert words == ["waiting for machines: 2 of 3 are here, and the job's loader is tied to 3"] * 2
    (third,) = job.add(1, min_nodes=1)
    for wait in [*waits, job.pool.submit(third.next_rendezvous)]:
        wait.result(LIMIT_S)
    assert {len(agent.attempt.members) for agent in job.agents} == {3}


@ONE_WAY
def test_what_was_not_heard_of_is_asked_for_and_said_to_be_so(job):
    job.add(2, min_nodes=2)
    go = job.form(job.agents)
    deaf = next(agent for agent in job.agents if agent is not job.first(go))
    word = messages.GoOn(attempt=7, before="of another", gone=(), added=(), store="127.0.0.1:1")
    deaf._hub.call(lambda: deaf._node._hear(word))
    halted(job.agents)
    assert deaf.halt.reason == "the coordinator speaks of an attempt not heard of here"
    assert "broken off" in job.first(go).halt.reason
    assert job.form(job.agents).attempt == go.attempt + 1


@ONE_WAY
def test_a_claim_that_cannot_be_read_any_more_is_still_its_coordinator_s(job):
    (agent,) = job.add(1, min_nodes=1)
    go = job.form(job.agents)
    claims = Claims(job.storage)
    (job.folder / "membership" / f"attempt-{go.attempt:012d}.json").write_bytes(b"")
    counts = {claims.alive().count}
    deadline = time.monotonic() + LIMIT_S
    while len(counts) < 4:  # it goes on
        assert time.monotonic() < deadline
        counts.add(claims.alive().count)
        time.sleep(0.05)
    assert agent.halt is None


@ONE_WAY
def test_why_no_attempt_can_be_claimed_is_said(job, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    words = []
    (agent,) = job.add(1, min_nodes=1, say=words.append)
    monkeypatch.setattr(Directory, "put_new", full)
    agent._timeout_s = 4.0
    why = "storage to take the claim of an attempt ([Errno 28] No space left on device)"
    with pytest.raises(RendezvousError) as failed:
        agent.next_rendezvous()
    assert str(failed.value) == f"waited 4 s for {why}; look at {job.folder}"
    assert words == [f"waiting for {why}"]


@ONE_WAY
def test_whoever_was_started_with_other_numbers_goes_by_those_of_the_job(job):
    words = []
    job.add(2, min_nodes=1, max_nodes=2)
    job.form(job.agents)
    (other,) = job.add(1, min_nodes=3, max_nodes=7, say=words.append)
    waiting = job.pool.submit(other.next_rendezvous)
    deadline = time.monotonic() + LIMIT_S
    while not (other.runs_elsewhere and words):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert words[0] == "the job runs with --nnodes 1:2, and so does this machine"
    for agent in job.agents[:2]:
        agent.done()
    with pytest.raises(JobOver):
        waiting.result(LIMIT_S)


@ONE_WAY
def test_a_machine_of_another_job_is_refused_and_the_first_goes_on(job):
    job.add(1, min_nodes=1, script="train.py")
    job.form(job.agents)
    (stranger,) = job.add(1, min_nodes=1, script="evaluate.py")
    with pytest.raises(JobOver, match=r"the job here runs train\.py .* started with evaluate\.py"):
        stranger.next_rendezvous()
    assert stranger.others_go_on
    assert job.agents[0].halt is None


def test_an_end_is_told_whatever_its_words_are(job):
    job.add(2, min_nodes=2)
    job.form(job.agents)
    job.agents[0].finish(2, "no such file: \udcff" + "x" * 100_000)
    for agent in job.agents:
        assert agent.wait_until_over_or_halted(LIMIT_S)
        assert agent.over.exit_code == 2
        assert agent.over.reason.startswith("no such file: \\udcffxxx")


def test_a_spare_machine_waits_as_long_as_others_train(job):
    job.add(2, min_nodes=2, max_nodes=2)
    go = job.form(job.agents)
    (spare,) = job.add(1, min_nodes=2, max_nodes=2)
    spare._timeout_s = 0.5
    waiting = job.pool.submit(spare.next_rendezvous)
    time.sleep(1.5)
    assert not waiting.done()
    assert spare.runs_elsewhere
    assert spare.others_go_on
    spare._timeout_s = LIMIT_S
    job.crash(next(agent for agent in job.agents[:2] if agent is not job.first(go)))
    halted(job.agents[:1])
    job.agents[0].next_rendezvous()
    waiting.result(LIMIT_S)
    assert {member.node for member in spare.attempt.members} == {
        agent.me.node for agent in job.agents
    }
    assert not spare.runs_elsewhere
