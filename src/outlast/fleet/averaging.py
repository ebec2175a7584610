"""Means over replicas that have the same bits on all of them.

Each replica owns one part of the vector. It gets that part from all others, adds the parts up in
the order of the ranks, in fp32, and gives the mean back to all. So the mean of each element is one
sum in one order, wherever the parts and the segments that cross the network end, and whatever
arrives first. The traffic is that of a reduce-scatter and an all-gather.

``mean`` sends fp32. ``compressed_mean`` sends int8 both ways: blocks of ``BLOCK`` elements with one
fp32 scale each. What rounding takes away is not lost: the sender adds it to what it sends next
(error feedback: Seide et al. 2014; Karimireddy et al., arXiv 1901.09847), and so does the owner of
a part with the mean that it sends back (both ways: Tang et al., arXiv 1905.05957). All replicas,
the owner too, go on from what was sent, not from what was meant.

An ``ExchangeThread`` makes exchanges, one after the other in the order in which it was asked, on a
process group that nothing else uses. A ``BandwidthLimit`` keeps what it sends below a bandwidth.

What can go wrong: a replica is gone, or stays away for longer than the process group's time-out;
the error is raised where the training thread waits for the result.
Rejected: an all-reduce (the order in which it adds is its own, and differs between the parts of a
vector and with its length); an all-gather of int8 and a sum by everybody (from eight replicas on it
sends as much as fp32 does).
"""

from __future__ import annotations

import atexit
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from outlast.checkpoint import devices
from outlast.errors import ConfigError
from outlast.reduce.exchange import gather
from outlast.reduce.same_bits import place

Result = TypeVar("Result")

BLOCK: Final = 256  # elements that share a scale
_SCALE_BYTES: Final = 4
ROW_BYTES: Final = BLOCK + _SCALE_BYTES
SEGMENT_BYTES: Final = 4 << 20  # of what each replica sends to each other one at a time
LEAST_BYTES: Final = 4 << 10
END_S: Final = 20.0  # for exchanges that are in flight when the process ends
BURST_S: Final = 0.1  # of what the bandwidth lets through, sent without a pause


_ending: Final = threading.Event()  # the process ends: nobody pauses any more


class ReplicaWire(Protocol):
    """How replicas reach each other. All of them call the same methods in the same order.

    Attributes:
        rank: this replica's, from 0.
        size: how many there are.
        ranks: of each replica, the rank in the job.
    """

    rank: int
    size: int
    ranks: list[int]

    def swap(self, into: torch.Tensor, own: torch.Tensor) -> None:
        """Row r of ``own`` goes to replica r; row r of ``into`` came from it."""

    def collect(self, into: torch.Tensor, own: torch.Tensor) -> None:
        """Row r of ``into`` is what replica r gave as ``own``."""

    def adopt(self, tensor: torch.Tensor) -> None:
        """The tensor becomes replica 0's."""


class GroupWire:
    """Over a process group of its own, between the hosts (gloo).

    Args:
        group: of the replicas; None is the default one. It is asked for its ranks alone.
    """

    def __init__(self, group: Any = None) -> None:
        self.ranks = [0]
        self.rank = 0
        self._group: Any = None
        rank, self.size = place(group, "outlast.LocalUpdates()")
        if rank < 0:
            raise ConfigError(
                "this rank is not in the group that was given to outlast.LocalUpdates; give each "
                "rank the group that it is in"
            )
        if dist.is_available() and dist.is_initialized():
            self.ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            # Replicas of several ranks have one such group each for their first ranks, for their
            # second ones …; none of them knows of the others.
            self._group = dist.new_group(
                self.ranks, backend="gloo", use_local_synchronization=group is not None
            )
            self.rank = dist.get_rank(self._group)

    def swap(self, into: torch.Tensor, own: torch.Tensor) -> None:
        """As of :class:`ReplicaWire`."""
        dist.all_to_all_single(into, own, group=self._group)

    def collect(self, into: torch.Tensor, own: torch.Tensor) -> None:
        """As of :class:`ReplicaWire`."""
        gather(into.view(-1), own.view(-1), self._group)

    def adopt(self, tensor: torch.Tensor) -> None:
        """As of :class:`ReplicaWire`."""
        dist.broadcast(tensor, group=self._group, group_src=0)


