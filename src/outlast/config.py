"""Settings: where they come from, and what happens to one that is not known.

Precedence: argument > ``OUTLAST_*`` variable > ``outlast.toml`` > default. Settings are frozen,
reject unknown keys with the nearest known one, and are checked once, here. Each remembers where
it came from; ``outlast config --explain`` prints that.

The file is ``outlast.toml`` in the working directory, or the one that ``OUTLAST_CONFIG`` names.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from outlast.errors import ConfigError
from outlast.tiers import Tier, nearest, parse_directory, parse_keep, parse_tiers, parse_whole

FILE_NAME: Final = "outlast.toml"

# Keys of the documented file that this version does not act on yet. They are refused in words:
# a setting that silently does nothing is worse than an error.
NOT_YET: Final = {
    "workers.min": "an elastic number of workers",
}

# What `outlast watch` tells the command that it runs: named like settings, and none of them.
NOTICE_VARIABLES: Final = (
    "OUTLAST_NOTICE_SOURCE",
    "OUTLAST_NOTICE_ACTION",
    "OUTLAST_NOTICE_DEADLINE_T",
    "OUTLAST_NOTICE_DETAIL",
    "OUTLAST_NOTICE_EARLY",
)


class Every(msgspec.Struct, frozen=True):
    """How often to save: by steps, by seconds, or (both None) as the policy finds best."""

    steps: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        if self.steps is not None:
            return f"{self.steps} steps"
        return "auto" if self.seconds is None else f"{self.seconds:g} s"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be set.

    Attributes:
        dir: the job's directory.
        checkpoint_every: how often a checkpoint is taken.
        checkpoint_keep: how many committed checkpoints are kept, at least 1.
        checkpoint_buffers: how many snapshots are held in memory at once, which is also the most
            saves in flight; 0 writes directly while training waits; None decides by itself.
        checkpoint_optimizer_every: the optimizer's state is in every Nth checkpoint; those in
            between hold the weights and cannot be resumed from.
        checkpoint_moments: "exact", or "bf16": the optimizer's moments at half their size, after
            which a resume is not bit-exact.
        tiers: where checkpoints go, in order of speed; one local tier unless set.
        checkpoints_dir: the first tier that is a directory; ``<dir>/checkpoints`` if none is.
        notice_platform: who gives notice, one of ``PLATFORMS``. Signals are always heard.
        notice_base_url: another address for the metadata service.
        notice_poll_s: seconds between two questions to the platform.
        notice_grace_s: seconds between a signal and the end, or None for the platform's own.
        notice_early: what an early notice leads to: auto, leave, save, ignore.
        notice_requeue: whether ``outlast run`` asks Slurm to run its job again after a drain.
        notice_file: a file whose being there is a notice, or None.
        notice_command: a command that exits with 0 when there is a notice; empty for none.
        notice_approve: whether the platform is told that it need not wait, once all is saved.
        membership_labels: what this machine may fail together with: zone, rack, pool → name.
        membership_silence_s: how long a machine may be silent before it is taken for lost.
        peer_replicas: how many machines keep a copy of another's snapshot; None: one if there are.
        peer_rate_bytes: how fast such copies are sent at most, per second; None: after the cores.
        peer_tls_cert, peer_tls_key, peer_tls_ca: files for TLS between machines; all or none.
        price_spot: price of a spot machine per hour, or None.
        price_on_demand: price of an on-demand machine per hour, or None.
        workers_warm: whether workers are forked from a process that has imported everything.
        origin: setting → where its value came from.
    """

    dir: Path
    checkpoint_every: Every
    checkpoint_keep: int
    checkpoint_buffers: int | None
    checkpoint_optimizer_every: int
    checkpoint_moments: str
    tiers: tuple[Tier, ...]
    checkpoints_dir: Path
    notice_platform: str
    notice_base_url: str
    notice_poll_s: float
    notice_grace_s: float | None
    notice_early: str
    notice_requeue: bool
    notice_file: Path | None
    notice_command: tuple[str, ...]
    notice_approve: bool
    membership_labels: dict[str, str]
    membership_silence_s: float
    peer_replicas: int | None
    peer_rate_bytes: float | None
    peer_tls_cert: Path | None
    peer_tls_key: Path | None
    peer_tls_ca: Path | None
    price_spot: float | None
    price_on_demand: float | None
    workers_warm: bool
    origin: dict[str, str]


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


