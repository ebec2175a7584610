"""What a session can tell about a run's bits: whether a resume will have the same, and if not, why.

Three workers or more under torch's DDP: it lays out its buckets anew after its first iteration, so
that the first step after a resume sums in another order than it would have undisturbed. A wrapper
that was not named is found by the parameters that it holds; one that is made later than the session
is entered is not.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from outlast.ledger.narrator import say
from outlast.reduce import SameBits, same_bits
from outlast.reduce.facts import difference

DDP: Final = torch.nn.parallel.DistributedDataParallel
WHERE: Final = "See docs/same-bits.md"


class Bits:
    """What the wrappers of a session's models promise.

    Args:
        wrappers: modules that were taken off: SameBits, DDP, others.
        models: what was inside of them, and those that came without.
    """

    def __init__(
        self,
        wrappers: Iterable[torch.nn.Module] = (),
        models: Iterable[torch.nn.Module] = (),
    ) -> None:
        wrappers = list(wrappers)
        self._ddp = [each for each in wrappers if isinstance(each, DDP)]
        self._models = list(models)
        named = [each for each in wrappers if isinstance(each, SameBits)]
        self._same = named or _around(self._models, list(same_bits.living))

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
        # As torch's Reducer::should_rebuild_buckets has it.
        found = [
            each
            for each in (*self._ddp, *_around(self._models, _ddp_objects()))
            if each.static_graph or not each.find_unused_parameters
        ]
        if found:
            more = " and no static_graph" if any(each.static_graph for each in found) else ""
            say(
                f"DDP on {world_size} workers sums in another order in the first step after a "
                f"resume; for the same bits give it find_unused_parameters=True{more}, or use "
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


def _around(models: Iterable[torch.nn.Module], wrappers: Iterable[Any]) -> list[Any]:
    """Those of the wrappers that hold a parameter of ``models``."""
    ours = {id(parameter) for model in models for parameter in model.parameters()}
    return [each for each in wrappers if any(id(p) in ours for p in each.parameters())]


def _ddp_objects() -> list[torch.nn.parallel.DistributedDataParallel]:
    """Of this process.

    DDP keeps no list of them, so the garbage collector is asked: some tens of milliseconds, once.
    """
    kinds = [DDP]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return [each for each in gc.get_referrers(*kinds) if isinstance(each, DDP)]
