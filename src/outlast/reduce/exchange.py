"""The fixed tree over shards, and how its nodes' sums cross the network.

**The tree.** A sum of floating-point numbers depends on how it is bracketed, and on nothing else:
IEEE addition commutes. So there is one binary tree over the shards 0 … V-1, and whatever the number
of workers, the sum is the one that this tree brackets. It cuts V into as many groups as its largest
prime factor says, each of these by the next one, and so on; the groups are added in halves. A
worker holds consecutive shards, which some few nodes of the tree cover exactly; it adds up those by
itself, and only they cross the network. How many it holds makes no difference to the sum: where one
is late, others may hold some of its shards.

A shard that was left out counts as nothing in the sum, which is divided by V all the same; whoever
knows how many were left out (``parts.py``) makes the mean of those that are there.

What it costs: with W workers that have K nodes each, a worker sends K·(W-1)/W gradients to those
that add them up, and (W-1)/W of the result. K is 1 where the tree has a row of W nodes of V/W
shards, as it has for V = W·2^k: the volume of a ring all-reduce. Elsewhere it is 2 or a little
more. Rejected: a tree that is aligned for 3 and for 4 workers at once. There is none: nodes of 3
and of 4 out of 12 shards overlap. Hence the largest factor first: a job that mostly has W workers
can choose V for them, whatever W is.

**The exchange.** Each worker adds up one chunk of all, and gives it to all. The traffic is that of
a reduce-scatter and an all-gather, with the difference that what arrives is added in the order of
the tree. Two ways, the same bits:

- :class:`Messages`, in the host's memory (gloo): each chunk goes from one worker to another without
  a copy, and a thread that lives for one step adds up and answers while backward goes on.
- :class:`CollectiveExchange`, on a GPU (NCCL): all-to-all and all-gather on a stream of their own.
  Nothing waits on the host.

What can go wrong: a worker dies or stays away; the wait for its messages ends with an error, at the
latest after the process group's time-out, and the error is raised where the training waits.
Rejected: gloo's own all-to-all and all-gather (they copy what they send, and one bucket's must end
before the next one's begin).

Tensors are laid out in flat buckets, so that few large messages carry them. Where a bucket ends has
no influence on any bit: sums are made element by element. Half-precision tensors are summed in fp32
and rounded once, at the end.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

from outlast.checkpoint import devices
from outlast.data.order import ranges_of, usual_counts

Node = tuple[int, int]  # the shards from … up to


def cut(node: Node, num_shards: int) -> tuple[Node, Node]:
    """The two parts of a node of two shards or more, in the tree of ``num_shards``."""
    first, stop = node
    size = _group(num_shards, stop - first)
    middle = first + -(-(stop - first) // size // 2) * size
    return (first, middle), (middle, stop)


@functools.cache
def _group(num_shards: int, length: int) -> int:
    """The size of the groups that a node of ``length`` shards is made of."""
    size = num_shards
    while size >= length:
        size //= _largest_factor(size)
    return size


def _largest_factor(number: int) -> int:
    """The largest prime factor of 2 and more."""
    factor = 2
    while factor * factor <= number:
        if number % factor:
            factor += 1
        else:
            number //= factor
    return number


def cover(shards: range, num_shards: int, node: Node | None = None) -> Iterator[Node]:
    """The largest nodes that hold nothing but ``shards``, in order; at or below ``node``."""
    node = node or (0, num_shards)
    first, stop = node
    if stop <= shards.start or shards.stop <= first or not shards:
        return
    if shards.start <= first and stop <= shards.stop:
        yield node
        return
    for part in cut(node, num_shards):
        yield from cover(shards, num_shards, part)


def folds(leaves: Sequence[Node], node: Node, num_shards: int) -> list[int]:
    """How often to add up the last two of what is there, after each of ``leaves`` has come.

    Args:
        leaves: nodes that cover ``node`` exactly, in order.
        node: what they add up to.
        num_shards: of the tree.
    """
    ends = set(leaves)
    counts: list[int] = []

    def walk(at: Node) -> None:
        if at in ends:
            counts.append(0)
            return
        for part in cut(at, num_shards):
            walk(part)
        counts[-1] += 1

    walk(node)
    return counts


@dataclass(frozen=True)
class Turn:
    """What to do with one shard of this worker when it has been computed.

    Attributes:
        merges: how many sums are complete with it: the last two of what is held are added up.
        node: index of this worker's node that is complete then, or None.
    """

    merges: int
    node: int | None


@dataclass(frozen=True)
class ReductionPlan:
    """The tree of ``num_shards``, divided among ``world_size`` workers, as ``rank`` sees it.

    Attributes:
        num_shards: V, at least 1.
        rank: this worker's, from 0.
        world_size: number of workers, at least 1; more than shards leaves some without any.
        counts: how many shards each worker holds; () for the usual ones.
    """

    num_shards: int
    rank: int
    world_size: int
    counts: tuple[int, ...] = ()

    @cached_property
    def ranges(self) -> list[range]:
        """The shards of each worker."""
        return ranges_of(self.counts or usual_counts(self.num_shards, self.world_size))

    @property
    def held(self) -> range:
        """The shards of this worker."""
        return self.ranges[self.rank]

    @cached_property
    def nodes(self) -> list[list[Node]]:
        """The nodes of each worker, in order: all together they are all shards, in order."""
        return [list(cover(share, self.num_shards)) for share in self.ranges]

    @property
    def mine(self) -> list[Node]:
        """The nodes of this worker."""
        return self.nodes[self.rank]

    @cached_property
    def turns(self) -> list[Turn]:
        """What to do with each shard of this worker, in order."""
        found: list[Turn] = []
        for number, (first, stop) in enumerate(self.mine):
            leaves = [(shard, shard + 1) for shard in range(first, stop)]
            merges = folds(leaves, (first, stop), self.num_shards)
            found += [Turn(count, None) for count in merges[:-1]]
            found.append(Turn(merges[-1], number))
        return found

    @cached_property
    def upper(self) -> list[int]:
        """The folds of all workers' nodes, in order, up to the root."""
        return self.folds([node for nodes in self.nodes for node in nodes])

    @cached_property
    def shard_folds(self) -> list[int]:
        """The folds of single shards, in order, up to the root."""
        return self.folds([(shard, shard + 1) for shard in range(self.num_shards)])

    def folds(self, leaves: Sequence[Node]) -> list[int]:
        """The folds of nodes that cover all shards, up to the root."""
        return folds(leaves, (0, self.num_shards), self.num_shards)

    def sent(self, rank: int) -> Fraction:
        """Gradients that a worker sends; a ring all-reduce sends 2·(W-1)/W."""
        return (len(self.nodes[rank]) + 1) * Fraction(self.world_size - 1, self.world_size)


