"""State changes hands between workers: before they leave an attempt together, and after a loss.

Leaving (:func:`meet`, at a boundary, with nobody lost): into the next attempt, or home. Whoever has
yet to end the step needs the others' connections: each rank says in words that it is at the
boundary. Rank 0 hears all of them, and says what is done: those whose machines have had notice
leave the job, the others go on in their processes; or all save here and end, where one of them
cannot go on. So no rank goes on while another waits for its part of a checkpoint. What a rank alone
knows (:mod:`outlast.attempt.beat`) would go with its machine. Two others take it before anybody
goes, of those who stay too: a machine may be lost on the way, or have notice after rank 0's word.

After a loss (:func:`find`): each rank offers what it has; rank 0 chooses (see
``policy.regain``); the chosen state goes to whoever lacks it by broadcasts over the new process
group, as bytes in pieces of bounded size. Of a state that is divided each part is sent to those who
lack it by a worker that has the same, over the group of these. Nothing is read from memory or
storage, and no completed step is lost.

Rejected: a barrier (gloo may lose one whose connections end as it is posted); all that leavers know
through rank 0 (as many bytes as there are workers, to each of them).
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist

from outlast.attempt.beat import RankState, read_own
from outlast.attempt.link import Link, device_of_group
from outlast.attempt.over import over
from outlast.checkpoint.plan import OWN
from outlast.checkpoint.tensors import as_bytes
from outlast.checkpoint.tree import DTYPE_OF, unflatten
from outlast.data.feed import TRAIL
from outlast.data.loader import KIND as LOADER
from outlast.data.trail import Others
from outlast.inprocess import living
from outlast.inprocess.divided import WHOLE, Dims, Division, dims_of, joined, local
from outlast.inprocess.living import BUFFERS, Moment, Packer, unpack
from outlast.inprocess.looks import Buffers, with_buffers
from outlast.policy.regain import OwnState, RegainPlan, StateOffer, decide
from outlast.policy.rollbacks import Rollback

# --- leaving together -----------------------------------------------------------------------------

ALL_END: Final = "the machines of the job change: all save, and start again"
WAIT_S: Final = 600.0  # that ranks wait for each other at such a boundary
_KEY: Final = "moves"
_Asks = Sequence[Mapping[str, Any]]


class PartingWord(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says at the boundary.

    Attributes:
        why_not: why it cannot go on in its process; "" if it can.
        timeline, attempt, step, rest, own: of its :class:`outlast.inprocess.living.Moment` there.
    """

    why_not: str = ""
    timeline: int = 0
    attempt: int = 0
    step: int = 0
    rest: bytes = b""
    own: bytes = b""


UNHELD: Final = PartingWord(why_not="a worker of it cannot go on in its process")


class Parting(msgspec.Struct, frozen=True, kw_only=True):
    """What all do.

    Attributes:
        drains: whether all save, and end; otherwise all but ``leavers`` go on.
        leavers: ranks of machines that leave the job.
        info: of the notices: reason, left_s, and how a drain is planned.
        why_not: why they do not go on, where it is not that all leave.
    """

    drains: bool = False
    leavers: list[int] = []
    info: dict[str, Any] = {}
    why_not: str = ""


def leavers_of(asks: _Asks, world_size: int) -> list[int]:
    """Ranks that leave while others go on; none where one who asks wants all to stop.

    Args:
        asks: for a drain; who leaves alone says its ranks.
        world_size: number of workers.
    """
    found = sorted({rank for info in asks for rank in info.get("leaves") or ()})
    is_of_some = all(info.get("leaves") for info in asks)
    return found if is_of_some and len(found) < world_size else []


def soonest(asks: _Asks) -> dict[str, Any]:
    """What was said with the ask that leaves the least time."""
    timed = [info for info in asks if info.get("left_s") is not None]
    return dict(min(timed, key=lambda info: info["left_s"]) if timed else asks[0])


