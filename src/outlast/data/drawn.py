"""Orders that are drawn epoch by epoch: by samplers, batch samplers, weights and lengths.

Guarantees: the order of an epoch follows from (seed, epoch) alone, so that all workers draw the
same one, and so does a run that is resumed at another number of workers. A sampler is iterated in
the training process, once for each epoch: Python's, NumPy's global and torch's default generator,
and the torch generators that it holds, are seeded before and put back behind, and ``set_epoch`` is
called where it has that. It is iterated twice for the first epoch, and refused if it gives another
order then.

Batches of variable length are those of all workers together: each takes its part of every batch,
of as many samples as the others' or one less, or with lengths of about as many tokens.

What can go wrong: a sampler whose order depends on the process (its rank, the time): a word for the
epoch's order is compared at a resume, and the workers' are compared by the audit.

Rejected: the orders in the checkpoint (as large as the data set); batches that differ in length
made by each worker for itself (then their number is not the same for all).
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import types
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from outlast.data.epochs import generators_of
from outlast.data.order import ids_at, mix64, scramble
from outlast.data.random_state import preserved, seed_all
from outlast.errors import ConfigError

_DRAW_TAG: Final = 0xD4A3
_WEIGHT_TAG: Final = 0x3E16
_ENDLESS: Final = 1 << 28  # indices of one epoch, of a sampler that tells no length
_KEPT: Final = 3  # epochs: loading ahead may be in the next one already

Ids = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float64]


class Epoch(NamedTuple):
    """The order of one epoch.

    Attributes:
        ids: of its samples.
        ends: where its batches end in ``ids``; None where no batches are drawn.
        word: of both, 64 bits.
        tokens: of its samples up to each; None without lengths.
    """

    ids: Ids
    ends: Ids | None
    word: str
    tokens: Ids | None


class DrawnPlace(NamedTuple):
    """Where a job stands in its data.

    Attributes:
        position: samples consumed.
        epoch: where steps differ in size, that of the next sample.
        begins: likewise, the position at which that epoch has begun.
        at: likewise, the number in it of the next sample, or of the next batch if they are drawn.
    """

    position: int = 0
    epoch: int = 0
    begins: int = 0
    at: int = 0


class Portion(NamedTuple):
    """One worker's part of one batch.

    Attributes:
        place: where the job stands in front of the batch.
        size: samples of the batch, of all workers.
        first: the part's first sample, counted from the batch's.
        num: how many it has.
        ids: which; None where they follow from the position.
        behind: where the job stands behind the batch.
    """

    place: DrawnPlace
    size: int
    first: int
    num: int
    ids: list[int] | None
    behind: DrawnPlace


class DrawnOrder:
    """The orders of all epochs.

    Args:
        draw: epoch → what is drawn: indices, or lists of them.
        name: of what draws, for messages.
        size: number of samples in the data set.
        is_batched: whether batches are drawn; else single indices.
    """

    def __init__(
        self,
        draw: Callable[[int], Any],
        *,
        name: str,
        size: int,
        is_batched: bool = False,
    ) -> None:
        self.name = name
        self._draw, self._size, self._is_batched = draw, size, is_batched
        self._lengths: Ids | None = None
        self._tokens = self._longest = 0
        self._epochs: dict[int, Epoch] = {}
        self._num: int | None = None  # samples of an epoch, where all have as many
        self._is_tried = False

    def cut_by(self, lengths: Ids, tokens: int) -> None:
        """Have as many samples in a step as have ``tokens`` together.

        Raises:
            ConfigError: a sample is longer.
        """
        self._lengths, self._tokens = lengths, tokens
        self._longest = int(lengths.max())
        self.check_workers(1)
        self.name = f"{self.name}, global_tokens={tokens}"

    def check_workers(self, world_size: int) -> None:
        """Refuse more workers than there may be samples in a step.

        Raises:
            ConfigError: there are.
        """
        least = self._longest * world_size
        if self._lengths is not None and self._tokens < least:
            raise ConfigError(
                f"global_tokens={self._tokens} must be {least} or more: the longest sample has "
                f"{self._longest}, and each of {world_size} workers has room for it then. Set it "
                "so, cut such samples, or run fewer workers"
            )

    def epoch_at(self, place: DrawnPlace) -> int:
        """The epoch of the sample that comes next."""
        is_cut = self._is_batched or self._lengths is not None
        return place.epoch if is_cut else place.position // self.num

    def epoch(self, number: int) -> Epoch:
        """That epoch's order.

        Raises:
            ConfigError: what draws gives no order, or not the same one twice.
        """
        found = self._epochs.pop(number, None) or self._drawn(number)
        self._epochs[number] = found
        if len(self._epochs) > _KEPT:
            self._epochs.pop(next(iter(self._epochs)))
        return found

    def _drawn(self, number: int) -> Epoch:
        found = self._once(number)
        if not self._is_tried:
            self._is_tried = True
            if self._once(number).word != found.word:
                raise ConfigError(
                    f"{self.name} gives another order each time that it is iterated, so no other "
                    "worker and no resumed run can know it. Let it draw from torch's, NumPy's or "
                    "Python's global generator, which are seeded for each epoch, or give "
                    "session.steps() a torch DataLoader with it (resumed at the same number of "
                    "workers)"
                )
        return found

    def _once(self, number: int) -> Epoch:
        flat, ends = _flat(self._draw(number), self._size, self.name)
        if (ends is not None) is not self._is_batched:
            right, what = (
                ("batch_sampler", "batches") if ends is not None else ("sampler", "indices")
            )
            raise ConfigError(f"{self.name} gives {what}: hand it over as {right}=")
        tokens = None if self._lengths is None else np.cumsum(self._lengths[flat])
        digest = xxhash.xxh3_64(flat.tobytes())
        digest.update(b"" if ends is None else ends.tobytes())
        return Epoch(flat, ends, digest.hexdigest(), tokens)

    @property
    def num(self) -> int:
        """Samples of each epoch, where batches are cut elsewhere."""
        if self._num is None:
            self._num = len(self.epoch(0).ids)
        return self._num

    def ids(self, position: int, count: int) -> list[int]:
        """Of samples from the job's cursor on.

        Raises:
            ConfigError: an epoch has another number than the first one.
        """
        if self._is_batched or self._lengths is not None:
            return self._ids_of_batches(position, count)
        found: list[int] = []
        while count > 0:
            number, place = divmod(position, self.num)
            ids = self.epoch(number).ids
            if len(ids) != self.num:
                raise ConfigError(
                    f"{self.name} gives {len(ids)} indices in epoch {number} and gave {self.num} "
                    "in epoch 0: a position is not to be found again. Let it give as many in each "
                    "epoch, or give the loader batch_sampler=, whose epochs may differ"
                )
            taken = ids[place : place + count].tolist()
            found += taken
            position, count = position + len(taken), count - len(taken)
        return found

    def step(self, place: DrawnPlace, rank: int, world_size: int) -> Portion:
        """What comes at ``place`` where steps differ in size, as far as it is this worker's.

        Raises:
            ConfigError: a batch of this epoch has fewer samples than there are workers.
        """
        ids, behind = self._batch(place, world_size) if self._is_batched else self._room(place)
        cuts = self._cuts(ids, world_size)
        mine = ids[cuts[rank] : cuts[rank + 1]].tolist()
        return Portion(place, len(ids), cuts[rank], len(mine), mine, behind)

    def _batch(self, place: DrawnPlace, world_size: int) -> tuple[Ids, DrawnPlace]:
        order = self.epoch(place.epoch)
        assert order.ends is not None  # noqa: S101 - batches are drawn
        sizes = np.diff(order.ends, prepend=0)
        small = int(sizes.argmin())
        if sizes[small] < world_size:
            raise ConfigError(
                f"batch {small + 1} of epoch {place.epoch} has {sizes[small]} samples, and "
                f"{world_size} workers cannot share it: {self.name} must give batches of "
                f"{world_size} samples or more (drop_last=True), or run fewer workers"
            )
        stop = int(order.ends[place.at])
        ids = order.ids[stop - int(sizes[place.at]) : stop]
        position = place.position + len(ids)
        if place.at + 1 == len(sizes):
            return ids, DrawnPlace(position, place.epoch + 1, position, 0)
        return ids, place._replace(position=position, at=place.at + 1)

    def _room(self, place: DrawnPlace) -> tuple[Ids, DrawnPlace]:
        """As many samples as there is room for; they may reach into the next epoch."""
        left, number, begins, at = self._tokens, place.epoch, place.begins, place.at
        parts: list[Ids] = []
        while True:
            order = self.epoch(number)
            assert order.tokens is not None  # noqa: S101 - there are lengths
            before = int(order.tokens[at - 1]) if at else 0
            stop = int(np.searchsorted(order.tokens, before + left, side="right"))
            parts.append(order.ids[at:stop])
            if stop < len(order.ids):
                ids = np.concatenate(parts)
                return ids, DrawnPlace(place.position + len(ids), number, begins, stop)
            left -= int(order.tokens[-1]) - before
            number, begins, at = number + 1, begins + len(order.ids), 0

    def _cuts(self, ids: Ids, world_size: int) -> list[int]:
        """Where the workers' parts of a batch meet, its ends included."""
        if self._lengths is None:
            return [len(ids) * rank // world_size for rank in range(world_size + 1)]
        tokens = np.cumsum(self._lengths[ids])
        cuts = [0]
        for rank in range(1, world_size):
            ideal = int(np.searchsorted(tokens, int(tokens[-1]) * rank // world_size)) + 1
            cuts.append(min(max(ideal, cuts[-1] + 1), len(ids) - world_size + rank))
        return [*cuts, len(ids)]

    def _ids_of_batches(self, position: int, count: int) -> list[int]:
        """Of samples from the job's cursor on, where epochs may differ: goes through them all."""
        number, begins, found = 0, 0, list[int]()
        while len(found) < count:
            ids = self.epoch(number).ids
            first = position + len(found) - begins
            if first < len(ids):
                found += ids[first : first + count - len(found)].tolist()
            number, begins = number + 1, begins + len(ids)
        return found


def drawn_by_sampler(sampler: Any, seed: int) -> Callable[[int], Any]:
    """Epoch → what a sampler, or a batch sampler, gives in it.

    Raises:
        ConfigError: it gives one worker's share only.
    """
    within = [sampler, getattr(sampler, "sampler", None), getattr(sampler, "batch_sampler", None)]
    for one in within:
        if getattr(one, "num_replicas", None) is not None:
            raise ConfigError(
                f"{type(one).__name__} gives one worker's share, and outlast.data.Loader shares "
                "out every batch itself: leave it out, as in outlast.data.Loader(dataset, "
                "global_batch=B), or give the sampler of all samples"
            )
    holder = types.SimpleNamespace(sampler=sampler, batch_sampler=sampler)

    def draw(epoch: int) -> Any:
        word = mix64(_DRAW_TAG, seed, epoch)
        own = generators_of(holder)
        states = [one.get_state() for one in own]
        with preserved(cuda=False), contextlib.ExitStack() as undo:
            seed_all(word)
            for number, one in enumerate(own):
                undo.callback(one.set_state, states[number])
                one.manual_seed(mix64(word, number) >> 1)
            for one in within:
                if callable(getattr(one, "set_epoch", None)):
                    one.set_epoch(epoch)
            most = _most(sampler)
            drawn = list(itertools.islice(iter(sampler), most + 1))
        if len(drawn) > most:
            raise ConfigError(
                f"{type(sampler).__name__} does not end: it has given more than {most} in one "
                "epoch. Have it end, for instance with itertools.islice"
            )
        return drawn

    return draw


def _most(sampler: Any) -> int:
    """How many there can be in one epoch."""
    try:
        return max(len(sampler), 1) * 2
    except (TypeError, NotImplementedError):
        return _ENDLESS


def drawn_by_weights(weights: Weights, seed: int) -> Callable[[int], Ids]:
    """Epoch → as many indices as there are weights, each drawn anew in proportion to them."""
    total = np.cumsum(weights)

    def draw(epoch: int) -> Ids:
        word = np.uint64(mix64(_WEIGHT_TAG, seed, epoch))
        mixed = scramble(scramble(np.arange(len(total), dtype=np.uint64)) + word)
        even = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
        found: Ids = np.searchsorted(total, even * total[-1], side="right").astype(np.int64)
        return found

    return draw


def drawn_by_seed(size: int, seed: int, *, shuffle: bool) -> Callable[[int], Ids]:
    """Epoch → the order that a loader has by itself."""

    def draw(epoch: int) -> Ids:
        positions = np.arange(epoch * size, (epoch + 1) * size, dtype=np.int64)
        return ids_at(positions, size=size, seed=seed, shuffle=shuffle)

    return draw


def checked_weights(weights: Any, size: int) -> Weights:
    """``weights`` as numbers, one for each sample.

    Raises:
        ConfigError: they are not.
    """
    found = _numbers("weights", weights, size)
    if not np.isfinite(found).all() or (found < 0).any() or not found.sum() > 0:
        raise ConfigError("weights must be finite numbers from 0 on, and not all of them 0")
    return found


def checked_lengths(lengths: Any, size: int) -> Ids:
    """``lengths`` as whole numbers, one for each sample.

    Raises:
        ConfigError: they are not.
    """
    found = _numbers("lengths", lengths, size).astype(np.int64)
    if (found < 1).any():
        raise ConfigError("lengths must be whole numbers from 1 on")
    return found


def _numbers(name: str, values: Any, size: int) -> Weights:
    if isinstance(values, torch.Tensor):
        values = values.tolist()
    try:
        found = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        found = np.empty(0)
    if found.shape != (size,):
        raise ConfigError(
            f"{name} must be one number for each of the {size} samples of the data set, and it is "
            f"{type(values).__name__} of {np.shape(found)}; as in {name}=[1] * len(dataset)"
        )
    return found


def _flat(drawn: Any, size: int, name: str) -> tuple[Ids, Ids | None]:
    """Indices, and where batches end, if there are any."""
    if isinstance(drawn, np.ndarray):
        return drawn, None
    is_batched = bool(drawn) and isinstance(drawn[0], list | tuple | np.ndarray | torch.Tensor)
    is_batched = is_batched and getattr(drawn[0], "ndim", 1) > 0
    try:
        batches = (
            [[operator.index(one) for one in batch] for batch in drawn] if is_batched else None
        )
        flat = (
            [one for batch in batches for one in batch]
            if batches
            else [operator.index(one) for one in drawn]
        )
    except (TypeError, ValueError):
        raise ConfigError(
            f"{name} gives something other than numbers of samples; outlast.data.Loader counts "
            "samples by number. Give session.steps() a torch DataLoader with it"
        ) from None
    if not flat or (batches and not all(batches)):
        raise ConfigError(f"{name} gives nothing, or an empty batch")
    ids = np.array(flat, np.int64)
    wrong = ids[(ids < 0) | (ids >= size)]
    if wrong.size:
        raise ConfigError(f"{name} gives sample {wrong[0]}, and the data set has {size} from 0 on")
    return ids, np.cumsum([len(batch) for batch in batches]) if batches else None
