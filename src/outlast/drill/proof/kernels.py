"""The operations of one step, one by one: what they were given, what they made, and whose line.

Where two runs have the same batch, the same state and the same random numbers, and come to another
loss or other weights, some operation has given two results for the same question. It is the first
one whose inputs are the same in both runs and whose outputs are not.

A backward pass has no line of the script. Its operations are known by the number that autograd has
given to the forward operation that they belong to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outlast.drill.digests import digest_of, unseen
from outlast.drill.proof.still import place_of

OPERATIONS_MAX: Final = 20_000
_NO_ANSWER: Final = ("aten.detach", "aten.empty", "aten.t.", "aten.view", "aten.new_empty")


class Operations(TorchDispatchMode):
    """While it is entered, each operation of this thread is told of.

    Args:
        tell: called with its name, the digests of what it was given and of what it made, and the
            script's line, "" where it has none.
    """

    def __init__(self, tell: Callable[[str, str, str, str], None]) -> None:
        super().__init__()
        self._tell = tell
        self._lines: dict[int, str] = {}
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what is asked for, and tell."""
        options = kwargs or {}
        name = str(func)
        self._count += 1
        if self._count > OPERATIONS_MAX or name.startswith(_NO_ANSWER):
            return func(*args, **options)
        node = torch._C._current_autograd_node()
        if node is None:
            line = place_of(sys._getframe(1))
            # The node of this operation was made just before, and has taken the number.
            self._lines.setdefault(torch.autograd._get_sequence_nr() - 1, line)
        else:
            line = self._lines.get(node._sequence_nr(), "")
        with unseen():
            given = digest_of([args, options])
        made = func(*args, **options)
        with unseen():
            self._tell(name, given, digest_of(made), line)
        return made
