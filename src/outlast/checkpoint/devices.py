"""Keep the GPU that is this rank's, and run threads of ours that may touch it.

A rank's device is the one that is current in the thread that trains, if its state lies there, and
otherwise the first on which its state lies. A new thread has device 0, whatever the others have:
what it asks of CUDA makes a context there, of some hundred MiB, every rank's on the same GPU. So a
thread of ours that may touch CUDA is a :class:`Thread`, and no other kind.

While a CUDA graph is captured, CUDA by default refuses calls of all threads that could spoil it (to
register memory, to ask for an event), and the capture fails with the call. Threads of ours take no
part in captures, and say so to the driver, as torch's own watchdog of NCCL does.

Rejected: ``torch.cuda.current_device()`` where a device is needed: autograd's threads have that of
the gradient, others 0. Scripts that never set a device are common.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch

logger = logging.getLogger(__name__)

_THREAD_LOCAL: Final = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, and HIP's
_here = threading.local()


class _Rank:
    """What is known of this process."""

    def __init__(self) -> None:
        self.devices: tuple[int, ...] = ()


_rank: Final = _Rank()


def settle(objects: Iterable[Any]) -> None:
    """In the thread that trains: from here on the rank's devices are those of its state.

    Args:
        objects: models and optimizers; others are passed over.
    """
    if not torch.cuda.is_initialized():
        _rank.devices = ()
        return
    found = dict.fromkeys(one.device.index for one in _tensors(objects) if one.is_cuda)
    current = torch.cuda.current_device()
    first = current if current in found or not found else next(iter(found))
    _rank.devices = (first, *(index for index in found if index != first))


def _tensors(objects: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in objects:
        if isinstance(value, torch.nn.Module):
            yield from value.parameters()
            yield from value.buffers()
        elif isinstance(value, torch.optim.Optimizer):
            for group in value.param_groups:
                yield from group["params"]


def own() -> int | None:
    """The rank's device; None where CUDA is not in use."""
    if not torch.cuda.is_initialized():
        return None
    return _rank.devices[0] if _rank.devices else int(torch.cuda.current_device())


def used() -> tuple[int, ...]:
    """The devices of the rank's state, its own one first, the others as they appear there."""
    first = own()
    return () if first is None else _rank.devices or (first,)


# --- threads -------------------------------------------------------------------------------------


class Thread(threading.Thread):
    """A thread that may touch CUDA. One that lives long calls :func:`enter` before each work."""

    def run(self) -> None:
        """As threading's, on the rank's device."""
        enter()
        super().run()


def enter() -> None:
    """In a thread of ours: what it does is on the rank's device, and in no one's graph."""
    index = own()
    if index is None:
        return
    torch.cuda.set_device(index)
    if not getattr(_here, "has_told", False):
        _here.has_told = True
        _ignore_captures()


def apart(act: Callable[[], None], name: str) -> None:
    """Do it in a thread of its own, and wait for it.

    A call of CUDA's runtime that failed leaves its error behind in the thread that made it, where
    torch takes it for that of its own next kernel.
    """
    thread = Thread(target=act, name=f"outlast-{name}", daemon=True)
    thread.start()
    thread.join()


def _ignore_captures() -> None:
    exchange = _exchange()
    if exchange is not None:
        exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))


@functools.cache
def _exchange() -> Any:
    """The driver's function that sets a thread's mode, if it can be found."""
    is_hip = torch.version.hip is not None
    try:
        driver = ctypes.CDLL("libamdhip64.so" if is_hip else "libcuda.so.1")
        return getattr(driver, f"{'hip' if is_hip else 'cu'}ThreadExchangeStreamCaptureMode")
    except (OSError, AttributeError) as error:
        logger.warning("a CUDA graph that is captured during a save may fail: %s", error)
        return None


# --- streams -------------------------------------------------------------------------------------


def stream_for(tensor: torch.Tensor) -> Any:
    """The stream on which this thread's work on ``tensor`` comes; None in this memory."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


@contextlib.contextmanager
def on(stream: Any) -> Iterator[None]:
    """In a thread of ours: in the order of another thread's ``stream``, if there is one."""
    if stream is None:
        yield
        return
    enter()
    with torch.cuda.stream(stream):
        yield
