"""What is written for one setting, read: each reader says what it takes when it is something else.

Each raises a ConfigError then. Settings themselves, and where their values come from, are in
:mod:`outlast.config`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from outlast.errors import ConfigError
from outlast.tiers import nearest, parse_directory, parse_whole

FILE_NAME: Final = "outlast.toml"
BUFFERS_MAX: Final = 8
PLATFORMS: Final = (
    "auto",
    "aws",
    "gcp",
    "azure",
    "alibaba",
    "slurm",
    "kubernetes",
    "signal",
    "file",
    "command",
    "none",
)
POLL_MIN_S: Final = 0.1
POLL_MAX_S: Final = 60.0
LABELS: Final = ("zone", "rack", "pool")  # what machines fail together by, the widest first
SILENCE_MIN_S: Final = 0.2
SILENCE_MAX_S: Final = 300.0
SPAN_MAX_S: Final = 30 * 86_400.0
HANG_MIN_S: Final = 1.0
HANG_MAX_S: Final = 86_400.0
GRACE_MAX_S: Final = 86_400.0  # an end that is further away is none
REPLICAS_MAX: Final = 2
_RATE: Final = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*([MG])B/s\s*\Z")
_DURATION: Final = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*([a-z]+)\s*$")
_SECONDS: Final = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("min", "m", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    "ms": 0.001,
}
_TRUTHS: Final = {
    **dict.fromkeys(("true", "yes", "1"), True),
    **dict.fromkeys(("false", "no", "0"), False),
}


class Every(msgspec.Struct, frozen=True):
    """How often to save: by steps, by seconds, or (both None) as the policy finds best."""

    steps: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        if self.steps is not None:
            return f"{self.steps} steps"
        return "auto" if self.seconds is None else f"{self.seconds:g} s"


def parse_every(value: object) -> Every:
    """Read ``"auto"``, ``"200 steps"``, ``200`` (steps) or ``"5 min"``.

    Raises:
        ConfigError: the value is none of these, or not positive.
    """
    problem = f'{value!r} is not a cadence; write "auto", "200 steps" or "5 min"'
    if isinstance(value, bool):
        raise ConfigError(problem)
    if isinstance(value, int):
        value = f"{value} steps"
    if not isinstance(value, str):
        raise ConfigError(problem)
    if value.strip() == "auto":
        return Every()
    if value.strip().isdigit():
        value = f"{value} steps"
    match = _DURATION.match(value.lower())
    if not match or float(match[1]) <= 0:
        raise ConfigError(problem)
    if match[2] in ("step", "steps"):
        if not match[1].isdigit():
            raise ConfigError(problem)
        return Every(steps=int(match[1]))
    if match[2] not in _SECONDS:
        raise ConfigError(problem)
    return Every(seconds=float(match[1]) * _SECONDS[match[2]])


class Hang(msgspec.Struct, frozen=True):
    """After how long without progress a worker hangs: as learned (None), or so many seconds."""

    seconds: float | None = None
    is_off: bool = False

    def __str__(self) -> str:
        if self.is_off:
            return "off"
        return "auto" if self.seconds is None else f"{self.seconds:g} s"


def parse_hang(value: object) -> Hang:
    """Read ``"auto"``, ``"off"`` or ``"30 s"``."""
    if value == "auto":
        return Hang()
    if value == "off" or value is False:
        return Hang(is_off=True)
    seconds = _seconds_within(value, HANG_MIN_S, HANG_MAX_S)
    if seconds is None:
        raise ConfigError(
            f'{value!r} is not how long a worker may be without progress; write "auto", "off" or '
            '"30 s", from 1 s to a day'
        )
    return Hang(seconds=seconds)


def parse_hang_limit(value: object) -> float:
    """Seconds that a limit is not below, or is as long as nothing is known."""
    seconds = _seconds_within(value, HANG_MIN_S, HANG_MAX_S)
    if seconds is None:
        raise ConfigError(f'{value!r} is not a limit; write "10 min", from 1 s to a day')
    return seconds


def parse_buffers(value: object) -> int | None:
    """How many snapshots are held in memory; None decides by itself."""
    return _number_or_auto(value, BUFFERS_MAX, "snapshots")


def _number_or_auto(value: object, most: int, what: str) -> int | None:
    if value == "auto":
        return None
    number = parse_whole(value, least=0, most=most)
    if number is None:
        raise ConfigError(f'{value!r} is not a number of {what}; write "auto", or 0 to {most}')
    return number


def parse_overhead(value: object) -> float:
    """A share of the time, above 0 and below 1: ``0.01`` or ``"1%"``."""
    text = str(value).strip()
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if isinstance(value, bool) or not 0 < share < 1:
        raise ConfigError(f"{value!r} is not a share of the time; write 1% or 0.01")
    return share


def parse_optimizer_every(value: object) -> int:
    """Every Nth checkpoint has the optimizer's state."""
    every = parse_whole(value, least=1)
    if every is None:
        raise ConfigError(
            f"{value!r} is not a whole number from 1; 1 puts the optimizer's state into each "
            "checkpoint, 3 into every third"
        )
    return every


