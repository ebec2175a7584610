"""Settings: one table of them, how each is read, and where their values come from.

Precedence: argument > ``OUTLAST_*`` variable > ``outlast.toml`` > default. Settings are frozen and
checked once, here. An unknown key is refused, with the nearest known one. Each setting remembers
where it came from; ``outlast config --explain`` prints that.

The table is the class :class:`Settings`: each of its fields that has a :class:`Setting` is a
setting. The field's name gives the key in the file (``notice_poll_s``: ``notice.poll``, without the
unit) and the variable (``OUTLAST_NOTICE_POLL``). Every setting may be given by each of the sources.
``[[tier]]`` is given in the file alone (:mod:`outlast.tiers`).

The file is ``outlast.toml`` in the working directory, or the one that ``OUTLAST_CONFIG`` names.
"""

from __future__ import annotations

import contextlib
import difflib
import ipaddress
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, get_type_hints
from urllib.parse import urlsplit

import msgspec

from outlast import units
from outlast.errors import ConfigError, nearest
from outlast.prices import PriceList, Prices, parse_currency, parse_kind, parse_prices
from outlast.tiers import Tier, parse_directory, parse_keep, parse_tiers
from outlast.units import reader

FILE_NAME: Final = "outlast.toml"
BUFFERS_MAX: Final = 8
# Where each step is kept: two versions, one in the making, one on its way to storage.
EACH_STEP_BUFFERS: Final = 4
PLATFORMS: Final = (
    "auto",
    "aws",
    "gcp",
    "azure",
    "alibaba",
    "tencent",
    "volcengine",
    "slurm",
    "kubernetes",
    "signal",
    "file",
    "command",
    "none",
)
LABELS: Final = ("zone", "rack", "pool")  # what machines fail together by, the widest first
SEVERITIES: Final = ("info", "warning", "critical")
EVERY_MAX_S: Final = 1e9
GRACE_MAX_S: Final = 86_400.0  # an end that is further away is none
REPLICAS_MAX: Final = 2

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

DRILL_VARIABLE: Final = "OUTLAST_DRILL"  # the run's directory, in processes of a job under test

# --- the table ------------------------------------------------------------------------------------

Reader: TypeAlias = Callable[[object], Any]


