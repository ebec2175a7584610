"""Workers that are late in synchronous steps: their shards are made by others, or left out.

Acts where sums are made by ``outlast.SameBits`` and samples are handed out by an
``outlast.data.Loader`` with the same shards. With each step's sums all workers tell each other what
their shards took them; :class:`outlast.policy.late.LateJudge` decides, in each worker alike.

Guarantees: with "move" each step has the samples that it would have had, and the same bits, since
sums are bracketed by shards and not by workers. Shares change at a place in the data that no worker
has loaded yet: each says how far it has loaded ahead, and the furthest one counts. With "drop" what
is summed is divided by the samples in it; what was left out is in the checkpoint's record of
samples and in the ledger. Nobody acts unless all say that they do, by the same rule, of this loop's
batches: one whose loader is another, or that has other settings, has all of them wait, and is
named.

Shares are in no checkpoint: who makes a shard makes no difference to it. A resume begins with the
usual ones, whatever the number of workers.

What can go wrong: what takes a worker long outside of its shards (an evaluation, the optimizer) is
not seen. On a GPU shards are timed by its own clock, and what is heard is acted on a step later;
the host waits for the device where shares change, and with "drop" at each shard's end.

Rejected: changes that hold at once (batches loaded ahead would be thrown away, and loaded again).
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

from outlast.attempt.link import Link
from outlast.attempt.over import over
from outlast.config import Settings
from outlast.data import Loader, Shards
from outlast.data.order import usual_counts
from outlast.ledger.file import QueuedLedger
from outlast.ledger.narrator import say
from outlast.policy.late import DROP, MOVE, WAIT, LateJudge, ShareChange
from outlast.reduce import losses
from outlast.reduce.same_bits import Bits, SameBits
from outlast.training.position import Position

_KINDS: Final = {WAIT: 0.0, MOVE: 1.0, DROP: 2.0}
_ASIDE: Final = 3.0  # of a batch that is none of this loop's
TOLD_S: Final = 10.0  # between two lines of the ledger on what was dropped, at first
TOLD_MOST_S: Final = 600.0
BOTH: Final = (
    "outlast.SameBits in place of DDP, and outlast.data.Loader(dataset, global_batch=B, shards=V)"
)

BY_HAND: Final = (
    'workers.late is "{}", and late workers are waited for in steps whose outlast.data.Shards are '
    "made by hand: nobody else could make them; take those that outlast.data.Loader hands out"
)


class _ShardTime(NamedTuple):
    """What some shards took, as it is told: 0 seconds where it is not known yet."""

    seconds: float = 0.0
    made: int = 0


class _HostStopwatch:
    """Times a step's shards by the host's clock."""

    def __init__(self) -> None:
        self._begin_s = 0.0

    def begin(self) -> None:
        """The first shard begins."""
        self._begin_s = time.monotonic()

    def so_far_s(self) -> float:
        """Since then."""
        return time.monotonic() - self._begin_s

    def end(self, made: int, waited_s: float) -> _ShardTime:
        """All shards are made that are; with ``waited_s`` before them."""
        return _ShardTime(waited_s + self.so_far_s(), made)


class _DeviceStopwatch(_HostStopwatch):
    """The same of a GPU: of a step that it has done, one or two behind."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._begin: Any = None
        self._ended: deque[tuple[Any, Any, int, float]] = deque()

    def begin(self) -> None:
        super().begin()
        self._begin = self._mark()

    def so_far_s(self) -> float:
        torch.cuda.current_stream(self._device).synchronize()
        return super().so_far_s()

    def end(self, made: int, waited_s: float) -> _ShardTime:
        self._ended.append((self._begin, self._mark(), made, waited_s))
        if not self._ended[0][1].query():
            return _ShardTime()
        begin, end, made, waited_s = self._ended.popleft()
        return _ShardTime(waited_s + begin.elapsed_time(end) / 1000, made)

    def _mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


class _HeardRows:
    """What all have said, as numbers: on a GPU that of the step before, so that nobody waits."""

    def __init__(self) -> None:
        self._open: tuple[torch.Tensor, Any] | None = None

    @staticmethod
    def now(rows: torch.Tensor) -> list[list[float]]:
        """This step's own, with a wait for the device."""
        return list(rows.tolist())

    def read(self, rows: torch.Tensor) -> list[list[float]]:
        """The newest rows that are there without a wait; [] for none."""
        if rows.device.type == "cpu":
            return list(rows.tolist())
        before = self._open
        here = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        here.copy_(rows, non_blocking=True)
        there = torch.cuda.Event()
        there.record(torch.cuda.current_stream(rows.device))
        self._open = here, there
        if before is None:
            return []
        before[1].synchronize()
        return list(before[0].tolist())


