"""The global order of samples: a pure function of (seed, epoch, size), with random access.

Guarantees: within an epoch every sample id occurs exactly once; the id at any position is found
in constant memory, without computing the ones before it; the order does not depend on the number
of workers, on the library that drew other random numbers, or on the version of torch or NumPy.

How: a Feistel network is a bijection whatever its round function is, so a keyed one on the
numbers of ``2h`` bits shuffles that domain; a value that falls outside ``range(size)`` is sent
through again until it falls inside (cycle walking: J. Black and P. Rogaway, "Ciphers with
Arbitrary Finite Domains", 2002), which keeps it a bijection. The domain is less than four times
the size, so the mean number of walks is below four.

Rejected: ``torch.randperm`` per epoch (memory and time grow with the data set, and its values
are not promised across versions of torch).

``Shards`` is a global batch cut into a fixed number of shards, and the part of it that one worker
holds. Guarantees: which samples a shard has depends on nothing but the batch; which shards a worker
holds depends on nothing but the number of shards and of workers, unless the batch has shares of its
own (``Shares``, where a late worker's are made by others). Each shard is collated by itself: its
padding and its shape are the same wherever it is computed.

Rejected: cutting up the batch that a worker was given (a collated batch has been padded to what is
in it, and random numbers of ``collate_fn`` belong to all of it).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from outlast.errors import ConfigError

_MASK = (1 << 64) - 1
_NUM_ROUNDS = 8
_SORTED_SIZE = 64

CHANGES_KEPT: Final = 8  # of shares: a loader is asked for places that it has just left
_KEY_TAG = 0x0DDE4
_SEED_TAG = 0x5A3D

Indices = npt.NDArray[np.int64]


def mix64(*values: int) -> int:
    """One 64-bit number from several integers (the finaliser of splitmix64, folded)."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def sample_seed(position: int, *, seed: int) -> int:
    """The 64-bit seed of all randomness spent on the sample at the job's cursor ``position``."""
    return mix64(_SEED_TAG, seed, position)


def permute(indices: npt.NDArray[Any], *, size: int, seed: int, epoch: int) -> Indices:
    """Where the order of ``epoch`` sends each of ``indices``.

    Args:
        indices: integers in ``range(size)``, any shape.
        size: number of samples, at least 1.
        seed: the job's data seed.
        epoch: index of the epoch, from 0.

    Returns:
        int64 array of the same shape; over all of ``range(size)`` a permutation of it.
    """
    keys = _keys(seed, epoch)
    if size <= _SORTED_SIZE:
        hashes = scramble(scramble(np.arange(size, dtype=np.uint64) + keys[0]) + keys[1])
        table: Indices = np.argsort(hashes, kind="stable").astype(np.int64)
        return np.take(table, indices)
    return _walk(indices, size, keys, _feistel)


def places_of(ids: npt.NDArray[Any], *, size: int, seed: int, epoch: int) -> Indices:
    """The places in the order of ``epoch`` at which ``ids`` come: :func:`permute` backwards."""
    if size <= _SORTED_SIZE:
        table = permute(np.arange(size), size=size, seed=seed, epoch=epoch)
        return np.take(np.argsort(table), ids)
    return _walk(ids, size, _keys(seed, epoch), _unfeistel)


def ids_at(positions: npt.NDArray[Any], *, size: int, seed: int, shuffle: bool) -> Indices:
    """The ids of the samples at the job's cursors ``positions``, in any order of them.

    Args:
        positions: cursors as in :func:`sample_ids`, any shape.
        size: number of samples in the data set, at least 1.
        seed: the job's data seed.
        shuffle: without it, ids come in the data set's own order.

    Returns:
        int64 array of the same shape.
    """
    epochs, places = np.divmod(np.asarray(positions, dtype=np.int64), size)
    if not shuffle or not places.size:
        return places
    found, flat = np.empty(places.size, dtype=np.int64), places.ravel()
    together = np.argsort(epochs, axis=None, kind="stable")
    numbers, starts = np.unique(epochs.ravel()[together], return_index=True)
    for epoch, inside in zip(numbers.tolist(), np.split(together, starts[1:]), strict=True):
        found[inside] = permute(flat[inside], size=size, seed=seed, epoch=epoch)
    return found.reshape(places.shape)


def _keys(seed: int, epoch: int) -> list[np.uint64]:
    return [np.uint64(mix64(_KEY_TAG, seed, epoch, number)) for number in range(_NUM_ROUNDS)]


def _walk(
    indices: npt.NDArray[Any], size: int, keys: list[np.uint64], network: Callable[..., Any]
) -> Indices:
    """Through the network, again and again, until all are inside ``range(size)``."""
    half_bits = ((size - 1).bit_length() + 1) // 2
    values = np.array(indices, dtype=np.uint64).ravel()
    outside = np.arange(values.size)
    while outside.size:
        walked = network(values[outside], keys, half_bits)
        values[outside] = walked
        outside = outside[walked >= np.uint64(size)]
    return values.astype(np.int64).reshape(np.shape(indices))


