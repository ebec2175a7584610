"""What other machines mean for this one's workers."""

import types

import pytest

from outlast.launch.machines import Machines
from outlast.launch.membership.handler import Mailbox
from outlast.launch.membership.messages import Departs, Excluded, Go, Halt, JobEnded, Member
from outlast.policy.exclusion import Exclusion
from outlast.policy.failures import Failure


class Others:
    """A membership that says what it is told to."""

    somebody_departs = False
    halt = over = None
    halted = ""
    is_done = False
    me = Member(node="a", host="A", address="")

    def done(self):
        self.is_done = True

    def wait_until_over_or_halted(self, _):
        return bool(self.halt or self.over)


@pytest.fixture
def others():
    return Others()


@pytest.fixture
def machines(others):
    made = Machines(types.SimpleNamespace())
    made._membership = others
    return made


def failures(*codes):
    return [Failure(rank=rank, exit_code=code) for rank, code in enumerate(codes)]


def test_a_crash_of_one_whose_peers_have_drained_does_not_end_the_job(machines, others):
    others.somebody_departs = True
    assert machines.judged(failures(75, 75)).restart
    assert machines.judged(failures(75, 1)).restart
    assert machines.judged(failures(1, 1)) is None
    assert machines.judged(failures(75, 78)) is None
    others.somebody_departs = False
    assert machines.judged(failures(75, 1)) is None
    others.halt = Halt(reason="new machines are taken in", gentle=True)
    assert machines.judged(failures(75, 1)).restart


def test_one_that_is_done_ends_as_the_job_does(machines, others):
    others.over = JobEnded(exit_code=76, reason="a bug")
    assert machines.wait_for_others(lambda: False).exit_code == 76
    assert others.is_done


def test_one_that_is_done_goes_on_with_the_others(machines, others):
    others.halt = Halt(reason="b was lost")
    assert machines.wait_for_others(lambda: False) is None


def test_one_that_is_done_leaves_when_it_must(machines):
    verdict = machines.wait_for_others(lambda: True)
    assert verdict.exit_code == 75
    assert "others go on" in verdict.reason


def go(attempt, names):
    members = tuple(Member(node=name, host=name.upper(), address="") for name in names)
    return Go(attempt=attempt, members=members, store="")


def test_one_that_left_is_not_called_lost(machines, others):
    mail = Mailbox()
    others.has_left = lambda node: node in mail.departs
    lost = []
    for message in (go(1, "abcd"), Departs(node="b", host="B", goes_on=True), go(2, "ac")):
        mail.tell(message)
        others.attempt = mail.go
        lost += machines.lost()
    assert lost == [("D", "")]


def test_how_a_machine_was_lost_is_known_from_what_ended_the_attempt(machines, others):
    mail = Mailbox()
    others.has_left = lambda node: False
    halt = Halt(reason="the workers of A ended; D has been silent for 3.0 s; B cannot reach C")
    lost = []
    for message in (go(1, "abcd"), halt, go(2, "ac")):
        mail.tell(message)
        others.attempt, others.halted = mail.go, mail.halted
        lost += machines.lost()
    assert lost == [("B", "cannot reach C"), ("D", "has been silent for 3.0 s")]


@pytest.mark.parametrize(("me", "tells"), [("a", False), ("c", True), ("d", False)])
def test_a_lost_machine_that_is_back_as_rank_0_leaves_the_telling_to_another(
    machines, others, me, tells
):
    others.me = Member(node=me, host=me.upper(), address="")
    others.has_left = lambda node: False
    lost = []
    for one in (go(1, "bcd"), go(2, "acd")):  # b was started again, and is called a now
        others.attempt = one
        lost += [] if me == "a" and one.attempt == 1 else machines.lost()
    assert lost == ([("B", "")] if tells else [])


def test_trouble_elsewhere_is_waited_for(machines, others):
    assert not machines.have_trouble(0.0)
    others.halt = Halt(reason="b was lost")
    assert machines.have_trouble(0.0)
    assert not Machines(None).have_trouble(0.0)


def test_whoever_asks_for_a_machine_to_be_left_out(machines, others):
    asked = []
    others.me = types.SimpleNamespace(host="A", node="a")
    others.exclude = lambda out, gentle: asked.append((out, gentle))
    members = tuple(
        Member(node=name, host=name.upper(), address="", workers=workers)
        for name, workers in [("a", 2), ("b", 1), ("c", 2)]
    )
    others.attempt = Go(attempt=1, members=members, store="")
    hosts = [machines.host_of(rank) for rank in range(6)]
    assert hosts == ["A", "A", "B", "C", "C", None]
    assert machines.exclude("it is slow", for_s=9.0, host="B", gentle=True, spare_only=True)
    assert machines.exclude("it failed", for_s=5.0)
    b = Exclusion(host="B", reason="it is slow", for_s=9.0, spare_only=True, asker="a")
    a = Exclusion(host="A", reason="it failed", for_s=5.0, asker="a")
    assert asked == [(b, True), (a, False)]
    assert not Machines(None).exclude("it failed", for_s=5.0)
    assert Machines(None).host_of(0) is None


def test_what_comes_of_asking_is_written_down_by_who_asked(machines, others):
    others.me = types.SimpleNamespace(host="A", node="a")
    others.hear_of_left_out = lambda told: setattr(others, "told", told)
    written = []
    machines.write_down(types.SimpleNamespace(append=lambda name, **more: written.append(more)))
    for asker in "ab":
        out = Exclusion(host="B", reason="it failed", for_s=5.0, asker=asker)
        others.told(Excluded(out=out, goes=False))
    (event,) = written
    assert (event["node"], event["goes"], event["for_s"]) == ("B", False, 5.0)
    assert not event["durable"]
