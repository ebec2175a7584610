"""Verify every byte in every tier; repair one tier from another; prune what retention allows.

**verify** looks at every copy of this job's with a manifest, and every one that should have one:
the newest save that was committed there, as the ledger says, and a save that has no manifest there
and one in another tier. A save without a manifest that is newer than all of its tier may be in the
making: it is named and not held against anybody.

**repair** takes each file from whichever tier has it whole, so that two damaged copies can mend
each other. What was found and what was mended goes into the ledger. It may run while the job does:
a file is replaced in one stroke, by the bytes that its manifest names.

**prune** guarantees: before anything goes from a tier, the newest checkpoint that stays there and
that a job can be resumed from has been read and verified, byte for byte; if it does not verify it
counts for nothing, and the next older one is looked at. What is shown is what goes. A job that runs
prunes by itself, by the same rule, and may be reading or copying the very step that goes: while it
runs here this command refuses, and it holds the job's lock so that none starts meanwhile. A job on
several machines has no lock that all of them see; its ledger is looked at instead. Rejected:
pruning beside a job that runs (it frees nothing that the next commit would not free).
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import click
import msgspec

from outlast import units
from outlast.checkpoint.catalog import KnownHealth, expendable, remove_save
from outlast.checkpoint.chunks import check_parts
from outlast.checkpoint.manifest import FILE_NAME, MANIFEST, PART_NAME, Manifest, SaveName
from outlast.checkpoint.mend import NotMended, Repaired, mend_copy
from outlast.checkpoint.transfer import FileCopies, inventory_of, job_for, read
from outlast.cli.checkpoints.survey import (
    DIRECTORY,
    JSON,
    TIER,
    JobAt,
    SaveCopy,
    Survey,
    bar,
    find_job,
    in_words,
    known,
    nothing_there,
    promised,
    size_of,
    survey,
    tiers_of,
)
from outlast.errors import CheckpointInvalid, ConfigError, StorageError
from outlast.ledger.file import Ledger, read_events
from outlast.ledger.job import JobLock
from outlast.storage import Storage
from outlast.tiers import parse_keep

NONE = SaveName(0)
ABSENT = SaveCopy("unfinished", reason=f"{MANIFEST} is missing")


class CopyTarget(NamedTuple):
    """A copy that is looked at; ``making`` if it may not be finished yet."""

    save: SaveName
    tier: str
    copy: SaveCopy
    making: bool = False

    @property
    def step(self) -> int:
        """The step that was saved."""
        return self.save.step


class Verified(NamedTuple):
    """What was found of a target; ``reason`` is empty when every byte is as it was."""

    target: CopyTarget
    reason: str = ""

    @property
    def bad(self) -> bool:
        """Whether it is damaged, rather than whole or in the making."""
        return bool(self.reason) and not self.target.making


@click.command(name="verify")
@DIRECTORY
@click.option("--step", type=int, default=None, help="Only this step; all of them by default.")
@TIER
@JSON
def verify_command(directory: str | None, step: int | None, tier: str | None, as_json: bool) -> int:
    """Read every byte and compare it with its checksum; exit code 1 if one does not match."""
    at = find_job(directory)
    found = survey(at, tier)
    found.complain()
    targets = targets_of(at, found, step)
    began_s = time.monotonic()
    results = verify_all(found, targets)
    if as_json:
        click.echo(msgspec.json.encode({"checkpoints": [_row(one) for one in results]}))
    else:
        for one in results:
            if one is results[0]:
                click.echo(_head(found.tiers))
            click.echo(_line(one, found.tiers))
        _conclude_verify(at, found, results, time.monotonic() - began_s, everything=step is None)
    return 1 if any(one.bad for one in results) or found.unreadable else 0


def targets_of(at: JobAt, found: Survey, step: int | None) -> list[CopyTarget]:
    """What is to be verified, oldest step first.

    Raises:
        ConfigError: there is nothing, or not this step.
    """
    targets = sorted(_targets(found, promised(at.settings)), key=lambda one: one.save)
    if step is not None:
        chosen = [one for one in targets if one.step == step] or [
            CopyTarget(save, tier, copy)
            for save, copies in found.copies.items()
            if save.step == step
            for tier, copy in copies.items()
        ]
        if not chosen:
            there = known(sorted({one.step for one in targets}))
            raise ConfigError(f"step {step} is in no tier; there are: {there}")
        return [one._replace(making=False) for one in chosen]
    if not any(not one.making for one in targets):
        raise nothing_there(at, found)
    return targets


def _targets(found: Survey, ledger: dict[str, SaveName]) -> Iterator[CopyTarget]:
    whole = set(found.saves())
    for tier in found.places:
        mine = found.at(tier)
        newest = max(
            (one for one, copy in mine.items() if copy.state != "unfinished"), default=NONE
        )
        said = ledger.get(tier, NONE)
        if said.step > newest.step:
            # An older Outlast did not note which save of the step it was.
            there = max((one for one in mine if one.step == said.step), default=said)
            said = there if not said.nonce else said
            yield CopyTarget(said, tier, mine.get(said, ABSENT))
        for save, copy in mine.items():
            if copy.state != "unfinished":
                yield CopyTarget(save, tier, copy)
            elif save > newest and save != said:
                yield CopyTarget(save, tier, copy, making=True)
            elif save < newest and save in whole:
                yield CopyTarget(save, tier, copy)


def verify_all(found: Survey, targets: list[CopyTarget]) -> list[Verified]:
    """Every byte of every target, in the order given, with a bar."""
    results = []
    with bar(sum(one.copy.num_bytes for one in targets)) as shown:
        for one in targets:
            shown.begin(f"step {one.step:,} {one.tier}")
            results.append(Verified(one, problem_of(found, one, shown.advance)))
    return results


def problem_of(found: Survey, one: CopyTarget, progress: Callable[[int], None]) -> str:
    """What is wrong with a copy, naming the file; empty when it verifies."""
    if one.copy.manifest is None:
        return one.copy.reason
    place = found.places[one.tier]
    try:
        files = check_parts(inventory_of(one.copy.manifest, [place]), progress)
        copies = [
            FileCopies([place], f"{one.save}/{name}", entry)
            for name, entry in sorted(files.items())
        ]
        read([job_for(each, (), everything=True) for each in copies], progress)
    except CheckpointInvalid as error:
        return error.reason
    except OSError as error:
        return f"it cannot be read: {in_words(error)}"
    return ""


def _row(one: Verified) -> dict[str, object]:
    row: dict[str, object] = {"step": one.target.step, "save": str(one.target.save)}
    row["tier"] = one.target.tier
    row["valid"] = not one.reason
    if one.target.making:
        row["unfinished"] = True
    return row | ({"reason": one.reason} if one.reason else {"bytes": one.target.copy.num_bytes})


def _line(one: Verified, tiers: Sequence[str]) -> str:
    mark = "BAD" if one.bad else "ok " if not one.reason else "-- "
    told = one.reason or units.size(one.target.copy.num_bytes)
    if one.target.making:
        told = "no manifest yet: in the making, or given up"
    return f"{mark} {one.target.step:>9,}{_tier(one.target.tier, tiers)}  {told}"


def _head(tiers: Sequence[str]) -> str:
    return f"    {'step':>9}{_tier('tier', tiers)}  size, or what is wrong"


def _tier(name: str, tiers: Sequence[str]) -> str:
    width = max(map(len, ("tier", *tiers)))
    return f"  {name:<{width}}" if len(tiers) > 1 else ""


def _conclude_verify(
    at: JobAt, found: Survey, results: list[Verified], took_s: float, *, everything: bool
) -> None:
    """What that means, and what to do next."""
    bad = [one for one in results if one.bad]
    good = [one for one in results if not one.reason]
    size = units.size(sum(one.target.copy.num_bytes for one in good))
    read = f"{size} in {units.seconds(took_s)}"
    if not bad:
        click.echo(f"{units.count(len(good), 'copy', 'copies')}, every byte matches ({read})")
        click.echo(at.next("show"))
        return
    copies = units.count(len(bad) + len(good), "copy", "copies")
    others = f"; in the others every byte matches ({read})" if good else ""
    click.echo(f"{len(bad)} of {copies} damaged{others}")
    resumable = [one.target.step for one in good if one.target.copy.restartable]
    if resumable and everything:
        click.echo(f"a resume would go on from step {max(resumable):,}")
    elsewhere = [one for one in bad if mendable(found, one.target)]
    steps = {one.target.step for one in elsewhere}
    if steps:
        click.echo(at.next("repair", *(["--step", str(*steps)] if len(steps) == 1 else [])))
    elif len(tiers_of(at.settings)) > len(found.places):  # another may have what is missing here
        click.echo(at.next("verify"))
    else:
        click.echo("no other tier has a copy to mend from")
        click.echo(at.next("list"))


def mendable(found: Survey, one: CopyTarget) -> bool:
    """Whether another tier has a copy of the save with a manifest."""
    return any(tier != one.tier for tier in found.manifests(one.save))


_FILE = re.compile(rf"{FILE_NAME.pattern}|{PART_NAME.pattern}|{re.escape(MANIFEST)}$")
Key = tuple[SaveName, str]  # a copy: its save and its tier


@click.command(name="repair")
@DIRECTORY
@click.option("--step", type=int, default=None, help="Only this step; all of them by default.")
@JSON
def repair_command(directory: str | None, step: int | None, as_json: bool) -> int:
    """Verify every tier and mend what is damaged from another; exit code 1 if something remains."""
    at = find_job(directory, writes=True)
    found = survey(at)
    found.complain()
    targets = [one for one in targets_of(at, found, step) if not one.making]
    bad = [one for one in verify_all(found, targets) if one.bad]
    ledger = Ledger(at.settings.dir, job=at.job.id)
    _put_on_record(bad, ledger)
    mended, left = [], bad
    while left:
        done, failures = _mend(found, left, ledger)
        mended += done
        left = _what_remains(at, left, failures)
        if all(one.file != MANIFEST for _, one in done):
            break
        found = survey(at)  # a copy that has its manifest again is one to mend others from
    ledger.close()
    if as_json:
        rows = [{"step": save.step, "save": str(save), **_mended_row(one)} for save, one in mended]
        remains = [
            {
                "step": one.target.step,
                "save": str(one.target.save),
                "tier": one.target.tier,
                "reason": one.reason,
            }
            for one in left
        ]
        click.echo(msgspec.json.encode({"repaired": rows, "remains": remains}))
    else:
        _print_mended(at, mended, left, len(targets))
    return 1 if left or found.unreadable else 0


def _put_on_record(bad: list[Verified], ledger: Ledger) -> None:
    for one in bad:
        words = (word.strip(":;,") for word in one.reason.split())
        file = next((word for word in words if _FILE.match(word)), "")
        step, tier = one.target.step, one.target.tier
        ledger.append("verify_failed", step=step, file=file, tier=tier, reason=one.reason)


def _mend(
    found: Survey, bad: list[Verified], ledger: Ledger
) -> tuple[list[tuple[SaveName, Repaired]], dict[Key, str]]:
    """Mend copy after copy; what was done, and copy → why not all of it could be.

    A copy without a manifest is made whole here as well: whoever calls has made sure that it is
    not one in the making.
    """
    mended: list[tuple[SaveName, Repaired]] = []
    failures: dict[Key, str] = {}
    targets = [one.target for one in bad if mendable(found, one.target)]
    total = sum(size_of(_model(found, target)[1]) for target in targets)
    with bar(total) as shown:
        for target in targets:
            shown.begin(f"step {target.step:,} {target.tier}")
            problems = []
            tier, manifest = _model(found, target)
            places = [one for name, one in found.places.items() if target.save in found.at(name)]
            here, source = found.places[target.tier], found.places[tier]
            for done in mend_copy(
                here, places, manifest, None if source is here else source, shown.advance
            ):
                if isinstance(done, NotMended):
                    problems.append(_why_not(done))
                    continue
                mended.append((target.save, done))
                ledger.append("repaired", step=target.step, **_mended_row(done))
            if problems:
                failures[target.save, target.tier] = "; ".join(problems)
    return mended, failures


def _model(found: Survey, target: CopyTarget) -> tuple[str, Manifest]:
    """The manifest that a copy is mended by, and its tier: its own, or else the first one's."""
    manifests = found.manifests(target.save)
    tier = target.tier if target.tier in manifests else next(iter(manifests))
    return tier, manifests[tier]