class Setting(NamedTuple):
    """What belongs to a setting besides its name and its type.

    Attributes:
        default: it is read like a value that somebody wrote; None stays None.
        read: makes the value of what was written, or raises a ConfigError.
        show: writes the value so that ``read`` takes it; by default after the field's unit.
    """

    default: object
    read: Reader
    show: Callable[[Any], str] | None = None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be set.

    The readers are below; their names are looked up when the table is complete.
    """

    dir: Annotated[Path, Setting("./outlast-job", parse_job_directory)]
    """The job's directory."""
    resume: Annotated[bool, Setting(False, parse_bool)]
    """Whether the job there is continued although this is another command than its own."""

    checkpoint_every: Annotated[Every, Setting("auto", parse_every)]
    """How often a checkpoint is taken."""
    checkpoint_keep: Annotated[int, Setting(3, parse_keep)]
    """How many committed checkpoints are kept, at least 1."""
    checkpoint_buffers: Annotated[int | None, Setting("auto", parse_buffers)]
    """How many snapshots are held in memory at once, which is also the most saves in flight.

    0 writes directly while training waits; None decides by itself.
    """
    checkpoint_overhead: Annotated[float, Setting("1%", parse_overhead, units.set_share)]
    """Share of the time for saving, at most, before the job has failed or run for an hour."""
    checkpoint_optimizer_every: Annotated[int, Setting(1, parse_optimizer_every)]
    """The optimizer's state is in every Nth checkpoint.

    Those in between hold the weights and cannot be resumed from.
    """
    checkpoint_moments: Annotated[str, Setting("exact", parse_moments)]
    """exact, or bf16: the optimizer's moments at half their size.

    After that a resume is not bit-exact.
    """

    checkpoint_each_step: Annotated[bool, Setting(False, parse_bool)]
    """Whether each step is kept in two machines' memory before the next; ``training.each_step``."""

    notice_platform: Annotated[str, Setting("auto", parse_platform)]
    """The platform that gives notice, one of ``PLATFORMS``. Signals are always heard."""
    notice_base_url: Annotated[str, Setting("", parse_url)]
    """Another address for the metadata service."""
    notice_poll_s: Annotated[float, Setting("1 s", parse_poll)]
    """Time between two questions to the platform."""
    notice_grace_s: Annotated[float | None, Setting("auto", parse_grace)]
    """Time between a signal and the end, or None for the platform's own."""
    notice_early: Annotated[str, Setting("auto", parse_early)]
    """The answer to an early notice: auto, leave, save, ignore."""
    notice_requeue: Annotated[bool, Setting(False, parse_bool)]
    """Whether ``outlast run`` asks Slurm to run its job again after a drain."""
    notice_file: Annotated[Path | None, Setting("", parse_file)]
    """A file; there is a notice when it exists. None for no file."""
    notice_command: Annotated[tuple[str, ...], Setting("", parse_command)]
    """A command that exits with 0 when there is a notice; empty for none."""
    notice_end: Annotated[datetime | None, Setting("", parse_end)]
    """When this machine ends, as far as that is known beforehand; None where it is not."""
    notice_approve: Annotated[bool, Setting(False, parse_bool)]
    """Whether the platform is told that it need not wait, once all is saved."""

    membership_labels: Annotated[dict[str, str], Setting("", parse_labels)]
    """The places that this machine may fail together with: zone, rack, pool → name."""
    membership_silence_s: Annotated[float, Setting("3 s", parse_silence)]
    """How long a machine may be silent before it is taken for lost."""

    peer_replicas: Annotated[int | None, Setting("auto", parse_replicas)]
    """How many machines keep a copy of another's snapshot; None: one if there are others."""
    peer_rate_bytes: Annotated[float | None, Setting("auto", parse_rate)]
    """How fast such copies are sent at most, per second; None: after the number of cores."""
    peer_tls_cert: Annotated[Path | None, Setting("", parse_file)]
    """Certificate for TLS between machines; it, the key and the authority, or none of them."""
    peer_tls_key: Annotated[Path | None, Setting("", parse_file)]
    """Its key."""
    peer_tls_ca: Annotated[Path | None, Setting("", parse_file)]
    """The authority that signed the certificates."""

    health_hang: Annotated[Hang, Setting("auto", parse_hang)]
    """After how long without progress a worker is taken for hung."""
    health_hang_floor_s: Annotated[float, Setting("1.5 s", parse_hang_limit)]
    """No learned limit is below it."""
    health_hang_ceiling_s: Annotated[float, Setting("10 min", parse_hang_limit)]
    """The limit where too little has been seen to learn one."""
    health_anomaly: Annotated[str, Setting("report", parse_anomaly)]
    """The answer to a loss that goes wrong: report, stop, rollback."""
    health_window: Annotated[int, Setting(100, parse_window)]
    """How many good losses a new one is compared with."""
    health_factor: Annotated[float, Setting(20.0, parse_factor)]
    """How many times their spread a loss may lie above them."""
    health_settle: Annotated[int, Setting(10, parse_from_1)]
    """Steps without a sign after which a checkpoint counts as healthy."""
    health_skip: Annotated[int, Setting(1, parse_from_1)]
    """Batches that the first rollback of a stretch leaves out."""
    health_rollbacks: Annotated[int, Setting(3, parse_from_0)]
    """How many rollbacks there may be in a stretch."""
    health_stretch: Annotated[int, Setting(1000, parse_from_1)]
    """Steps of a stretch."""
    health_straggler: Annotated[str, Setting("report", parse_straggler)]
    """The answer to a slow rank: report, notify, replace, leave out."""
    health_notify: Annotated[tuple[str, ...], Setting("", parse_command)]
    """A command that is told of it; empty for none."""

    metrics_port: Annotated[int, Setting(0, parse_port)]
    """The port that this machine's metrics are served on; 0: none."""
    metrics_bind: Annotated[str, Setting("127.0.0.1", parse_bind)]
    """The address of this machine that they are served on."""
    metrics_textfile: Annotated[Path | None, Setting("", parse_file)]
    """A file that they are written to, for node_exporter; None for no file."""
    metrics_trackers: Annotated[bool, Setting(True, parse_bool)]
    """Whether incidents and goodput go into the experiment tracker that the script uses."""

    tell_urls: Annotated[Addresses, Setting("", parse_addresses, str)]
    """Addresses that messages about the job go to; they hold secrets and are never shown whole."""
    tell_file: Annotated[Path | None, Setting("", parse_file)]
    """A file with further addresses, one a line, that this user alone may read; None for none."""
    tell_least: Annotated[str, Setting("info", parse_least)]
    """The least severity that is told: info, warning, critical."""
    tell_group_s: Annotated[float, Setting("30 s", parse_group)]
    """What happens within this time is one message."""
    tell_per_hour: Annotated[int, Setting(12, parse_per_hour)]
    """Messages an hour, at most; what is not told is counted in the next one."""

    price_spot: Annotated[PriceList, Setting("", parse_prices, str)]
    """Price of a spot machine per hour: one for all, or one for each kind of machine."""
    price_on_demand: Annotated[PriceList, Setting("", parse_prices, str)]
    """The same of an on-demand machine."""
    price_currency: Annotated[str, Setting("", parse_currency)]
    """The currency of the prices, as it is shown; nothing is converted."""
    price_kind: Annotated[str | None, Setting("auto", parse_machine_kind)]
    """What kind of machine this is, as the prices name it; None: as its platform says."""

    workers_warm: Annotated[bool, Setting(True, parse_bool)]
    """Whether workers are forked from a process that has imported everything."""
    workers_in_process: Annotated[bool, Setting(False, parse_bool)]
    """Whether workers live through the loss of others, where the script lets them."""
    workers_late: Annotated[str, Setting("wait", parse_late)]
    """What follows where a worker is late in synchronous steps: wait, move, drop."""
    workers_late_factor: Annotated[float, Setting(1.5, parse_late_factor)]
    """How many times as long as the others a late worker takes."""

    restart_without_progress: Annotated[int, Setting(5, parse_attempts)]
    """Attempts in a row that may end without progress."""
    restart_failures: Annotated[int | None, Setting("auto", parse_failures)]
    """A machine's own failures, within the window, before it is left out.

    0: it never is; None: three, where they cost more than the machine adds.
    """
    restart_window_s: Annotated[float, Setting("1 h", parse_span)]
    """How long such failures count."""
    restart_leave_out_s: Annotated[float, Setting("1 h", parse_span)]
    """How long a machine is left out."""
    restart_back_off_s: Annotated[float, Setting("5 min", parse_span)]
    """The longest wait before an attempt."""
    restart_let_in: Annotated[bool, Setting(False, parse_bool)]
    """Whether this machine takes part again although it was left out."""

    tiers: tuple[Tier, ...] = ()
    """The places that checkpoints go to, in order of speed; one local tier unless set."""
    origin: dict[str, str]
    """Key of a setting → where its value came from."""

    @property
    def checkpoints_dir(self) -> Path:
        """The first tier that is a directory; ``<dir>/checkpoints`` if none is."""
        directories = (Path(tier.url) for tier in self.tiers if tier.kind == "directory")
        return next(directories, self.dir / "checkpoints")

    @property
    def prices(self) -> Prices:
        """What machines cost."""
        return Prices(
            spot=self.price_spot, on_demand=self.price_on_demand, currency=self.price_currency
        )


