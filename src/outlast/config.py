"""Settings: where they come from, and what happens to one that is not known.

Precedence: argument > ``OUTLAST_*`` variable > ``outlast.toml`` > default. Settings are frozen,
reject unknown keys with the nearest known one, and are checked once, here. Each remembers where
it came from; ``outlast config --explain`` prints that. How each is read is in
:mod:`outlast.values`.

The file is ``outlast.toml`` in the working directory, or the one that ``OUTLAST_CONFIG`` names.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from outlast import values
from outlast.errors import ConfigError
from outlast.tiers import Tier, nearest, parse_keep, parse_tiers
from outlast.values import Every, Hang

FILE_NAME: Final = values.FILE_NAME

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


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be set.

    Attributes:
        dir: the job's directory.
        resume: whether the job there is gone on with although this is another command than its own.
        checkpoint_every: how often a checkpoint is taken.
        checkpoint_keep: how many committed checkpoints are kept, at least 1.
        checkpoint_buffers: how many snapshots are held in memory at once, which is also the most
            saves in flight; 0 writes directly while training waits; None decides by itself.
        checkpoint_overhead: share of the time that saving takes at most before the job has failed
            or run for an hour.
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
        health_hang: after how long without progress a worker is taken for hung.
        health_hang_floor_s: no learned limit is below it.
        health_hang_ceiling_s: the limit of what has not been seen often enough to learn one.
        health_anomaly: what is done about a loss that goes wrong: report, stop, rollback.
        health_window: how many good losses a new one is compared with.
        health_factor: how many times their spread a loss may lie above them.
        health_settle: steps without a sign after which a checkpoint counts as healthy.
        health_skip: batches that the first rollback of a stretch leaves out.
        health_rollbacks: how many rollbacks there may be in a stretch.
        health_stretch: steps of a stretch.
        price_spot: price of a spot machine per hour, or None.
        price_on_demand: price of an on-demand machine per hour, or None.
        health_straggler: what is done about a slow rank: report, notify, replace, leave out.
        health_notify: a command that is told of it; empty for none.
        workers_warm: whether workers are forked from a process that has imported everything.
        workers_in_process: whether workers live through the loss of others, where the script lets.
        restart_without_progress: attempts in a row that may end without progress.
        restart_failures: of a machine's own, within the window, before it is left out; 0: never;
            None: three, where they cost more than the machine adds.
        restart_window_s: how long such failures count.
        restart_leave_out_s: how long a machine is left out.
        restart_back_off_s: the longest wait before an attempt.
        restart_let_in: whether this machine takes part again although it was left out.
        origin: setting → where its value came from.
    """

    dir: Path
    resume: bool
    checkpoint_every: Every
    checkpoint_keep: int
    checkpoint_buffers: int | None
    checkpoint_overhead: float
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
    health_hang: Hang
    health_hang_floor_s: float
    health_hang_ceiling_s: float
    health_anomaly: str
    health_window: int
    health_factor: float
    health_settle: int
    health_skip: int
    health_rollbacks: int
    health_stretch: int
    price_spot: float | None
    price_on_demand: float | None
    health_straggler: str
    health_notify: tuple[str, ...]
    workers_warm: bool
    workers_in_process: bool
    restart_without_progress: int
    restart_failures: int | None
    restart_window_s: float
    restart_leave_out_s: float
    restart_back_off_s: float
    restart_let_in: bool
    origin: dict[str, str]