def _why_not(one: NotMended) -> str:
    if isinstance(one.error, OSError):
        return f"{one.file} cannot be written: {in_words(one.error)}"
    return one.error.reason if one.file == MANIFEST else f"no tier has {one.file} whole"


def _what_remains(at: JobAt, bad: list[Verified], failures: dict[Key, str]) -> list[Verified]:
    """The copies that do not verify still, each read again, and why they could not be mended."""
    if not bad:
        return []
    now = survey(at)
    left = []
    for one in bad:
        copy = now.at(one.target.tier).get(one.target.save, ABSENT)
        (after,) = verify_all(now, [one.target._replace(copy=copy)])
        if after.bad:
            why = failures.get((one.target.save, one.target.tier)) or "no other tier has a copy"
            left.append(after._replace(reason=f"{after.reason}; {why}"))
    return left


def _mended_row(one: Repaired) -> dict[str, Any]:
    return {"file": one.file, "tier": one.place, "source": one.source}


def _print_mended(
    at: JobAt, mended: list[tuple[SaveName, Repaired]], left: list[Verified], num_copies: int
) -> None:
    for save, one in mended:
        click.echo(f"mended  step {save.step:>9,}  {one.place}  {one.file}, from {one.source}")
    for broken in left:
        click.echo(f"BAD     step {broken.target.step:>9,}  {broken.target.tier}  {broken.reason}")
    if left:
        click.echo(
            f"{units.count(len(left), 'copy', 'copies')} could not be mended; a resume passes "
            "over what is damaged"
        )
    elif not mended:
        click.echo(f"nothing to mend: {units.count(num_copies, 'copy', 'copies')} verified")
    click.echo(at.next("list" if left else "verify"))


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
def prune_command(
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
            _print_plans(plans)
        failures: dict[tuple[str, SaveName], str] = {}
        if going and not dry_run:
            _ask(going, yes, as_json)
            failures = _remove(found, going)
    if as_json:
        click.echo(msgspec.json.encode(_pruned_as_json(plans, failures, dry_run)))
    else:
        _conclude_prune([one for one in going if (one.tier, one.save) not in failures], dry_run)
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
            if not problem_of(found, CopyTarget(save, tier, copies[save]), shown.advance):
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


def _print_plans(plans: list[PrunePlan]) -> None:
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


def _pruned_as_json(
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


def _conclude_prune(gone: list[Going], dry_run: bool) -> None:
    if gone:
        copies, freed = _copies(gone), _total(gone)
        done = f"{copies} would go and free {freed}; nothing was removed"
        click.echo(done if dry_run else f"{copies} removed, {freed} freed")


def _copies(going: list[Going]) -> str:
    return units.count(len(going), "copy", "copies")


def _total(going: list[Going]) -> str:
    return units.size(sum(one.num_bytes for one in going))