# --- how each is read -----------------------------------------------------------------------------


class Every(msgspec.Struct, frozen=True):
    """How often to save: by steps, by seconds, or (both None) as the policy finds best."""

    steps: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        if self.steps is not None:
            return f"{self.steps} steps"
        return "auto" if self.seconds is None else units.set_seconds(self.seconds)


def parse_every(value: object) -> Every:
    """Read ``"auto"``, ``"200 steps"``, ``200`` (steps) or ``"5 min"``.

    Raises:
        ConfigError: the value is none of these, or not positive.
    """
    if isinstance(value, str) and value.strip() == "auto":
        return Every()
    is_text = isinstance(value, str | int) and not isinstance(value, bool)
    number, unit = (units.split(str(value).lower()) if is_text else None) or ("0", "")
    if float(number) > 0 and unit in ("", "step", "steps") and number.isdigit():
        return Every(steps=int(number))
    seconds = units.read_seconds(value, least_s=0.0, most_s=EVERY_MAX_S)
    if seconds:
        return Every(seconds=seconds)
    raise ConfigError(f'{value!r} is not a cadence; write "auto", "200 steps" or "5 min"')


class Hang(msgspec.Struct, frozen=True):
    """After how long without progress a worker hangs: as learned (None), or so many seconds."""

    seconds: float | None = None
    is_off: bool = False

    def __str__(self) -> str:
        if self.is_off:
            return "off"
        return "auto" if self.seconds is None else units.set_seconds(self.seconds)