def parse_moments(value: object) -> str:
    """How the optimizer's moments are kept."""
    known = ("exact", "bf16")
    if value not in known:
        raise ConfigError(
            f"{value!r} is not a way to keep the optimizer's moments;{nearest(str(value), known)}"
        )
    return str(value)


def parse_platform(value: object) -> str:
    """Who gives notice."""
    if value in PLATFORMS:
        return str(value)
    raise ConfigError(f"{value!r} is not a platform;{nearest(str(value), PLATFORMS)}")


def parse_file(value: object) -> Path | None:
    """A file's path, or None."""
    if not isinstance(value, str | Path) or "\0" in str(value):
        raise ConfigError(f"{value!r} is not a file's path")
    return Path(value).expanduser().absolute() if str(value) else None


def parse_command(value: object) -> tuple[str, ...]:
    """A command in words; empty for none."""
    try:
        words = tuple(shlex.split(value)) if isinstance(value, str) else None
    except ValueError:
        words = None
    if words is None or any("\0" in word for word in words):
        raise ConfigError(
            f"{value!r} is not a command; write a program and its arguments, quoted as for a shell"
        )
    return words


def parse_poll(value: object) -> float:
    """Seconds between two questions."""
    seconds = _seconds_within(value, POLL_MIN_S, POLL_MAX_S)
    if seconds is None:
        raise ConfigError(f'{value!r} is not a polling period; write "1 s", from 100 ms to 60 s')
    return seconds


def parse_labels(value: object) -> dict[str, str]:
    """Where a machine stands: zone, rack, pool."""
    words = [word.strip() for word in str(value).split(",") if word.strip()]
    labels = dict(word.split("=", 1) for word in words if "=" in word)
    if len(labels) != len(words) or not all(labels.values()) or not set(labels) <= set(LABELS):
        raise ConfigError(
            f'{value!r} does not say where a machine stands; write "zone=a, rack=12, pool=x", or '
            "some of them"
        )
    return labels


def parse_silence(value: object) -> float:
    """Seconds that a machine may be silent."""
    seconds = _seconds_within(value, SILENCE_MIN_S, SILENCE_MAX_S)
    if seconds is None:
        raise ConfigError(
            f'{value!r} is not how long a machine may be silent; write "3 s", from 200 ms to 5 min'
        )
    return seconds


def _seconds_within(value: object, least_s: float, most_s: float) -> float | None:
    try:
        seconds = parse_grace(value)
    except ConfigError:
        return None
    return seconds if seconds is not None and least_s <= seconds <= most_s else None


def parse_grace(value: object) -> float | None:
    """Seconds between a signal and the end; None for the platform's own."""
    if value == "auto":
        return None
    try:
        every = parse_every(value)
    except ConfigError:
        every = Every()
    if every.seconds is None or every.seconds > GRACE_MAX_S:
        raise ConfigError(f'{value!r} is not a grace period; write "auto" or "30 s", up to a day')
    return every.seconds


def parse_span(value: object) -> float:
    """Seconds of a stretch of time, from one second to thirty days."""
    try:
        seconds = parse_every(value).seconds
    except ConfigError:
        seconds = None
    if seconds is None or not 1.0 <= seconds <= SPAN_MAX_S:
        raise ConfigError(f'{value!r} is not a stretch of time; write "5 min", from 1 s to 720 h')
    return seconds


