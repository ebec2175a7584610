"""Machines spread over zones, each reclaimed as a whole with probability p per hour.

The mean number of machines lost per hour is K·p for every number of zones z; its variance is
K²p(1-p)/z. What that does to the job depends on how it recovers, and a verdict that does not name
the mode is wrong for one of them:

- rigid: every event stops the whole job until all K machines are there again. Events come z times
  as often with z zones: it gets slower with each.
- restart: every event rewinds the job to its newest checkpoint; it goes on with those that are
  left. Rewinds come z times as often: slower with each zone, though never quite stopped.
- peer: what a lost zone held is in the memory of another; nothing is rewound. Each event costs a
  pause and the lost zone's machines while they are away, which is the same for every z. Needs
  z ≥ 2: one zone takes all copies with it.

A zone is there for 1/λ on average, λ = -ln(1-p), and then away until it is replaced; meanwhile it
cannot be reclaimed. With one zone nobody is left to go on: all modes are rigid. First order
otherwise: events that come while another is mended are counted as if they came after it.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from outlast.plan.rates import from_probability

Mode = Literal["rigid", "restart", "peer"]
MODES: Final[tuple[Mode, ...]] = ("rigid", "restart", "peer")


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Machines over zones.

    Attributes:
        num_machines: K in all.
        num_zones: z, each with K/z.
        reclaimed_per_h: p, probability that one zone is reclaimed within an hour.
    """

    num_machines: int
    num_zones: int
    reclaimed_per_h: float

    @property
    def mean_lost_per_h(self) -> float:
        """K·p machines, whatever z is."""
        return self.num_machines * self.reclaimed_per_h

    @property
    def variance_lost(self) -> float:
        """K²p(1-p)/z machines²."""
        p = self.reclaimed_per_h
        return self.num_machines**2 * p * (1 - p) / self.num_zones

    @property
    def events_per_h(self) -> float:
        """Reclaims of any zone per hour: z·(-ln(1-p))."""
        return self.num_zones * from_probability(self.reclaimed_per_h)

    @property
    def all_lost_per_h(self) -> float:
        """Probability that all zones are reclaimed in the same hour: p^z."""
        return float(self.reclaimed_per_h**self.num_zones)


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """What an event costs.

    Attributes:
        back_h: until a reclaimed zone's machines are replaced.
        restore_h: restore and rejoin, in the modes that rewind.
        interval_h: useful hours between two checkpoints.
        pause_h: of the survivors, with copies in peers' memory.
    """

    back_h: float
    restore_h: float
    interval_h: float
    pause_h: float


def throughput(spread: Spread, recovery: Recovery, mode: Mode) -> float:
    """Useful work per hour over that of K machines which are never reclaimed, in [0, 1].

    A rewind is paid by all machines, a replacement only by those that are away.
    """
    rewound_h = recovery.restore_h + recovery.interval_h / 2
    if mode == "rigid":
        return 1 / (1 + spread.events_per_h * (recovery.back_h + rewound_h))
    alone = spread.num_zones == 1  # nobody is left to go on, and no copy
    stopped_h = recovery.pause_h if mode == "peer" and not alone else rewound_h
    there = 1 / (1 + spread.events_per_h / spread.num_zones * recovery.back_h)  # share of machines
    return there / (1 + there * spread.events_per_h * stopped_h)