def parse_hang(value: object) -> Hang:
    """Read ``"auto"``, ``"off"`` or ``"30 s"``."""
    if value == "auto":
        return Hang()
    if value == "off" or value is False:
        return Hang(is_off=True)
    return Hang(seconds=_parse_fixed_hang(value))


def parse_file(value: object) -> Path | None:
    """Read a file's path; None for an empty one."""
    if not isinstance(value, str | Path) or "\0" in str(value):
        raise ConfigError(f"{value!r} is not a file's path")
    return Path(value).expanduser().absolute() if str(value) else None


class Addresses(msgspec.Struct, frozen=True):
    """Addresses of those who are told of incidents; only ``urls`` has what is secret in them."""

    urls: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join(in_public(url) for url in self.urls)

    def __repr__(self) -> str:  # of the settings, too
        return f"Addresses({str(self)!r})"


_HAS_HOST: Final = ("http", "json", "xml", "form", "mailto")  # elsewhere a token stands there


def in_public(url: str) -> str:
    """What may be shown of an address: its scheme, and its host where that is no secret."""
    scheme, _, rest = url.partition("://")
    if scheme not in _HAS_HOST and scheme.removesuffix("s") not in _HAS_HOST:
        return f"{scheme}://…"
    host = re.split(r"[/?#]", rest)[0].rpartition("@")[2]
    return (
        f"{scheme}://{host}/…"
        if re.fullmatch(r"[\w.-]+(:\d+)?|\[[\w:]+\]", host)
        else f"{scheme}://…"
    )


def parse_addresses(value: object) -> Addresses:
    """Read addresses: a list, or a text with spaces between them.

    Raises:
        ConfigError: one is not an address; it is not shown.
    """
    urls = value if isinstance(value, list) else str(value).split()
    for place, url in enumerate(urls, 1):
        if not isinstance(url, str) or not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s\0]+", url):
            raise ConfigError(
                f"number {place} of {len(urls)} is not an address (not shown: it may hold a "
                "secret); write it as SCHEME://…, such as json://HOST/PATH or mailto://…"
            )
    return Addresses(tuple(urls))


def all_addresses(settings: Settings) -> Addresses:
    """Those of ``tell.urls`` and of ``tell.file``.

    Raises:
        ConfigError: the file cannot be read, or others than its owner can read it.
    """
    path = settings.tell_file
    if path is None:
        return settings.tell_urls
    try:
        mode = path.stat().st_mode
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not a text"
        raise ConfigError(f"tell.file {path} cannot be read: {why}") from None
    if mode & 0o077:
        raise ConfigError(
            f"tell.file {path} holds secrets and others may read it: chmod 600 {path}"
        )
    named = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    try:
        found = parse_addresses(named)
    except ConfigError as error:
        raise ConfigError(f"tell.file {path}: {error}") from None
    return Addresses(tuple(dict.fromkeys([*settings.tell_urls.urls, *found.urls])))


