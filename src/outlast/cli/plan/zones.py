"""``outlast plan zones``: over how many zones?"""

from __future__ import annotations

from typing import Any

import click

from outlast.cli.plan.answer import Answer, answered, number, percent, table
from outlast.cli.quantities import DURATION, GPUS, RATE, SPAN, Rate
from outlast.errors import ConfigError
from outlast.plan.rates import to_probability
from outlast.plan.zones import MODES, Mode, Recovery, Spread, throughput

_TRIED = (1, 2, 4, 8)
_RATE_MOST_PER_H = 10.0  # of a zone


def answer(machines: int, rate: Rate, recovery: Recovery, tried: tuple[int, ...]) -> Answer:
    """Each number of zones by each mode of recovery."""
    p = to_probability(rate.per_h)
    spreads = [Spread(num_machines=machines, num_zones=z, reclaimed_per_h=p) for z in tried]
    by_mode: dict[Mode, list[float]] = {
        mode: [throughput(spread, recovery, mode) for spread in spreads] for mode in MODES
    }
    best = {mode: tried[by_mode[mode].index(max(by_mode[mode]))] for mode in MODES}
    data: dict[str, Any] = {
        "num_machines": machines,
        "reclaimed_probability_per_h": p,
        "rate_source": rate.source,
        "back_h": recovery.back_h,
        "restore_h": recovery.restore_h,
        "interval_h": recovery.interval_h,
        "pause_h": recovery.pause_h,
        "zones": [
            {
                "num_zones": spread.num_zones,
                "mean_lost_machines_per_h": spread.mean_lost_per_h,
                "variance_lost_machines_squared": spread.variance_lost,
                "events_per_h": spread.events_per_h,
                "all_lost_probability_per_h": spread.all_lost_per_h,
                **{f"{mode}_throughput_fraction": by_mode[mode][i] for mode in MODES},
            }
            for i, spread in enumerate(spreads)
        ],
        **{f"best_num_zones_{mode}": best[mode] for mode in MODES},
    }
    headline = [
        (
            f"With copies in other zones' memory take {_zones(best['peer'])}; a job that rewinds "
            f"or stops at each reclaim is fastest with {best['restart']:,}."
        )
    ]
    rows = [
        (
            _zones(spread.num_zones),
            number(spread.mean_lost_per_h, 1),
            number(spread.variance_lost, 2),
            *(percent(by_mode[mode][i]) for mode in MODES),
        )
        for i, spread in enumerate(spreads)
    ]
    lines = [
        *headline,
        *table(
            ("", "lost per hour", "variance", "rigid", "restart", "peer"),
            rows,
            [spread.num_zones == best["peer"] for spread in spreads],
        ),
        (
            "The last three: useful work, of that without reclaims, by how the job recovers. "
            "rigid: it waits for all machines; restart: it rewinds and goes on with the rest; "
            "peer: nothing is rewound (outlast run with replicas). Marked: the best for peer."
        ),
        f"The rate: each zone is reclaimed with {percent(p)} an hour; {rate.source}. First order.",
    ]
    return Answer(
        question="over how many zones?",
        data=data,
        headline=headline,
        lines=lines,
        next=f"outlast plan replicas --nodes {machines + machines % 2} --lost 2",
    )


def _zones(count: int) -> str:
    return f"{count:,} zones" if count > 1 else "1 zone"


@click.command(name="zones")
@click.option("--machines", type=GPUS, required=True, help="In all.")
@click.option("--reclaim", "rate", type=RATE, required=True, help="Of one zone: 5%/h.")
@click.option("--zones", "given", type=GPUS, multiple=True, help="How many; 1, 2, 4, 8 if none.")
@click.option(
    "--back", "back_h", type=SPAN, default="30min", show_default=True, help="Until replaced."
)
@click.option(
    "--restore",
    "restore_h",
    type=DURATION,
    default="3min",
    show_default=True,
    help="Restore and rejoin, where the job rewinds.",
)
@click.option(
    "--every",
    "interval_h",
    type=SPAN,
    default="20min",
    show_default=True,
    help="Useful time between two checkpoints.",
)
@click.option(
    "--pause",
    "pause_h",
    type=DURATION,
    default="1s",
    show_default=True,
    help="Of the others, where copies are in memory.",
)
@answered
def command(
    *,
    machines: int,
    rate: Rate,
    given: tuple[int, ...],
    back_h: float,
    restore_h: float,
    interval_h: float,
    pause_h: float,
) -> Answer:
    """Spreading over zones, by how the job recovers."""
    if rate.of not in ("job", "node"):
        raise ConfigError("--reclaim is of a whole zone; write 5%/h or 0.05/h")
    if rate.per_h > _RATE_MOST_PER_H:
        raise ConfigError(f"zones that are reclaimed {rate.per_h:.3g} times an hour are no place")
    recovery = Recovery(back_h=back_h, restore_h=restore_h, interval_h=interval_h, pause_h=pause_h)
    if given and max(given) > machines:
        raise ConfigError(
            f"--zones {max(given):,}: {machines:,} machines do not stand in more zones than there "
            f"are of them; write --zones {machines} or fewer"
        )
    tried = tuple(sorted(set(given))) or tuple(z for z in _TRIED if z <= machines)
    return answer(machines, rate, recovery, tried)
