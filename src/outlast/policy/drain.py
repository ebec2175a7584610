"""How a job answers a notice: what can still be made safe in the seconds that are left.

A drain is: hear (up to one polling period, and one request), agree on a step, finish that step,
bring the state to a tier, leave. It is worth beginning when the sum fits into the notice:

    poll + http + agreement + step's rest + bytes/bandwidth + fsync + margin ≤ notice

Bandwidth is what this job's own saves have shown, and a slow one of them (``ledger.measured``): a
mean is missed half of the time. Three answers: ``flush`` fits even when it goes slowly; ``try``
fits only if it goes as well as it ever did, or nobody knows yet; ``keep`` fits in no case, so the
newest commit stands and nobody waits for the step's end in vain.

A notice that comes again at each start, before a step is made, would have the job start and leave
for ever: it stays a little longer each time (``stay_s``), and after ``IDLE_MOST`` it gives up.

Rejected: always trying (a machine that cannot make it holds up those that stay, and its owner is
not told before it is gone); stopping in the middle of a step with its state (there is none).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final, Literal, NamedTuple

import msgspec

from outlast.units import short_seconds

Choice = Literal["flush", "try", "keep"]

HTTP_S: Final = 1.0  # one request to a metadata service
AGREEMENT_S: Final = 0.2  # all ranks on one step; milliseconds unless a rank has no processor
LEAVING_S: Final = 2.0  # kept for the way out: leaving in time matters more than the last commit
LEAVING_SHARE: Final = 0.25  # of a notice that is very short


def leaving_s(left_s: float) -> float:
    """What is kept of ``left_s`` seconds for the way out."""
    return min(LEAVING_S, LEAVING_SHARE * left_s)


class DrainTier(msgspec.Struct, frozen=True, kw_only=True):
    """A durable tier, as a drain sees it.

    Attributes:
        name: of the tier.
        outlasts: whether it is there when this machine is not.
        slow_s: seconds until the state is there, when it goes slowly; None: never measured.
        fast_s: the same when it goes well.
        size: bytes that one save brings there.
    """

    name: str
    outlasts: bool
    slow_s: float | None = None
    fast_s: float | None = None
    size: int = 0


class DrainPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is done with the seconds that a notice leaves.

    Attributes:
        choice: see the module.
        tiers: where the last save goes, the fastest first; None: wherever a save goes.
        needs_s: seconds until the first of them has it; None when nobody knows.
        left_s: seconds that are left; None when nobody said.
    """

    choice: Choice
    tiers: tuple[str, ...] | None = None
    needs_s: float | None = None
    left_s: float | None = None

    @property
    def words(self) -> str:
        """Why, for people; "" where there is nothing to say."""
        if self.left_s is None or self.needs_s is None:
            return ""
        return f"it needs {self.needs_s:.1f} s and {self.left_s:.1f} s are left"


def plan(
    left_s: float | None,
    tiers: Sequence[DrainTier],
    *,
    step_slow_s: float = 0.0,
    step_fast_s: float = 0.0,
) -> DrainPlan:
    """Choose what to do with the time that is left.

    Args:
        left_s: seconds until the machine goes; None when nobody said.
        tiers: durable tiers, the fastest first.
        step_slow_s: seconds to the end of the step in progress, when it goes slowly.
        step_fast_s: the same when it goes well.
    """
    head_s = step_slow_s + AGREEMENT_S
    if left_s is None:
        return DrainPlan(choice="flush", needs_s=_after(head_s, _least(tiers, slow=True)))
    until_s = left_s - leaving_s(left_s)
    best = _best(tiers, until_s - head_s, slow=True)
    if best:
        needs_s = _after(head_s, best[0].slow_s)
        return DrainPlan(choice="flush", tiers=_names(best), needs_s=needs_s, left_s=left_s)
    needs_s = _after(head_s, _least(tiers, slow=True))
    best = _best(tiers, until_s - step_fast_s, slow=False)
    if best:
        return DrainPlan(choice="try", tiers=_names(best), needs_s=needs_s, left_s=left_s)
    return DrainPlan(choice="keep", tiers=(), needs_s=needs_s, left_s=left_s)


def hopeless(left_s: float, rest_s: Sequence[float]) -> list[bool]:
    """While tiers are being brought up to date: which of them to give up for the others' sake.

    Args:
        left_s: seconds until the machine goes.
        rest_s: for each tier, seconds that it still takes at the pace it has had.

    Returns:
        For each tier whether to give it up. The one that is nearest to its end is never given up,
        and none is as long as none could be helped by it.
    """
    if not rest_s:
        return []
    nearest = min(rest_s)
    # What shares a network with others goes faster without them: not twice as fast for each.
    return [rest > 2 * left_s and rest > nearest for rest in rest_s]


def _best(tiers: Sequence[DrainTier], budget_s: float, *, slow: bool) -> list[DrainTier]:
    """The tiers of the best way: the first of them directly, the others copied from it."""
    ways: list[tuple[tuple[bool, int], list[DrainTier]]] = []
    for index, first in enumerate(tiers):
        at_first_s = _seconds(first, slow=slow)
        if at_first_s > budget_s:
            continue
        others = [
            tier
            for tier in tiers[index + 1 :]
            if at_first_s + _seconds(tier, slow=slow) <= budget_s
        ]
        way = [first, *others]
        ways.append(((any(tier.outlasts for tier in way), len(way)), way))
    return max(ways, key=lambda way: way[0], default=(None, []))[1]  # of equals the first


def _seconds(tier: DrainTier, *, slow: bool) -> float:
    known = tier.slow_s if slow else tier.fast_s
    if known is not None:
        return known
    return float("inf") if slow else 0.0  # nobody knows: it may be tried, and not relied upon


