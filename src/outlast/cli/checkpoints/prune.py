"""``outlast checkpoints prune``: what retention allows to remove, in every tier.

Guarantees: before anything goes from a tier, the newest checkpoint that stays there and that a job
can be resumed from has been read and verified, byte for byte; if it does not verify it counts for
nothing, and the next older one is looked at. What is shown is what goes.

A job that runs prunes by itself, by the same rule, and may be reading or copying the very step
that goes: while it runs here this command refuses, and it holds the job's lock so that none starts
meanwhile. (Rejected: pruning beside it. It frees nothing that the next commit would not free.) A
job on several machines has no lock that all of them see; its ledger is looked at instead.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import click
import msgspec

from outlast import units
from outlast.checkpoint.catalog import KnownHealth, expendable, remove_save
from outlast.checkpoint.manifest import SaveName
from outlast.cli.checkpoints.survey import Survey, survey
from outlast.cli.checkpoints.verify import Target, problem_of
from outlast.cli.checkpoints.where import (
    DIRECTORY,
    JSON,
    TIER,
    JobAt,
    bar,
    find_job,
    in_words,
)
from outlast.errors import ConfigError, StorageError
from outlast.ledger.file import read_events
from outlast.ledger.job import JobLock
from outlast.storage import Storage
from outlast.tiers import parse_keep

QUIET_S: Final = 120.0


class Going(NamedTuple):
    """A save that may go from a tier."""

    tier: str
    save: SaveName
    state: str
    num_bytes: int


class PrunePlan(NamedTuple):
    """What may go from one tier, and which save that stays there was verified for it."""

    tier: str
    keep: int
    going: list[Going]
    verified: SaveName | None


@click.command(name="prune")
@DIRECTORY
@click.option("--keep", default=None, help="How many stay in each tier; its own keep by default.")
@TIER
@click.option("--dry-run", is_flag=True, help="Show what would go, and remove nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@JSON
def command(
    *,
    directory: str | None,
    keep: str | None,
    tier: str | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Remove what need not be kept; never the newest that verifies."""
    at = find_job(directory, writes=True)
    wanted = None if keep is None else _parse_keep(keep)
    with _nobody_else(at) if not dry_run else contextlib.nullcontext():
        found = survey(at, tier)
        found.complain()
        plans = [_plan(at, found, name, wanted) for name in found.places]
        going = [one for plan in plans for one in plan.going]
        if not as_json:
            _print(plans)
        failures: dict[tuple[str, SaveName], str] = {}
        if going and not dry_run:
            _ask(going, yes, as_json)
            failures = _remove(found, going)
    if as_json:
        click.echo(msgspec.json.encode(_as_json(plans, failures, dry_run)))
    else:
        _conclude([one for one in going if (one.tier, one.save) not in failures], dry_run)
        again = [f"--keep={wanted}"] * (wanted is not None) + [f"--tier={tier}"] * bool(tier)
        click.echo(at.next("prune", *again) if going and dry_run else at.next("list"))
    if failures:
        raise StorageError(
            f"{units.count(len(failures), 'copy', 'copies')} could not be removed: "
            f"{'; '.join(failures.values())}. Look at the disk and its permissions, and try again"
        )
    return 0


def _parse_keep(value: str) -> int:
    try:
        return parse_keep(value)
    except ConfigError as error:
        raise ConfigError(f"--keep: {error}") from None


@contextlib.contextmanager
def _nobody_else(at: JobAt) -> Iterator[None]:
    """Hold the job's lock.

    Raises:
        ConfigError: the job is running.
    """
    why = "and prunes by itself after each commit; wait for it, or look with --dry-run"
    try:
        lock = JobLock(at.settings.dir)
    except ConfigError:
        raise ConfigError(f"the job in {at.settings.dir} is running {why}") from None
    except OSError:  # a directory that may be read only: there is nothing to lock
        lock = None
    try:
        silent_s = _silent_s(at)
        if silent_s is not None and silent_s < QUIET_S:
            raise ConfigError(
                f"the job in {at.settings.dir} runs on several machines, last heard of "
                f"{units.seconds(silent_s)} ago, {why}"
            )
        yield
    finally:
        if lock is not None:
            lock.release()


def _silent_s(at: JobAt) -> float | None:
    """Seconds since the last event of a job on several machines; None when it has ended."""
    machines, last = 1, None
    for event in read_events(at.settings.dir):
        last = last if event.event in ("verify_failed", "repaired") else event
        if event.event == "attempt_formed" and isinstance(event.get("nodes"), int):
            machines = event["nodes"]
    if last is None or machines < 2 or last.event in ("job_finished", "drained"):
        return None
    return max(time.time() - last.t, 0.0)


