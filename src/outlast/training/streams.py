"""The random numbers that a resumed loop goes on with."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from outlast.attempt.link import Link
from outlast.data import random_state
from outlast.data.order import mix64


class Streams:
    """Of one rank, until they are put back where the loop goes on.

    Args:
        link: says which rank this is, and of how many.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._state: Mapping[str, Any] | None = None
        self._saved_by = 1
        self._any_size = False

    def resumed(self, state: Mapping[str, Any], saved_by: int, *, any_size: bool) -> None:
        """Note what is to be put back, of ``saved_by`` workers' random numbers.

        ``any_size``: all workers' are the same, however many there are.
        """
        self._state, self._any_size = state, any_size
        self._saved_by = saved_by

    def forget(self) -> None:
        """The loop goes on: from here they are its own."""
        self._state = None

    def restore(self, step: int) -> None:
        """Put them back, if that is still to be done."""
        if self._state is None:
            return
        random_state.restore(self._state)
        if self._link.rank >= self._saved_by and not self._any_size:  # its stream is another's
            seed = mix64(torch.initial_seed(), step, self._link.rank)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed % 2**63)