def _least(tiers: Sequence[DrainTier], *, slow: bool) -> float | None:
    known = [_seconds(tier, slow=slow) for tier in tiers]
    least = min(known, default=float("inf"))
    return None if least == float("inf") else least


def _after(head_s: float, save_s: float | None) -> float | None:
    return None if save_s is None else head_s + save_s


def _names(tiers: Sequence[DrainTier]) -> tuple[str, ...]:
    return tuple(tier.name for tier in tiers)


def on_early(setting: str, *, has_deadline: bool) -> Literal["leave", "save", "ignore"]:
    """What an early notice leads to.

    A machine that *will* go leaves once the next checkpoint is due. A mere recommendation may come
    hours ahead or lead to nothing: it only brings checkpoints closer together, unless the owner
    wants more.

    Args:
        setting: ``notice.early``: "auto", "leave", "save" or "ignore".
        has_deadline: whether the platform said when.
    """
    if setting == "auto":
        return "leave" if has_deadline else "save"
    assert setting in ("leave", "save", "ignore")  # noqa: S101 - the settings were checked
    return setting  # type: ignore[return-value]


# --- a notice that comes back ---------------------------------------------------------------------

IDLE_MOST: Final = 20  # an hour and more, with the longest waits that are usual
IDLE_FIRST_S: Final = 5.0


def stay_s(idle: int, *, longest_s: float, left_s: float | None) -> float:
    """Seconds to stay on a machine after a drain without progress, before "start me again".

    No scheduler knows why a job leaves. It may start it again at once on the same machine, where
    the same notice stands: an instance that nobody cordons, a file that somebody has forgotten.

    Args:
        idle: drains in a row, this one included, between which no checkpoint came to be.
        longest_s: ``restart.back_off``.
        left_s: until the machine goes; None where nobody said.
    """
    if idle < 2:  # any machine may have its notice before a first step
        return 0.0
    longest_s = min(longest_s, float("inf") if left_s is None else max(left_s - LEAVING_S, 0.0))
    return min(IDLE_FIRST_S * 2.0 ** min(idle - 2, 60), longest_s)


# --- before anything has happened ----------------------------------------------------------------


def bandwidth_needed(
    num_bytes: int,
    notice_s: float,
    *,
    poll_s: float = 0.0,
    http_s: float = 0.0,
    agreement_s: float = 0.0,
    step_s: float = 0.0,
    fsync_s: float = 0.0,
    margin_s: float = 0.0,
) -> float:
    """Bytes per second that a flush must reach to fit into the notice; infinite if none does."""
    rest_s = notice_s - (poll_s + http_s + agreement_s + step_s + fsync_s + margin_s)
    return num_bytes / rest_s if rest_s > 0 else float("inf")


class DrainCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a notice is long enough for this job.

    Attributes:
        fits: whether a save fits.
        notice_s: how long before the end the machine is told.
        needs_s: from there to the commit and out, when it goes slowly.
        words: one line for people, with what to change if it does not fit.
    """

    fits: bool
    notice_s: float
    needs_s: float
    words: str


class Around(NamedTuple):
    """What a notice must leave room for besides the save itself, in seconds.

    Attributes:
        before_s: until a save begins: it is heard, agreed upon, and a step ends.
        out_s: kept for the way out.
    """

    before_s: float
    out_s: float


def around_save(notice_s: float, *, heard_s: float, step_s: float) -> Around:
    """What a notice of ``notice_s`` seconds must leave room for besides the save itself."""
    return Around(heard_s + AGREEMENT_S + step_s, leaving_s(notice_s))


def check(
    notice_s: float, tiers: Sequence[DrainTier], *, heard_s: float, step_s: float, leaves: bool
) -> DrainCheck | None:
    """Compare what a drain needs with what the platform gives; None while nobody knows.

    Args:
        notice_s: what the platform (or ``notice.grace``) gives.
        tiers: durable tiers, the fastest first.
        heard_s: longest time until the notice is heard: a polling period and a request.
        step_s: a slow step.
        leaves: whether the machine's own disks are gone afterwards.
    """
    measured = [tier for tier in tiers if tier.slow_s is not None]
    if not measured:
        return None
    tier = min(measured, key=lambda one: one.slow_s or 0.0)
    around = around_save(notice_s, heard_s=heard_s, step_s=step_s)
    needs_s = around.before_s + (tier.slow_s or 0.0) + around.out_s
    fits = needs_s <= notice_s
    words = f"grace {notice_s:.0f} s, save needs {_short(needs_s)} {'✔' if fits else '✘'}"
    if not fits:
        words += f" ({_short(tier.slow_s or 0.0)} of it to write to {tier.name}). "
        words += _remedy(notice_s, tier, around)
    elif leaves and not any(one.outlasts for one in tiers):
        words += (
            f". {tier.name} is on this machine's own disk: if that goes with the machine, so does "
            "the checkpoint. Add a [[tier]] that stays"
        )
    return DrainCheck(fits=fits, notice_s=notice_s, needs_s=needs_s, words=words)


def _remedy(notice_s: float, tier: DrainTier, around: Around) -> str:
    before_s, out_s = around
    if notice_s <= before_s + out_s:
        return (
            f"To hear of it, end a step and leave takes {_short(before_s + out_s)} alone: a "
            "notice will cost what came after the newest checkpoint; checkpoint.every bounds that"
        )
    needed = bandwidth_needed(tier.size, notice_s, step_s=before_s, margin_s=out_s)
    return (
        f"It would fit at {needed / 1e9:.2f} GB/s: put a faster [[tier]] first, save less "
        "(checkpoint.moments), or use more machines"
    )


_short: Final = partial(short_seconds, below_10=".1f")
