"""``outlast plan interval --tier …``: how often should I save into each of several places?"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

import click
import msgspec

from outlast.cli.plan.answer import Answer, chance, number, span, table
from outlast.cli.quantities import DURATION, RATE, SPAN, Rate
from outlast.errors import ConfigError
from outlast.plan.comparison import or_none
from outlast.plan.schedule import PLACES_MOST, Schedule, best, nearest, of_counts
from outlast.plan.tiers import TierCosts, intervals_h, wall_per_useful, waste

_RANGE_IS: Final = "if all rates are twice or half that"


class TierType(click.ParamType):  # type: ignore[type-arg]  # older ones are not generic
    """``9s,7.78e-6/s`` or ``9s,7.78e-6/s,30s``: what a save blocks, failures, restore."""

    name = "tier"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read one tier."""
        if not isinstance(value, str):
            return value
        parts = [part.strip() for part in value.split(",")]
        if len(parts) not in (2, 3):
            self.fail(
                f"{value!r} is not a tier; write what a save blocks, the rate of the failures that "
                "need it, and the restore: 50s,5.19e-7/s,120s",
                param,
                ctx,
            )
        rate: Rate = RATE.convert(parts[1], param, ctx)
        restore_h = DURATION.convert(parts[2], param, ctx) if len(parts) == 3 else 0.0
        if rate.of != "job":
            self.fail(f"{parts[1]!r}: a tier's rate is the whole job's, like 0.1/h", param, ctx)
        return TierCosts(
            checkpoint_h=SPAN.convert(parts[0], param, ctx),
            failures_per_h=rate.per_h,
            restore_h=restore_h,
        )


def answer(tiers: tuple[TierCosts, ...]) -> Answer:
    """The schedule that the Markov model finds, and the additive one beside it."""
    chosen, alone = best(tiers), nearest(tiers)
    range_h = [_interval_at(tiers, chosen, times) for times in (2.0, 0.5)]
    additive_h = intervals_h(tiers)
    walls = [or_none(chosen.wall_per_useful), or_none(wall_per_useful(tiers, additive_h))]
    markov = or_none(alone.wall_per_useful)
    error = math.inf if math.isinf(walls[1]) or math.isinf(markov) else walls[1] / markov - 1
    data: dict[str, Any] = {
        "model": "Markov",
        "interval_h": chosen.interval_h,
        "interval_low_h": range_h[0],
        "interval_high_h": range_h[1],
        "range_is": _RANGE_IS,
        "tiers": _tiers_json(tiers, chosen),
        "wall_h_per_useful_h": walls[0],
        "wasted_fraction": 1 - 1 / walls[0],
        "makes_progress": not math.isinf(walls[0]),
        "models": [
            _model_json("Markov", chosen, walls[0], walls[0], is_chosen=True),
            _model_json("additive", alone, walls[1], markov, is_chosen=False)
            | {"tier_intervals_h": additive_h, "waste_fraction": waste(tiers, additive_h)},
        ],
        "additive_error_fraction": error,
    }
    headline = [_headline(chosen, walls[0])]
    lines = [
        *headline,
        *table(
            ("", "a save", "restore", "needed every", "save every", "of all", "additive"),
            [_cells(i, *each) for i, each in enumerate(_by_tier(tiers, chosen, additive_h), 1)],
        ),
        *table(
            ("model", "wall h per useful h", "by the Markov model"),
            [
                ("Markov", number(walls[0], 4), number(walls[0], 4)),
                ("additive", number(walls[1], 4), number(markov, 4)),
            ],
            [True, False],
        ),
        *_range_words(chosen, range_h),
        _error_words(error),
        (
            "Markov: exponential failures, which strike while saving and restoring too (Moody et "
            "al., SC'10). A save into a slower tier takes the place of one into the faster ones, "
            "and is read after any failure that comes before the next save."
        ),
        "additive: Σ C/T + Σ λ(T/2+R), each T = √(2C/λ); first order, each tier as if alone.",
        (
            "Rates as given, of failures that need this tier and no slower one. Set it with every "
            "= in each [[tier]] of outlast.toml; without, the running job finds its own."
        ),
    ]
    return Answer(question="how often should I save?", data=data, headline=headline, lines=lines)


