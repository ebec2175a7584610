"""The random-number states of a process, as data: Python's, NumPy's, torch's, CUDA's.

Guarantees: ``restore(capture())`` puts every stream back to the bit, also after the state went
through JSON (plain values) and safetensors (tensors). Capturing draws nothing and waits for no
device. Where nothing was drawn since, the states are the very objects that were given before: they
are not to be written to.

CUDA's states belong to the rank, not to a device's number: those of the devices that its state lies
on (``checkpoint.devices``) go to those that it lies on then, in the same order. So a rank that was
on ``cuda:0`` of a second machine has its own random numbers on ``cuda:4`` of a larger one. Others
that this process uses are kept by their distance from the first.

What can go wrong: a checkpoint from a machine with more devices than this one; the states of the
devices that are not here are left out, and a warning says so. What is kept here are the *global*
streams; generators that a script makes are kept by ``generators.py``.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import operator
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from outlast.checkpoint import devices
from outlast.errors import ConfigError

logger = logging.getLogger(__name__)

_NUMPY_GENERATOR = "MT19937"
_NUM_WORDS = 624
_PYTHON_AT = object.__basicsize__  # behind what every object begins with
# A place among the words and four of them: whatever is drawn moves the one or makes new words.
_SIGN_BYTES = 5 * 4
_NUMPY_AT = (_NUM_WORDS - 4) * 4  # its place is behind its words
# In torch's lie: words left, a flag and three bytes of anything, its place; the words; normals.
_TORCH_WORDS_AT, _TORCH_TAIL_BYTES = 3 * 4, 28
_TORCH_SEARCHED_BYTES = 256  # of a generator, which has ten times as many
_TORCH_WORDS = slice(3, 3 + _NUM_WORDS)  # of its state: eight bytes each
_outside: list[Mapping[str, Any]] = []  # of the blocks that are open, the outermost first


def capture(*, cuda: bool = True) -> Mapping[str, Any]:
    """All random-number states of this process.

    Args:
        cuda: include the states of the CUDA devices, where CUDA has been initialised.

    Returns:
        Plain values, int64 tensors of 625 (Python) and 624 (NumPy) words, and uint8 tensors.

    Raises:
        ConfigError: NumPy's global generator was replaced by one that is not an MT19937.
    """
    seen = look()
    known, state = _LastStates.told
    if not all(map(operator.is_, known, seen)):
        state = as_data(seen)
        _LastStates.told = (seen, state)
    return _with_devices(state) if cuda and torch.cuda.is_initialized() else state


def look() -> tuple[Any, Any, torch.Tensor]:
    """The states of Python's, NumPy's and torch's own streams as they are: cheap, to compare."""
    return _look_at_python(), _look_at_numpy(), _look_at_torch()


class _LastStates:
    """What was told last, and by which signs it is known; each is one value, as threads may look.

    Asking for a state takes 1 to 80 µs, a look at its sign in the generator's memory half of one;
    and ten to fifty times as long each, where other code has run in between. A normal number that
    waits to be given out lies elsewhere and goes without a trace: then there is no sign.

    Attributes:
        told: what ``look`` saw, and what ``capture`` made of it.
        in_python, in_numpy, in_torch: the sign, b"" if there is none, and the state.
        python_at, numpy_at: the generator, and where its sign lies.
        torch_at: where that of torch's lies, nowhere if that is not known; None before it was
            looked for.
        on_devices: what ``capture`` told without the devices, and with them.
    """

    told: tuple[tuple[Any, ...], Mapping[str, Any]] = ((None, None, None), {})
    in_python: tuple[bytes, Any] = (b"", None)
    in_numpy: tuple[bytes, Any] = (b"", None)
    in_torch: tuple[bytes, torch.Tensor] = (b"", torch.empty(0))
    python_at: tuple[Any, list[memoryview]] = (None, [])
    numpy_at: tuple[Any, list[memoryview]] = (None, [])
    torch_at: list[memoryview] | None = None
    on_devices: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {})