class BandwidthLimit:
    """Keeps what one thread sends below a bandwidth, by pauses between segments.

    Args:
        bandwidth: bytes a second; None for no bound.
        clock: seconds.
        pause: waits for so many seconds.
    """

    def __init__(
        self,
        bandwidth: float | None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = _ending.wait,
    ) -> None:
        self._bandwidth, self._clock, self._pause = bandwidth, clock, pause
        self._free_at_s = 0.0

    def segment_bytes(self, copies: int) -> int:
        """How much of a part is sent at a time, ``copies`` times."""
        if self._bandwidth is None:
            return SEGMENT_BYTES
        burst = int(self._bandwidth * BURST_S / max(copies, 1))
        return min(max(burst, LEAST_BYTES), SEGMENT_BYTES)

    def sent(self, num_bytes: int, since_s: float) -> None:
        """So many bytes were sent since then; wait until there is room for more."""
        if self._bandwidth is None:
            return
        self._free_at_s = max(self._free_at_s, since_s) + num_bytes / self._bandwidth
        left_s = self._free_at_s - self._clock()
        if left_s > 0:
            self._pause(left_s)

    def now_s(self) -> float:
        """Seconds, for ``sent``."""
        return self._clock()


# --- means ----------------------------------------------------------------------------------------


def mean(
    wire: ReplicaWire,
    own: torch.Tensor,
    who: Sequence[bool] | None = None,
    pace: BandwidthLimit | None = None,
) -> torch.Tensor:
    """The mean of a vector over the replicas, exact in fp32 in the order of their ranks.

    Args:
        wire: to the others, which call this with vectors as long.
        own: (n,), fp32.
        who: for each replica, whether its vector counts; the same on all. None: all do.
        pace: of sending.

    Returns:
        (n,), fp32, new memory; the same bits on all replicas.
    """
    counts = [True] * wire.size if who is None else who
    rows = _dealt(own.view(-1, 1), wire.size)
    result = torch.empty_like(rows)
    for part, got in _segments(wire, rows, result, pace or BandwidthLimit(None)):
        total = _sum([each for each, is_in in zip(got, counts, strict=True) if is_in])
        part(total.div_(sum(counts)))
    return result.view(-1)[: own.numel()]


class Compressed(NamedTuple):
    """Rows of ``BLOCK`` elements each, as they are sent, and what that is worth.

    Attributes:
        rows: (blocks, ROW_BYTES), uint8: the codes, and the scale's four bytes.
        values: (blocks, BLOCK), fp32.
    """

    rows: torch.Tensor
    values: torch.Tensor


