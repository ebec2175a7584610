"""A slower tier that several machines bring their files to: what comes, and what does not.

Three machines, a rank each; their workers only say what workers say (see ``lean``).
"""

import time

import pytest
from floor import until
from peer_floor import Fleet

from outlast.storage import Directory
from whole_reads import verify

NODES = ("n0", "n1", "n2")


class SlowFleet(Fleet):
    """With a slower tier that all machines see, but for those whose is broken."""

    def __init__(self, floor, place, broken=()):
        super().__init__(floor, place, (), replicas=0)
        self.slower = Directory(place / "slower")
        for node in NODES:
            path = place / "broken" if node in broken else place / "slower"
            if node in broken:
                path.write_text("")  # a file where the directory should be
            self.add(node, slower=path)

    def said(self, node, event):
        return [one for one in self.machines[node].events(event) if one["tier"] == "slower"]


@pytest.fixture(name="fleets")
def _fleets(floor, tmp_path):
    made = []

    def make(**options):
        made.append(SlowFleet(floor, tmp_path, **options))
        return made[-1]

    yield make
    for fleet in made:
        fleet.close()


def test_a_slower_tier_gets_what_all_machines_bring(fleets):
    job = fleets()
    job.start(*NODES)
    assert job.save(1) == ["", "", ""]
    until(lambda: job.said("n0", "tier_copied"), "the copy")
    verify(job.slower, 1)
    assert all(job.said(node, "tier_copied") for node in NODES)


def test_a_machine_that_gives_up_at_the_end_says_so_and_nobody_waits_for_it(fleets):
    job = fleets(broken=("n2",))
    job.start(*NODES)
    assert job.save(1) == ["", "", ""]
    until(lambda: job.said("n2", "storage_error"), "a failure")
    job.end()
    until(lambda: job.said("n0", "save_skipped"), "the word of the other machine")
    (skipped,) = job.said("n0", "save_skipped")
    assert skipped["reason"].startswith("tier slower did not get it: rank 2: ")
    assert not job.said("n0", "storage_error")
    assert not job.said("n0", "tier_copied")


def test_of_a_machine_that_is_gone_it_is_said_in_seconds(fleets):
    job = fleets(broken=("n2",))
    job.start(*NODES)
    assert job.save(1) == ["", "", ""]
    until(lambda: job.said("n2", "storage_error"), "a failure")
    since_s = time.monotonic()
    job.machines["n2"].die()
    until(lambda: job.said("n0", "storage_error"), "that it is gone")
    assert time.monotonic() - since_s < 30
    first = job.said("n0", "storage_error")[0]
    assert "rank-00002.part.json did not come from its machine" in first["error"]
    assert "gone" in first["error"]