def _parse_buffers(value: object) -> int | None:
    return _number_or_auto(value, BUFFERS_MAX, "snapshots")


def _number_or_auto(value: object, most: int, what: str) -> int | None:
    if value == "auto":
        return None
    number = parse_whole(value, least=0, most=most)
    if number is None:
        raise ConfigError(f'{value!r} is not a number of {what}; write "auto", or 0 to {most}')
    return number


def _parse_optimizer_every(value: object) -> int:
    every = parse_whole(value, least=1)
    if every is None:
        raise ConfigError(
            f"{value!r} is not a whole number from 1; 1 puts the optimizer's state into each "
            "checkpoint, 3 into every third"
        )
    return every


def _parse_moments(value: object) -> str:
    known = ("exact", "bf16")
    if value not in known:
        raise ConfigError(
            f"{value!r} is not a way to keep the optimizer's moments;{nearest(str(value), known)}"
        )
    return str(value)


def _parse_platform(value: object) -> str:
    if value in PLATFORMS:
        return str(value)
    raise ConfigError(f"{value!r} is not a platform;{nearest(str(value), PLATFORMS)}")


def _parse_file(value: object) -> Path | None:
    if not isinstance(value, str | Path) or "\0" in str(value):
        raise ConfigError(f"{value!r} is not a file's path")
    return Path(value).expanduser().absolute() if str(value) else None


def _parse_command(value: object) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(value)) if isinstance(value, str) else None
    except ValueError:
        words = None
    if words is None or any("\0" in word for word in words):
        raise ConfigError(
            f"{value!r} is not a command; write a program and its arguments, quoted as for a shell"
        )
    return words


def _parse_poll(value: object) -> float:
    seconds = _seconds_within(value, POLL_MIN_S, POLL_MAX_S)
    if seconds is None:
        raise ConfigError(f'{value!r} is not a polling period; write "1 s", from 100 ms to 60 s')
    return seconds


def _parse_labels(value: object) -> dict[str, str]:
    words = [word.strip() for word in str(value).split(",") if word.strip()]
    labels = dict(word.split("=", 1) for word in words if "=" in word)
    if len(labels) != len(words) or not all(labels.values()) or not set(labels) <= set(LABELS):
        raise ConfigError(
            f'{value!r} does not say where a machine stands; write "zone=a, rack=12, pool=x", or '
            "some of them"
        )
    return labels


def _parse_silence(value: object) -> float:
    seconds = _seconds_within(value, SILENCE_MIN_S, SILENCE_MAX_S)
    if seconds is None:
        raise ConfigError(
            f'{value!r} is not how long a machine may be silent; write "3 s", from 200 ms to 5 min'
        )
    return seconds


def _seconds_within(value: object, least_s: float, most_s: float) -> float | None:
    try:
        seconds = _parse_grace(value)
    except ConfigError:
        return None
    return seconds if seconds is not None and least_s <= seconds <= most_s else None


def _parse_grace(value: object) -> float | None:
    if value == "auto":
        return None
    try:
        every = parse_every(value)
    except ConfigError:
        every = Every()
    if every.seconds is None or every.seconds > GRACE_MAX_S:
        raise ConfigError(f'{value!r} is not a grace period; write "auto" or "30 s", up to a day')
    return every.seconds


def _parse_early(value: object) -> str:
    known = ("auto", "leave", "save", "ignore")
    if value not in known:
        raise ConfigError(f"{value!r} is no answer to early notices;{nearest(str(value), known)}")
    return str(value)


def _parse_replicas(value: object) -> int | None:
    return _number_or_auto(value, REPLICAS_MAX, "replicas")


