"""Whose directory this is: ``job.json`` says so, and where that is lost, what else is there.

A job that takes itself for another one does not see its own checkpoints, and begins anew. So a
record that is missing, empty or damaged is made again only with the id that the job had, as far as
that is proven:

- by the ledger, each of whose lines names the job, if all name the same one;
- by the checkpoints below the job's directory, if all name the same one, and the ledger no other.

Where neither does, and something is there that was a job's, nothing is begun: it is said what to
do. Checkpoints elsewhere prove nothing, because jobs may share a tier; where a job has lived they
are reason enough not to begin anew. A directory that nobody has used is a new job's.

Rejected: the newest of several ids (a job that began anew by mistake has the newest lines, and
nothing to go on from).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from outlast.checkpoint.manifest import ABANDONED, MANIFEST
from outlast.checkpoint.names import SaveName, parse, signed_by
from outlast.config import Settings
from outlast.errors import ConfigError, OutlastError, ResumeRefused, StorageError, remedy
from outlast.ledger.file import FILE_NAME as LEDGER
from outlast.ledger.job import (
    FILE_NAME,
    Job,
    NoRecord,
    ids_in_ledger,
    make_directory,
    new_job,
    raise_unless_writable,
    read_record,
    write_record,
)
from outlast.ledger.narrator import say
from outlast.storage import Storage, open_storage

_TRACES: Final = (LEDGER, "membership", "rollbacks")  # of a job that has lived in a directory
_TRIES: Final = 20  # each is lost to somebody else who writes the record too
_PAUSE_S: Final = 0.05


class Proof(NamedTuple):
    """Which job it is, since when, and what says so."""

    id: str
    since_t: float
    by: str


class _Seen(NamedTuple):
    """What checkpoints say of whose they are: the jobs, and how many say nothing."""

    jobs: set[str]
    num_unknown: int


class _Head(msgspec.Struct):
    job: str


def open_job(directory: Path, settings: Settings) -> Job:
    """The job in ``directory``, made now if there is none, and found again if its record is lost.

    Raises:
        ConfigError: the directory cannot be one; or its record is damaged, and a job runs there.
        StorageError: it cannot be made, read or written.
        ResumeRefused: something of a job is there, and nothing says of which.
    """
    make_directory(directory)
    for _ in range(_TRIES):
        found = read_record(directory)
        if isinstance(found, Job):
            raise_unless_writable(directory)
            return found
        proof = _prove(directory, settings, found)
        job = new_job(settings, *(proof[:2] if proof else ()))
        if write_record(directory, job, found):
            _say(directory / FILE_NAME, found, job, proof)
        else:
            time.sleep(_PAUSE_S)
    if proof is not None:  # a job runs there, perhaps our own agent: its lock decides, not this
        return job
    raise ConfigError(
        f"{directory / FILE_NAME} is not a job's record, and is held by a job that runs; wait for "
        "it, or give another --dir"
    )


def _say(path: Path, found: NoRecord, job: Job, proof: Proof | None) -> None:
    if proof is not None:
        say(f"{path}: {found.why}; it is job {job.id}, as {proof.by} says, and is written anew")
    elif found.there:
        say(
            f"{path}: {found.why}, and nothing else is left of its job; this is a new one, {job.id}"
        )


def _prove(directory: Path, settings: Settings, found: NoRecord) -> Proof | None:
    """Which job it was; None where there was none.

    Raises:
        StorageError: what could say so cannot be read.
        ResumeRefused: it is not known which.
    """
    in_ledger = ids_in_ledger(directory)
    if len(in_ledger) == 1:
        ((job, since_t),) = in_ledger.items()
        return Proof(job, since_t, str(directory / LEDGER))
    tiers = [tier.url for tier in settings.tiers if tier.kind != "memory"]
    below = [url for url in tiers if Path(url).resolve().is_relative_to(directory.resolve())]
    here = _look(below)
    if len(here.jobs) == 1 and here.jobs <= (in_ledger.keys() or here.jobs):
        (job,) = here.jobs
        return Proof(job, in_ledger.get(job, 0.0), f"each checkpoint in {' and '.join(below)}")
    if in_ledger or here.jobs or here.num_unknown:
        raise _refused(directory, found, in_ledger.keys() | here.jobs)
    if not found.there and not any((directory / name).exists() for name in _TRACES):
        return None
    there = _look([url for url in tiers if url not in below])
    if there.jobs or there.num_unknown:
        raise _refused(directory, found, there.jobs)
    return None


def _refused(directory: Path, found: NoRecord, jobs: Iterable[str]) -> ResumeRefused:
    path = directory / FILE_NAME
    choice = " or ".join(f'{{"id": "{job}"}}' for job in sorted(jobs)) or "its old content"
    return ResumeRefused(
        f"{path}: {found.why}, and there are checkpoints that may be this job's, which nothing "
        f"proves; put {choice} into it to go on from them, or start anew with another --dir"
    )


def _look(urls: Iterable[str]) -> _Seen:
    """What the checkpoints in these places say.

    Raises:
        StorageError: a place does not answer: nothing may be concluded from that.
    """
    jobs: set[str] = set()
    num_unknown = 0
    for url in urls:
        try:
            storage = open_storage(url)
            for save in filter(None, map(parse, storage.children())):
                job, is_committed = _owner(storage, save)
                jobs |= {job} if job else set()
                num_unknown += is_committed and not job
        except (OSError, OutlastError) as error:
            words = getattr(error, "strerror", None) or error
            raise StorageError(
                f"whose checkpoints lie in {url} cannot be read: {words}; {remedy(error)}, or "
                f"bring {FILE_NAME} back from a copy"
            ) from None
    return _Seen(jobs, num_unknown)


def _owner(storage: Storage, save: SaveName) -> tuple[str, bool]:
    """Whose a save is, "" where it does not say; and whether it was committed."""
    try:
        data = storage.read(f"{save}/{MANIFEST}")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        data = ABANDONED
    job = signed_by(storage, save) or ""
    if not job:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            job = msgspec.json.decode(data, type=_Head).job
    return job, data != ABANDONED
