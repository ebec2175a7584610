"""What must hold of a tree after a crash, asked of the package's own code: catalog, reader, resume.

``Promises.check`` raises ``Broken``, in words, unless all of these hold:

- **on record**: what the ledger was told to keep durably is in it;
- **acknowledged**: of each tier, the newest saves whose commit (or copy, or repair) was put on
  record are there and whole, as many as the tier keeps, but for those that newer whole ones have
  pushed out; retention has kept what it promised;
- **believed**: each save that the catalog lists as committed, or the reader opens, verifies in
  full, and its tensor has the bytes that were saved;
- **restart**: the job opens with the id that was promised; a resume finds the newest whole save of
  all tiers, by itself; nobody has the number of an attempt that was claimed before;
- **next**: the newest step can be saved once more, and the next one after it; both are whole, and
  when retention has done its work, nothing else of the job is left but what it keeps.

The tree is laid out in memory (``/dev/shm``, where there is one). Most trees of a recording differ
in one tier or in a part of one: what was seen of a directory with these very bytes is remembered.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from keeper_fakes import FakeWorker, StepPool
from lean import HEAD_BYTES
from operations import KEEP, NOTHING, TIERS, expected
from power_loss import Tree, lay

from outlast import config
from outlast.attempt.link import LocalLink
from outlast.checkpoint.catalog import find_saves, open_job, prune, standing
from outlast.checkpoint.manifest import Place, SaveName, parse
from outlast.checkpoint.reader import Checkpoint, open_checkpoint
from outlast.errors import CheckpointInvalid, OutlastError
from outlast.keeper import wire
from outlast.keeper.memory import Books
from outlast.keeper.saves import SavesInFlight
from outlast.ledger.file import FILE_NAME, Ledger, kept
from outlast.ledger.past import Past
from outlast.peer.claims import Claim, Claims
from outlast.peer.key import job_key
from outlast.storage import Directory
from outlast.training import resume

NEXT_NONCE = "ffffffff"


class Broken(AssertionError):
    """A promise is not kept."""


class Known(NamedTuple):
    """What has been promised so far.

    Attributes:
        saves: (tier, save) of all that was put on record.
        lines: of the ledger, of which its writer was told that they are durable.
        job: the id that was told, "" for none.
        attempt: the largest number that was told to be claimed.
        kept: how many rollbacks were told to be kept beside the ledger.
        hurt: copies that were damaged by somebody else, and are not mended yet.
        keep: how many saves each tier keeps.
    """

    saves: frozenset[tuple[str, SaveName]] = frozenset()
    lines: frozenset[bytes] = frozenset()
    job: str = ""
    attempt: int = 0
    kept: int = 0
    hurt: frozenset[tuple[str, SaveName]] = frozenset()
    keep: dict[str, int] = KEEP

    def after(self, lines: Iterable[bytes], durable: Iterable[bytes] = ()) -> Known:
        """And what these lines say: of the ledger, or of a process under test."""
        saves, hurt = set(self.saves), set(self.hurt)
        job, attempt, kept_too = self.job, self.attempt, self.kept
        for line in lines:
            if not line.strip():
                continue
            said = json.loads(line)
            if said.get("event") in ("commit", "tier_copied"):
                saves.add((said["tier"], parse(said["save"])))
            elif said.get("event") == "repaired":  # in each copy one file was damaged
                done = said["tier"], said["step"]
                hurt = {one for one in hurt if (one[0], one[1].step) != done}
            elif "resumed" in said:  # and has mended what it found of that save
                done = {(tier, said["resumed"]) for _, tier in said["repaired"]}
                hurt = {one for one in hurt if (one[0], one[1].step) not in done}
            elif "event" not in said:
                job = said.get("job", job)
                kept_too = max(kept_too, said.get("kept", 0))
                attempt = max(attempt, said.get("claimed", 0))
        return self._replace(
            saves=frozenset(saves),
            lines=self.lines.union(durable),
            hurt=frozenset(hurt),
            job=job,
            attempt=attempt,
            kept=kept_too,
        )


class Promises:
    """Looks at trees.

    Args:
        root: a directory that trees may be laid out in; the settings lie beside it.

    Attributes:
        num_checked: trees that were looked at; equal ones count once.
        num_verified: directories of saves that were read in full.
    """

    def __init__(self, root: Path) -> None:
        self.num_checked = self.num_verified = 0
        self._root = root
        self._seen: set[tuple] = set()
        self._verdicts: dict[tuple, str] = {}

    def check(self, tree: Tree, known: Known) -> bool:
        """See that all holds; whether this tree was news.

        Raises:
            Broken: something does not; says what.
        """
        # By what is in it: bytes that are equal are the same.
        key = (frozenset(tree.items()), known._replace(keep=tuple(known.keep.items())))
        if key in self._seen:
            return False
        self._seen.add(key)
        self.num_checked += 1
        shutil.rmtree(self._root, ignore_errors=True)
        lay(tree, self._root)
        try:
            self.look(known)
        except (OSError, OutlastError, ValueError, KeyError, TypeError) as error:
            raise Broken(f"a restart needs a person: {type(error).__name__}: {error}") from error
        return True

    def look(self, known: Known) -> None:
        """As ``check``, of what lies in the root now."""
        directory = self._root / "job"
        settings = config.load({"dir": str(directory)}, file=self._settings())
        job = open_job(directory, settings).id
        if known.job and job != known.job:
            raise Broken(f"the job was {known.job}, and is {job} now")
        with contextlib.suppress(FileNotFoundError):
            lost = known.lines - set((directory / FILE_NAME).read_bytes().splitlines())
            if lost:
                raise Broken(f"the ledger has lost {len(lost)} lines: {min(lost).decode()}")
        if known.lines and not (directory / FILE_NAME).exists():
            raise Broken(f"the ledger is gone, with {len(known.lines)} lines")
        if len(kept(directory)) < known.kept:
            raise Broken("a rollback that was kept beside the ledger is gone")
        places = self._places(job)
        whole = {place.name: self._believed(place, known) for place in places}
        for tier, saves in whole.items():
            _acknowledged(tier, saves, known)
        step = self._resumes(directory, places, whole, known)
        number = self._attempt(directory, known)
        self._goes_on(job, number, step, whole, known)

    # --- one after the other -----------------------------------------------------------------

    def _settings(self) -> Path:
        """The settings of the job as it lies here."""
        path = self._root.parent / "outlast.toml"
        tables = [
            f'[[tier]]\nname = "{name}"\nurl = "{self._root / below}"\n'
            for name, below in TIERS.items()
        ]
        path.write_text("\n".join(tables))
        return path

    def _places(self, job: str) -> list[Place]:
        found = [Place(name, Directory(self._root / below)) for name, below in TIERS.items()]
        return standing(found, job, ())

    def _believed(self, place: Place, known: Known) -> set[SaveName]:
        """The saves of a tier that the catalog lists and that are whole."""
        whole = set()
        for save in find_saves(place.storage).committed:
            problem = self._problem(place, save)
            if not problem:
                whole.add(save)
            elif (place.name, save) not in known.hurt:
                raise Broken(f"{save} is listed in {place.name}, and is not whole: {problem}")
        return whole

    def _problem(self, place: Place, save: SaveName) -> str:
        """What is wrong with a save; "" if every byte is right."""
        folder = self._root / TIERS[place.name] / str(save)
        files = frozenset((path.name, path.read_bytes()) for path in folder.iterdir())
        key = str(save), files
        if key not in self._verdicts:
            self.num_verified += 1
            self._verdicts[key] = self._read(place, save)
        return self._verdicts[key]

    def _read(self, place: Place, save: SaveName) -> str:
        try:
            checkpoint = open_checkpoint([place], save)
            checkpoint.read((), share=(0, 1))
            data = b"" if save.nonce == NEXT_NONCE else _tensor(checkpoint)
        except (CheckpointInvalid, OSError) as error:
            return str(error)
        if data and data != expected(save)[HEAD_BYTES:]:
            raise Broken(f"{save} verifies in {place.name}, and has other bytes than were saved")
        return ""

    def _resumes(
        self, directory: Path, places: list[Place], whole: dict[str, set[SaveName]], known: Known
    ) -> int:
        """Find what to go on from; gives the step."""
        past = Past(directory).look()
        promised = {parse(past.promised_save)} if past.promised else set()
        on_record = {save for _, save in known.saves}
        best = max(set().union(*whole.values()), default=NOTHING)
        found = resume.find(places, LocalLink(), promised - {None}, lambda _: None)
        # Of two copies that are damaged in other places the resume makes a whole one.
        if found.loaded is not None and found.loaded.save < best:
            raise Broken(f"a resume goes on from {found.loaded.save}, and {best} is whole")
        if found.loaded is None and best != NOTHING:
            raise Broken(f"a resume begins anew, and {best} is whole")
        newest = max(on_record, default=NOTHING)
        if newest != NOTHING and (found.loaded is None or found.loaded.save < newest):
            raise Broken(f"a resume goes on from step {found.step}, and {newest} was committed")
        loaded = found.loaded
        if loaded is not None and _tensor(loaded) != expected(loaded.save)[HEAD_BYTES:]:
            raise Broken(f"a resume from {loaded.save} has other bytes than were saved")
        return found.step

    def _attempt(self, directory: Path, known: Known) -> int:
        """Claim the next attempt; gives its number."""
        storage = Directory(directory)
        job_key(storage)
        claims = Claims(storage)
        before = claims.newest()
        held = max(before.attempt if before else 0, Past(directory).look().attempt)
        if held < known.attempt:
            raise Broken(f"attempt {known.attempt} was claimed, and {held + 1} would be next")
        claim = Claim(attempt=held + 1, node="n", host="h", address="", term="t", members=("t",))
        if not claims.take(claim, before.attempt if before else 0):
            raise Broken(f"attempt {held + 1} cannot be claimed")
        return held + 1

    def _goes_on(
        self, job: str, number: int, newest: int, whole: dict[str, set[SaveName]], known: Known
    ) -> None:
        """Save the newest step once more, and the next; see what is left then."""
        ledger = Ledger(self._root / "job", job=job, attempt=number)
        storage = Directory(self._root / TIERS["local"], num_spares=1)
        number = max([number, *(save.attempt + 1 for saves in whole.values() for save in saves)])
        keeper = _Keeper(job, storage, ledger)
        steps = newest, newest + 1
        try:
            made = [keeper.save(step, number, serial) for serial, step in enumerate(steps)]
        finally:
            keeper.close()  # thousands of states are looked at in one process
            ledger.close()
        past = Past(self._root / "job").look()
        if past.promised != newest + 1:
            raise Broken(f"step {newest + 1} was saved next, and the ledger knows {past.promised}")
        place, *_ = self._places(job)
        keep = known.keep["local"]
        hurt = {save for tier, save in known.hurt if tier == "local"}
        prune(storage, job, keep=keep, invalid=hurt)
        for save in made[-keep:]:
            if problem := self._problem(place, save):
                raise Broken(f"{save} was saved next, and is not whole: {problem}")
        left = set(map(parse, storage.children())) - {None}
        # A directory in which nothing is may be anybody's: it stays, and costs nothing.
        left = {save for save in left if storage.children(str(save))}
        restartable = (whole["local"] | set(made)) - {
            save for save in whole["local"] if save.step == newest
        }
        wanted = set(sorted(restartable)[-keep:])
        if left != wanted:
            raise Broken(f"retention has left {_words(left)} and not {_words(wanted)}")


class _Keeper:
    """The keeper's own way of saving, in the calling thread; its worker has one tensor."""

    def __init__(self, job: str, storage: Directory, ledger: Ledger) -> None:
        self.books, self.pool = Books(), StepPool()
        self.saves = SavesInFlight(
            job,
            {"local": storage},
            self.books,
            self.pool,
            record=ledger.append,
            on_committed=lambda _: None,
            on_change=lambda: None,
        )
        self._job = job
        self._worker: FakeWorker | None = None

    def save(self, step: int, attempt: int, serial: int) -> SaveName:
        """Save a step; gives the save's name.

        Raises:
            Broken: it was not committed.
        """
        if self._worker is None:
            self._worker = FakeWorker(self, 0, 1, 1000, attempt, 0, None)
            hello = wire.Hello(job=self._job, attempt=attempt, nonce=NEXT_NONCE, rank=0)
            self._worker.who = {"hello": hello}
        self._worker.save(step, serial)
        self.pool.run()
        ended = self._worker.ended[-1]
        if ended.error or ended.step != step:
            raise Broken(f"step {step} cannot be saved any more: {ended.error}")
        return SaveName(step, attempt, serial, NEXT_NONCE)

    def close(self) -> None:
        """Give its memory back."""
        for number in list(self.books.arenas):
            self.books.drop(number)


def _tensor(checkpoint: Checkpoint) -> bytes:
    """The one tensor of a recorded save."""
    shape = checkpoint.inventory.tensor("x", 0).shape
    entry = checkpoint.inventory.locate({"x": [((0,), shape)]}, 0)["x"]
    (tensor,) = checkpoint.tensors([entry])
    return bytes(tensor.numpy())


def _acknowledged(tier: str, whole: set[SaveName], known: Known) -> None:
    """What was put on record is there, unless retention may have taken it."""
    on_record = {save for name, save in known.saves if name == tier}
    hurt = {save for name, save in known.hurt if name == tier}
    for save in on_record - whole - hurt:
        newer = {one.step: one for one in whole | hurt if one > save}
        is_superseded = save.step in newer
        if not is_superseded and len(newer) < known.keep[tier]:
            raise Broken(
                f"{save} was on record as committed in {tier}, and is gone; there are "
                f"{_words(whole)}"
            )


def _words(saves: Iterable[SaveName]) -> str:
    return ", ".join(map(str, sorted(saves))) or "none"