def parse_bind(value: object) -> str:
    """Read an address of this machine."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(str(value)))
    raise ConfigError(
        f"{str(value)!r} is not an address of this machine; write 127.0.0.1, or 0.0.0.0 for all of "
        "its networks: then everybody there can read the metrics"
    )


def parse_end(value: object) -> datetime | None:
    """Read a moment with its zone, such as 2026-12-01T11:00:00Z; None for an empty one."""
    if value == "":
        return None
    with contextlib.suppress(ValueError):
        moment = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
        if moment.tzinfo is not None:
            return moment
    raise ConfigError(f"{str(value)!r} is not a moment; write it with its zone: 2026-12-01T11:00Z")


def parse_job_directory(value: object) -> Path:
    """Read the job's directory."""
    if "://" in str(value):
        raise ConfigError(
            f"{str(value).partition('://')[0]}://… is not a directory; the job's directory is one "
            "that every machine sees. Checkpoints go to an object store through a [[tier]] in "
            f"{FILE_NAME}"
        )
    return parse_directory(value)


def parse_url(value: object) -> str:
    """Read a metadata service's address, or ""."""
    text = str(value)
    if "@" in text:  # not repeated: what stands before it is a password
        raise ConfigError("an address with a password in it; write it as http://HOST[:PORT]")
    return parse_address(text) if text else ""


