"""Which of a machine's places have a worker in the attempt, and what torch's agent makes of it.

Where survivors of a loss go on without those that were lost, a place stays empty for a while: its
process is there, stands by, and has no rank. torch's agent knows of none but full machines: for it
all places have workers, of which the ranks of those that stand by lie behind everybody's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup

from outlast.attempt.line import STANDBY_VARIABLE
from outlast.attempt.own import EMPTY_VARIABLE
from outlast.launch.survivors import Kept


class Crew(NamedTuple):
    """Those of an attempt's processes here that are more than a worker that begins.

    Attributes:
        kept: local rank → one that goes on from the attempt before, or that stood by.
        standing: local rank → torch's handler of one that stands by already.
        environ: local rank → variables that are others than torch's agent has them.
    """

    kept: Mapping[int, Kept] = {}
    standing: Mapping[int, Any] = {}
    environ: Mapping[int, dict[str, str]] = {}


class Seats:
    """The places of one machine in one attempt.

    Args:
        taken: local ranks that have a worker in it.
        places: how many places there are.
    """

    def __init__(self, taken: Sequence[int], places: int) -> None:
        self.taken = list(taken)
        self.places = places

    @property
    def empty(self) -> list[int]:
        """Local ranks whose process stands by."""
        return [place for place in range(self.places) if place not in self.taken]

    def workers(self, group_rank: int, sizes: Sequence[int]) -> list[Worker]:
        """For torch's agent, one for each place.

        Args:
            group_rank: which machine this is.
            sizes: how many workers each machine has in the attempt.
        """
        first, world_size = sum(sizes[:group_rank]), sum(sizes)
        ranks = {place: first + number for number, place in enumerate(self.taken)}
        return [
            Worker(
                local_rank=place,
                global_rank=ranks.get(place, world_size + place),
                role_rank=ranks.get(place, world_size + place),
                world_size=world_size,
                role_world_size=world_size,
            )
            for place in range(self.places)
        ]

    def of(self, group: WorkerGroup) -> WorkerGroup:
        """The group as those see it that ask for the attempt's workers."""
        seen = copy.copy(group)
        seen.workers = [group.workers[place] for place in self.taken]
        return seen

    def environ(self, group_rank: int, sizes: Sequence[int]) -> dict[int, dict[str, str]]:
        """Local rank → what differs from what torch's agent would have them see.

        Who stands by goes through its beginning with the rank that it would have if all places of
        this machine were taken; one of the others tells what those before it have left behind.
        """
        if not self.empty:
            return {}
        first, world_size = sum(sizes[:group_rank]), sum(sizes) + len(self.empty)
        size = {"LOCAL_WORLD_SIZE": str(len(self.taken))}
        found = {place: dict(size) for place in self.taken}
        found[self.taken[0]][EMPTY_VARIABLE] = " ".join(map(str, self.empty))
        for place in self.empty:
            rank = str(first + place)
            sizes_now = dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), str(world_size))
            found[place] = {"RANK": rank, "ROLE_RANK": rank, **sizes_now, STANDBY_VARIABLE: "1"}
        return found
