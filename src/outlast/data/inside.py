"""Whether random numbers are drawn inside a loader's processes, where they cannot be kept.

A map-style data set in loader processes draws from streams of theirs, and from copies of the
generators that it holds. A resume in the midst of an epoch starts new processes, whose streams
begin anew. Batches are not touched to see it: a collate function around the script's own compares
the states after each batch, in the process, and sets a mark in memory that all of them share.

What can go wrong: what a data set draws without handing out a batch afterwards is not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from outlast.checkpoint.attributes import state_of
from outlast.data import random_state
from outlast.data.generators import Held, same

GLOBAL: Final = "Python's, NumPy's or torch's global generator"


class Watch:
    """Goes with a loader's processes in place of its ``collate_fn`` and ``worker_init_fn``.

    Args:
        loader: a torch DataLoader with processes; a copy, whose two functions are replaced.
        roots: (name, object): what of the script's goes into the processes.
    """

    def __init__(self, loader: Any, roots: list[tuple[str, Any]]) -> None:
        carried = Held(roots).items()
        self._names = [GLOBAL, *[name for name, _ in carried]]
        self._marks = torch.zeros(len(self._names), dtype=torch.uint8).share_memory_()
        watching = _Watching(
            loader.collate_fn, loader.worker_init_fn, [one for _, one in carried], self._marks
        )
        loader.collate_fn, loader.worker_init_fn = watching, watching.begin

    def drawn(self) -> list[str]:
        """Names of what was drawn from."""
        return [name for name, mark in zip(self._names, self._marks.tolist(), strict=True) if mark]


class _Watching:
    def __init__(
        self,
        collate: Callable[[Any], Any],
        user_init: Callable[[int], Any] | None,
        generators: list[Any],
        marks: torch.Tensor,
    ) -> None:
        self._collate = collate
        self._user_init = user_init
        self._generators = generators
        self._marks = marks
        self._latest: list[Any] = []

    def begin(self, worker_id: int) -> None:
        """In a process, before its first item."""
        if self._user_init is not None:
            self._user_init(worker_id)
        self._latest = self._states()

    def __call__(self, items: Any) -> Any:
        """The script's batch of ``items``."""
        batch = self._collate(items)
        if self._latest:  # else no process of ours
            now = self._states()
            for number, (one, other) in enumerate(zip(now, self._latest, strict=True)):
                if not self._marks[number] and not same([one], [other]):
                    self._marks[number] = 1
            self._latest = now
        return batch

    def _states(self) -> list[Any]:
        return [random_state.look(), *map(state_of, self._generators)]
