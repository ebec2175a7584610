"""Two halves of a job under one number, a real keeper each: the claim says which one commits."""

import os
import signal

import msgspec
import pytest
from floor import until
from lean import Place

from outlast.keeper.process import Supervisor
from outlast.ledger.file import read_events
from outlast.peer.claims import Claim, Claims
from outlast.storage import Directory

HALVES = ("majority", "minority")
NUMBER = 1


class Half(Place):
    """Machines that go on together: their keeper commits, to a tier that is elsewhere."""

    def __init__(self, floor, directory, term, claims):
        super().__init__(floor, directory / term)
        self.term, self.claims = term, Claims(claims)
        self.setup = msgspec.structs.replace(self.setup, claims=str(claims.root))
        self.supervisor = Supervisor(self.setup)
        self.supervisor.start()
        assert self.supervisor.tell_members(NUMBER, [], 60, term=term)
        self.workers = []

    def worker(self, **options):
        self.workers.append(super().worker(**options))
        return self.workers[-1]

    def claim(self, number=NUMBER):
        made = Claim(attempt=number, node=self.term, host="", address="", term=self.term)
        return self.claims.take(made, number - 1)

    def held(self):
        events = [event for event in read_events(self.directory) if event.event == "storage_error"]
        return [event["error"] for event in events if event["operation"] == "claim"]


@pytest.fixture
def halves(floor, tmp_path, monkeypatch):
    for name, value in floor.environ.items():  # keepers that are started here are the floor's
        monkeypatch.setenv(name, value)
    claims = Directory(tmp_path / "claims")
    both = [Half(floor, tmp_path, term, claims) for term in HALVES]
    yield both
    for half in both:
        for worker in half.workers:
            worker.close()
        half.supervisor.close(20.0)


@pytest.mark.parametrize("first", [0, 1], ids=HALVES)
def test_the_half_that_has_the_claim_commits_and_the_other_does_not(halves, first):
    winner, loser = halves[first], halves[1 - first]
    workers = [half.worker() for half in (winner, loser)]
    serials = [worker.begin(10) for worker in workers]
    assert winner.claim()
    assert not loser.claim()
    assert workers[0].wait(serials[0]) == ""
    assert "attempt 1 was claimed by other machines" in workers[1].wait(serials[1])
    assert winner.committed() == [10]
    assert loser.committed() == []
    # A keeper that is started again is told whose it is.
    for half in halves:
        half.attempt = 0
        old = half.supervisor.pid
        os.kill(old, signal.SIGKILL)
        until(lambda half=half, old=old: half.supervisor.pid != old, "another keeper")
    assert [half.worker().save(20) == "" for half in (winner, loser)] == [True, False]


def test_claims_that_cannot_be_read_hold_a_save_and_nothing_else(halves, tmp_path):
    half = halves[0]
    assert half.claim()
    claims = tmp_path / "claims"
    claims.rename(tmp_path / "away")
    claims.write_text("not a directory")
    worker = half.worker(buffers=2)
    first = worker.begin(10)
    until(half.held, "a reason in the ledger")
    assert "cannot be read: Not a directory" in half.held()[0]
    second = worker.begin(20, arena=1)  # training goes on, and there is room
    assert "step 20 waits in its place" in worker.wait(first)
    assert second not in worker.ended
    assert half.committed() == []
    claims.unlink()
    (tmp_path / "away").rename(claims)
    assert worker.wait(second) == ""
    assert half.committed() == [20]