def parse_attempts(value: object) -> int:
    """How many attempts may end without progress."""
    attempts = parse_whole(value, least=1)
    if attempts is None:
        raise ConfigError(f"{value!r} is not a number of attempts; write a whole number from 1")
    return attempts


def parse_failures(value: object) -> int | None:
    """How many failures of its own a machine may have; 0 for any number, None for auto."""
    if value == "auto":
        return None
    failures = parse_whole(value, least=0)
    if failures is None:
        raise ConfigError(
            f"{value!r} is not a number of failures; write auto or a whole number, 0 for any number"
        )
    return failures


def parse_early(value: object) -> str:
    """What an early notice leads to."""
    known = ("auto", "leave", "save", "ignore")
    if value not in known:
        raise ConfigError(f"{value!r} is no answer to early notices;{nearest(str(value), known)}")
    return str(value)


def parse_straggler(value: object) -> str:
    """What is done about a slow rank."""
    known = ("report", "notify", "replace", "leave out")
    if value not in known:
        raise ConfigError(
            f"{value!r} is nothing that could be done about a slow rank;"
            f"{nearest(str(value), known)}"
        )
    return str(value)


def parse_replicas(value: object) -> int | None:
    """How many machines keep a copy; None decides by itself."""
    return _number_or_auto(value, REPLICAS_MAX, "replicas")


def parse_rate(value: object) -> float | None:
    """Bytes per second at most; None decides by itself."""
    if value == "auto":
        return None
    match = _RATE.match(value) if isinstance(value, str) else None
    rate = float(match[1]) * {"M": 1e6, "G": 1e9}[match[2]] if match else 0.0
    if rate < 1e6:
        raise ConfigError(f'{value!r} is not a rate; write "auto", "200 MB/s" or "1.5 GB/s"')
    return rate


def parse_anomaly(value: object) -> str:
    """What is done about a loss that goes wrong."""
    known = ("report", "stop", "rollback")
    if value not in known:
        raise ConfigError(
            f"{value!r} is no answer to a loss that goes wrong;{nearest(str(value), known)}"
        )
    return str(value)


def parse_factor(value: object) -> float:
    """Times a spread."""
    try:
        factor = 0.0 if isinstance(value, bool) else float(str(value))
    except ValueError:
        factor = 0.0
    if not 1 <= factor < float("inf"):
        raise ConfigError(f"{value!r} is not a factor from 1 on; write a number like 20")
    return factor


def whole_from(least: int, most: int = 10**9) -> Callable[[object], int]:
    """A reader of whole numbers from ``least`` on."""

    def parse(value: object) -> int:
        found = parse_whole(value, least=least, most=most)
        if found is None:
            raise ConfigError(f"{value!r} is not a whole number from {least} to {most}")
        return found

    return parse


def parse_bool(value: object) -> bool:
    """Yes or no."""
    found = _TRUTHS.get(str(value).lower())
    if found is None:
        raise ConfigError(f"{value!r} is neither true nor false; write one of them")
    return found


def parse_price(value: object) -> float | None:
    """A price per machine and hour."""
    try:
        price = float(str(value))
    except ValueError:
        price = -1.0
    if not 0 <= price < float("inf"):
        raise ConfigError(
            f"{value!r} is not a price per machine and hour; write a number like 0.70"
        )
    return price


def parse_job_directory(value: object) -> Path:
    """The job's directory."""
    if "://" in str(value):
        raise ConfigError(
            f"{str(value).partition('://')[0]}://… is not a directory; the job's directory is one "
            "that every machine sees. Checkpoints go to an object store through a [[tier]] in "
            f"{FILE_NAME}"
        )
    return parse_directory(value)


def parse_url(value: object) -> str:
    """A metadata service's address, or ""."""
    text = str(value)
    if "@" in text:  # not repeated: what stands before it is a password
        raise ConfigError("an address with a password in it; write it as http://HOST[:PORT]")
    return parse_address(text) if text else ""


def parse_address(text: str) -> str:
    """The address of a metadata service.

    Raises:
        ConfigError: it is not one.
    """
    try:
        parts = urlsplit(text)
        usable = parts.scheme == "http" and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment or parts.username or " " in text:
        raise ConfigError(
            f"{text!r} is not a metadata service's address; write it as http://HOST[:PORT] "
            "(the service does not speak https)"
        )
    return text.rstrip("/")