class Fold:
    """A sum in the tree's order, of what comes leaf by leaf; like the carries of a binary counter.

    At most log2 of the leaves are held at a time.

    A leaf of None is one that is not there: nothing is added for it.

    Args:
        add: adds its second argument to its first, in place.
    """

    def __init__(self, add: Callable[[Any, Any], object]) -> None:
        self._add = add
        self._held: list[Any] = []

    def push(self, leaf: Any, merges: int) -> None:
        """Take the next leaf, and add up the last two of what is held ``merges`` times."""
        self._held.append(leaf)
        for _ in range(merges):
            right = self._held.pop()
            if self._held[-1] is None:
                self._held[-1] = right
            elif right is not None:
                self._add(self._held[-1], right)

    def pop(self) -> Any:
        """What the leaves so far came to; nothing is held afterwards."""
        (total,) = self._held
        self._held = []
        return total


BUCKET_BYTES: Final = 25 << 20
FIRST_BYTES: Final = 1 << 20  # the first to be complete: the network has something to do early
WHOLE: Final = slice(None)
_ALIGNED: Final = (
    64  # bytes: where a tensor begins in a bucket is the same at any number of workers
)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What tensors of ``dtype`` are summed in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def group(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Indices of ``tensors``, bucket by bucket: the last ones first, as backward comes to them."""
    buckets: list[list[int]] = []
    open_ones: dict[Any, int] = {}  # by dtype and device: which bucket is being filled
    filled: dict[int, int] = {}
    for index in reversed(range(len(tensors))):
        tensor = tensors[index]
        key = tensor.dtype, tensor.device
        number = open_ones.get(key)
        if number is None or filled[number] >= (BUCKET_BYTES if number else FIRST_BYTES):
            number = open_ones[key] = len(buckets)
            buckets.append([])
            filled[number] = 0
        buckets[number].append(index)
        filled[number] += tensor.numel() * tensor.element_size()
    return buckets


class Bucket:
    """Room for some tensors' sums: one flat tensor for each of this worker's nodes, and the result.

    Args:
        tensors: what is laid out, all of one dtype and device.
        plan: the tree.

    Attributes:
        dtype: what is summed in.
        nodes: flat sums over this worker's nodes, each in ``world_size`` chunks of ``chunk``
            elements, of which the workers own one each.
        result: flat; the sum of all workers over the number of shards. Its memory is that of the
            first node where the dtypes are the same.
        results: views of ``result`` in the shapes and strides of ``tensors``; nobody else's, since
            one whose ``.data`` is set is no view any more.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], plan: ReductionPlan) -> None:
        self._plan = plan
        dtype, device = tensors[0].dtype, tensors[0].device
        step = max(_ALIGNED // tensors[0].element_size(), 1)
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.numel() // step) * step
        self.chunk = -(-max(end, 1) // plan.world_size)
        length = self.chunk * plan.world_size
        self.dtype = sum_dtype(dtype)
        self.nodes = [torch.zeros(length, dtype=self.dtype, device=device) for _ in plan.mine]
        if self.nodes and self.dtype == dtype:
            self.result = self.nodes[0]
        else:
            self.result = torch.zeros(length, dtype=dtype, device=device)
        self._views = [_views(flat, starts, tensors) for flat in self.nodes]
        self.results = _views(self.result, starts, tensors)
        self._fold = Fold(torch._foreach_add_)

    def take(self, tensors: Sequence[torch.Tensor | None], number: int) -> None:
        """Take one shard's values.

        Args:
            tensors: in the order of the bucket; they become the bucket's own, to be changed. None
                counts as zeros.
            number: which of this worker's shards it was, from 0.
        """
        turn = self._plan.turns[number]
        leaf = [
            torch.zeros_like(view) if tensor is None else tensor.to(self.dtype)
            for tensor, view in zip(tensors, self._views[0], strict=True)
        ]
        self._fold.push(leaf, turn.merges)
        if turn.node is not None:
            torch._foreach_copy_(self._views[turn.node], self._fold.pop())

    def leave_out(self, number: int) -> None:
        """One of this worker's shards is not there; ``number`` is which, from 0."""
        turn = self._plan.turns[number]
        self._fold.push(None, turn.merges)
        if turn.node is None:
            return
        found = self._fold.pop()
        if found is None:
            self.nodes[turn.node].zero_()
        else:
            torch._foreach_copy_(self._views[turn.node], found)

    def forget(self) -> None:
        """Let go of what a step that was not finished has left."""
        self._fold = Fold(torch._foreach_add_)

    def complete(
        self, others: Sequence[Sequence[torch.Tensor]], part: slice = WHOLE
    ) -> torch.Tensor:
        """Sum up this worker's own chunk and write it into ``result``.

        Args:
            others: for each worker the chunk of each of its nodes; this worker's own included.
                What is in them is used up.
            part: of the chunks, if only that is there yet.

        Returns:
            That part of the result.
        """
        own = self.piece(self.result, self._plan.rank)[part]
        fold = Fold(lambda left, right: left.add_(right))
        leaves = (chunk for chunks in others for chunk in chunks)
        for chunk, merges in zip(leaves, self._plan.upper, strict=True):
            fold.push(chunk[part], merges)
        total = fold.pop()
        if total.dtype == own.dtype:
            torch.div(total, self._plan.num_shards, out=own)
        else:
            own.copy_(total.div_(self._plan.num_shards))
        return own

    def piece(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """The chunk of a flat tensor that ``rank`` owns."""
        return flat[rank * self.chunk : (rank + 1) * self.chunk]

    def own_pieces(self) -> list[torch.Tensor]:
        """This worker's own chunk of each of its nodes."""
        return [self.piece(flat, self._plan.rank) for flat in self.nodes]


def _views(
    flat: torch.Tensor, starts: Sequence[int], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    views = []
    for start, tensor in zip(starts, tensors, strict=True):
        part = flat[start : start + tensor.numel()]
        # As autograd lays out a gradient: like the parameter, where that is dense (channels last).
        strides = torch.empty_like(tensor, device="meta").stride()
        dense = strides == tensor.stride()
        views.append(part.as_strided(tensor.shape, strides) if dense else part.view(tensor.shape))
    return views


_TAG: Final = 0x5B00000  # of our messages, apart from those that a script sends
_CHANNEL_TAGS: Final = 1 << 22  # one for each segment and node: a TiB of gradients has some 2^20
_NUM_CHANNELS: Final = 400  # gloo counts tags in 31 bits; later channels are the first ones again
SEGMENT_BYTES: Final = 2 << 20  # of a chunk: one is added up while the next arrives
Expected = list[tuple[list[Any], list[Any]]]  # for each segment, what nodes and results arrive by
JOIN_S: Final = 5.0  # for the thread of a step that was given up


def gather(into: torch.Tensor, own: torch.Tensor, group: Any) -> None:
    """All workers' tensors, one after the other, for each of them."""
    # torch 2.13 has a new name for it, and warns at the old one.
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    call(into, own, group=group)


_opened: Final[weakref.WeakKeyDictionary[Any, int]] = weakref.WeakKeyDictionary()  # by group


class GroupChannel:
    """Tags of one model's messages, apart from those of others that are under way in its group.

    A message goes to whoever waits for its tag, and two models' loops may be open at once.

    Args:
        group: the process group; None is the default one.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.first_tag = _TAG
        self._opened_in: Callable[[], Any] = lambda: None

    def __reduce__(self) -> tuple[Any, ...]:
        return GroupChannel, (self.group,)  # a model that is loaded has taken none

    def open(self) -> bool:
        """Take the next free tags of the group, unless some are taken there already.

        All workers open a group's channels in the same order: when a step begins, not when a model
        is made, since one worker alone may copy one.

        Returns:
            Whether the group is another one than before.
        """
        group = dist.group.WORLD if self.group is None else self.group
        if group is None or self._opened_in() is group:
            return False
        number = _opened.get(group, 0)
        _opened[group] = number + 1
        self.first_tag = _TAG + number % _NUM_CHANNELS * _CHANNEL_TAGS
        self._opened_in = weakref.ref(group)
        return True


class Exchange(Protocol):
    """Carries the sums of one set of buckets, step after step."""

    def begin(self) -> None:
        """A step's buckets will be launched from here on."""

    def launch(self, number: int) -> None:
        """Bucket ``number`` has all of this worker's nodes; all workers launch them in order."""

    def finish(self) -> None:
        """Wait until every bucket has its result.

        Raises:
            RuntimeError: a worker is gone.
        """

    def abort(self) -> None:
        """Give up the step: it will not be finished."""


def open_exchange(
    plan: ReductionPlan, buckets: Sequence[Bucket], channel: GroupChannel
) -> Exchange:
    """The exchange that suits the place where the buckets are.

    Args:
        plan: the tree.
        buckets: all of one kind of device.
        channel: the model's; it is open when a step begins.
    """
    if plan.world_size == 1:
        return Alone(plan, buckets)
    if buckets and buckets[0].result.device.type == "cpu":
        return Messages(plan, buckets, channel)
    return CollectiveExchange(plan, buckets, channel)


class Alone:
    """The exchange of a single worker, which has all: nothing is sent."""

    def __init__(self, plan: ReductionPlan, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets

    def begin(self) -> None:
        """Nothing to prepare."""

    def launch(self, number: int) -> None:
        """Divide."""
        bucket = self._buckets[number]
        bucket.complete([bucket.own_pieces()])

    def finish(self) -> None:
        """Nothing to wait for."""

    def abort(self) -> None:
        """Nothing is under way."""


class Messages:
    """Chunks as messages between two workers each.

    Args:
        plan: the tree.
        buckets: in the order in which they are launched.
        channel: the model's; its exchanges follow each other.
    """

    def __init__(
        self, plan: ReductionPlan, buckets: Sequence[Bucket], channel: GroupChannel
    ) -> None:
        self._plan = plan
        self._buckets = buckets
        self._channel = channel
        # The next rank first, so that not all begin with the same one.
        self._others = [(plan.rank + by) % plan.world_size for by in range(1, plan.world_size)]
        most = max(len(nodes) for nodes in plan.nodes)
        self._chunks = [
            {
                rank: [torch.empty(bucket.chunk, dtype=bucket.dtype) for _ in plan.nodes[rank]]
                for rank in self._others
            }
            for bucket in buckets
        ]
        self._segments = [_segments(bucket) for bucket in buckets]
        # Bucket and segment → the tag of its first node, from the channel's first one on; that of
        # the result comes after the last.
        tags = itertools.count(0, most + 1)
        self._tags = [[next(tags) for _ in segments] for segments in self._segments]
        self._last_tag = most
        self._launched: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._sent: list[Any] = []
        self._is_given_up = False
        self._error: BaseException | None = None

    def begin(self) -> None:
        """Say where everything is to be written, and start the thread that answers.

        Others' messages go straight to their places if these are known when they set out.
        """
        self._error, self._is_given_up = None, False
        self._launched = queue.SimpleQueue()
        expected = [self._expect(number) for number in range(len(self._buckets))]
        self._thread = devices.Thread(
            target=self._run, args=(expected,), name="outlast-reduce", daemon=True
        )
        self._thread.start()

    def launch(self, number: int) -> None:
        """Send this worker's nodes to those who add them up."""
        bucket = self._buckets[number]
        for segment, tag in zip(self._segments[number], self._tags[number], strict=True):
            for rank in self._others:
                for index, flat in enumerate(bucket.nodes):
                    self._send(bucket.piece(flat, rank)[segment], rank, tag + index)
        self._launched.put(number)

    def finish(self) -> None:
        """Wait until every bucket has its result."""
        assert self._thread is not None  # noqa: S101 - begin() comes first
        self._launched.put(None)
        self._thread.join()
        self._thread = None
        if self._error is not None:
            raise self._error
        for work in self._sent:
            work.wait()
        self._sent = []

    def abort(self) -> None:
        """Let the thread go; one that waits for a worker ends with the group's time-out."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._is_given_up = True
            self._launched.put(None)
            thread.join(JOIN_S)
        self._sent = []

    def _run(self, expected: Sequence[Expected]) -> None:
        try:
            for number in iter(self._launched.get, None):
                self._answer(number, expected[number])
            if self._is_given_up:
                return
            for arriving in expected:
                for _, results in arriving:
                    for work in results:
                        work.wait()
        except BaseException as error:  # noqa: BLE001 - raised by finish()
            self._error = error

    def _expect(self, number: int) -> Expected:
        """Say where a bucket's chunks are to be written: for each segment (nodes, results).

        A result may be announced before this worker's own nodes are sent, though it is written over
        them: it cannot be there before they were.
        """
        bucket = self._buckets[number]
        expected: Expected = []
        for segment, tag in zip(self._segments[number], self._tags[number], strict=True):
            nodes, results = [], []
            for rank in self._others:
                for index, chunk in enumerate(self._chunks[number][rank]):
                    nodes.append(self._receive(chunk[segment], rank, tag + index))
                piece = bucket.piece(bucket.result, rank)
                results.append(self._receive(piece[segment], rank, tag + self._last_tag))
            expected.append((nodes, results))
        return expected

    def _answer(self, number: int, expected: Expected) -> None:
        """Add up this worker's chunk of a bucket as it arrives, and give it to all."""
        bucket, found = self._buckets[number], self._chunks[number]
        mine = bucket.own_pieces()
        chunks = [found.get(rank, mine) for rank in range(self._plan.world_size)]
        places = zip(self._segments[number], self._tags[number], expected, strict=True)
        for segment, tag, (arriving, _) in places:
            for work in arriving:
                work.wait()
            own = bucket.complete(chunks, segment)
            for rank in self._others:
                self._send(own, rank, tag + self._last_tag)

    def _send(self, tensor: torch.Tensor, rank: int, tag: int) -> None:
        tag += self._channel.first_tag
        self._sent.append(dist.isend(tensor, group=self._channel.group, group_dst=rank, tag=tag))

    def _receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        tag += self._channel.first_tag
        return dist.irecv(tensor, group=self._channel.group, group_src=rank, tag=tag)


def _segments(bucket: Bucket) -> list[slice]:
    """A chunk in parts of about the same size."""
    count = -(-bucket.chunk * bucket.dtype.itemsize // SEGMENT_BYTES)
    edges = [bucket.chunk * number // count for number in range(count + 1)]
    return [slice(*edge) for edge in itertools.pairwise(edges)]


class CollectiveExchange:
    """All-to-all and all-gather; on a GPU on a stream of their own.

    Args:
        plan: the tree.
        buckets: in the order in which they are launched.
        channel: the model's; only the group is of interest, collectives go by their order.
    """

    def __init__(
        self, plan: ReductionPlan, buckets: Sequence[Bucket], channel: GroupChannel
    ) -> None:
        self._plan = plan
        self._buckets = buckets
        self._group = channel.group
        self._num_nodes = [len(nodes) for nodes in plan.nodes]
        self._chunks = [
            torch.empty(
                (sum(self._num_nodes), bucket.chunk),
                dtype=bucket.dtype,
                device=bucket.result.device,
            )
            for bucket in buckets
        ]
        devices = {bucket.result.device for bucket in buckets if bucket.result.is_cuda}
        self._streams = {device: torch.cuda.Stream(device) for device in devices}

    def begin(self) -> None:
        """Nothing to prepare: work is queued as it comes."""

    def launch(self, number: int) -> None:
        """Queue both exchanges of a bucket and the sum between them."""
        bucket = self._buckets[number]
        device = bucket.result.device
        with contextlib.ExitStack() as stack:
            stream = self._streams.get(device)
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(device))
                stack.enter_context(torch.cuda.stream(stream))
            self._exchange(bucket, self._chunks[number])

    def _exchange(self, bucket: Bucket, chunks: torch.Tensor) -> None:
        world_size, size = self._plan.world_size, bucket.chunk
        if len(bucket.nodes) == 1:
            sent = bucket.nodes[0]  # in chunks by owner already
        elif bucket.nodes:
            rows = [flat.view(world_size, size) for flat in bucket.nodes]
            sent = torch.stack(rows, dim=1).view(-1)
        else:
            sent = chunks.new_empty(0)
        dist.all_to_all_single(
            chunks.view(-1),
            sent,
            [count * size for count in self._num_nodes],
            [len(bucket.nodes) * size] * world_size,
            group=self._group,
        )
        found = chunks.split(self._num_nodes)
        own = bucket.complete([list(rows.unbind()) for rows in found])
        gather(bucket.result, own, self._group)

    def finish(self) -> None:
        """Have the current streams wait for the results; the host does not."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def abort(self) -> None:
        """What is queued will end or fail by itself."""