def parse_address(text: str) -> str:
    """Read the address of a metadata service.

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


def _words(value: object) -> tuple[str, ...] | None:
    """Part a command into words; None where that cannot be."""
    try:
        words = tuple(shlex.split(value)) if isinstance(value, str) else None
    except ValueError:
        return None
    return None if words is None or any("\0" in word for word in words) else words


def _labels(value: object) -> dict[str, str] | None:
    words = [word.strip() for word in str(value).split(",") if word.strip()]
    labels = dict(word.split("=", 1) for word in words if "=" in word)
    is_whole = len(labels) == len(words) and all(labels.values())
    return labels if is_whole and set(labels) <= set(LABELS) else None


def _truth(value: object) -> bool | None:
    truths = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    return truths.get(str(value).lower())


def _or_auto(read: Reader) -> Reader:
    """Make a reader that takes "auto" too, as None."""
    return lambda value: None if value == "auto" else read(value)


def _one_of(*known: str, problem: str) -> Callable[[object], str]:
    """Make a reader of one of several words."""

    def read(value: object) -> str:
        if value not in known:
            raise ConfigError(f"{value!r} {problem};{nearest(str(value), known)}")
        return str(value)

    return read


def _whole(least: int, problem: str, most: int = 10**9) -> Callable[[object], int]:
    return reader(partial(units.read_whole, least=least, most=most), problem)


def _seconds(least_s: float, most_s: float, problem: str) -> Callable[[object], float]:
    read = partial(units.read_seconds, least_s=least_s, most_s=most_s)
    return reader(read, problem, has_unit=True)


def _at_least(least: float, problem: str) -> Callable[[object], float]:
    return reader(partial(units.read_number, least=least), problem)


parse_bool: Final = reader(_truth, "is neither true nor false; write one of them")
parse_buffers: Final = _or_auto(
    _whole(0, f'is not a number of snapshots; write "auto", or 0 to {BUFFERS_MAX}', BUFFERS_MAX)
)
parse_overhead: Final = reader(units.read_share, "is not a share of the time; write 1% or 0.01")
parse_optimizer_every: Final = _whole(
    1,
    "is not a whole number from 1; 1 puts the optimizer's state into each checkpoint, 3 into every "
    "third",
)
parse_moments: Final = _one_of(
    "exact", "bf16", problem="is not a way to keep the optimizer's moments"
)
parse_platform: Final = _one_of(*PLATFORMS, problem="is not a platform")
parse_poll: Final = _seconds(0.1, 60.0, 'is not a polling period; write "1 s", from 100 ms to 60 s')
parse_grace: Final = _or_auto(
    _seconds(0.0, GRACE_MAX_S, 'is not a grace period; write "auto" or "30 s", up to a day')
)
parse_early: Final = _one_of(
    "auto", "leave", "save", "ignore", problem="is no answer to early notices"
)
parse_command: Final = reader(
    _words, "is not a command; write a program and its arguments, quoted as for a shell"
)
parse_labels: Final = reader(
    _labels,
    'does not say where a machine stands; write "zone=a, rack=12, pool=x", or some of them',
)
parse_silence: Final = _seconds(
    0.2, 300.0, 'is not how long a machine may be silent; write "3 s", from 200 ms to 5 min'
)
parse_replicas: Final = _or_auto(
    _whole(0, f'is not a number of replicas; write "auto", or 0 to {REPLICAS_MAX}', REPLICAS_MAX)
)
parse_rate: Final = _or_auto(
    reader(units.read_rate, 'is not a rate; write "auto", "200 MB/s" or "1.5 GB/s"', has_unit=True)
)
_HANG_S: Final = (1.0, 86_400.0)
_parse_fixed_hang: Final = _seconds(
    *_HANG_S,
    'is not how long a worker may be without progress; write "auto", "off" or "30 s", from 1 s to '
    "a day",
)
parse_hang_limit: Final = _seconds(*_HANG_S, 'is not a limit; write "10 min", from 1 s to a day')
parse_anomaly: Final = _one_of(
    "report", "stop", "rollback", problem="is no answer to a loss that goes wrong"
)
parse_window: Final = _whole(10, "is not a whole number from 10 to 10000", 10_000)
parse_factor: Final = _at_least(1, "is not a factor from 1 on; write a number like 20")
parse_from_0: Final = _whole(0, "is not a whole number from 0 to 1000000000")
parse_from_1: Final = _whole(1, "is not a whole number from 1 to 1000000000")
parse_port: Final = _whole(
    0, "is not a port; write a whole number up to 65535, such as 9410, or 0 for none", 65_535
)
parse_least: Final = _one_of(*SEVERITIES, problem="is not a severity")
parse_group: Final = _seconds(0.0, 3600.0, 'is not a stretch of time; write "30 s", up to 1 h')
parse_per_hour: Final = _whole(2, "is not a number of messages; write 2 to 1000", 1000)
parse_machine_kind: Final = _or_auto(parse_kind)
parse_straggler: Final = _one_of(
    "report",
    "notify",
    "replace",
    "leave out",
    problem="is nothing that could be done about a slow rank",
)
parse_late: Final = _one_of(
    *("wait", "move", "drop"), problem="is nothing that could be done about a late worker"
)
parse_late_factor: Final = _at_least(
    1.1, "is not a factor from 1.1 on; write a number like 1.5, how many times as long it may take"
)
parse_attempts: Final = _whole(1, "is not a number of attempts; write a whole number from 1")
parse_failures: Final = _or_auto(
    _whole(0, "is not a number of failures; write auto or a whole number, 0 for any number")
)
parse_span: Final = _seconds(
    1.0, 30 * 86_400.0, 'is not a stretch of time; write "5 min", from 1 s to 720 h'
)


# --- where values come from -----------------------------------------------------------------------


def _rows() -> Iterator[tuple[str, tuple[str, Setting]]]:
    for attribute, hint in get_type_hints(Settings, include_extras=True).items():
        for setting in getattr(hint, "__metadata__", ()):
            key = attribute.removesuffix("_s").removesuffix("_bytes").replace("_", ".", 1)
            yield key, (attribute, setting)


SETTINGS: Final = dict(_rows())  # key in the file → attribute, and what belongs to it


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
    if DRILL_VARIABLE in environ:
        sources.reverse()  # whatever directory a script asks for: its job under test lies apart
    path = file or (Path(environ["OUTLAST_CONFIG"]) if environ.get("OUTLAST_CONFIG") else None)
    if path is not None or Path(FILE_NAME).exists():
        path = path or Path(FILE_NAME)
        sources.append((str(path), _from_file(path)))
    chosen: dict[str, Any] = {}
    came_from: dict[str, str] = {}
    for key, (attribute, setting) in SETTINGS.items():
        name, found = next(
            ((n, s[key]) for n, s in sources if key in s), ("default", setting.default)
        )
        if name == "environment":
            name = variable_name(key)
        try:
            chosen[attribute] = None if found is None else setting.read(found)
        except ConfigError as error:
            raise ConfigError(f"{key} (from {name}): {error}") from None
        came_from[key] = name
    for name, found_in in sources:
        unknown = [key for key in found_in if key not in SETTINGS and key != "tier"]
        if unknown:
            raise ConfigError(_unknown(unknown[0], name))
    settings = Settings(**chosen, origin=came_from)
    _require_buffers(settings)
    _require_command(settings)
    tiers, where = _tiers(sources, settings)
    return msgspec.structs.replace(settings, tiers=tiers, origin=came_from | {"tier": where})


def _require_buffers(settings: Settings) -> None:
    buffers, needed = settings.checkpoint_buffers, EACH_STEP_BUFFERS
    if settings.checkpoint_each_step and buffers is not None and buffers < needed:
        raise ConfigError(
            f"checkpoint.buffers is {buffers}, and checkpoint.each_step needs {needed}: two "
            "versions of a snapshot, one in the making, and one on its way to storage; write "
            f'checkpoint.buffers = {needed}, or "auto"'
        )


def _require_command(settings: Settings) -> None:
    platform = settings.notice_platform
    needed = {"file": settings.notice_file, "command": settings.notice_command}
    if not needed.get(platform, True):
        example = {"file": "/run/leave", "command": "site-says-leave --host"}[platform]
        raise ConfigError(
            f'notice.platform is "{platform}", and notice.{platform} is not set: nothing would be '
            f'heard; write notice.{platform} = "{example}", or another platform'
        )
    if settings.health_straggler == "notify" and not settings.health_notify:
        raise ConfigError(
            'health.straggler is "notify", and health.notify is not set: nobody would be told; '
            'write health.notify = "mail-us", a command that reads the event from its input'
        )
    if settings.workers_late != "wait" and settings.workers_in_process:
        raise ConfigError(
            f'workers.late is "{settings.workers_late}", and workers.in_process is true: a worker '
            "that takes a lost one's place does not know who makes which shards; leave one of the "
            "two settings out"
        )


def _tiers(
    sources: list[tuple[str, dict[str, object]]], settings: Settings
) -> tuple[tuple[Tier, ...], str]:
    """The tiers and where they were set; without any, one below the job's directory."""
    for name, found_in in sources:
        if "tier" in found_in:
            try:
                tiers = parse_tiers(
                    found_in["tier"],
                    keep=settings.checkpoint_keep,
                    buffers=settings.checkpoint_buffers,
                    every=None if settings.checkpoint_every == Every() else 1,
                )
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
            return tiers, name
    url = str(settings.dir / "checkpoints")
    return (Tier(name="local", url=url, keep=settings.checkpoint_keep),), "default"


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    known = [variable_name(key) for key in SETTINGS]
    ours = {*known, *NOTICE_VARIABLES}
    for name in environ:
        # A variable of somebody else's may start like ours; one that is nearly ours is a slip.
        if name.startswith("OUTLAST_") and name not in ours:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            if close:
                raise ConfigError(f"{name} is not a setting; did you mean {close[0]}?")
    return {key: environ[variable_name(key)] for key in SETTINGS if environ.get(variable_name(key))}


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
    return f"{source}: {key} is not a setting;{nearest(key, tuple(SETTINGS))}"


