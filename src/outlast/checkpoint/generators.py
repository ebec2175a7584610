"""Where one random-number generator stands, of any kind: read, and put back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def state_of(generator: Any) -> Any:
    """Where it stands.

    Args:
        generator: Python's, NumPy's of either kind, one of NumPy's bit generators, or torch's.
    """
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return _bits(generator).state


def put_state(generator: Any, state: Any) -> None:
    """Have it stand where :func:`state_of` found one of its kind; lists may stand for tuples."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif isinstance(generator, random.Random):
        generator.setstate(_tuples(state))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        _bits(generator).state = state


def _bits(generator: Any) -> Any:
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator


def _tuples(state: Any) -> Any:
    return tuple(map(_tuples, state)) if isinstance(state, list | tuple) else state
