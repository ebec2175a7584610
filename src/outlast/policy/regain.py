"""Which state of the survivors a new attempt goes on from, if any: the furthest that is complete.

Complete means: a survivor has all that optimizers change as of a step's end (of a state that is
divided over the workers: for each part, a survivor has that part); survivors that are there too
have the same, bit for bit; and somebody knows what each rank alone knew at that step: its
random numbers, its place in the data and its record of samples. Otherwise the attempt goes on from
a checkpoint, as one whose workers were all started anew.

Of who died within a step that others completed it is only known what it had drawn by then. That
counts if no worker was ever seen to draw later in a step; those that completed this very step have
shown it for this one. And it counts only if the step has changed weights: then all gradients of it
were used. At the end of a step that has not, one rank may have none in the making where another one
has.

The state of a step's end is the same for any number of workers; what each of them knew alone is
not. Where one is lost on the way into an attempt of another number, the others may know it of the
attempt before or of this one: either will do, all of it. A part of each will not, nor where both
have as many workers and a third one was in between: what all have counted was shared out anew.

Rejected: going on without what only a rank that is lost knew. It would lose no step, and be another
run; and nobody could prove any more that each sample was trained on once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from outlast.policy.rollbacks import Rollback, is_undone


class OwnState(msgspec.Struct, frozen=True, kw_only=True):
    """That somebody knows the own state of a rank at a step.

    Attributes:
        timeline, attempt, rank, world_size, step: of which.
        rest: digest of what that rank held besides, "" where that is not known.
        stage: how far it was in that step (0: the backward pass began, 1: the optimizer was about
            to; 2: at its end).
    """

    timeline: int
    attempt: int = 0
    rank: int
    world_size: int
    step: int
    rest: str = ""
    stage: int = 2


class StateOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker of the new attempt has.

    Attributes:
        step: whose end it has the state of, or None.
        timeline, attempt, world_size: of that state.
        digest: of that state without the rank's own.
        rest: digest of the part of it that optimizers do not change.
        lives: whether its process was in the attempt before.
        is_grouped: whether it is in a process group, so that state can be sent to it.
        known: own states that it knows, of any rank.
        stepped: whether that step has changed weights.
        draws: the stage from which on it was never seen to draw random numbers in a step, in the
            newest one neither.
        part: of the state, where that is divided over the workers: the lowest rank that has it.
        before: what it has of the step before, where it has that too.
    """

    step: int | None = None
    timeline: int = 0
    attempt: int = 0
    world_size: int = 0
    digest: str = ""
    rest: str = ""
    lives: bool = False
    is_grouped: bool = False
    known: list[OwnState] = []
    stepped: bool = True
    draws: int = 0
    part: int = 0
    before: StateOffer | None = None


class RegainPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks do: whose state is gone on from.

    Attributes:
        step: completed steps to go on from; None: from a checkpoint.
        why_not: why the survivors' state is not used; "" where there was none.
        timeline: of the state.
        attempt, world_size: of the own states.
        sources: part of the state → the rank that sends it.
        lacking: ranks that need it sent.
        new: ranks of processes that were started for this attempt.
        own: rank before → the rank that knows its own state now.
        committed: the newest step that is committed.
    """

    step: int | None = None
    why_not: str = ""
    timeline: int = 0
    attempt: int = 0
    world_size: int = 0
    sources: dict[int, int] = {}
    lacking: list[int] = []
    new: list[int] = []
    own: dict[int, int] = {}
    committed: int = 0


def decide(
    offers: Sequence[StateOffer], promised: Collection[int], rollbacks: Sequence[Rollback] = ()
) -> RegainPlan:
    """Decide whose state the new attempt goes on from, if anybody's.

    Args:
        offers: of the new attempt's ranks, in order.
        promised: steps that the ledger says were committed.
        rollbacks: what they have undone is not gone on from, whoever survives with it.
    """
    held = [
        (rank, one)
        for rank, offer in enumerate(offers)
        for one in (offer, offer.before)
        if one and one.step and not is_undone(rollbacks, one.timeline, one.step)
    ]
    if not held:
        lives = any(offer.lives for offer in offers)
        return RegainPlan(why_not="none of them has a state of a step's end" if lives else "")
    parts = {offer.part for offer in offers}
    ends = _whole_ends(offers, held, parts)
    if not ends:
        return RegainPlan(
            why_not=_of_parts(offers, parts - {offers[rank].part for rank, _ in held})
        )
    # Of a divided state one that is older may do: it is there where nobody knows of the newest one
    # whether it counts.
    plans = [_plan(offers, promised, *end) for end in (ends if len(parts) > 1 else ends[:1])]
    return next((plan for plan in plans if plan.step is not None), plans[0])


def _plan(
    offers: Sequence[StateOffer],
    promised: Collection[int],
    timeline: int,
    step: int,
    there: Mapping[int, StateOffer],
) -> RegainPlan:
    source = next(iter(there.values()))
    committed = max(promised, default=0)
    if committed > step:
        return RegainPlan(why_not=f"they have step {step}, and step {committed} is committed")
    sources: dict[int, int] = {}
    for rank in there:
        sources.setdefault(offers[rank].part, rank)
    if any(one.digest != there[sources[offers[rank].part]].digest for rank, one in there.items()):
        return RegainPlan(
            why_not=f"they differ at step {step}: not all of it is the same on all ranks"
        )
    lacking = [rank for rank in range(len(offers)) if rank not in there]
    if lacking and not all(one.is_grouped for one in offers):
        return RegainPlan(
            why_not="it cannot be sent: call init_process_group() before outlast.session()"
        )
    known = [
        (one.attempt, one.world_size)
        for offer in offers
        for one in offer.known
        if (one.timeline, one.step) == (timeline, step)
    ]
    stepped = any(one.stepped for one in there.values())
    own: dict[int, int] = {}
    reasons, attempt, world_size = [], 0, 0
    of_those_there = [(one.attempt, one.world_size) for one in there.values()]
    for attempt, world_size in dict.fromkeys([*of_those_there, *known]):
        whose = timeline, attempt, world_size
        own, why_not = _owners(offers, whose, step, source, stepped=stepped)
        reasons.append(why_not)
        if not why_not:
            break
    if reasons[-1]:
        return RegainPlan(why_not=reasons[0])
    return RegainPlan(
        step=step,
        timeline=timeline,
        attempt=attempt,
        world_size=world_size,
        sources=sources,
        lacking=lacking,
        new=[rank for rank, one in enumerate(offers) if not one.lives],
        own=own,
        committed=committed,
    )


def _whole_ends(
    offers: Sequence[StateOffer], held: Sequence[tuple[int, StateOffer]], parts: Collection[int]
) -> list[tuple[int, int, dict[int, StateOffer]]]:
    """Steps of which all parts are there, the newest first: timeline, step, and who has them."""
    found = []
    for timeline, step in sorted({(one.timeline, one.step or 0) for _, one in held}, reverse=True):
        there = {rank: one for rank, one in held if (one.timeline, one.step) == (timeline, step)}
        if {offers[rank].part for rank in there} == parts:
            found.append((timeline, step, there))
    return found


def _of_parts(offers: Sequence[StateOffer], lost: Collection[int]) -> str:
    if not lost:
        return "their parts of it are of different steps"
    of = (str(rank) for rank, offer in enumerate(offers) if offer.part in lost)
    return f"the state is divided, and nobody has the part of ranks {' and '.join(of)} any more"


def _owners(
    offers: Sequence[StateOffer],
    whose: tuple[int, int, int],
    step: int,
    source: StateOffer,
    *,
    stepped: bool,
) -> tuple[dict[int, int], str]:
    """Who knows the own states of a timeline, an attempt and a number of workers: rank → holder.

    And why that is not enough, or "".
    """
    own: dict[int, int] = {}
    held: dict[int, str] = {source.step or 0: source.rest}  # by step: of the rank seen first
    # All run one script: what one draws late, who died before it may have been about to draw.
    draws = max(offer.draws for offer in offers) if stepped else 2
    for holder, offer in enumerate(offers):
        for one in offer.known:
            # Of a step before, too: who died in this one has left nothing to compare of it.
            is_comparable = (one.timeline, one.attempt, one.world_size) == whose
            if is_comparable and one.rest and one.rest != held.setdefault(one.step, one.rest):
                return own, f"at step {step} rank {one.rank} held what other ranks did not"
            if not is_comparable or one.step != step or one.stage < draws:
                continue
            if one.rank not in own or holder == one.rank:
                own[one.rank] = holder
    missing = [rank for rank in range(whose[2]) if rank not in own]
    if missing and not stepped:
        return own, f"rank {missing[0]} had not ended step {step}, which has changed no weights"
    if missing:
        return own, f"the random numbers of rank {missing[0]} at step {step} went with its process"
    return own, ""