# key in the file → (attribute, default, parser). OUTLAST_CHECKPOINT_EVERY sets checkpoint.every.
_KEYS: Final[dict[str, tuple[str, object, Callable[[object], Any]]]] = {
    "dir": ("dir", "./outlast-job", values.parse_job_directory),
    "resume": ("resume", False, values.parse_bool),
    "checkpoint.every": ("checkpoint_every", "auto", values.parse_every),
    "checkpoint.keep": ("checkpoint_keep", 3, parse_keep),
    "checkpoint.buffers": ("checkpoint_buffers", "auto", values.parse_buffers),
    "checkpoint.overhead": ("checkpoint_overhead", "1%", values.parse_overhead),
    "checkpoint.optimizer_every": ("checkpoint_optimizer_every", 1, values.parse_optimizer_every),
    "checkpoint.moments": ("checkpoint_moments", "exact", values.parse_moments),
    "notice.platform": ("notice_platform", "auto", values.parse_platform),
    "notice.base_url": ("notice_base_url", "", values.parse_url),
    "notice.poll": ("notice_poll_s", "1 s", values.parse_poll),
    "notice.grace": ("notice_grace_s", "auto", values.parse_grace),
    "notice.early": ("notice_early", "auto", values.parse_early),
    "notice.requeue": ("notice_requeue", False, values.parse_bool),
    "notice.file": ("notice_file", "", values.parse_file),
    "notice.command": ("notice_command", "", values.parse_command),
    "notice.approve": ("notice_approve", False, values.parse_bool),
    "membership.labels": ("membership_labels", "", values.parse_labels),
    "membership.silence": ("membership_silence_s", "3 s", values.parse_silence),
    "peer.replicas": ("peer_replicas", "auto", values.parse_replicas),
    "peer.rate": ("peer_rate_bytes", "auto", values.parse_rate),
    "peer.tls_cert": ("peer_tls_cert", "", values.parse_file),
    "peer.tls_key": ("peer_tls_key", "", values.parse_file),
    "peer.tls_ca": ("peer_tls_ca", "", values.parse_file),
    "health.hang": ("health_hang", "auto", values.parse_hang),
    "health.hang_floor": ("health_hang_floor_s", "1.5 s", values.parse_hang_limit),
    "health.hang_ceiling": ("health_hang_ceiling_s", "10 min", values.parse_hang_limit),
    "health.anomaly": ("health_anomaly", "report", values.parse_anomaly),
    "health.window": ("health_window", 100, values.whole_from(10, 10_000)),
    "health.factor": ("health_factor", 20.0, values.parse_factor),
    "health.settle": ("health_settle", 10, values.whole_from(1)),
    "health.skip": ("health_skip", 1, values.whole_from(1)),
    "health.rollbacks": ("health_rollbacks", 3, values.whole_from(0)),
    "health.stretch": ("health_stretch", 1000, values.whole_from(1)),
    "price.spot": ("price_spot", None, values.parse_price),
    "price.on_demand": ("price_on_demand", None, values.parse_price),
    "health.straggler": ("health_straggler", "report", values.parse_straggler),
    "health.notify": ("health_notify", "", values.parse_command),
    "workers.warm": ("workers_warm", True, values.parse_bool),
    "workers.in_process": ("workers_in_process", False, values.parse_bool),
    "restart.without_progress": ("restart_without_progress", 5, values.parse_attempts),
    "restart.failures": ("restart_failures", "auto", values.parse_failures),
    "restart.window": ("restart_window_s", "1 h", values.parse_span),
    "restart.leave_out": ("restart_leave_out_s", "1 h", values.parse_span),
    "restart.back_off": ("restart_back_off_s", "5 min", values.parse_span),
    "restart.let_in": ("restart_let_in", False, values.parse_bool),
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
    chosen: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for key, (attribute, default, parse) in _KEYS.items():
        name, found = next(((n, s[key]) for n, s in sources if key in s), ("default", default))
        if name == "environment":
            name = variable_name(key)
        try:
            chosen[attribute] = None if found is None else parse(found)
        except ConfigError as error:
            raise ConfigError(f"{key} (from {name}): {error}") from None
        origin[key] = name
    for name, found_in in sources:
        unknown = [key for key in found_in if key not in _KEYS and key != "tier"]
        if unknown:
            raise ConfigError(_unknown(unknown[0], name))
    _require_source(chosen)
    if chosen["health_straggler"] == "notify" and not chosen["health_notify"]:
        raise ConfigError(
            'health.straggler is "notify", and health.notify is not set: nobody would be told; '
            'write health.notify = "mail-us", a command that reads the event from its input'
        )
    chosen["tiers"], origin["tier"] = _tiers(sources, chosen)
    directories = [Path(tier.url) for tier in chosen["tiers"] if tier.kind == "directory"]
    chosen["checkpoints_dir"] = next(iter(directories), chosen["dir"] / "checkpoints")
    return Settings(**chosen, origin=origin)


def _require_source(chosen: Mapping[str, Any]) -> None:
    platform = chosen["notice_platform"]
    if platform in ("file", "command") and not chosen[f"notice_{platform}"]:
        example = {"file": "/run/leave", "command": "site-says-leave --host"}[platform]
        raise ConfigError(
            f'notice.platform is "{platform}", and notice.{platform} is not set: nothing would be '
            f'heard; write notice.{platform} = "{example}", or another platform'
        )


def _tiers(
    sources: list[tuple[str, dict[str, object]]], chosen: Mapping[str, Any]
) -> tuple[tuple[Tier, ...], str]:
    """The tiers and where they were set; without any, one below the job's directory."""
    keep: int = chosen["checkpoint_keep"]
    for name, found_in in sources:
        if "tier" in found_in:
            try:
                tiers = parse_tiers(
                    found_in["tier"],
                    keep=keep,
                    buffers=chosen["checkpoint_buffers"],
                    every=None if chosen["checkpoint_every"] == values.Every() else 1,
                )
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
            return tiers, name
    local = Tier(name="local", url=str(chosen["dir"] / "checkpoints"), keep=keep)
    return (local,), "default"


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    known = [variable_name(key) for key in _KEYS]
    ours = {*known, *NOTICE_VARIABLES}
    for name in environ:
        # A variable of somebody else's may start like ours; one that is nearly ours is a slip.
        if name.startswith("OUTLAST_") and name not in ours:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            if close:
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
        elif isinstance(shown, dict):
            shown = ", ".join(f"{name}={where}" for name, where in shown.items())
        rows.append((key, "" if shown is None else str(shown), settings.origin[key]))
    rows += [(f"tier.{tier.name}", str(tier), settings.origin["tier"]) for tier in settings.tiers]
    return rows