def _plan(at: JobAt, found: Survey, tier: str, keep: int | None) -> PrunePlan:
    """What may go from ``tier``, after the newest that stays has been verified."""
    own = next(one.keep for one in at.settings.tiers if one.name == tier)
    keep = own if keep is None else keep
    storage = found.places[tier].storage
    copies = found.at(tier)
    invalid = {save for save, copy in copies.items() if copy.state == "invalid"}
    full = [s for s, one in copies.items() if one.restartable and found.health(s) != "unhealthy"]
    past = found.past
    health = KnownHealth(
        healthy=frozenset(past.healthy) if past.healthy or past.rollbacks else None,
        rollbacks=tuple(past.rollbacks),
    )
    if not expendable(storage, at.job.id, keep=keep, invalid=invalid, health=health).saves:
        return PrunePlan(tier, keep, [], None)
    verified = None
    for save in reversed(full):
        with bar(copies[save].num_bytes) as shown:
            shown.begin(f"step {save.step:,} {tier}")
            if not problem_of(found, Target(save, tier, copies[save]), shown.advance):
                verified = save
                break
        invalid.add(save)
    if full and verified is None:
        return PrunePlan(tier, keep, [], None)
    going = []
    for save in expendable(storage, at.job.id, keep=keep, invalid=invalid, health=health).saves:
        copy = copies.get(save)
        state = copy.state if copy is not None and save not in invalid else "invalid"
        if copy is not None and copy.manifest and not copy.restartable:
            state = "weights only"
        num_bytes = copy.num_bytes if copy else 0
        going.append(Going(tier, save, state, num_bytes or _size_of(storage, save)))
    return PrunePlan(tier, keep, going, verified)


def _size_of(storage: Storage, save: SaveName) -> int:
    """Bytes of a save that has no manifest to say so."""
    total = 0
    for name in storage.children(str(save)):
        with contextlib.suppress(OSError):
            total += storage.size(f"{save}/{name}")
    return total


def _print(plans: list[PrunePlan]) -> None:
    for plan in plans:
        if not plan.going:
            click.echo(f"tier {plan.tier}: nothing may go (keep {plan.keep})")
            continue
        stays = "" if plan.verified is None else f"; step {plan.verified.step:,} stays and verifies"
        saves = units.count(len(plan.going), "save")
        click.echo(f"tier {plan.tier}: {saves} may go (keep {plan.keep}{stays})")
        for one in plan.going:
            click.echo(
                f"  step {one.save.step:>9,}  {one.state:<12}{units.size(one.num_bytes):>10}"
            )


def _ask(going: list[Going], yes: bool, as_json: bool) -> None:
    """Have a person agree.

    Raises:
        ConfigError: there is nobody to ask, or the answer is no.
    """
    if yes:
        return
    what = f"{_copies(going)} ({_total(going)})"
    if as_json or not _is_terminal():
        raise ConfigError(f"{what} would go; add --yes to remove, or --dry-run to look")
    if not click.confirm(f"Remove {what}?"):
        raise ConfigError("nothing was removed")


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _remove(found: Survey, going: list[Going]) -> dict[tuple[str, SaveName], str]:
    """Remove each; (tier, step) → why it could not be."""
    failures = {}
    for one in going:
        storage = found.places[one.tier].storage
        try:
            remove_save(storage, one.save, is_unfinished=one.state == "unfinished")
        except FileNotFoundError:
            continue
        except OSError as error:
            where = storage.describe(str(one.save))
            failures[one.tier, one.save] = f"{where}: {in_words(error)}"
    return failures


def _as_json(
    plans: list[PrunePlan], failures: dict[tuple[str, SaveName], str], dry_run: bool
) -> dict[str, Any]:
    tiers = [
        {
            "tier": plan.tier,
            "keep": plan.keep,
            "verified": None if plan.verified is None else plan.verified.step,
            "steps": [
                {
                    "step": one.save.step,
                    "save": str(one.save),
                    "state": one.state,
                    "bytes": one.num_bytes,
                    "removed": not dry_run and (one.tier, one.save) not in failures,
                }
                for one in plan.going
            ],
        }
        for plan in plans
    ]
    return {"dry_run": dry_run, "tiers": tiers}


def _conclude(gone: list[Going], dry_run: bool) -> None:
    if gone:
        copies, freed = _copies(gone), _total(gone)
        done = f"{copies} would go and free {freed}; nothing was removed"
        click.echo(done if dry_run else f"{copies} removed, {freed} freed")


def _copies(going: list[Going]) -> str:
    return units.count(len(going), "copy", "copies")


def _total(going: list[Going]) -> str:
    return units.size(sum(one.num_bytes for one in going))