def meet(
    link: Link,
    word: PartingWord,
    asks: Callable[[], _Asks],
    plan: Callable[[dict[str, Any]], object],
) -> Parting:
    """Come to the boundary; what all do from here.

    Args:
        link: the other ranks.
        word: this rank's.
        asks: on rank 0, gives all asks for a drain so far.
        plan: on rank 0, adds to the info of a drain how it is done.

    Raises:
        OSError, RuntimeError: another rank is gone.
    """
    link.publish(f"{_KEY}/{link.rank}/own", msgspec.msgpack.encode(word))
    if link.rank:
        link.publish(f"{_KEY}/{link.rank}", word.why_not.encode())
        return msgspec.json.decode(link.fetch(_KEY, WAIT_S), type=Parting)
    others = range(1, link.world_size)
    reasons = [word.why_not, *(link.fetch(f"{_KEY}/{rank}", WAIT_S).decode() for rank in others)]
    why_not, notices = next(filter(None, reasons), ""), asks()
    leavers = leavers_of(notices, link.world_size)
    drains = bool(why_not) or (bool(notices) and not leavers)
    info = soonest(notices) if notices else {}
    if drains:
        plan(info)
    parting = Parting(drains=drains, leavers=[] if drains else leavers, info=info, why_not=why_not)
    link.publish(_KEY, msgspec.json.encode(parting))
    return parting


def take(link: Link, parting: Parting) -> list[RankState]:
    """Take, on a rank that goes on, what is its to keep of what others know alone.

    Raises:
        OSError, RuntimeError: another rank is gone.
    """
    stay = _who_stay(link, parting)
    records = []
    for rank in range(link.world_size):
        if rank == link.rank or link.rank not in _keepers(rank, stay):
            continue
        raw = link.fetch(f"{_KEY}/{rank}/own", WAIT_S)
        word = msgspec.msgpack.decode(raw, type=PartingWord)
        records.append(
            RankState(
                timeline=word.timeline,
                attempt=word.attempt,
                rank=rank,
                world_size=link.world_size,
                step=word.step,
                is_final=True,
                is_certain=True,
                stage=2,
                draws=0,
                rest=word.rest,
                blob=word.own,
            )
        )
    link.publish(f"{_KEY}/{link.rank}/taken", b"")
    return records


def see_off(link: Link, parting: Parting, timeout_s: float) -> None:
    """Wait, on a rank that leaves, until the others have all that they need of it.

    The attempt's store may be served by this machine.
    """
    until_s = time.monotonic() + timeout_s
    with contextlib.suppress(OSError, RuntimeError):  # they are late, or gone
        for rank in _who_stay(link, parting):
            link.fetch(f"{_KEY}/{rank}/taken", until_s - time.monotonic())


def _who_stay(link: Link, parting: Parting) -> list[int]:
    leavers = set(parting.leavers)
    return [rank for rank in range(link.world_size) if rank not in leavers]