def _look_at_python() -> Any:
    generator: Any = getattr(random.random, "__self__", None)
    if type(generator) is not random.Random:
        return random.getstate()
    owner, at = _LastStates.python_at
    if owner is not generator:
        at = _memory((id(generator) + _PYTHON_AT, _SIGN_BYTES))
        _LastStates.python_at = generator, at
    sign = b"".join(at)
    known, state = _LastStates.in_python
    if sign == known and generator.gauss_next == state[2]:
        return state
    state = random.getstate()
    # What lies there is believed only if it is the state: an interpreter may keep it elsewhere.
    is_it = sign == _words(state[1][-1], *state[1][:4])
    _LastStates.in_python = (sign if is_it else b"", state)
    return state


def _look_at_numpy() -> Any:
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not np.random.MT19937:
        return np.random.get_state(legacy=False)
    owner, at = _LastStates.numpy_at
    if owner is not generator:
        at = _memory((generator.ctypes.state_address + _NUMPY_AT, _SIGN_BYTES))
        _LastStates.numpy_at = generator, at
    sign = b"".join(at)
    known, state = _LastStates.in_numpy
    if sign == known:
        return state
    state = np.random.get_state(legacy=False)
    inner = state["state"]
    is_it = sign == _words(*inner["key"][-4:], inner["pos"]) and not state["has_gauss"]
    _LastStates.in_numpy = (sign if is_it else b"", state)
    return state


def _look_at_torch() -> torch.Tensor:
    sign = b"".join(_LastStates.torch_at or ())
    known, before = _LastStates.in_torch
    if sign and sign == known:
        return before
    state = torch.get_rng_state()
    if torch.is_inference_mode_enabled():
        return state  # of a kind that is of little use outside of that mode
    raw = state.numpy()
    if np.array_equal(raw, before.numpy()):
        state = before
    wanted = _sign_of_torch(raw)
    if _LastStates.torch_at is None and wanted:
        _LastStates.torch_at = _found_in_torch(wanted)
        sign = b"".join(_LastStates.torch_at)
    is_it = bool(wanted) and sign.startswith(wanted)
    _LastStates.in_torch = (sign if is_it else b"", state)
    return state


def _sign_of_torch(raw: Any) -> bytes:
    """The beginning of that, by a state of it; b"" if a normal number waits."""
    words = raw.view(np.uint64)
    if words[_TORCH_WORDS.stop :].any():
        return b""
    left = raw[8:12].view(np.int32)[0]
    return _words(left, words[2], *words[_TORCH_WORDS][:4])


def _found_in_torch(sign: bytes) -> list[memoryview]:
    """Where in the memory of torch's generator its sign lies: of its words, and of a normal."""
    address: int = torch.default_generator._cdata
    found = ctypes.string_at(address, _TORCH_SEARCHED_BYTES).find(sign[2 * 4 :])
    if found < _TORCH_WORDS_AT:
        return []
    at = address + found - _TORCH_WORDS_AT
    head = (at, 4), (at + 8, _TORCH_WORDS_AT - 8 + 4 * 4)
    return _memory(*head, (at + _TORCH_WORDS_AT + _NUM_WORDS * 4, _TORCH_TAIL_BYTES))


def _memory(*spans: tuple[int, int]) -> list[memoryview]:
    """That of (address, bytes), as it is whenever it is read; its owner is to be held on to."""
    arrays = ((ctypes.c_char * size).from_address(address) for address, size in spans)
    return [memoryview(one).cast("B") for one in arrays]


def _words(*words: Any) -> bytes:
    return np.array(words, np.uint32).tobytes()


def as_data(seen: tuple[Any, Any, torch.Tensor]) -> dict[str, Any]:
    """What :func:`look` saw, as :func:`capture` gives it.

    Raises:
        ConfigError: NumPy's global generator was replaced by one that is not an MT19937.
    """
    (version, words, gauss), numpy_state, torch_state = seen
    if numpy_state["bit_generator"] != _NUMPY_GENERATOR:
        raise ConfigError(
            f"NumPy's global generator is {numpy_state['bit_generator']}, and only "
            f"{_NUMPY_GENERATOR} can be kept; do not call numpy.random.set_bit_generator"
        )
    return {
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
        "torch": torch_state,
    }


