"""Keep the GPU that is this rank's, run threads of ours that may touch it, and copy from it.

A rank's device is the one that is current in the thread that trains, if its state lies there, and
otherwise the first on which its state lies. A new thread has device 0, whatever the others have:
what it asks of CUDA makes a context there, of some hundred MiB, every rank's on the same GPU. So a
thread of ours that may touch CUDA is a :class:`Thread`, and no other kind.

While a CUDA graph is captured, CUDA by default refuses calls of all threads that could spoil it (to
register memory, to ask for an event), and the capture fails with the call. Threads of ours take no
part in captures, and say so to the driver, as torch's own watchdog of NCCL does.

Copies of a snapshot go on a stream of their own, behind the training's stream. What training had
put into its queue at the boundary comes before the copies; the optimizer's stream waits for them on
the device, so the host never waits. Pieces that other ranks hold too are hashed on the device:
bringing a replica to the host only to compare it would cost as much as its copy. While copies are
under way no CUDA graph is captured (see ``writers``): torch hands out streams in turn from a small
pool, so that ours may be the one that is captured.

Rejected: ``torch.cuda.current_device()`` where a device is needed: autograd's threads have that of
the gradient, others 0. Scripts that never set a device are common.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from outlast.checkpoint.capture import Capture, TensorPiece

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


# --- copies from GPUs -----------------------------------------------------------------------------

_CHUNK: Final = 1 << 21  # words of 32 bits that are hashed at once
_SEED: Final = 20_261_123
_BASES: Final = (0x9E3779B97F4A7C13, 0xBF58476D1CE4E5BB)  # odd, of the chunks


class CudaCopies:
    """The copies of one snapshot from all devices.

    It does not hold its capture: in a circle both would keep the tensors until garbage is looked
    for, and the next snapshot would take their memory for held by others, and copy it at once.

    Args:
        sources: what is to be copied.
        checks: what is only to be hashed.
        buffer: the arena; its memory should be registered with the driver.

    Attributes:
        over: set once no copy is under way any more.
    """

    def __init__(
        self,
        sources: Sequence[TensorPiece],
        checks: Sequence[TensorPiece],
        buffer: torch.Tensor,
    ) -> None:
        self.over = threading.Event()
        self._buffer = buffer
        self._sources = sources
        self._checks = checks
        self._launched = threading.Event()
        self._last: dict[torch.device, Any] = {}
        self._begun: dict[torch.device, Any] = {}
        for device in {source.tensor.device for source in [*sources, *checks]}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._begun[device] = event

    def run(self, reports: Capture) -> None:
        """Launch everything, then report blocks as they arrive; in a copier's thread.

        Args:
            reports: told of bytes that have arrived.
        """
        try:
            self._run(reports)
        finally:
            try:  # where it failed, too: the arena and the tensors may be used for something else
                for event in self._last.values():
                    event.synchronize()
            finally:
                self.over.set()

    def _run(self, reports: Capture) -> None:
        arrived: list[tuple[Any, TensorPiece]] = []
        hashed: list[tuple[TensorPiece, torch.Tensor]] = []
        try:
            for source in self._sources:
                arrived.append((self._launch(source, hashed), source))  # noqa: PERF401 - in order
            for check in self._checks:
                self._launch_hash(check, hashed)
        finally:
            self._launched.set()
        for event, source in arrived:
            event.synchronize()
            write: Any = source.write
            reports.count(write.start, write.end)
        for source, sums in hashed:
            with torch.cuda.stream(_stream(source.tensor.device)):
                reports.digests[source.key] = in_words(sums)

    def hold_back_training(self) -> None:
        """Before anything is changed: the device finishes the copies first, the host goes on."""
        self._launched.wait()
        for device, event in self._last.items():
            torch.cuda.current_stream(device).wait_event(event)

    def _launch(self, source: TensorPiece, hashed: list[tuple[TensorPiece, torch.Tensor]]) -> Any:
        write: Any = source.write
        device = source.tensor.device
        with torch.cuda.stream(self._behind(device)):
            target = self._buffer[write.start : write.end].view(write.dtype)
            # Here: torch would do it on the host, as soon as the copy is queued.
            plain = source.tensor.resolve_conj().resolve_neg()
            target.view(write.piece.shape).copy_(plain, non_blocking=True)
            if write.shared:
                hashed.append((source, sums_of(source.tensor.to(write.dtype))))
        return self._record(device)

    def _launch_hash(
        self, check: TensorPiece, hashed: list[tuple[TensorPiece, torch.Tensor]]
    ) -> None:
        device = check.tensor.device
        with torch.cuda.stream(self._behind(device)):
            hashed.append((check, sums_of(check.tensor.to(check.write.dtype))))
        self._record(device)

    def _behind(self, device: torch.device) -> Any:
        stream = _stream(device)
        if device not in self._last:
            stream.wait_event(self._begun[device])
        return stream

    def _record(self, device: torch.device) -> Any:
        event = torch.cuda.Event(blocking=True)  # waited for asleep: a core is training's
        event.record(_stream(device))
        self._last[device] = event
        return event


# --- digests -------------------------------------------------------------------------------------


def sums_of(tensor: torch.Tensor) -> torch.Tensor:
    """A digest of a tensor's bits and their order that a device computes.

    Two sums modulo 2^64 of its words of 32 bits, each times an odd number drawn for its place in
    its chunk, and each chunk's sum times a power of another odd number (multilinear hashing; Lemire
    and Kaser, 2014): words that differ, or have changed places, keep one sum with about 2^-31.
    """
    words = _words_of(tensor)
    found = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    numbers = _numbers(tensor.device)
    for chunk, start in enumerate(range(0, len(words), _CHUNK)):
        part = words[start : start + _CHUNK]
        for index, base in enumerate(_BASES):
            power = pow(base, chunk, 1 << 64)
            power -= (power >> 63) << 64  # as torch counts
            found[index] += (part * numbers[index, : len(part)]).sum() * power
    return found


def in_words(sums: torch.Tensor) -> str:
    """The digest as text; waits for the device."""
    return "-".join(str(number) for number in sums.tolist())


def _words_of(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    raw = flat.view(torch.uint8)
    if raw.numel() % 4 or raw.storage_offset() % 4 or raw.data_ptr() % 4:
        whole = raw.new_zeros(-(-raw.numel() // 4) * 4)
        whole[: raw.numel()] = raw
        raw = whole
    return raw.view(torch.int32)


_drawn: dict[torch.device, torch.Tensor] = {}


def _numbers(device: torch.device) -> torch.Tensor:
    """Those of the places, the same in every process."""
    if device not in _drawn:
        generator = torch.Generator().manual_seed(_SEED)
        least, most = -(1 << 63), (1 << 63) - 1
        drawn = torch.randint(least, most, (2, _CHUNK), generator=generator)
        _drawn[device] = (drawn | 1).to(device)
    return _drawn[device]


_streams: dict[torch.device, Any] = {}


def _stream(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
