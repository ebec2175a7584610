"""Which places of a machine have a worker, and the ranks that follow."""

from types import SimpleNamespace

from torch.distributed.elastic.agent.server.api import WorkerGroup

from outlast.attempt.beat import EMPTY_VARIABLE
from outlast.attempt.over import STANDBY_VARIABLE
from outlast.launch.ending import Seats


def test_ranks_where_a_place_is_empty():
    seats = Seats([0, 2, 3], 4)
    workers = seats.workers(1, [4, 3, 4])
    assert [one.local_rank for one in workers] == [0, 1, 2, 3]
    assert [workers[place].global_rank for place in seats.taken] == [4, 5, 6]
    assert workers[1].global_rank >= 11  # nobody's
    assert {one.world_size for one in workers} == {11}


def test_those_who_ask_for_the_workers_see_none_in_an_empty_place():
    seats = Seats([0, 2], 3)
    group = WorkerGroup(SimpleNamespace(role="x", local_world_size=3))
    group.workers = seats.workers(0, [2])
    assert [one.local_rank for one in seats.of(group).workers] == [0, 2]
    assert len(group.workers) == 3


def test_who_stands_by_rehearses_with_the_rank_that_it_is_to_have():
    environ = Seats([0, 2, 3], 4).environ(1, [4, 3, 4])
    assert environ[1]["RANK"] == environ[1]["ROLE_RANK"] == "5"
    assert environ[1]["WORLD_SIZE"] == environ[1]["ROLE_WORLD_SIZE"] == "12"
    assert environ[1][STANDBY_VARIABLE]
    assert environ[0][EMPTY_VARIABLE] == "1"  # one tells of what was in the empty place
    assert [EMPTY_VARIABLE in environ[place] for place in (2, 3)] == [False, False]
    assert {environ[place]["LOCAL_WORLD_SIZE"] for place in (0, 2, 3)} == {"3"}
    assert Seats(range(4), 4).environ(1, [4, 4, 4]) == {}
