"""The random-number states of a process, as data: Python's, NumPy's, torch's, CUDA's.

Guarantees: ``restore(capture())`` puts every stream back to the bit, also after the state went
through JSON (plain values) and safetensors (tensors). Capturing draws nothing and waits for no
device.

What can go wrong: a checkpoint from a machine with more devices than this one; the states of the
devices that are not here are left out, and a warning says so. NumPy's *global* stream is covered;
a ``numpy.random.Generator`` that a script makes is the script's to save.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from outlast.errors import ConfigError

logger = logging.getLogger(__name__)

_NUMPY_GENERATOR = "MT19937"


def capture(*, cuda: bool = True) -> dict[str, Any]:
    """All random-number states of this process.

    Args:
        cuda: include the states of the CUDA devices, where CUDA has been initialised.

    Returns:
        Plain values, int64 tensors of 625 (Python) and 624 (NumPy) words, and uint8 tensors.

    Raises:
        ConfigError: NumPy's global generator was replaced by one that is not an MT19937.
    """
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    if numpy_state["bit_generator"] != _NUMPY_GENERATOR:
        raise ConfigError(
            f"NumPy's global generator is {numpy_state['bit_generator']}, and only "
            f"{_NUMPY_GENERATOR} can be kept; do not call numpy.random.set_bit_generator"
        )
    state: dict[str, Any] = {
        "python": {
            "version": version,
            "words": torch.from_numpy(np.fromiter(words, np.int64, len(words))),
            "gauss": gauss,
        },
        "numpy": {
            "words": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "torch": torch.get_rng_state(),
    }
    if cuda and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore(state: Mapping[str, Any]) -> None:
    """Put back what :func:`capture` returned."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    numpy_state = state["numpy"]
    np.random.set_state(  # the script's own stream, whatever one thinks of it
        (
            _NUMPY_GENERATOR,
            numpy_state["words"].cpu().numpy().astype(np.uint32),
            numpy_state["pos"],
            numpy_state["has_gauss"],
            numpy_state["gauss"],
        )
    )
    torch.set_rng_state(state["torch"].cpu())
    devices = state.get("cuda", [])
    num_here = torch.cuda.device_count() if devices else 0
    for index, device_state in enumerate(devices[:num_here]):
        torch.cuda.set_rng_state(device_state.cpu(), index)
    if len(devices) > num_here:
        logger.warning(
            "the checkpoint has random-number states of %d CUDA devices, this process sees %d; "
            "the others are left out",
            len(devices),
            num_here,
        )


def seed_all(seed: int, *, cuda: bool = False) -> None:
    """Seed Python's, NumPy's global and torch's default generator, with 64 bits.

    Args:
        seed: in ``range(2**64)``.
        cuda: seed the CUDA devices' as well, where CUDA has been initialised.
    """
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    # Not torch.manual_seed, which would reseed accelerators unasked, and notes each call's stack
    # while there is none.
    torch.default_generator.manual_seed(seed)
    if cuda and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


@contextlib.contextmanager
def preserved(*, cuda: bool = True) -> Iterator[None]:
    """Random numbers drawn inside leave no trace outside, also when the block raises."""
    state = capture(cuda=cuda)
    try:
        yield
    finally:
        restore(state)