def _parse_rate(value: object) -> float | None:
    if value == "auto":
        return None
    match = _RATE.match(value) if isinstance(value, str) else None
    rate = float(match[1]) * {"M": 1e6, "G": 1e9}[match[2]] if match else 0.0
    if rate < 1e6:
        raise ConfigError(f'{value!r} is not a rate; write "auto", "200 MB/s" or "1.5 GB/s"')
    return rate


def _parse_bool(value: object) -> bool:
    found = _TRUTHS.get(str(value).lower())
    if found is None:
        raise ConfigError(f"{value!r} is neither true nor false; write one of them")
    return found


def _parse_price(value: object) -> float | None:
    try:
        price = float(str(value))
    except ValueError:
        price = -1.0
    if not 0 <= price < float("inf"):
        raise ConfigError(
            f"{value!r} is not a price per machine and hour; write a number like 0.70"
        )
    return price


def _parse_job_directory(value: object) -> Path:
    if "://" in str(value):
        raise ConfigError(
            f"{str(value).partition('://')[0]}://… is not a directory; the job's directory is one "
            "that every machine sees. Checkpoints go to an object store through a [[tier]] in "
            f"{FILE_NAME}"
        )
    return parse_directory(value)


def _parse_url(value: object) -> str:
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


# key in the file → (attribute, default, parser). OUTLAST_CHECKPOINT_EVERY sets checkpoint.every.
_KEYS: Final[dict[str, tuple[str, object, Callable[[object], Any]]]] = {
    "dir": ("dir", "./outlast-job", _parse_job_directory),
    "checkpoint.every": ("checkpoint_every", "auto", parse_every),
    "checkpoint.keep": ("checkpoint_keep", 3, parse_keep),
    "checkpoint.buffers": ("checkpoint_buffers", "auto", _parse_buffers),
    "checkpoint.optimizer_every": ("checkpoint_optimizer_every", 1, _parse_optimizer_every),
    "checkpoint.moments": ("checkpoint_moments", "exact", _parse_moments),
    "notice.platform": ("notice_platform", "auto", _parse_platform),
    "notice.base_url": ("notice_base_url", "", _parse_url),
    "notice.poll": ("notice_poll_s", "1 s", _parse_poll),
    "notice.grace": ("notice_grace_s", "auto", _parse_grace),
    "notice.early": ("notice_early", "auto", _parse_early),
    "notice.requeue": ("notice_requeue", False, _parse_bool),
    "notice.file": ("notice_file", "", _parse_file),
    "notice.command": ("notice_command", "", _parse_command),
    "notice.approve": ("notice_approve", False, _parse_bool),
    "membership.labels": ("membership_labels", "", _parse_labels),
    "membership.silence": ("membership_silence_s", "3 s", _parse_silence),
    "peer.replicas": ("peer_replicas", "auto", _parse_replicas),
    "peer.rate": ("peer_rate_bytes", "auto", _parse_rate),
    "peer.tls_cert": ("peer_tls_cert", "", _parse_file),
    "peer.tls_key": ("peer_tls_key", "", _parse_file),
    "peer.tls_ca": ("peer_tls_ca", "", _parse_file),
    "price.spot": ("price_spot", None, _parse_price),
    "price.on_demand": ("price_on_demand", None, _parse_price),
    "workers.warm": ("workers_warm", True, _parse_bool),
}


def in_short(command: Sequence[str]) -> str:
    """A command as it may be shown and written down: its arguments may hold a secret."""
    return " ".join([*command[:1], *(["…"] if len(command) > 1 else [])])


def variable_name(key: str) -> str:
    """The environment variable that sets ``key``, such as ``OUTLAST_CHECKPOINT_EVERY``."""
    return "OUTLAST_" + key.upper().replace(".", "_")


