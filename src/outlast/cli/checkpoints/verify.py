"""``outlast checkpoints verify``: every byte in every tier.

Looked at is every copy of this job's with a manifest, and every one that should have one: the
newest save that was committed there, as the ledger says, and a save that has no manifest there and
one in another tier. A save without a manifest that is newer than all of its tier may be in the
making: it is named and not held against anybody.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import click
import msgspec

from outlast import units
from outlast.checkpoint.inventory import check_parts
from outlast.checkpoint.manifest import MANIFEST, SaveName
from outlast.checkpoint.transfer import FileCopies, inventory_of, job_for, read
from outlast.cli.checkpoints.survey import (
    SaveCopy,
    Survey,
    known,
    nothing_there,
    promised,
    survey,
)
from outlast.cli.checkpoints.where import (
    DIRECTORY,
    JSON,
    TIER,
    JobAt,
    bar,
    find_job,
    in_words,
    tiers_of,
)
from outlast.errors import CheckpointInvalid, ConfigError

NONE = SaveName(0)
ABSENT = SaveCopy("unfinished", reason=f"{MANIFEST} is missing")


class Target(NamedTuple):
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

    target: Target
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
def command(directory: str | None, step: int | None, tier: str | None, as_json: bool) -> int:
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
            click.echo(_line(one, found.tiers))
        _conclude(at, found, results, time.monotonic() - began_s, everything=step is None)
    return 1 if any(one.bad for one in results) or found.unreadable else 0


def targets_of(at: JobAt, found: Survey, step: int | None) -> list[Target]:
    """What is to be verified, oldest step first.

    Raises:
        ConfigError: there is nothing, or not this step.
    """
    targets = sorted(_targets(found, promised(at.settings)), key=lambda one: one.save)
    if step is not None:
        chosen = [one for one in targets if one.step == step] or [
            Target(save, tier, copy)
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


def _targets(found: Survey, ledger: dict[str, SaveName]) -> Iterator[Target]:
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
            yield Target(said, tier, mine.get(said, ABSENT))
        for save, copy in mine.items():
            if copy.state != "unfinished":
                yield Target(save, tier, copy)
            elif save > newest and save != said:
                yield Target(save, tier, copy, making=True)
            elif save < newest and save in whole:
                yield Target(save, tier, copy)


def verify_all(found: Survey, targets: list[Target]) -> list[Verified]:
    """Every byte of every target, in the order given, with a bar."""
    results = []
    with bar(sum(one.copy.num_bytes for one in targets)) as shown:
        for one in targets:
            shown.begin(f"step {one.step:,} {one.tier}")
            results.append(Verified(one, problem_of(found, one, shown.advance)))
    return results


def problem_of(found: Survey, one: Target, progress: Callable[[int], None]) -> str:
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
    width = max(map(len, tiers))
    tier = f"  {one.target.tier:<{width}}" if len(tiers) > 1 else ""
    return f"{mark} step {one.target.step:>9,}{tier}  {told}"


def _conclude(
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


def mendable(found: Survey, one: Target) -> bool:
    """Whether another tier has a copy of the save with a manifest."""
    return any(tier != one.tier for tier in found.manifests(one.save))