def _interval_at(tiers: tuple[TierCosts, ...], chosen: Schedule, times: float) -> float:
    """The best interval if all rates were so many times as high; the counts hardly change."""
    rated = [
        msgspec.structs.replace(tier, failures_per_h=tier.failures_per_h * times) for tier in tiers
    ]
    return of_counts(rated, chosen.counts, chosen.interval_h).interval_h


def _by_tier(
    tiers: tuple[TierCosts, ...], chosen: Schedule, additive_h: list[float]
) -> Iterable[tuple[TierCosts, int | None, float, float]]:
    """Each tier, every which save goes there, hours between those, the additive model's."""
    for tier, every, alone_h in zip(tiers, chosen.every, additive_h, strict=True):
        yield tier, every, every * chosen.interval_h if every else math.inf, alone_h


def _cells(
    i: int, tier: TierCosts, every: int | None, interval_h: float, alone_h: float
) -> tuple[str, ...]:
    return (
        f"tier {i}",
        span(tier.checkpoint_h),
        span(tier.restore_h),
        span(1 / tier.failures_per_h),
        span(interval_h),
        _nth(every),
        span(alone_h),
    )


def _nth(every: int | None) -> str:
    if every is None:
        return "none"
    if every == 1:
        return "each"
    ending = {1: "st", 2: "nd", 3: "rd"}.get(every % 10 if every % 100 not in (11, 12, 13) else 0)
    return f"{every:,}{ending or 'th'}"


def _headline(chosen: Schedule, wall: float) -> str:
    if math.isinf(wall):
        return "The job makes no progress: failures come faster than it is restored and saved."
    slower = [(i, every) for i, every in enumerate(chosen.every, 1) if every and every > 1]
    words = ", ".join(f"every {_nth(every)} into tier {i}" for i, every in slower)
    left = [str(i) for i, every in enumerate(chosen.every, 1) if every is None]
    none = f"nothing into tier {' and '.join(left)}" if left else ""
    also = "".join(f", {part}" for part in (words, none) if part)
    wasted = chance(1 - 1 / wall)
    return (
        f"Save every {span(chosen.interval_h)}{also}; {wasted} of the time goes to saving and "
        "failing."
    )


def _range_words(chosen: Schedule, range_h: list[float]) -> list[str]:
    if math.isinf(chosen.wall_per_useful):
        return []
    return [f"Range: every {span(range_h[0])} to {span(range_h[1])} {_RANGE_IS}."]


def _error_words(error: float) -> str:
    if math.isinf(error):
        return "The additive model is far out of its range here; go by the Markov one."
    return (
        f"The additive model's own figure is off by {100 * error:+.2f} % here; go by the Markov "
        "one."
    )


def _tiers_json(tiers: tuple[TierCosts, ...], chosen: Schedule) -> list[dict[str, Any]]:
    return [
        {
            "checkpoint_h": tier.checkpoint_h,
            "failures_per_h": tier.failures_per_h,
            "restore_h": tier.restore_h,
            "every_saves": every,
            "interval_h": interval_h,
        }
        for tier, every, interval_h, _ in _by_tier(tiers, chosen, intervals_h(tiers))
    ]


def _model_json(
    name: str, schedule: Schedule, wall: float, markov: float, *, is_chosen: bool
) -> dict[str, Any]:
    return {
        "model": name,
        "interval_h": schedule.interval_h,
        "every_saves": list(schedule.every),
        "wall_h_per_useful_h": wall,
        "wasted_fraction": 1 - 1 / wall,
        "markov_wall_h_per_useful_h": markov,
        "makes_progress": not math.isinf(wall),
        "chosen": is_chosen,
    }


def only_tiers(tiers: tuple[TierCosts, ...], **others: object) -> None:
    """Tiers bring their own rates and costs.

    Raises:
        ConfigError: something else was given besides, or there are too many.
    """
    if len(tiers) > PLACES_MOST:
        raise ConfigError(f"{len(tiers)} times --tier: more than {PLACES_MOST} are not planned for")
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise ConfigError(
            f"--{given[0].replace('_', '-')} and --tier do not go together: each tier has its own "
            "rate and cost"
        )
