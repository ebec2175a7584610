"""Numbers with units as people write them: ``3min``, ``0.5%/gpu-day``, ``1.5GB/s``, ``7B``.

Each is a type of click's, so that a value that cannot be read is one line which names the flag and
an example. Times become hours, sizes bytes. A number without a unit is refused where units differ:
a guess would be wrong by 60.

A rate with a percent sign is a probability and becomes -ln(1-p) per period; a plain number is a
rate already. ``3 in 5h`` is what was seen, and keeps its uncertainty.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final, Literal

import click
import msgspec

from outlast import units
from outlast.errors import nearest
from outlast.planner.formulas import PUBLISHED, from_probability, published
from outlast.policy.hazard import Posterior
from outlast.policy.interval import TierCosts

# Commas and underscores part thousands, in groups of three; elsewhere a comma is refused, because
# in half of the world it is the decimal point, and 0,5 would become 5.
_GROUPED: Final = r"[1-9][0-9]{0,2}(?:[,_][0-9]{3})+(?![0-9,_])"
_NUMBER: Final = rf"[-+]?(?:(?:{_GROUPED}|[0-9]+)\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_COMMA: Final = re.compile(r"(?<![0-9,_])[-+]?([0-9]+)[,_]([0-9]+)")
_HOURS: Final = {
    **{unit: seconds / 3600 for unit, seconds in units.SECONDS.items()},
    "month": 730.5,
    **dict.fromkeys(("y", "year"), 8766.0),
}
_BYTES: Final = {
    "b": 1.0,
    **{f"{letter}b": 1000.0**n for n, letter in enumerate("kmgtp", 1)},
    **{f"{letter}ib": 1024.0**n for n, letter in enumerate("kmgtp", 1)},
}
_THOUSANDS: Final = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_QUANTITY: Final = re.compile(rf"^\s*\$?\s*({_NUMBER})\s*([^\s0-9]*)\s*\Z")
_MIXED: Final = re.compile(r"^([KMGTPkmgtp]?)([bB])(ps|/s)?\Z")
_RATE: Final = re.compile(
    rf"^\s*({_NUMBER})\s*(%?)\s*(?:failures?|interruptions?)?\s*(?:/|per\s)\s*({_NUMBER})?\s*"
    r"(?:(gpu|node|machine|job)[-/\s]?)?([a-z]+)\s*\Z",
    re.IGNORECASE,
)
_SEEN: Final = re.compile(r"^\s*([0-9]+)\s*(?:failures?)?\s*in\s+(.+)\Z", re.IGNORECASE)
_MTBF: Final = re.compile(r"^\s*mt(?:bf|tf)\s*[=:]?\s*([0-9.].*)\Z", re.IGNORECASE)
_TIME: Final = re.compile(rf"^\s*{_NUMBER}\s*(?:s|min|h|d|hours?|days?|minutes?)\s*\Z")
_RATE_EXAMPLES: Final = "write 2/h, 1/3.5h, 0.5%/gpu-day, 6.5/1000 node-days, or 3 in 5h as seen"

Of = Literal["job", "gpu", "node", "step"]
GPUS_PER_NODE: Final = 8
LITTLE_H: Final = 1.0  # evidence of less says little beside the prior, which is worth three
_SMALLEST: Final = 1e-12  # of any quantity that is not 0: hours, bytes, shares


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """How often something fails.

    Attributes:
        per_h: failures per hour of one GPU, one machine, or the whole job; or per step.
        of: which of these.
        source: where the number is from, in words.
        seen: what it was learnt from, if it was.
        text: as it was written, if somebody wrote it.
    """

    per_h: float
    of: Of
    source: str
    seen: Posterior | None = None
    text: str = ""


class _Type(click.ParamType):  # type: ignore[type-arg]  # older ones are not generic
    """Reads text; what is not text is a default and passes."""

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """In help, the first word: TIME for "a time"."""
        return self.name.removeprefix("a ").split()[0].upper()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self.read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def read(self, text: str) -> Any:
        raise NotImplementedError


class Quantity(_Type):
    """A number with one of several units.

    Args:
        name: what it is, for people.
        units: unit → what a value is multiplied by; in lower case, without the plural's s.
        example: how it is written.
        least: what it may not be below; ``open`` if not that either.
        most: what it may not be above; said as ``most_words``.
        bare: whether a number alone is taken; 0 always is.
    """

    def __init__(
        self,
        name: str,
        units: dict[str, float],
        example: str,
        *,
        least: float = 0.0,
        most: float = math.inf,
        most_words: str = "",
        above: bool = True,
        bare: bool = False,
        whole: bool = False,
    ) -> None:
        self.name = name
        self._units = units
        self._example = example
        self._least, self._most, self._above = least, most, above
        self._bare, self._whole = bare, whole
        self._most_words = most_words or f"{most:g}"

    def read(self, text: str) -> float | int:
        """The value, in the unit that counts."""
        match = _QUANTITY.match(text)
        if not match:
            raise ValueError(
                f"{text!r} is not {self.name}; {_decimal(text) or f'write {self._example}'}"
            )
        value = self._scaled(text, _number(match[1]), _bits_or_bytes(text, match[2]))
        low = value <= self._least if self._above else value < self._least
        if low or not value <= self._most:
            bounds = f"{'above' if self._above else 'at least'} {self._least:g}"
            most = "" if math.isinf(self._most) else f" and at most {self._most_words}"
            raise ValueError(f"{text!r}: {self.name} is {bounds}{most}, like {self._example}")
        if 0 < value < _SMALLEST:
            raise ValueError(f"{text!r} is too small to plan with; write {self._example}")
        if not self._whole:
            return value
        if value != int(value):
            raise ValueError(f"{text!r} is not a whole number")
        return int(value)

    def _scaled(self, text: str, number: float, unit: str) -> float:
        bare = not unit and (self._bare or number == 0)
        scale = 1.0 if bare else _unit(self._units, unit)
        if scale is None:
            hint = f": {unit!r} is not a unit of {self.name}" if unit else f" {units.NO_UNIT}"
            raise ValueError(f"{text!r}{hint}; write {self._example}")
        return number * scale


class Duration(Quantity):
    """A time; ``1h30m`` and ``2d 12h`` are sums."""

    def read(self, text: str) -> float | int:
        """The hours."""
        seconds = units.read_sum(text)
        return super().read(text if seconds is None else f"{seconds / 3600:.17g}h")


class RateType(_Type):
    """``2/h``, ``MTBF 3.5h``, ``0.5%/gpu-day``, ``6.5/1000 node-days``, ``3 in 5h``, ``rsc-1``."""

    name = "rate"

    def read(self, text: str) -> Rate:
        """The rate, and where it is from."""
        return msgspec.structs.replace(self._read(text), text=text.strip())

    def _read(self, text: str) -> Rate:
        known = published(text.strip().lower())
        if known is not None:
            second_hand = "" if known.primary else " (secondary)"
            return Rate(
                per_h=known.per_gpu_day / 24,
                of="gpu",
                source=f"{known.source}{second_hand}: {known.per_gpu_day:.3g} per GPU-day",
            )
        seen = _SEEN.match(text)
        if seen:
            return learnt(int(seen[1]), float(DURATION.read(seen[2])))
        apart = _MTBF.match(text)
        if apart:
            hours = float(SPAN.read(apart[1]))
            return Rate(per_h=1 / hours, of="job", source=f"given as {text.strip()}")
        match = _RATE.match(text)
        if not match:
            if _TIME.match(text):
                raise ValueError(f"{text!r} is a time; write 1/{text.strip()} for one in each")
            keys = tuple(rate.key for rate in PUBLISHED)
            hint = nearest(text, keys) if text.strip()[:1].isalpha() else ""
            examples = _decimal(text) or _RATE_EXAMPLES
            raise ValueError(f"{text!r} is not a rate; {examples}{hint and ';' + hint}")
        return _rate(text, match)


class TierType(_Type):
    """``9s,7.78e-6/s`` or ``9s,7.78e-6/s,30s``: what a save blocks, failures, restore."""

    name = "tier"

    def read(self, text: str) -> TierCosts:
        """The tier."""
        parts = [part.strip() for part in text.split(",")]
        if len(parts) not in (2, 3):
            raise ValueError(
                f"{text!r} is not a tier; write what a save blocks, the rate of the failures that "
                "need it, and the restore: 50s,5.19e-7/s,120s"
            )
        rate = RATE.read(parts[1])
        restore_h = DURATION.read(parts[2]) if len(parts) == 3 else 0.0
        if rate.of != "job":
            raise ValueError(f"{parts[1]!r}: a tier's rate is the whole job's, like 0.1/h")
        checkpoint_h = SPAN.read(parts[0])
        return TierCosts(checkpoint_h=checkpoint_h, failures_per_h=rate.per_h, restore_h=restore_h)


def learnt(num_failures: int, hours: float, seen: Posterior | None = None) -> Rate:
    """A rate from failures that were seen, over the prior.

    Args:
        num_failures: that there were.
        hours: in which they came.
        seen: what is made of them; all of them count the same unless it is given.
    """
    seen = seen or Posterior().after(hours, num_failures)
    times = "failure" if num_failures == 1 else "failures"
    span = f"{hours:.3g} h"
    if round(hours, 2) < LITTLE_H:
        span = f"{units.seconds(hours * 3600)} (little evidence: less than an hour)"
    return Rate(
        per_h=seen.mean_per_h,
        of="job",
        source=f"{num_failures} {times} in {span}, over the prior of 1 in 10 h",
        seen=seen,
    )


def _rate(text: str, match: re.Match[str]) -> Rate:
    value, percent, count, of, unit = match.groups()
    number, periods = _number(value), _number(count) if count else 1.0
    if number <= 0 or periods <= 0:
        raise ValueError(f"{text!r}: a rate is above 0, like 2/h or 0.5%/gpu-day")
    kind: Of = "job"
    if of:
        kind = {"gpu": "gpu", "node": "node", "machine": "node", "job": "job"}[of.lower()]  # type: ignore[assignment]
    if unit in ("m", "M"):
        raise ValueError(f"{text!r}: {unit} could be a minute or a month; write min or month")
    hours = _unit(_HOURS, unit.lower())
    if hours is None and unit.lower() in ("step", "steps") and not of:
        kind, hours = "step", 1.0
    if hours is None:
        raise ValueError(f"{text!r}: {unit!r} is not a unit of time; {_RATE_EXAMPLES}")
    if not _SMALLEST <= number / periods / hours <= 1 / _SMALLEST:
        raise ValueError(f"{text!r} is no rate that can be planned with; {_RATE_EXAMPLES}")
    source = f"given as {text.strip()}"
    if percent:
        if number >= 100:
            raise ValueError(f"{text!r}: a probability is below 100 %; a plain number is a rate")
        number = from_probability(number / 100)
        source += f", a probability: -ln(1-p) = {number:.5g}"
    return Rate(per_h=number / periods / hours, of=kind, source=source)


def _decimal(text: str) -> str:
    """What to write in place of a decimal comma; "" where there is none."""
    comma = _COMMA.search(text)
    if not comma:
        return ""
    return f"write {comma[1]}.{comma[2]}; a comma parts thousands, as in 640,000"


def _bits_or_bytes(text: str, unit: str) -> str:
    """The unit in lower case; ``Gbps`` are bits, ``GBps`` bytes, and ``Gb`` could be either.

    Raises:
        ValueError: it could be either, which is off by 8.
    """
    found = _MIXED.match(unit)
    if not found:
        return unit.lower()
    prefix, letter, per = found[1].lower(), found[2], found[3]
    if per == "ps" and letter == "b":
        return f"{prefix}bit/s"
    if letter == "B" or not found[1].isupper():
        return f"{prefix}b/s" if per == "ps" else unit.lower()
    rest = "/s" if per else ""
    raise ValueError(
        f"{text!r}: {unit} are bits or bytes; write {found[1]}B{rest} for bytes"
        + (f", {found[1]}bit/s for bits" if per else "")
    )


def _number(text: str) -> float:
    return float(text.replace(",", "").replace("_", ""))


def _unit(units: dict[str, float], unit: str) -> float | None:
    found = units.get(unit)
    return units.get(unit.removesuffix("s")) if found is None and len(unit) > 1 else found


_PERCENT: Final = {"%": 0.01}

_LONGEST: Final[dict[str, Any]] = {"most": 8.766e6, "most_words": "1,000 years"}

DURATION: Final = Duration("a time", _HOURS, "90s, 3min or 1.5h", above=False, **_LONGEST)
SPAN: Final = Duration("a time", _HOURS, "90s, 3min or 1.5h", **_LONGEST)
GRACE: Final = Duration("a time", units.SECONDS, "120s", most=86_400, most_words="a day", bare=True)
WAIT: Final = Duration("a time", _HOURS, "60s", most=24, most_words="a day")
DAYS: Final = Quantity("a number of days", {"d": 1.0, "day": 1.0}, "60", bare=True, most=365_250)
RATE: Final = RateType()
TIER: Final = TierType()
SIZE: Final = Quantity("a size", _BYTES, "640GB or 1.2TB", most=1e24)
BANDWIDTH: Final = Quantity(
    "a bandwidth",
    {
        **{f"{unit}/s": scale for unit, scale in _BYTES.items()},
        **{f"{letter}bit/s": 1000.0**n / 8 for n, letter in enumerate("kmgt", 1)},
    },
    "1.5GB/s or 100Gbit/s",
    most=1e18,
)
PRICE: Final = Quantity("a price", {}, "2.50", bare=True, above=False, most=1e12)
GPUS: Final = Quantity("a number", {"": 1.0, "k": 1e3}, "4096", bare=True, whole=True, most=1e9)
COUNT0: Final = Quantity("a number", {}, "50", bare=True, whole=True, above=False, most=1e9)
PARAMETERS: Final = Quantity(
    "a number of parameters", _THOUSANDS, "7B or 70B", bare=True, least=1000, most=1e18
)
SHARE: Final = Quantity("a share", _PERCENT, "0.9 or 90%", above=False, most=1.0, bare=True)
DISCOUNT: Final = Quantity("a discount", _PERCENT, "0.3 or 30%", above=False, most=1.0, bare=True)


def flag(
    name: str,
    kind: click.ParamType,  # type: ignore[type-arg]  # older ones are not generic
    words: str,
    default: str | float | None = None,
    *,
    to: str = "",
    **more: Any,
) -> click.Option:
    """Make a flag of a command; its help says the default.

    The function's parameter is ``to``, or else the flag's name: a time's ends in ``_h``, a size's
    in ``_bytes``.
    """
    unit = "_h" if isinstance(kind, Duration) else "_bytes" if kind is SIZE else ""
    if default is not None:
        more = {"default": default, "show_default": True, **more}
    to = to or name.removeprefix("--").replace("-", "_") + unit
    return click.Option([name, to], type=kind, help=words, **more)


JSON_FLAG: Final = click.Option(
    ["--json", "as_json"], is_flag=True, help="One JSON object, nothing else."
)