def _keepers(rank: int, stay: Sequence[int]) -> Collection[int]:
    """Who takes what ``rank`` knows: its next one, and one half of the way round."""
    num = len(stay)
    return {stay[(rank + 1) % num], stay[(rank + 1 + num // 2) % num]}


# --- at an attempt's beginning --------------------------------------------------------------------

_ABLE: Final = "able"


def is_wanted(link: Link, here: bool) -> bool:
    """Whether workers live through losses, as rank 0 has it; ``here`` is what this one has.

    Raises:
        OSError, RuntimeError: rank 0 is gone.
    """
    if link.rank == 0:
        link.publish("living", b"1" if here else b"0")
    return link.fetch("living", TIMEOUT_S) == b"1"


def all_are_able(link: Link, is_able: bool) -> bool:
    """Whether all ranks could go on after a loss.

    Otherwise none does, and none votes: a vote waits for all, and whoever takes the place of one
    that could not go on cannot come to the others either.

    All ranks call it.

    Raises:
        OSError, RuntimeError: another rank is gone.
    """
    link.publish(f"{_ABLE}/{link.rank}", b"1" if is_able else b"")
    if link.rank == 0:
        ranks = range(link.world_size)
        found = all(link.fetch(f"{_ABLE}/{rank}", TIMEOUT_S) for rank in ranks)
        link.publish(_ABLE, b"1" if found else b"")
    return bool(link.fetch(_ABLE, TIMEOUT_S))


# --- after a loss ---------------------------------------------------------------------------------

TIMEOUT_S: Final = 600.0
PIECE_BYTES: Final = 32 << 20
# Of tensors: name, dtype, shape here, and how they are divided.
Outline = list[tuple[str, str, tuple[int, ...], Dims | None]]


class Regained(msgspec.Struct, frozen=True, kw_only=True):
    """The state to go on from.

    Attributes:
        step: completed steps.
        timeline: number of the attempt in which this line of steps began.
        state: key → state.
        own_of: rank → its own state.
        attempt, world_size: that the own states are of.
        committed: the newest step that is committed.
        seconds: what that took.
        num_lacking: how many ranks had to be sent the state.
        moment: where this one has it; None where it was sent.
        has_new: whether some ranks' processes were started for this attempt.
    """

    step: int
    timeline: int
    state: dict[str, Any]
    own_of: Callable[[int], dict[str, Any]]
    attempt: int
    world_size: int
    committed: int
    seconds: float
    num_lacking: int
    moment: Moment | None
    has_new: bool

    def fields(self, num_workers: int) -> dict[str, Any]:
        """Of the ledger's event; ``num_workers`` take part in the new attempt."""
        num = num_workers - self.num_lacking
        return {
            "step": self.step,
            "source": f"from {num} worker{'s'[: num > 1]} that survived",
            "places": [],
            "read_s": round(self.seconds, 6),
            "skipped": [],
            "from_world_size": self.world_size,
        }


def find(
    link: Link,
    promised: Collection[int],
    *,
    division: Division = WHOLE,
    lives: bool = False,
    others: Others | None = None,
    rollbacks: Sequence[Rollback] = (),
) -> Regained | str:
    """What survivors hold, for this rank; or why that is not used ("" where nobody holds any).

    All ranks call it.

    Args:
        link: the other ranks.
        promised: steps that the ledger says were committed (rank 0 needs them).
        division: what this rank has of the state.
        lives: whether this one was in the attempt before.
        others: what it knows of other workers' records of samples.
        rollbacks: what they have undone is not gone on from.

    Raises:
        OSError, RuntimeError: another rank is gone.
    """
    start_s = time.monotonic()
    moments, records = living.all_kept(), read_own()
    if others is not None:
        records = [*_of_others(records, others), *records]  # its own word counts more
    offer = _offer(moments, records, lives=lives, part=division.part)
    plan = _agree(link, promised, rollbacks, offer)
    if plan.step is None:
        living.forget()
        return plan.why_not
    ends = (one for one in moments if (one.timeline, one.step) == (plan.timeline, plan.step))
    at_it = next(ends, None)
    _publish_own(link, plan, at_it, records)
    own_of = functools.cache(lambda rank: unpack(link.fetch(_own_key(rank), TIMEOUT_S)))
    buffers = own_of(0).get(BUFFERS, []) if 0 in plan.own else []
    state = _state(link, plan, at_it, buffers, division)
    return Regained(
        step=plan.step,
        timeline=plan.timeline,
        state=state,
        own_of=own_of,
        attempt=plan.attempt,
        world_size=plan.world_size,
        committed=plan.committed,
        seconds=time.monotonic() - start_s,
        num_lacking=len(plan.lacking),
        moment=at_it,
        has_new=bool(plan.new),
    )


def _agree(
    link: Link,
    promised: Collection[int],
    rollbacks: Sequence[Rollback],
    offer: StateOffer,
) -> RegainPlan:
    link.publish(f"living/{link.rank}", msgspec.json.encode(offer))
    if link.rank == 0:
        offers = [
            msgspec.json.decode(link.fetch(f"living/{rank}", TIMEOUT_S), type=StateOffer)
            for rank in range(link.world_size)
        ]
        link.publish("living/plan", msgspec.json.encode(decide(offers, promised, rollbacks)))
    return msgspec.json.decode(link.fetch("living/plan", TIMEOUT_S), type=RegainPlan)


def _offer(
    moments: Sequence[Moment], records: list[RankState], *, lives: bool, part: int
) -> StateOffer:
    known = [
        OwnState(
            timeline=one.timeline,
            attempt=one.attempt,
            rank=one.rank,
            world_size=one.world_size,
            step=one.step,
            rest=one.rest.hex(),
            stage=one.stage,
        )
        for one in records
        if one.is_certain
    ]
    found: StateOffer | None = None
    for one in reversed(moments):
        mine = OwnState(
            timeline=one.timeline,
            attempt=one.attempt,
            rank=one.rank,
            world_size=one.world_size,
            step=one.step,
            rest=one.rest.hex(),
        )
        known.append(mine)
        found = StateOffer(
            step=one.step,
            timeline=one.timeline,
            attempt=one.attempt,
            world_size=one.world_size,
            digest=one.digest(),
            rest=mine.rest,
            stepped=one.stepped,
            before=found,
        )
    return msgspec.structs.replace(
        found or StateOffer(),
        lives=lives,
        is_grouped=dist.is_available() and dist.is_initialized(),
        known=known,
        draws=max((one.draws for one in records), default=0),
        part=part,
    )


def _of_others(records: Sequence[RankState], others: Others) -> Iterator[RankState]:
    """What other workers knew alone, where all know the same but for their records of samples."""
    whose = others.attempt, others.rank, others.world_size
    for one in records:
        if (one.attempt, one.rank, one.world_size) != whose or not one.is_certain:
            continue
        own = unpack(one.blob)
        if own["data"].get("position", {}).get("kind") != LOADER:
            continue  # a stream's lanes are each worker's own
        for rank, trail in others.at(one.step, own["data"].get(TRAIL, {}).get("number", 0)).items():
            its = {**own, "data": {**own["data"], TRAIL: trail}}
            blob = Packer(OWN).pack(its)
            yield msgspec.structs.replace(one, rank=rank, rest=b"", blob=blob)


def _own_key(rank: int) -> str:
    return f"living/own/{rank}"


def _publish_own(
    link: Link, plan: RegainPlan, moment: Moment | None, records: list[RankState]
) -> None:
    """Tell the own states that others, or this rank itself, are to have from here."""

    def is_of_plan(one: RankState | Moment) -> bool:
        of = one.timeline, one.attempt, one.step, one.world_size
        return of == (plan.timeline, plan.attempt, plan.step, plan.world_size)

    blobs = {
        one.rank: one.blob
        for one in sorted(records, key=lambda one: one.is_final)  # what was completed counts
        if one.is_certain and is_of_plan(one)
    }
    if moment is not None and is_of_plan(moment):
        blobs[moment.rank] = moment.own
    for rank, holder in plan.own.items():
        if holder == link.rank:
            link.publish(_own_key(rank), blobs[rank])


def _state(
    link: Link, plan: RegainPlan, moment: Moment | None, buffers: Buffers, division: Division
) -> dict[str, Any]:
    """The state: from here where it is here, sent otherwise; with rank 0's buffers."""
    source = plan.sources[division.part]
    is_sent = bool(division.twins.intersection(plan.lacking) if division.twins else plan.lacking)
    key = f"living/outline/{source}"
    if is_sent and link.rank == source:
        assert moment is not None  # noqa: S101 - that is what the source is
        outline: Outline = [
            (name, str(one.dtype).removeprefix("torch."), tuple(local(one).shape), dims_of(one))
            for name, one in moment.tensors.items()
        ]
        link.publish(key, msgspec.msgpack.encode((moment.data, outline)))
    data, tensors = ({}, {}) if moment is None else (moment.data, moment.tensors)
    if is_sent:
        raw = link.fetch(key, TIMEOUT_S)
        sent, outline = msgspec.msgpack.decode(raw, type=tuple[dict[str, Any], Outline])
        found = _broadcast(outline, source, moment, division.group)
        if moment is None:
            data = sent
            tensors = {name: joined(found[name], dims, division) for name, *_, dims in outline}
    tensors = with_buffers(tensors, buffers)
    if moment is not None:
        moment.take(tensors)
    return {key: unflatten(value, tensors) for key, value in data.items()}


def _broadcast(
    outline: Outline, source: int, moment: Moment | None, group: Any
) -> dict[str, torch.Tensor]:
    """Take part in sending to ``group``; what came, where this rank has nothing.

    Raises:
        AttemptOver: it is, and what came may be anything.
        RuntimeError: another rank is gone.
    """
    device = device_of_group()
    found: dict[str, torch.Tensor] = {}
    for piece in _pieces(outline):
        sizes = [_num_bytes(dtype, shape) for _, dtype, shape, _ in piece]
        if moment is not None and dist.get_rank() == source:
            parts = [as_bytes(local(moment.tensors[name])) for name, *_ in piece]
            flat = torch.cat(parts).to(device)
        else:
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        dist.broadcast(flat, source, group=group)
        if moment is not None:
            continue
        come = flat.cpu()
        over.raise_if_over()  # on a GPU a broadcast that was aborted ends without a word
        for (name, dtype, shape, _), part in zip(piece, come.split(sizes), strict=True):
            # In memory of its own, aligned as torch aligns.
            found[name] = part.clone().view(DTYPE_OF[dtype]).reshape(shape)
    return found


def _pieces(outline: Outline) -> Iterator[Outline]:
    """Tensors together, as many as fit into a piece; a larger one alone."""
    piece: Outline = []
    size = 0
    for one in outline:
        num_bytes = _num_bytes(one[1], one[2])
        if piece and size + num_bytes > PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(one)
        size += num_bytes
    if piece:
        yield piece


def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * int(DTYPE_OF[dtype].itemsize)
