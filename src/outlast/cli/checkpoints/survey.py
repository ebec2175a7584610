"""Which step is in which tier, as the manifests say; data is not read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import click

from outlast.checkpoint.catalog import find_steps
from outlast.checkpoint.manifest import FULL, MANIFEST, Manifest, decode, step_name
from outlast.checkpoint.places import Place
from outlast.checkpoint.standing import stands
from outlast.cli.checkpoints.where import JobAt, in_words, places_of, tiers_of
from outlast.config import Settings
from outlast.errors import CheckpointInvalid, ConfigError, StorageError
from outlast.ledger.file import read_events
from outlast.ledger.past import Past
from outlast.policy.rollbacks import is_undone
from outlast.storage import Storage


def size_of(manifest: Manifest) -> int:
    """Bytes of the files that a manifest names."""
    return sum(file.size for file in manifest.files.values())


class Copy(NamedTuple):
    """One step in one tier.

    Attributes:
        state: "committed", "invalid" (its manifest does not verify) or "unfinished" (it has none).
        manifest: where it is committed.
        reason: why it is invalid.
    """

    state: str
    manifest: Manifest | None = None
    reason: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of the files that the manifest names."""
        return size_of(self.manifest) if self.manifest else 0

    @property
    def restartable(self) -> bool:
        """Whether a job can be resumed from it, if its bytes verify."""
        return self.manifest is not None and self.manifest.kind == FULL


class Survey(NamedTuple):
    """What there is.

    Attributes:
        past: what the ledger says besides: which were seen to be healthy, which were undone.
        tiers: names of the tiers that were asked for, in order of speed.
        places: tier → place, of those that could be listed.
        unreadable: tier → why it could not be listed.
        copies: step → tier → what is there, oldest step first.
    """

    tiers: tuple[str, ...]
    places: dict[str, Place]
    unreadable: dict[str, str]
    copies: dict[int, dict[str, Copy]]
    past: Past

    def manifests(self, step: int) -> dict[str, Manifest]:
        """Tier → manifest of ``step``, of those that verify."""
        here = self.copies.get(step, {})
        return {tier: copy.manifest for tier, copy in here.items() if copy.manifest}

    def at(self, tier: str) -> dict[int, Copy]:
        """Step → what is in ``tier``, oldest first."""
        return {step: here[tier] for step, here in self.copies.items() if tier in here}

    def steps(self) -> list[int]:
        """Steps with a manifest that verifies in some tier, oldest first."""
        return [step for step in self.copies if self.manifests(step)]

    def state(self, step: int) -> str:
        """What ``step`` is in the best of its copies."""
        for manifest in self.manifests(step).values():
            return "committed" if manifest.kind == FULL else "weights only"
        states = {copy.state for copy in self.copies[step].values()}
        return "invalid" if "invalid" in states else "unfinished"

    def health(self, step: int) -> str:
        """What is known of the loss behind ``step``: "healthy", "unhealthy" or "unknown"."""
        manifests = self.manifests(step).values()
        if manifests and not any(stands(one, self.past.rollbacks) for one in manifests):
            return "unhealthy"
        return "healthy" if manifests and step in self.past.healthy else "unknown"

    def places_in_words(self) -> str:
        """The places that could be listed, as a person would write them."""
        return " or ".join(place.storage.describe() for place in self.places.values())

    def complain(self) -> None:
        """Say on standard error which tiers could not be read."""
        for tier, reason in self.unreadable.items():
            click.echo(f"outlast: tier {tier}: {reason}; going on without it", err=True)


def survey(settings: Settings, only: str | None = None) -> Survey:
    """List every tier and read every manifest.

    Raises:
        ConfigError: ``only`` is not a tier.
        StorageError: no tier can be listed.
    """
    places, unreadable = places_of(settings, only)
    found: dict[int, dict[str, Copy]] = {}
    for tier, place in list(places.items()):
        try:
            for step, copy in _copies(place.storage):
                found.setdefault(step, {})[tier] = copy
        except OSError as error:
            del places[tier]
            unreadable[tier] = f"{place.storage.describe()} cannot be listed: {in_words(error)}"
    if not places:
        reasons = "; ".join(unreadable.values())
        raise StorageError(f"{reasons}. Look at the disk, the network and its permissions")
    names = tuple(tier.name for tier in tiers_of(settings, only))
    past = Past(settings.dir).look()
    return Survey(names, places, unreadable, dict(sorted(found.items())), past)


def _copies(storage: Storage) -> Iterator[tuple[int, Copy]]:
    steps = find_steps(storage)
    for step in steps.committed:
        yield step, look(storage, step)
    for step in steps.unfinished:
        yield step, Copy("unfinished", reason=f"{MANIFEST} is missing")


def look(storage: Storage, step: int) -> Copy:
    """One step in one place, its manifest read."""
    try:
        return Copy("committed", decode(storage.read(f"{step_name(step)}/{MANIFEST}"), step))
    except CheckpointInvalid as error:
        return Copy("invalid", reason=error.reason)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return Copy("unfinished", reason=f"{MANIFEST} is missing")
    except OSError as error:
        return Copy("invalid", reason=f"{MANIFEST} cannot be read: {in_words(error)}")


def promised(settings: Settings) -> dict[str, int]:
    """Tier → the newest step that the ledger says was committed there."""
    first = next(tier.name for tier in settings.tiers if tier.kind != "memory")
    newest: dict[str, int] = {}
    rollbacks = Past(settings.dir).look().rollbacks
    for event in read_events(settings.dir):
        if event.event in ("commit", "tier_copied"):
            tier, step = str(event.get("tier") or first), event.get("step")
            if isinstance(step, int) and not is_undone(rollbacks, event.attempt, step):
                newest[tier] = max(newest.get(tier, 0), step)
    return newest


def pick(at: JobAt, found: Survey, step: int | None) -> int:
    """``step`` if some tier has it committed; by default the newest that was not undone.

    Raises:
        ConfigError: there is no such step.
        CheckpointInvalid: it is there and does not verify.
    """
    steps = found.steps()
    if step is None and steps:
        return max((one for one in steps if found.health(one) != "unhealthy"), default=steps[-1])
    if step in steps:
        return step
    if step is None:
        raise nothing_there(at, found)
    if step in found.copies:
        reason = next(iter(found.copies[step].values())).reason
        raise CheckpointInvalid(step, f"{reason}. See: outlast checkpoints verify --step {step}")
    raise ConfigError(
        f"step {step} is not in {found.places_in_words()}; committed steps: {known(steps)}"
    )


def nothing_there(at: JobAt, found: Survey) -> ConfigError:
    """The error that says so."""
    return ConfigError(
        f"there is no checkpoint in {found.places_in_words()} yet; train first, or give the job's "
        f"directory{at.hint()}"
    )


def known(steps: list[int]) -> str:
    """Steps for a message; of many, the newest."""
    shown = ", ".join(map(str, steps[-12:]))
    return f"…, {shown}" if len(steps) > 12 else shown or "none yet"