def in_blocks(flat: torch.Tensor) -> torch.Tensor:
    """A vector as (blocks, BLOCK), with zeros behind its end."""
    blocks = -(-flat.numel() // BLOCK)
    padded = torch.zeros(blocks * BLOCK, dtype=flat.dtype)
    padded[: flat.numel()] = flat
    return padded.view(blocks, BLOCK)


def compress(values: torch.Tensor) -> Compressed:
    """Round to int8: each block to whole multiples of a 127th of its largest element.

    What is not finite makes its whole block so, on all replicas alike.

    Args:
        values: (blocks, BLOCK), fp32.
    """
    scales = values.abs().amax(1, keepdim=True).div_(127) if len(values) else values[:, :1]
    codes = values.div(scales).round_().clamp_(-127, 127)
    codes = torch.where((scales > 0) & codes.isfinite(), codes, 0).to(torch.int8)
    rows = torch.cat([codes.view(torch.uint8), scales.contiguous().view(torch.uint8)], 1)
    return Compressed(rows, decoded(rows))


def decoded(rows: torch.Tensor) -> torch.Tensor:
    """What compressed rows are worth: (blocks, BLOCK), fp32."""
    codes = rows[:, :BLOCK].contiguous().view(torch.int8)
    scales = rows[:, BLOCK:].contiguous().view(torch.float32)
    return codes.to(torch.float32).mul_(scales)


def compressed_mean(
    wire: ReplicaWire, own: torch.Tensor, feedback: torch.Tensor, pace: BandwidthLimit | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of compressed vectors over all replicas, itself compressed.

    Args:
        wire: to the others, which call this with as many rows.
        own: (blocks, ROW_BYTES), from :func:`compress`.
        feedback: (blocks of this replica's part, BLOCK), fp32: what rounding has taken from the
            means that this replica sent before.
        pace: of sending.

    Returns:
        The mean (blocks, BLOCK), fp32, with the same bits on all replicas; and the new feedback.
    """
    rows = _dealt(own, wire.size)
    result = torch.empty_like(rows)
    left = torch.empty_like(feedback)
    at = 0
    for part, got in _segments(wire, rows, result, pace or BandwidthLimit(None)):
        here = slice(at, at + len(got[0]))
        wanted = _sum([decoded(each) for each in got]).div_(wire.size).add_(feedback[here])
        sent = compress(wanted)
        left[here] = wanted.sub_(sent.values)
        part(sent.rows)
        at = here.stop
    return decoded(result.view(-1, ROW_BYTES)[: len(own)]), left


def own_blocks(num_elements: int, size: int) -> int:
    """How many blocks of a vector each of ``size`` replicas owns."""
    return math.ceil(math.ceil(num_elements / BLOCK) / size)


Give = Callable[[torch.Tensor], None]


def _dealt(rows: torch.Tensor, size: int) -> torch.Tensor:
    """(length, width) → (size, part, width): the part that each replica owns; zeros at the end."""
    length, width = rows.shape
    part = -(-length // size)
    if part * size == length:
        return rows.view(size, part, width)
    padded = torch.zeros(part * size, width, dtype=rows.dtype)
    padded[:length] = rows
    return padded.view(size, part, width)


def _segments(
    wire: ReplicaWire, rows: torch.Tensor, result: torch.Tensor, pace: BandwidthLimit
) -> Any:
    """Piece by piece of this replica's part: what all replicas have of it, and where its mean goes.

    Yields:
        (give, got): ``give`` takes the mean, (length, width), and sees that all have all of it;
        ``got`` is each replica's, (size, length, width), to be used up.
    """
    size, part, width = rows.shape
    copies = 2 * (size - 1)  # what is swapped, and what is given back
    row_bytes = width * rows.element_size()
    step = max(pace.segment_bytes(copies) // row_bytes, 1)
    for first in range(0, part, step):
        here = slice(first, min(first + step, part))
        since_s = pace.now_s()
        own = rows[:, here].contiguous()
        if size == 1:
            got = own.clone()
        else:
            wire.swap(got := torch.empty_like(own), own)

        def give(total: torch.Tensor, here: slice = here) -> None:
            if size == 1:
                result[0, here] = total
                return
            all_of_it = torch.empty((size, *total.shape), dtype=total.dtype)
            wire.collect(all_of_it, total.contiguous())
            result[:, here] = all_of_it

        yield give, got
        pace.sent(copies * (here.stop - here.start) * row_bytes, since_s)


def _sum(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of fp32 vectors, in their order; the first one's memory."""
    total = vectors[0]
    for vector in vectors[1:]:
        total.add_(vector)
    return total


# --- the thread that exchanges --------------------------------------------------------------------


class ExchangeThread:
    """A thread that does one thing after the other, in the order in which it was asked.

    It begins with the first, and ends when nobody has this object any more: what it does must not
    hold it. A process that ends waits for what is in flight, a while: a thread that comes back from
    the network while Python is being taken down would abort the process, and its exit code.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._asked = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, act: Callable[[], Result]) -> Future[Result]:
        """Have it done; the future has what comes of it, or the error."""
        if self._thread is None:
            asked = self._asked
            self._thread = devices.Thread(
                target=_run, args=(asked,), name="outlast-local-updates", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, asked.put, None).atexit = False
            _threads.add(self)
        promise: Future[Result] = Future()
        self._asked.put((act, promise))
        return promise

    def stop(self, timeout_s: float) -> None:
        """Wait until all that was asked is done, but no longer than that."""
        self._asked.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)


_threads: Final[weakref.WeakSet[ExchangeThread]] = weakref.WeakSet()  # that have begun


def _end() -> None:
    _ending.set()
    deadline_s = time.monotonic() + END_S
    for each in list(_threads):
        each.stop(max(deadline_s - time.monotonic(), 0.0))


atexit.register(_end)


def _run(asked: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]) -> None:
    while (one := asked.get()) is not None:
        act, promise = one
        del one
        try:
            with torch.no_grad():
                found = act()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            promise.set_exception(error)
        else:
            promise.set_result(found)
            del found
        del act, promise