class LateRanks:
    """One worker's part in it, in one attempt.

    Args:
        settings: the job's.
        link: the other ranks.
        ledger: the job's; rank 0 writes.
        step: gives the completed steps.
    """

    def __init__(
        self, settings: Settings, link: Link, ledger: QueuedLedger, step: Callable[[], int]
    ) -> None:
        self._answer, self._factor = settings.workers_late, settings.workers_late_factor
        self._link, self._ledger, self._step = link, ledger, step
        self.may_leave_out = self._answer == DROP
        self._judges: dict[int, LateJudge] = {}  # by loader: a shard of each has its own cost
        self._position: Position
        self._model: SameBits | None = None
        self._loader: Loader | None = None
        self._judge: LateJudge | None = None
        self._why_not = ""
        self._is_told = self._is_told_of_hands = self._is_aside = False
        self._watch = _HostStopwatch()
        self._heard = _HeardRows()
        self._limit_s: float | None = None
        self._made = 0
        self._dropped = _DroppedSoFar()

    @contextlib.contextmanager
    def loop(self, position: Position, bits: Bits) -> Iterator[None]:
        """Within, a loop's steps are made.

        Args:
            position: where this worker is in its data.
            bits: what the session's models are summed by.
        """
        if self._answer == WAIT or self._link.world_size == 1:
            yield
            return
        self._position, loader = position, position.loader
        self._why_not = self._missing(bits, loader)
        if self._why_not and not self._link.rank:
            self._tell(self._why_not)
        self._model = bits.summed[0] if bits.summed else None
        self._loader = self._judge = None
        if not self._why_not:
            self._begin(loader)
        losses.late.append(self)
        try:
            yield
        finally:
            losses.late.remove(self)
            self._write(is_end=True)

    def _begin(self, loader: Loader) -> None:
        assert self._model is not None  # noqa: S101 - nothing is missing
        if loader.number not in self._judges:  # a session before may have left it other shares
            self._judges[loader.number] = self._new_judge(loader)
        self._loader, self._judge = loader, self._judges[loader.number]
        device = self._model.device
        self._watch = _DeviceStopwatch(device) if device.type == "cuda" else _HostStopwatch()
        self._heard = _HeardRows()

    def _new_judge(self, loader: Loader) -> LateJudge:
        assert loader.shards  # noqa: S101 - nothing is missing
        return LateJudge(
            usual_counts(loader.shards, self._link.world_size),
            answer=self._answer,
            factor=self._factor,
            counts=loader.newest_shares,
        )

    def _missing(self, bits: Bits, loader: Any) -> str:
        """Why nothing can be done about a late worker here; "" if it can."""
        world_size = self._link.world_size
        if not isinstance(loader, Loader) or loader.shards is None or not bits.summed:
            return f"this takes {BOTH}"
        if len(bits.summed) > 1:
            return "the session has several outlast.SameBits, and nobody knows whose time counts"
        model = bits.summed[0]
        if model.world_size != world_size:
            return "the model's sums are not those of all workers; leave process_group out"
        if self._answer == DROP and loader.shards <= world_size:
            return (
                f"of {loader.shards} shards no worker has more than one, and the first one is "
                f"always made; give the loader and the model {2 * world_size} shards or more"
            )
        return ""

    def _tell(self, why: str) -> None:
        """In one line, once."""
        if not self._is_told:
            self._is_told = True
            whose = f"rank {self._link.rank}: " if self._link.rank else ""
            say(f'{whose}workers.late is "{self._answer}", and late workers are waited for: {why}')

    # --- what our sums ask and tell -------------------------------------------------------------

    def is_of(self, model: torch.nn.Module) -> bool:
        """Whether it looks after the sums of this model."""
        return model is self._model

    def begins(self, batch: Shards) -> None:
        """The first shard of ``batch`` is about to be handed out."""
        loader, judge = self._loader, self._judge
        self._is_aside = over.is_void or (loader is not None and batch.loader != loader.number)
        if loader is not None and not batch.loader and not self._is_told_of_hands:
            self._is_told_of_hands = True
            if not self._link.rank:
                say(BY_HAND.format(self._answer))
        self._made, self._limit_s = 0, None
        if judge is not None and self.may_leave_out and not self._is_aside:
            self._limit_s = judge.limit_s(self._link.rank)
        self._watch.begin()

    def goes_on(self, num_made: int) -> bool:
        """Whether another shard is to be made, once so many are."""
        self._made = num_made + 1
        if self._limit_s is None or not num_made:
            return True
        assert self._loader is not None  # noqa: S101 - it has a limit
        so_far_s = self._watch.so_far_s()
        if self._loader.waited_s + so_far_s + so_far_s / num_made <= self._limit_s:
            return True
        self._made = num_made
        return False

    def words(self) -> list[float]:
        """This worker's."""
        kind = _KINDS[WAIT] if self._judge is None else _KINDS[self._answer]
        loader = self._loader
        if loader is None or self._is_aside:
            loaded_to = 0.0 if loader is None else float(loader.loaded_to)
            kind = _ASIDE if self._is_aside else kind
            return [kind, self._factor, 0.0, 0.0, loaded_to, 0.0]
        assert self._model is not None  # noqa: S101 - it has a loader
        spent = self._watch.end(self._made, loader.waited_s)
        times = (spent.seconds, float(spent.made), float(loader.loaded_to))
        return [kind, self._factor, *times, float(self._model.is_scaled)]

    def heard(self, rows: torch.Tensor) -> None:
        """All workers': see them, and decide."""
        said = self._heard.read(rows)
        kinds = {row[0] for row in said}
        if not said or _ASIDE in kinds:
            return
        if len(kinds) > 1 or len({row[1] for row in said}) > 1 or self._judge is None:
            self._differ(said)
            return
        assert self._loader is not None  # noqa: S101 - there is a judge
        # A GradScaler that has scaled nothing refuses to step.
        self._judge.least = int(any(row[5] for row in said))
        self._judge.see([row[2] for row in said], [int(row[3]) for row in said])
        change = self._judge.change() if self._answer == MOVE else None
        if change is None:
            return
        # On a GPU what was read is a step old, and nobody knows how much was loaded since by whom
        # (batches may be passed over): so this once all wait for what was said in this step.
        loaded_to = [int(row[4]) for row in self._heard.now(rows)]
        if min(loaded_to) <= 0:  # somebody has no loader any more: nobody changes anything
            self._judge = self._judges[self._loader.number] = self._new_judge(self._loader)
            return
        start = max(loaded_to)
        self._loader.share_out(start, change.counts)
        self._moved(change, (start - self._loader.position) // self._loader.global_batch)

    def _differ(self, said: Sequence[Sequence[float]]) -> None:
        """Not all take part: rank 0 names the first who does not, and whoever does not says why."""
        if self._why_not:
            self._tell(self._why_not)
        first = said[0][:2]
        other = next((rank for rank, row in enumerate(said) if list(row[:2]) != list(first)), None)
        if not self._link.rank and other is not None:
            self._tell(
                f"rank {other} has another loader or other settings of workers.late than rank 0; "
                "give all workers the same"
            )

    # --- what was done --------------------------------------------------------------------------

    def _moved(self, change: ShareChange, steps_ahead: int) -> None:
        if self._link.rank:
            return
        step = self._step() + 1
        self._ledger.append(
            "late_moved",
            step=step,
            from_step=step + 1 + steps_ahead,
            counts=list(change.counts),
            late=list(change.late),
            factors=list(change.factors),
            back=list(change.back),
            probes=list(change.probes),
        )

    def left_out(self, num_made: Sequence[int], num_held: Sequence[int]) -> None:
        """In this step not all shards were made that each worker holds."""
        loader = self._loader
        if loader is None or loader.shards is None:
            return
        size = loader.global_batch // loader.shards
        here = self._link.rank
        if num_made[here] < num_held[here]:
            self._position.dropped((num_held[here] - num_made[here]) * size)
        lost = {
            rank: (held - made) * size
            for rank, (made, held) in enumerate(zip(num_made, num_held, strict=True))
            if made < held
        }
        self._dropped.add(self._step() + 1, lost)
        self._write()

    def _write(self, *, is_end: bool = False) -> None:
        fields = self._dropped.due(time.monotonic(), is_end=is_end)
        if fields and not self._link.rank:
            self._ledger.append("late_dropped", **fields)


class _DroppedSoFar:
    """What was dropped since it was written last: at once at first, then seldomer and seldomer."""

    def __init__(self) -> None:
        self._samples: dict[int, int] = {}
        self._first = self._last = self._num = 0
        self._due_s, self._between_s = 0.0, TOLD_S

    def add(self, step: int, samples: dict[int, int]) -> None:
        """In ``step`` so many samples were, by rank."""
        self._first, self._last = self._first or step, step
        self._num += 1
        for rank, num in samples.items():
            self._samples[rank] = self._samples.get(rank, 0) + num

    def due(self, now_s: float, *, is_end: bool) -> dict[str, Any]:
        """What is to be written now; {} for nothing."""
        if not self._num or (now_s < self._due_s and not is_end):
            return {}
        samples = {str(rank): num for rank, num in sorted(self._samples.items())}
        fields = {
            "first_step": self._first,
            "step": self._last,
            "steps": self._num,
            "samples": samples,
        }
        self._samples, self._first, self._num = {}, 0, 0
        self._due_s = now_s + self._between_s
        self._between_s = min(2 * self._between_s, TOLD_MOST_S)
        return fields
