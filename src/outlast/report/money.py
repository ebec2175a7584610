"""What a job's machines cost, machine by machine, each at the price of its kind.

Money is machine-hours at the price of the machine's kind (:mod:`outlast.prices`), while machines
were held: all but waiting and pauses. What is spent on new steps, their waits for batches, and the
script's own code is useful. The rest is lost: replays, stalls, detecting, restarting, start-up,
what is not known.

Which machine is of which kind, the ledger's ``machine`` events say. Where all that are known are of
one kind, one that nobody has named is of that kind too. A machine without a price is in no sum; its
hours are told, so that nobody takes a part of the cost for all of it.

What can go wrong: a name that two machines of different kinds have had, one after the other, has
the kind of the second. Machines that are paid for while nothing runs on them are not in the ledger,
and so not in the sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from outlast.ledger.events import Event
from outlast.ledger.goodput import NOT_HELD, PARTS, Part, Split
from outlast.ledger.measured import Measured
from outlast.prices import Prices

USEFUL: Final[tuple[Part, ...]] = ("productive", "data", "script")
AGAIN: Final[tuple[Part, ...]] = ("detecting", "restarting", "replayed")  # after interruptions
HOUR_S: Final = 3600.0


class KindMoney(msgspec.Struct, frozen=True, kw_only=True):
    """The machines of one kind.

    Attributes:
        kind: its name; "" where it is not known.
        machines: how many, by name.
        held_s: machine-seconds.
        price: per machine and hour, or None.
        priced_as: "spot" or "on demand".
    """

    kind: str
    machines: int
    held_s: float
    price: float | None
    priced_as: str


class Money(msgspec.Struct, frozen=True, kw_only=True):
    """What a job has cost so far, in the currency of the prices.

    Attributes:
        price: per machine and hour, in the mean; None where no machine has one, and then no sum is.
        priced_as: "spot", "on demand", or both.
        cost: of the time that machines were held, or None.
        useful, lost: its two parts, or None.
        saved: by how much the same job on demand would have cost more, of the machines that have
            both prices; None without any. There nothing would have interrupted it: neither
            detecting, restarting nor replaying. Below zero where interruptions have cost more than
            the lower price has spared.
        parts: part of the time → its price.
        by_machine: machine → its price, or None; "" for those that are not known by name.
        kinds: the kinds of machines.
        unpriced_s: machine-seconds of those without a price.
        currency: of all amounts, as it is shown; "" where nobody has named it.
    """

    price: float | None = None
    priced_as: str = ""
    cost: float | None = None
    useful: float | None = None
    lost: float | None = None
    saved: float | None = None
    parts: dict[Part, float] = {}
    by_machine: dict[str, float | None] = {}
    kinds: list[KindMoney] = []
    unpriced_s: float = 0.0
    currency: str = ""

    def amount(self, value: float) -> str:
        """An amount as it is shown, with its currency where that is known: ``12.50 USD``."""
        shown = f"{value:,.2f}" if abs(value) >= 0.1 or not value else f"{value:.2g}"
        return f"{shown} {self.currency}".strip()


def kinds_of(events: Iterable[Event]) -> dict[str, str]:
    """Machine → its kind, of those that have said so."""
    return Measured(one for one in events if one.event == "machine").kinds


def money(spent: Split, kinds: Mapping[str, str], prices: Prices) -> Money | None:
    """Put a price on a job's time; None where no price is set.

    Args:
        spent: the job's time.
        kinds: machine → its kind.
        prices: what is set.
    """
    if not prices:
        return None
    known = set(kinds.values())
    usual = known.pop() if len(known) == 1 else ""
    by_kind: dict[str, list[dict[Part, float]]] = {}
    by_machine: dict[str, float | None] = {}
    for name, parts in spent.machines_by_name.items():
        kind = kinds.get(name) or usual
        by_kind.setdefault(kind, []).append(parts)
        price = prices.of(kind)
        by_machine[name] = None if price is None else held_s(parts) / HOUR_S * price
    found = [_of_kind(kind, machines, prices) for kind, machines in sorted(by_kind.items())]
    unpriced_s = math.fsum(one.held_s for one in found if one.price is None)
    priced = {one.kind: one.price for one in found if one.price is not None}
    if not priced and found:
        return Money(
            by_machine=by_machine,
            kinds=found,
            unpriced_s=unpriced_s,
            currency=prices.currency,
        )
    sums = {
        part: 0.0
        if part in NOT_HELD
        else math.fsum(
            one[part] / HOUR_S * price for kind, price in priced.items() for one in by_kind[kind]
        )
        for part in PARTS
    }
    cost, useful = math.fsum(sums.values()), math.fsum(sums[part] for part in USEFUL)
    return Money(
        price=_mean(found, prices.of(usual)),
        priced_as=" and ".join(sorted({one.priced_as for one in found if one.price is not None}))
        or ("spot" if prices.is_spot(usual) else "on demand"),
        cost=cost,
        useful=useful,
        lost=max(cost - useful, 0.0),
        saved=_saved(by_kind, prices),
        parts=sums,
        by_machine=by_machine,
        kinds=found,
        unpriced_s=unpriced_s,
        currency=prices.currency,
    )


def held_s(parts: Mapping[Part, float]) -> float:
    """Of a machine's time: what somebody pays for."""
    return math.fsum(seconds for part, seconds in parts.items() if part not in NOT_HELD)


def _of_kind(kind: str, machines: list[dict[Part, float]], prices: Prices) -> KindMoney:
    return KindMoney(
        kind=kind,
        machines=len(machines),
        held_s=math.fsum(map(held_s, machines)),
        price=prices.of(kind),
        priced_as="spot" if prices.is_spot(kind) else "on demand",
    )


def _mean(found: list[KindMoney], otherwise: float | None) -> float | None:
    """Over the hours of those with a price; before there are any, over those kinds."""
    priced = [(one.price, one.held_s) for one in found if one.price is not None]
    if not priced:
        return otherwise
    if len({price for price, _ in priced}) == 1:
        return priced[0][0]
    hours = math.fsum(seconds for _, seconds in priced) or 1.0
    return math.fsum(price * seconds for price, seconds in priced) / hours


def _saved(by_kind: Mapping[str, list[dict[Part, float]]], prices: Prices) -> float | None:
    saved = []
    for kind, machines in by_kind.items():
        spot, on_demand = prices.spot.of(kind), prices.on_demand.of(kind)
        if spot is not None and on_demand is not None:
            held_h = math.fsum(map(held_s, machines)) / HOUR_S
            again_h = math.fsum(one[part] for one in machines for part in AGAIN) / HOUR_S
            saved.append((held_h - again_h) * on_demand - held_h * spot)
    return math.fsum(saved) if saved else None
