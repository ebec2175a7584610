"""Streams whose batches do not depend on how many machines are there.

Guarantees: a step consumes the same samples in the same order at any number of workers and of
loader processes, from a stream that is cut into shards, shuffled and packed or not; what a process
has loaded ahead is neither lost nor repeated by a stop. With known sizes every unit of every shard
comes exactly once in each epoch, and epochs follow each other without a gap.

How: the stream is cut into a fixed number of lanes (``lanes.py``); each step takes the same number
of samples from each lane; a worker has some of the lanes, and reads their shards alone.

What can go wrong: without sizes a lane begins its next pass when its own shards are over, so that
a sample may come a second time while another lane still has some that did not come at all. A
``collate_fn`` that draws random numbers is exact only at the same number of workers.

Rejected: all workers reading everything and keeping their part (reading costs as many times more as
there are workers); asking each other at each step which lane is over (training would wait for it);
a last batch of an epoch that is smaller (workers without a sample).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from outlast.data import shield
from outlast.data.generators import GLOBAL, GeneratorWatch, Held
from outlast.data.lanes import Lane, LaneSource, Point
from outlast.data.loader import COLLATE_TAG, checked_int, identity
from outlast.data.order import held, mix64
from outlast.data.random_state import preserved, seed_all
from outlast.data.usage import answered
from outlast.errors import ConfigError

KIND: Final = "stream"
FORM: Final = "outlast.data.Stream(read, num_shards=N, global_batch=B)"
LANES_MAX: Final = 64  # unless set


class Stream:
    """Endless batches of a stream that is cut into shards, the same at any number of workers.

    Of the lanes, worker ``r`` of ``W`` has those from ``lanes*r//W`` up to ``lanes*(r+1)//W``; a
    session sets the worker by itself. While an item is read, Python's, NumPy's global and torch's
    default CPU generator are seeded from the seed, the pass, the shard and the item's number in it.

    Attributes:
        position: samples that the job has consumed, by all workers.
        handed: the numbers of the samples in the batch handed out last, in its order, told by the
            lanes that made them: sample number p of the job is the ``p // lanes``-th of lane
            ``p % lanes``.

    Args:
        shards: a function from a shard's number to its items (any iterable, the same ones each
            time), or an object with ``shard(num_shards=…, index=…)`` that gives such an iterable.
        num_shards: how many shards there are.
        global_batch: samples per step over all workers.
        sizes: how many items each shard has, with ``pack`` how many units. With them an epoch is
            one pass over everything; without, each lane goes through its own shards again and
            again, and shards may be endless.
        lanes: parts that are read on their own, a divisor of ``global_batch``: the most workers
            that there can be. By default the largest up to 64, without sizes up to ``num_shards``.
        seed: of all that is random, in ``range(2**63)``.
        shuffle: a new order of shards in each pass.
        buffer: so many items of a lane are read and shuffled together; 1 for none.
        pack: items are rows of numbers; they are put together and cut to samples of this length,
            int64 or as they are. What is left of an item begins the next sample.
        transform: from what was read to a sample; random numbers are seeded for each sample.
        collate_fn: from a list of samples to a batch; torch's default if None.
        num_workers: loader processes; each has some of the worker's lanes.
        prefetch_factor: steps that each process loads ahead.
        multiprocessing_context: how processes are started.

    Raises:
        ConfigError: a setting out of range, or that does not fit another.
    """

    @answered("outlast.data.Stream", FORM)
    def __init__(
        self,
        shards: Any,
        *,
        num_shards: int,
        global_batch: int,
        sizes: Sequence[int] | None = None,
        lanes: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        buffer: int = 1,
        pack: int | None = None,
        transform: Callable[[Any], Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        multiprocessing_context: Any = None,
    ) -> None:
        self.global_batch = checked_int("global_batch", global_batch, 1)
        checked_int("num_shards", num_shards, 1)
        self.source = LaneSource(
            open_shard=_opener(shards, num_shards),
            num_shards=num_shards,
            lanes=_checked_lanes(lanes, global_batch, num_shards if sizes is None else None),
            sizes=_checked_sizes(sizes, num_shards),
            seed=checked_int("seed", seed, 0),
            shuffle=bool(shuffle),
            buffer=checked_int("buffer", buffer, 1),
            pack=None if pack is None else checked_int("pack", pack, 1),
            transform=transform,
        )
        self.collate_fn = collate_fn or torch.utils.data.default_collate
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self.multiprocessing_context = multiprocessing_context
        self.position = 0
        self.handed: NDArray[np.int64] = np.empty(0, np.int64)
        self.rank = 0
        self.world_size = 1
        self._held = Held()
        self._watch: GeneratorWatch | None = None
        # What the order follows from: a position means nothing under another value.
        names = ("num_shards", "lanes", "seed", "shuffle", "buffer", "pack")
        self._fixed = {name: getattr(self.source, name) for name in names}
        known = self.source.sizes
        self._fixed["sizes"] = None if known is None else f"{mix64(*known):016x}"
        self._since = 0  # the position from which on batches have this size
        self._points: dict[int, Point] = {}  # of this worker's lanes, once they have begun

    @property
    def kind(self) -> str:
        """What its positions are marked with."""
        return KIND

    @property
    def noted(self) -> NDArray[np.int64]:
        """What is recorded of ``handed``."""
        return self.handed

    @property
    def lanes(self) -> range:
        """The lanes of this worker."""
        return held(self.source.lanes, self.rank, self.world_size)

    @property
    def slice_of_batch(self) -> tuple[int, int]:
        """(first, behind the last) of this worker's samples in each global batch."""
        per_lane = self.global_batch // self.source.lanes
        return self.lanes.start * per_lane, self.lanes.stop * per_lane

    def set_worker(self, rank: int, world_size: int) -> None:
        """Say which lanes are this worker's; call before iterating.

        Raises:
            ConfigError: there are more workers than lanes.
        """
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} is not one of {world_size} workers")
        if world_size > self.source.lanes:
            raise ConfigError(
                f"{world_size} workers cannot share a stream of {self.source.lanes} lanes; make it "
                f"with lanes={world_size} or more (a divisor of global_batch), or run fewer workers"
            )
        self.rank, self.world_size = rank, world_size

    @property
    def epoch(self) -> int | None:
        """The epoch of the next sample's first unit; None where sizes are not known."""
        if self.source.sizes is None:
            return None
        return self.position * (self.source.pack or 1) // sum(self.source.sizes)

    def __iter__(self) -> Iterator[Any]:
        """Batches from the position on, without end; the position counts those handed out.

        Raises:
            ShardError: a shard raised; the position is that before its batch.
            ConfigError: the position was moved by someone else meanwhile, or sizes do not hold.
        """
        portions = self._portions()
        processes = min(self.num_workers, len(portions.lanes))
        loader = torch.utils.data.DataLoader(
            portions,
            batch_size=None,
            num_workers=processes,
            collate_fn=identity,
            prefetch_factor=self.prefetch_factor if processes else None,
            multiprocessing_context=self.multiprocessing_context if processes else None,
            # Its own generator: starting the iterator draws nothing from the script's stream.
            generator=torch.Generator().manual_seed(self.source.seed),
        )
        if processes and self._watch is None:
            self._watch = GeneratorWatch(loader, [("loader", self.source)])
        self._held = self._held if processes else Held([("loader", self.source)])
        iterator = shield.start(loader)
        expected = self.position
        try:
            while True:
                # Processes answer in turn, each with its lanes' part of the step.
                parts = [next(iterator) for _ in range(max(processes, 1))]
                if self.position != expected:
                    raise ConfigError(
                        f"the stream was at sample {expected} and is now at {self.position}: it "
                        "was moved, or is iterated twice at once; make a new iterator"
                    )
                batch = self._collated([one for samples, _, _ in parts for one in samples])
                self.handed = np.frombuffer(b"".join(ids for _, ids, _ in parts), np.int64)
                self._points |= {lane: point for _, _, points in parts for lane, point in points}
                self.position = expected = expected + self.global_batch
                yield batch
        finally:
            shield.shut_down(iterator)

    def drawn(self) -> list[str]:
        """The script's own generators that were drawn from while reading, by name."""
        if self._watch is not None:
            return [name for name in self._watch.drawn() if name != GLOBAL]  # seeded for each item
        return [one["name"] for one in self._held.state() if one["moved"]]  # reading is ahead

    def _portions(self) -> Portions:
        if self.position:
            missing = [lane for lane in self.lanes if lane not in self._points]
            if missing:
                raise ConfigError(
                    f"the stream is at sample {self.position} and does not know where lanes "
                    f"{missing} stand; load the positions of all workers (a session does)"
                )
        return Portions(
            self.source,
            {lane: self._points.get(lane, Point()) for lane in self.lanes},
            self.global_batch // self.source.lanes,
        )

    def _collated(self, samples: list[Any]) -> Any:
        with preserved(cuda=False):
            seed_all(mix64(COLLATE_TAG, self.source.seed, self.position))
            return self.collate_fn(samples)

    def order(self) -> dict[str, Any]:
        """All that the numbers of a step's samples follow from."""
        return {
            **self._fixed,
            "kind": KIND,
            "lanes": self.source.lanes,
            "global_batch": self.global_batch,
            "since": self._since,
        }

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches handed out so far; of the lanes, this worker's."""
        return {
            **self._fixed,
            "kind": KIND,
            "position": self.position,
            "global_batch": self.global_batch,
            "since": self._since,
            "points": {
                str(lane): list(msgspec.structs.astuple(point))
                for lane, point in self._points.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position; iterators made before become unusable.

        The number of workers and the global batch may have changed; ``state["points"]`` must hold
        this worker's lanes, from whichever workers saved them.

        Raises:
            ConfigError: something changed that the order follows from.
        """
        for name, here in self._fixed.items():
            if state[name] != here:
                raise ConfigError(
                    f"the checkpoint's stream had {name}={state[name]}, this one has {name}="
                    f"{here}: samples would be repeated or left out. Make the stream as it was, or "
                    "start a new job from the checkpoint's model"
                )
        self.position = int(state["position"])
        same = state["global_batch"] == self.global_batch
        self._since = int(state["since"]) if same else self.position
        self._points = {int(lane): Point(*point) for lane, point in state["points"].items()}


class Portions(torch.utils.data.IterableDataset):
    """A worker's part of each step: what its loader processes hold.

    Args:
        source: the stream.
        points: lane → where it stands.
        per_lane: samples of each lane in a step.
    """

    def __init__(self, source: LaneSource, points: Mapping[int, Point], per_lane: int) -> None:
        super().__init__()
        self.lanes = list(points)
        self._source = source
        self._points = dict(points)
        self._per_lane = per_lane

    def __iter__(self) -> Iterator[tuple[Any, bytes, list[tuple[int, Point]]]]:
        """Samples, their numbers as int64, and where the lanes stand after them; step by step."""
        process = torch.utils.data.get_worker_info()
        mine = self.lanes
        if process is not None:
            which = held(len(mine), process.id, process.num_workers)
            mine = [mine[index] for index in which]
        lanes: list[tuple[int, Lane]] = []
        while True:
            with contextlib.nullcontext() if process else preserved(cuda=False):
                lanes = lanes or [(one, self._lane(one)) for one in mine]
                taken = [lane.take() for _, lane in lanes for _ in range(self._per_lane)]
            samples = [sample for _, sample in taken]
            numbers = np.array([number for number, _ in taken], np.int64)
            yield _together(samples), numbers.tobytes(), [(one, lane.point) for one, lane in lanes]

    def _lane(self, number: int) -> Lane:
        return Lane(self._source, number, self._points[number])


def _together(samples: list[Any]) -> Any:
    """Tensors of one kind as one: each would cost a file descriptor on its way to the worker."""
    if all(type(one) is torch.Tensor for one in samples):
        kinds = {(one.shape, one.dtype, one.device, one.layout) for one in samples}
        if len(kinds) == 1 and samples[0].layout == torch.strided:
            return torch.stack(samples)
    return samples


def _opener(shards: Any, num_shards: int) -> Callable[[int], Iterable[Any]]:
    if callable(getattr(shards, "shard", None)):
        return _Sharded(shards, num_shards)
    if callable(shards):
        opener: Callable[[int], Iterable[Any]] = shards
        return opener
    raise ConfigError(
        f"outlast.data.Stream needs a function from a shard's number to its items, or an object "
        f"with shard(num_shards=…, index=…), and {type(shards).__name__} is neither"
    )


class _Sharded:
    """``shard`` of a data set as a function of the number alone; goes to loader processes."""

    def __init__(self, dataset: Any, num_shards: int) -> None:
        self._dataset = dataset
        self._num_shards = num_shards

    def __call__(self, index: int) -> Any:
        return self._dataset.shard(num_shards=self._num_shards, index=index)


def _checked_lanes(lanes: int | None, global_batch: int, most: int | None) -> int:
    limit = LANES_MAX if most is None else min(LANES_MAX, most)
    if lanes is None:
        return max(one for one in range(1, limit + 1) if global_batch % one == 0)
    checked_int("lanes", lanes, 1)
    if global_batch % lanes:
        raise ConfigError(
            f"lanes={lanes} does not divide global_batch={global_batch}: each step takes as many "
            "samples from one lane as from another"
        )
    if most is not None and lanes > most:
        raise ConfigError(
            f"lanes={lanes} is more than the {most} shards: without sizes a lane needs a shard of "
            "its own. Cut the stream finer, set fewer lanes, or give sizes"
        )
    return lanes


def _checked_sizes(sizes: Sequence[int] | None, num_shards: int) -> tuple[int, ...] | None:
    if sizes is None:
        return None
    found = tuple(checked_int("each of sizes", int(size), 0) for size in sizes)
    if len(found) != num_shards:
        raise ConfigError(f"there are {len(found)} sizes for {num_shards} shards; give one of each")
    if not sum(found):
        raise ConfigError("all shards are empty, as sizes says")
    return found
