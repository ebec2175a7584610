"""What machines cost, as it is set: ``[price]`` in ``outlast.toml``.

A price is that of one machine for one hour, in the currency that ``price.currency`` names; it is
shown, and nothing is converted. It is one number for all machines, or one for each kind of machine,
by the name that its cloud has for it (``p5.48xlarge``); ``other`` is then the price of a kind that
is not named. A job whose machines are of several kinds is reckoned machine by machine; which is of
which kind, its ledger says (the event ``machine``).

Guarantees: what a machine costs is said in one place, :meth:`Prices.of`: the price on spot, and
where there is none, the one on demand. A kind without a price has none, and whoever reckons with
it says so: nothing is guessed from other kinds.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from outlast.errors import ConfigError
from outlast.units import read_number

OTHER: Final = "other"  # a kind that is not named
_KIND: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")
_CURRENCY: Final = re.compile(r"[A-Z]{3}|[$€£¥₹₩₿]")
_WRITE: Final = (
    'write a number like 0.70, or one for each kind of machine: "p5.48xlarge=12.5, other=0.70"'
)


class PriceList(msgspec.Struct, frozen=True, kw_only=True):
    """Prices of one way to rent machines.

    Attributes:
        kinds: kind of machine → price of one for an hour.
        other: the same of a kind that is not named, or None.
    """

    kinds: dict[str, float] = {}
    other: float | None = None

    def of(self, kind: str) -> float | None:
        """The price of a machine of this kind ("" where that is not known), or None."""
        return self.kinds.get(kind, self.other)

    def __str__(self) -> str:
        """As :func:`parse_prices` reads it."""
        last = "" if self.other is None else _shown(self.other)
        if not self.kinds:
            return last
        named = [f"{kind}={_shown(price)}" for kind, price in self.kinds.items()]
        return ", ".join([*named, *([f"{OTHER}={last}"] if last else [])])


def _shown(price: float) -> str:
    return f"{price:.12g}"


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """All that is set of prices.

    Attributes:
        spot: of machines that may be taken back.
        on_demand: of machines that are not.
        currency: of all of them, as it is shown; "" where nobody has named it.
    """

    spot: PriceList = PriceList()
    on_demand: PriceList = PriceList()
    currency: str = ""

    def __bool__(self) -> bool:
        """Whether any price is set."""
        return bool(self.spot != PriceList() or self.on_demand != PriceList())

    def of(self, kind: str) -> float | None:
        """What a machine of this kind costs: on spot where that is set, or else on demand."""
        found = self.spot.of(kind)
        return self.on_demand.of(kind) if found is None else found

    def is_spot(self, kind: str) -> bool:
        """Whether :meth:`of` is the price on spot."""
        return self.spot.of(kind) is not None

    def mean(self, kinds: Iterable[str]) -> float | None:
        """What one of several machines costs in the mean, of those that have a price, or None."""
        known = [price for kind in kinds if (price := self.of(kind)) is not None]
        return statistics.fmean(known) if known else None


NO_PRICES: Final = Prices()


def parse_prices(value: object) -> PriceList:
    """Read a price, prices by kind of machine (a table, or a text), or "" for none.

    Raises:
        ConfigError: it is none of these.
    """
    if value == "":
        return PriceList()
    price = read_number(value, least=0)
    if price is not None:
        return PriceList(other=price)
    by_kind = value if isinstance(value, Mapping) else _pairs(value)
    found: dict[str, float] = {}
    for kind, given in by_kind.items():
        price = read_number(given, least=0)
        if price is None:
            raise ConfigError(f"{kind} = {given!r} is not a price per machine and hour; {_WRITE}")
        found[parse_kind(kind)] = price
    return PriceList(other=found.pop(OTHER, None), kinds=found)


def _pairs(value: object) -> dict[str, str]:
    """``KIND=PRICE``, with commas between them."""
    words = [word.strip() for word in str(value).split(",")]
    pairs = [word.partition("=") for word in words]
    if not isinstance(value, str) or not all(is_there for _, is_there, _ in pairs):
        raise ConfigError(f"{value!r} is not a price per machine and hour; {_WRITE}")
    found = {kind.strip(): price.strip() for kind, _, price in pairs}
    if len(found) < len(pairs):
        raise ConfigError(f"{value!r} has two prices for one kind of machine; {_WRITE}")
    return found


def parse_currency(value: object) -> str:
    """Read the name of a currency, as USD; "" for one that nobody names.

    Raises:
        ConfigError: it is not one.
    """
    text = value.strip() if isinstance(value, str) else "?"
    if text and not _CURRENCY.fullmatch(text):
        raise ConfigError(
            f"{value!r} is not a currency; write its code of three letters, as USD, or its sign"
        )
    return text


def parse_kind(value: object) -> str:
    """Read the name of a kind of machine.

    Raises:
        ConfigError: it is not one.
    """
    text = value.strip() if isinstance(value, str) else ""
    if not _KIND.fullmatch(text):
        raise ConfigError(
            f"{value!r} is not a kind of machine; write what your cloud calls it, as p5.48xlarge"
        )
    return text