def load(
    arguments: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Settings:
    """Read settings from all their sources.

    Args:
        arguments: key (as in the file, ``checkpoint.every``) → value; None values are unset.
        environ: the environment; the process's own by default.
        file: the settings file; by default ``OUTLAST_CONFIG`` or ``outlast.toml`` if it exists.

    Raises:
        ConfigError: an unknown setting, a value that cannot be read, an unreadable file.
    """
    environ = os.environ if environ is None else environ
    sources: list[tuple[str, dict[str, object]]] = []
    given = {key: value for key, value in (arguments or {}).items() if value is not None}
    sources.append(("argument", given))
    sources.append(("environment", _from_environment(environ)))
    path = file or (Path(environ["OUTLAST_CONFIG"]) if environ.get("OUTLAST_CONFIG") else None)
    if path is not None or Path(FILE_NAME).exists():
        path = path or Path(FILE_NAME)
        sources.append((str(path), _from_file(path)))
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for key, (attribute, default, parse) in _KEYS.items():
        name, found = next(((n, s[key]) for n, s in sources if key in s), ("default", default))
        if name == "environment":
            name = variable_name(key)
        try:
            values[attribute] = None if found is None else parse(found)
        except ConfigError as error:
            raise ConfigError(f"{key} (from {name}): {error}") from None
        origin[key] = name
    for name, found_in in sources:
        unknown = [key for key in found_in if key not in _KEYS and key != "tier"]
        if unknown:
            raise ConfigError(_unknown(unknown[0], name))
    _require_source(values)
    values["tiers"], origin["tier"] = _tiers(sources, values)
    directories = [Path(tier.url) for tier in values["tiers"] if tier.kind == "directory"]
    values["checkpoints_dir"] = next(iter(directories), values["dir"] / "checkpoints")
    return Settings(**values, origin=origin)


def _require_source(values: Mapping[str, Any]) -> None:
    platform = values["notice_platform"]
    if platform in ("file", "command") and not values[f"notice_{platform}"]:
        example = {"file": "/run/leave", "command": "site-says-leave --host"}[platform]
        raise ConfigError(
            f'notice.platform is "{platform}", and notice.{platform} is not set: nothing would be '
            f'heard; write notice.{platform} = "{example}", or another platform'
        )


def _tiers(
    sources: list[tuple[str, dict[str, object]]], values: Mapping[str, Any]
) -> tuple[tuple[Tier, ...], str]:
    """The tiers and where they were set; without any, one below the job's directory."""
    keep: int = values["checkpoint_keep"]
    for name, found_in in sources:
        if "tier" in found_in:
            try:
                tiers = parse_tiers(
                    found_in["tier"], keep=keep, buffers=values["checkpoint_buffers"]
                )
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
            return tiers, name
    local = Tier(name="local", url=str(values["dir"] / "checkpoints"), keep=keep)
    return (local,), "default"


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    known = [variable_name(key) for key in _KEYS]
    for name in environ:
        # A variable of somebody else's may start like ours; one that is nearly ours is a slip.
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        slip = name.startswith("OUTLAST_") and name not in (*known, *NOTICE_VARIABLES)
        if slip and close:
            raise ConfigError(f"{name} is not a setting; did you mean {close[0]}?")
    return {key: environ[variable_name(key)] for key in _KEYS if environ.get(variable_name(key))}


def _from_file(path: Path) -> dict[str, object]:
    try:
        raw = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    flat: dict[str, object] = {}
    for key, value in raw.items():
        if key == "tier":
            flat["tier"] = value
        elif isinstance(value, dict):
            flat |= {f"{key}.{inner}": found for inner, found in value.items()}
        else:
            flat[key] = value
    return flat


def _unknown(key: str, source: str) -> str:
    if key in NOT_YET:
        return f"{source}: {key}: {NOT_YET[key]} is not there yet; remove the setting"
    return f"{source}: {key} is not a setting;{nearest(key, tuple(_KEYS))}"


def as_rows(settings: Settings) -> list[tuple[str, str, str]]:
    """Each setting as (key, value, where it came from), for ``outlast config --explain``."""
    rows = []
    for key, (attribute, default, _) in _KEYS.items():
        value = getattr(settings, attribute)
        shown = "auto" if value is None and default == "auto" else value
        shown = str(shown).lower() if isinstance(shown, bool) else shown
        if isinstance(shown, tuple):
            shown = in_short(shown)
        rows.append((key, "" if shown is None else str(shown), settings.origin[key]))
    rows += [(f"tier.{tier.name}", str(tier), settings.origin["tier"]) for tier in settings.tiers]
    return rows
