"""``outlast checkpoints repair``: what is damaged in one tier is mended from another.

Each file is taken from whichever tier has it whole, so that two damaged copies can mend each other.
What was found and what was mended goes into the ledger. It may run while the job does: a file is
replaced in one stroke, by the bytes that its manifest names.
"""

from __future__ import annotations

import re
from typing import Any

import click
import msgspec

from outlast import units
from outlast.checkpoint.manifest import FILE_NAME, MANIFEST, PART_NAME, Manifest, SaveName
from outlast.checkpoint.transfer import NotMended, Repaired, mend_copy
from outlast.cli.checkpoints.survey import Survey, size_of, survey
from outlast.cli.checkpoints.verify import (
    ABSENT,
    Target,
    Verified,
    mendable,
    targets_of,
    verify_all,
)
from outlast.cli.checkpoints.where import (
    DIRECTORY,
    JSON,
    JobAt,
    bar,
    find_job,
    in_words,
)
from outlast.ledger.file import Ledger

_FILE = re.compile(rf"{FILE_NAME.pattern}|{PART_NAME.pattern}|{re.escape(MANIFEST)}$")
Key = tuple[SaveName, str]  # a copy: its save and its tier


@click.command(name="repair")
@DIRECTORY
@click.option("--step", type=int, default=None, help="Only this step; all of them by default.")
@JSON
def command(directory: str | None, step: int | None, as_json: bool) -> int:
    """Verify every tier and mend what is damaged from another; exit code 1 if something remains."""
    at = find_job(directory, writes=True)
    found = survey(at)
    found.complain()
    targets = [one for one in targets_of(at, found, step) if not one.making]
    bad = [one for one in verify_all(found, targets) if one.bad]
    ledger = Ledger(at.settings.dir, job=at.job.id)
    mended, failures = _mend(found, bad, ledger)
    left = _what_remains(at, bad, failures)
    ledger.close()
    if as_json:
        rows = [{"step": save.step, "save": str(save), **_as_row(one)} for save, one in mended]
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
        _print(at, mended, left, len(targets))
    return 1 if left or found.unreadable else 0


def _mend(
    found: Survey, bad: list[Verified], ledger: Ledger
) -> tuple[list[tuple[SaveName, Repaired]], dict[Key, str]]:
    """Mend copy after copy; what was done, and copy → why not all of it could be.

    A copy without a manifest is made whole here as well: whoever calls has made sure that it is
    not one in the making.
    """
    mended: list[tuple[SaveName, Repaired]] = []
    failures: dict[Key, str] = {}
    for one in bad:
        step, tier = one.target.step, one.target.tier
        words = (word.strip(":;,") for word in one.reason.split())
        file = next((word for word in words if _FILE.match(word)), "")
        ledger.append("verify_failed", step=step, file=file, tier=tier, reason=one.reason)
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
                ledger.append("repaired", step=target.step, **_as_row(done))
            if problems:
                failures[target.save, target.tier] = "; ".join(problems)
    return mended, failures


def _model(found: Survey, target: Target) -> tuple[str, Manifest]:
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


def _as_row(one: Repaired) -> dict[str, Any]:
    return {"file": one.file, "tier": one.place, "source": one.source}


def _print(
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