def _with_devices(state: Mapping[str, Any]) -> Mapping[str, Any]:
    before, told = _LastStates.on_devices
    devices = _capture_devices()
    if before is state:
        known = told["devices"]
        is_known = known["distances"] == devices["distances"]
        if is_known and all(map(torch.equal, known["states"], devices["states"])):
            return told
    told = {**state, "devices": devices}
    if not torch.is_inference_mode_enabled():
        _LastStates.on_devices = (state, told)
    return told


def _capture_devices() -> dict[str, Any]:
    """Of those that this process uses: a device on which it holds no memory has drawn nothing."""
    own = devices.used()
    others = [
        index
        for index in range(torch.cuda.device_count())
        if index not in own and torch.cuda.memory_reserved(index)
    ]
    used = [*own, *others]
    return {
        "num_own": len(own),
        "distances": [index - own[0] for index in used],
        "states": [torch.cuda.get_rng_state(index) for index in used],
    }


def _restore_devices(saved: Mapping[str, Any]) -> None:
    num_here = torch.cuda.device_count()
    own = devices.used() or ((torch.cuda.current_device(),) if num_here else (0,))
    num_same = min(int(saved.get("num_own", 1)), len(own))
    missing = 0
    for number, state in enumerate(saved["states"]):
        distance = int(saved["distances"][number])
        index = own[number] if number < num_same else own[0] + distance
        if 0 <= index < num_here:
            torch.cuda.set_rng_state(state.cpu(), index)
        else:
            missing += 1
    _tell_of_missing(len(saved["states"]), missing, num_here)


def _restore_by_number(states: list[Any]) -> None:
    """Those of a checkpoint that has them by device number, of all devices that there were."""
    num_here = torch.cuda.device_count() if states else 0
    for index, state in enumerate(states[:num_here]):
        torch.cuda.set_rng_state(state.cpu(), index)
    _tell_of_missing(len(states), len(states[num_here:]), num_here)


def _tell_of_missing(num_saved: int, missing: int, num_here: int) -> None:
    if missing:
        logger.warning(
            "the checkpoint has random-number states of %d CUDA devices, this process sees %d; "
            "%d have no place here and are left out",
            num_saved,
            num_here,
            missing,
        )


def restore(state: Mapping[str, Any]) -> None:
    """Put back what :func:`capture` returned."""
    python, numpy_state = state["python"], state["numpy"]
    # There may be a normal number that waits now.
    _LastStates.in_python = _LastStates.in_numpy = (b"", None)
    _LastStates.in_torch = (b"", _LastStates.in_torch[1])
    words = numpy_state["words"].cpu().numpy().astype(np.uint32)
    others = numpy_state["pos"], numpy_state["has_gauss"], numpy_state["gauss"]
    _put(
        (python["version"], tuple(python["words"].tolist()), python["gauss"]),
        (_NUMPY_GENERATOR, words, *others),
        state["torch"].cpu(),
    )
    if "devices" in state:
        _restore_devices(state["devices"])
    else:
        _restore_by_number(state.get("cuda", []))


def _put(python: Any, numpy_state: Any, torch_state: torch.Tensor) -> None:
    """States in the forms that the libraries themselves give and take."""
    random.setstate(python)
    np.random.set_state(numpy_state)  # the script's own stream, whatever one thinks of it
    torch.set_rng_state(torch_state)


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
    before = _LastStates.told, _LastStates.in_python, _LastStates.in_numpy, _LastStates.in_torch
    _outside.append(state)
    try:
        yield
    finally:
        _outside.pop()
        _put(*before[0][0])
        if "devices" in state:
            _restore_devices(state["devices"])
        _LastStates.told, _LastStates.in_python, _LastStates.in_numpy, _LastStates.in_torch = before


def outside() -> Mapping[str, Any]:
    """The states as they are outside of all blocks in which they are ``preserved``."""
    return _outside[0] if _outside else capture()