def _unfeistel(
    values: npt.NDArray[np.uint64], keys: list[np.uint64], half_bits: int
) -> npt.NDArray[np.uint64]:
    shift = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in reversed(keys):
        left, right = right ^ (scramble(left + key) & mask), left
    return (left << shift) | right


def _feistel(
    values: npt.NDArray[np.uint64], keys: list[np.uint64], half_bits: int
) -> npt.NDArray[np.uint64]:
    shift = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (scramble(right + key) & mask)
    return (left << shift) | right


def scramble(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Each 64-bit number mixed, one to one (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def sample_ids(position: int, count: int, *, size: int, seed: int, shuffle: bool) -> list[int]:
    """The ids of ``count`` samples from the job's cursor ``position`` on.

    The cursor counts samples over the whole job: epoch ``position // size``, place
    ``position % size`` in it. A span may cross into later epochs; none is cut short.

    Args:
        position: samples consumed before, by all workers together.
        count: number of ids wanted.
        size: number of samples in the data set, at least 1.
        seed: the job's data seed.
        shuffle: without it, ids come in the data set's own order.
    """
    ids: list[int] = []
    end = position + count
    while position < end:
        epoch, place = divmod(position, size)
        stop = min(size, place + end - position)
        places = np.arange(place, stop, dtype=np.int64)
        if shuffle:
            places = permute(places, size=size, seed=seed, epoch=epoch)
        ids.extend(places.tolist())
        position += stop - place
    return ids


def held(num_shards: int, rank: int, world_size: int) -> range:
    """The shards that a worker holds, in order.

    All workers' follow each other without a gap; their numbers differ by one at most. Where there
    are more workers than shards, some have one and the others none.
    """
    return range(num_shards * rank // world_size, num_shards * (rank + 1) // world_size)


def ranges_of(counts: Sequence[int]) -> list[range]:
    """The shards of each worker, where worker r holds ``counts[r]`` of them."""
    ends = [*itertools.accumulate(counts)]
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def usual_counts(num_shards: int, world_size: int) -> tuple[int, ...]:
    """How many shards each worker holds unless somebody has said otherwise."""
    return tuple(len(held(num_shards, rank, world_size)) for rank in range(world_size))


class Shares:
    """How many shards each worker holds, from which place in the data on.

    Every worker has the same list, and a place is asked for before its batch is loaded: so what was
    loaded ahead fits what the others have loaded, however far ahead that was.

    Args:
        num_shards: of a global batch.
        world_size: number of workers.
    """

    def __init__(self, num_shards: int, world_size: int) -> None:
        self._usual = usual_counts(num_shards, world_size)
        self._changes: list[tuple[int, tuple[int, ...]]] = []  # (position, counts), in order

    @property
    def are_usual(self) -> bool:
        """Whether they were at every place that is still remembered."""
        return not self._changes

    @property
    def newest(self) -> tuple[int, ...]:
        """The counts at the furthest place that anybody has spoken of."""
        return (self._changes[-1][1] if self._changes else ()) or self._usual

    def at(self, position: int) -> tuple[int, ...]:
        """The counts of the batch that begins at ``position``; () for the usual ones."""
        counts: tuple[int, ...] = ()
        for start, changed in self._changes:
            if start > position:
                break
            counts = changed
        return counts

    def change(self, position: int, counts: Sequence[int]) -> None:
        """From ``position`` on they are these; all workers say so before any has loaded it."""
        now = tuple(counts)
        kept = [one for one in self._changes if one[0] < position][-CHANGES_KEPT:]
        self._changes = [*kept, (position, () if now == self._usual else now)]


class Shards:
    """What a worker holds of one global batch; made by ``outlast.data.Loader(…, shards=V)``.

    Attributes:
        parts: one batch for each shard held here, in order; may be empty.
        of: number of shards of the global batch.
        first: which of them ``parts`` begins with.
        position: samples that the job has consumed before, or another number that no other batch
            of the job has; all workers' are the same. Random numbers are seeded with it.
        counts: how many shards each worker holds of this batch, the same on all of them; () for the
            usual ones.
        loader: number of the loader that it is from; 0 where it was made by hand.

    Raises:
        ConfigError: the numbers do not fit.
    """

    def __init__(
        self,
        parts: Sequence[Any],
        *,
        of: int,
        first: int,
        position: int,
        counts: Sequence[int] = (),
    ) -> None:
        if first < 0 or first + len(parts) > of or position < 0:
            raise ConfigError(
                f"{len(parts)} shards from number {first} on, at position {position}, are not "
                f"part of {of} shards; shards and positions count from 0"
            )
        if counts and (min(counts) < 0 or sum(counts) != of):
            raise ConfigError(f"counts {list(counts)} are not those of {of} shards in all")
        self.parts = list(parts)
        self.of = of
        self.first = first
        self.position = position
        self.counts = tuple(counts)
        self.loader = 0

    def __len__(self) -> int:
        return len(self.parts)

    def pin_memory(self) -> Shards:
        """The same in pinned memory; torch's DataLoader asks for it."""
        from torch.utils.data._utils.pin_memory import pin_memory

        parts = [pin_memory(part) for part in self.parts]
        return Shards(
            parts, of=self.of, first=self.first, position=self.position, counts=self.counts
        )
