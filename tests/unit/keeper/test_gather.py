"""What rank 0's keeper does with the parts of thousands of ranks."""

import sys

from keeper_fakes import FakeKeeper, hello

from outlast.keeper import protocol
from outlast.keeper.flight import MAX_ASKED, GatheredParts, RankPart
from outlast.storage import Directory


def calls_of(act):
    """How many Python functions ``act`` calls: work that no clock and no other process changes."""
    count = [0]

    def see(_, event, __):
        count[0] += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count[0]


def test_the_work_for_a_save_is_linear_in_the_ranks(monkeypatch, tmp_path):
    part = RankPart(replicas={"all": "1"})

    def calls(num_ranks):
        keeper = FakeKeeper(monkeypatch, {"local": Directory(tmp_path / str(num_ranks))})
        keeper.meet([0])
        keeper.worker(world_size=num_ranks).begin(5, 1)
        reports = [protocol.PartReport(step=5, serial=1, rank=rank) for rank in range(1, num_ranks)]
        who = hello(1, num_ranks)

        def report_all():
            for report in reports:
                keeper.saves.reported(who, report, part, None)

        return calls_of(report_all) / num_ranks

    assert calls(4000) < 1.1 * calls(500)


def test_replicas_are_compared_within_their_group_and_one_of_each_version_is_asked():
    found = GatheredParts(1000)
    for rank in range(1000):
        version = "odd" if rank == 7 else "even"
        found.add(rank, RankPart(replicas={"all": version, f"pair-{rank // 2}": str(rank // 2)}))
    assert found.is_whole
    assert found.differs
    assert found.ask() == {0: ("all",), 7: ("all",)}
    assert found.ask() == {}
    assert list(found.missing()) == [0, 7]
    assert not found.answer(5, {"w[0]": "1"})  # nobody asked it
    assert not found.answer(0, {"w[0]": "1", "v[0]": "1"})
    assert found.answer(7, {"w[0]": "2", "v[0]": "1"})
    assert found.differing() == ("w[0]",)


def test_of_ranks_that_are_all_different_some_are_asked():
    found = GatheredParts(100)
    for rank in range(100):
        found.add(rank, RankPart(replicas={"all": str(rank)}))
    assert len(found.ask()) == MAX_ASKED


def test_a_part_counts_once_and_ranks_that_are_not_there_do_not():
    found = GatheredParts(2)
    assert found.add(1, RankPart(error="lost", void=("a",)))
    assert not found.add(1, RankPart())
    assert not found.add(2, RankPart(error="who?"))
    assert (found.failed, found.void, found.is_whole) == ([1], {"a"}, False)