class SettingRow(NamedTuple):
    """A setting in force.

    Attributes:
        key: as in the file; ``tier.NAME`` for a tier.
        value: in the units that the file takes; of a command, without its arguments.
        source: where it came from.
        is_default: whether it is what it would be if nobody had set it.
    """

    key: str
    value: str
    source: str
    is_default: bool


def as_rows(settings: Settings) -> list[SettingRow]:
    """Each setting, in the order of the table, for ``outlast config``."""
    rows = []
    for key, (attribute, setting) in SETTINGS.items():
        value, default = getattr(settings, attribute), setting.default
        is_default = value == (None if default is None else setting.read(default))
        shown = _shown(value, attribute, setting)
        rows.append(SettingRow(key, shown, settings.origin[key], is_default))
    where = settings.origin["tier"]
    return rows + [
        SettingRow(f"tier.{tier.name}", str(tier), where, where == "default")
        for tier in settings.tiers
    ]


def _shown(value: Any, attribute: str, setting: Setting) -> str:
    if value is None:
        return "auto" if setting.default == "auto" else ""
    if setting.show is not None:
        return setting.show(value)
    if attribute.endswith("_s"):
        return units.set_seconds(value)
    if attribute.endswith("_bytes"):
        return units.set_rate(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return in_short(value)
    if isinstance(value, dict):
        return ", ".join(f"{name}={where}" for name, where in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)
