"""What a session can tell about a run's bits: whether a resume will have the same, and if not, why.

Three workers or more under torch's DDP: it lays out its buckets anew after its first iteration, so
that the first step after a resume sums in another order than it would have undisturbed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from outlast.ledger.narrator import say
from outlast.reduce import SameBits
from outlast.reduce.facts import difference

DDP: Final = torch.nn.parallel.DistributedDataParallel
WHERE: Final = "See docs/same-bits.md"


class Bits:
    """What the wrappers of a session's models promise.

    Args:
        wrappers: modules that were taken off: SameBits, DDP, others.
    """

    def __init__(self, wrappers: Iterable[torch.nn.Module] = ()) -> None:
        wrappers = list(wrappers)
        self._same = [each for each in wrappers if isinstance(each, SameBits)]
        self._ddp = [each for each in wrappers if isinstance(each, DDP)]

    @property
    def any_size(self) -> bool:
        """Whether the bits are meant to be the same at any number of workers."""
        return bool(self._same)

    def facts(self) -> list[dict[str, str]]:
        """What they depend on; goes into each checkpoint."""
        return [each.facts for each in self._same]

    def tell_at_start(self, rank: int, world_size: int) -> None:
        """Say what will not be the same after a resume, and the remedy."""
        if rank or world_size < 3:
            return
        if any(not each.find_unused_parameters for each in self._ddp):
            say(
                f"DDP on {world_size} workers sums in another order in the first step after a "
                "resume; for the same bits give it find_unused_parameters=True, or use "
                f"outlast.SameBits in its place. {WHERE}"
            )

    def tell_of_resume(
        self, saved: Iterable[Mapping[str, Any]], rank: int, saved_by: int, world_size: int
    ) -> None:
        """Say what is not as it was when the checkpoint was written.

        Args:
            saved: the facts then.
            rank: this worker's.
            saved_by: the number of workers then.
            world_size: the number of workers now.
        """
        if rank:
            return
        found = next(filter(None, map(difference, saved, self.facts())), "")
        if found:
            say(f"the run's bits may differ from here on: other {found} than before. {WHERE}")
        elif world_size != saved_by and not self.any_size:
            say(
                f"resumed with {world_size} in place of {saved_by} workers: random numbers "
                "and sums of gradients are not those of an undisturbed run"
            )
