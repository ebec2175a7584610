"""The model of checkpoints, tiers and retention: sessions, disks and what must hold of them.

Real are the keeper's saves, gate, fence, manifests, copies and pruning, the reader, the repair and
the resume's choice. The model is a few dictionaries: what each save was given by its ranks
(``given``), which bytes each committed copy has (``stands``), what was damaged or taken away here
on purpose (``hurt``). It reads the disks itself and believes none of the code under test.

What must hold, after each act, wherever a session died in it:

- a manifest appears only where all that was given lies already, and only by a session whose
  attempt's number was its own when it asked;
- what is committed in a place stays there byte by byte until retention removes it;
- retention leaves the newest ``keep`` valid ones, what is in use, and what is not the job's;
- a resume goes on from the newest save of which each block is right somewhere, with the bytes that
  were given; it begins anew only where nothing was ever committed.
"""

import contextlib
import errno
import json
import logging

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from keeper_fakes import JOB
from ram_disk import Crash, RamDisk
from saving_sessions import (
    BLOCK_BYTES,
    SIZE,
    TIERS,
    WORLD,
    Session,
    bytes_of,
    set_the_stage,
)
from unit_checkpoints import mend_all
from unit_fakes import Hub

from outlast.checkpoint.catalog import prune, standing
from outlast.checkpoint.manifest import (
    ABANDONED,
    MANIFEST,
    NOTE,
    Place,
    SaveName,
    own_name,
    parse,
)
from outlast.errors import ResumeRefused, StorageError
from outlast.keeper.conclude import Committed
from outlast.training import resume

KEEP = {"local": 2, "shared": 3}
SESSIONS_MAX = 3
OTHERS = (SaveName(0, 1, 1, "0000ffff"), SaveName(900, 1, 1, "0000ffff"))  # another job's
ALL = 1000
steps = st.integers(1, 4)
tiers = st.sampled_from(TIERS)
places = st.floats(0, 1, exclude_max=True)
acts = st.one_of(st.integers(0, 16), st.just(ALL))  # of a save there are about sixteen
likely = st.sampled_from([True, True, True, False])


class Checkpoints(RuleBasedStateMachine):
    """Sessions of one job, some of them left behind, on two tiers."""

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.acting = None  # the session that does something now
        set_the_stage(self.patch, lambda _, act: self.acting.timers.append(act))
        self.patch.setattr(logging.root.manager, "disable", logging.CRITICAL)
        self.disks = {name: self.make_disk(name) for name in TIERS}
        self.claims = self.make_disk("claims")
        for name in TIERS:
            self.disks[name].on_put = self.watcher(name)
            self.disks[name].on_remove = self.remover(name)
        self.sessions = []
        self.num_sessions = 0
        self.given = {}  # save → file → bytes, as the ranks gave them
        self.whole = set()  # saves of which every rank has said that its copy is whole
        self.truth = {}  # save → file → bytes, of those that were committed somewhere
        self.stands = {name: set() for name in TIERS}  # saves
        self.ghosts = set()  # (tier, save) of which somebody else had removed all
        self.hurt = set()  # (tier, path) damaged or taken away on purpose
        self.told = set()  # saves of whose commit somebody was told
        self.removed = set()  # (tier, path) of what the code under test removes in an act
        self.ever_removed = set()  # the same of all acts
        self.others = set()  # (tier, path) of another job's files
        self.broken = []  # what was seen in the midst of an act, where it would be caught

    @staticmethod
    def make_disk(name):
        return RamDisk(name)

    def teardown(self):
        for session in self.sessions:
            session.ends()
        self.patch.undo()

    @initialize(steps=st.lists(steps, max_size=4))
    def begins(self, steps):
        """Some checkpoints are there already: from nothing, hardly anything would be lost."""
        self.attempt_begins(is_half=False)
        for step in steps:
            self.saves(which=0, step=step, is_whole=True, acts=ALL)
            self.brings(which=0, tier="shared")

    # --- what is seen at the disks ----------------------------------------------------------------

    def watcher(self, tier):
        def put(path, data):
            directory, _, name = path.partition("/")
            save = parse(directory)
            if save not in self.given:
                return
            if name != MANIFEST:  # its parts and its note are the keeper's own words
                self.given[save].setdefault(name, data)
            elif data != ABANDONED:
                try:
                    self.manifest_appears(tier, save, data)
                except AssertionError as error:
                    self.broken.append(error)

        return put

    def remover(self, tier):
        def remove(path):
            self.removed.add((tier, path))
            self.ever_removed.add((tier, path))

        return remove

    def files_of(self, tier, save):
        """What lies there of a save."""
        disk = self.disks[tier]
        return {
            path.partition("/")[2]: data
            for path, data in disk.files.items()
            if path.startswith(f"{save}/")
        }

    def manifest_appears(self, tier, save, data):
        there = self.files_of(tier, save)
        was_removed = (tier, f"{save}/{NOTE}") in self.ever_removed
        if NOTE not in there and save not in self.stands[tier] and was_removed:
            self.ghosts.add((tier, save))  # everything was removed meanwhile: it counts for nothing
            return
        if save not in self.truth:
            session = self.acting
            assert session.nonce == save.nonce
            assert tier == "local", "committed in a slower tier first"
            assert NOTE in self.given[save], "nothing says whose it is"
            assert save in self.whole, "committed before all ranks' copies were whole"
            assert save.serial in session.passed, "committed by an attempt that was left behind"
            self.truth[save] = {**self.given[save], MANIFEST: data}
        for name, right in self.truth[save].items():
            if (tier, f"{save}/{name}") not in self.hurt:
                assert there.get(name) == right, f"{name} is not there when its manifest appears"
        self.stands[tier].add(save)

    # --- attempts ---------------------------------------------------------------------------------

    @precondition(lambda self: len(self.sessions) < SESSIONS_MAX)
    @rule(is_half=st.booleans())
    def attempt_begins(self, is_half):
        """A new one; ``is_half``: it takes itself for the newest attempt that there is already."""
        newest = max((one.attempt for one in self.sessions), default=0)
        attempt = newest if is_half and newest else self.newest_claim() + 1
        self.num_sessions += 1
        session = Session(
            self.patch,
            self.num_sessions,
            attempt,
            self.disks,
            self.claims,
            keep=KEEP,
        )
        self.sessions.append(session)
        session.claim()

    def newest_claim(self):
        numbers = [int(name.split("-")[1][:12]) for name in self.claims.children("membership")]
        return max(numbers, default=0)

    @rule(which=st.integers(0, SESSIONS_MAX - 1))
    def session_ends(self, which):
        if len(self.sessions) > 1 and which < len(self.sessions):
            self.sessions.pop(which).ends()

    def picked(self, which):
        return self.sessions[-1 - which % len(self.sessions)]

    # --- saves ------------------------------------------------------------------------------------

    @rule(which=st.integers(0, 2), step=steps, is_whole=likely, acts=acts)
    def saves(self, which, step, is_whole, acts):
        """A session begins a save and comes so far with it; or one of its ranks is lost."""
        session = self.picked(which)
        if session.has_room():
            with self.may_crash(session):
                save, files = session.begins(step)
                self.given[save] = files
                if is_whole:
                    self.whole.add(save)
                for worker in session.workers[: WORLD if is_whole else 1]:
                    worker.copies(step, save.serial)
                if not is_whole:
                    session.keeper.saves.lost(session.attempt, session.workers[1].peer)
                session.goes_on(acts)

    @rule(acts=st.integers(8, 14), step=steps, after=st.integers(0, 7))
    def is_paused_and_taken_for_gone(self, acts, step, after):
        """A session stands still with a save nearly done; another goes on, and may die tidying."""
        if len(self.sessions) < SESSIONS_MAX and self.picked(0).has_room():
            self.saves(which=0, step=step, is_whole=True, acts=acts)
            self.attempt_begins(is_half=False)
            self.saves(which=0, step=step + 1, is_whole=True, acts=ALL)
            self.prunes(tier="local", keep=2, which=0, after=after)

    @rule(which=st.integers(0, 2), acts=acts)
    def goes_on(self, which, acts):
        with contextlib.suppress(OSError), self.may_crash(self.picked(which)) as session:
            session.goes_on(acts)

    @rule(which=st.integers(0, 2), after=st.integers(0, 12), tier=tiers, brings=st.booleans())
    def crashes(self, which, after, tier, brings):
        """The session dies at a durable change that it makes from here on, or lives."""
        session = self.picked(which)
        self.disks[tier].fuse = after
        with self.may_crash(session):
            session.goes_on(ALL)
            for name in TIERS if brings else ():
                session.brings(name)
        self.disks[tier].fuse = None

    @contextlib.contextmanager
    def may_crash(self, session):
        self.acting = session
        try:
            with self.pruning(session):
                yield session
        except Crash:
            for disk in self.disks.values():
                disk.fuse = None
            self.note_told()
            self.sessions.remove(session)
            session.ends()
            if not self.sessions:
                self.attempt_begins(is_half=False)
        self.note_told()

    def note_told(self):
        for session in self.sessions:
            for serial in session.told_committed:
                named = [s for s in self.given if (s.nonce, s.serial) == (session.nonce, serial)]
                self.told.update(named)

    # --- tiers ------------------------------------------------------------------------------------

    @rule(which=st.integers(0, 2), tier=tiers)
    def brings(self, which, tier):
        """A session's copier does what it has to do: copy the newest, and prune."""
        with self.may_crash(self.picked(which)) as session:
            session.brings(tier)

    @rule(which=st.integers(0, 2))
    def brings_what_is_left(self, which):
        """As a keeper that is started again: the newest checkpoint goes to the slower tier."""
        session = self.picked(which)
        right = [save for save in self.stands["local"] if self.is_right("local", save, MANIFEST)]
        if not right or session.copies._copiers["shared"]._next is not None:
            return
        manifest = self.truth[max(right)][MANIFEST]
        found = Committed(
            manifest=resume.read_manifest([Place("local", Only(manifest))], max(right)),
            data=manifest,
            ranks=tuple(range(WORLD)),
            tiers=("shared",),
            tier="local",
            by_us=False,
        )
        session.copies._copiers["shared"].submit(found)
        with self.may_crash(session):
            session.brings("shared")

    @rule(tier=tiers, fails=st.sampled_from([errno.EIO, errno.ENOSPC]))
    def tier_fails(self, tier, fails):
        self.disks[tier].fails = fails

    @rule()
    def tiers_are_back(self):
        for disk in self.disks.values():
            disk.fails = 0

    @rule(tier=tiers, keep=st.integers(1, 3), which=st.integers(0, 2), after=st.integers(0, 40))
    def prunes(self, tier, keep, which, after):
        """As ``outlast checkpoints prune``, which may be killed, beside a session that saves."""
        session = self.picked(which)
        disk = self.disks[tier]
        disk.fuse = after
        with self.pruning(session, keep, (tier,)), contextlib.suppress(OSError, Crash):
            prune(disk, JOB, keep=keep, invalid=(), in_use=lambda: session.in_use(tier))
        disk.fuse = None

    @contextlib.contextmanager
    def pruning(self, session, keep=None, where=TIERS):
        """What is done within removes nothing but what retention allows."""
        before = {tier: (set(self.stands[tier]), self.valid(tier)) for tier in where}
        in_use = {tier: session.in_use(tier) for tier in where}
        self.removed.clear()
        try:
            yield
        finally:
            for tier in where:
                used = in_use[tier] & session.in_use(tier)
                self.judge_removal(tier, keep or KEEP[tier], *before[tier], used)

    def judge_removal(self, tier, keep, stood, valid, in_use):
        files = self.disks[tier].files
        gone = {save for save in self.stands[tier] if f"{save}/{MANIFEST}" not in files}
        self.stands[tier] -= gone
        newest = {}
        for save in sorted(valid | self.valid(tier) | (gone - stood)):
            newest[save.step] = save
        kept = sorted(newest.values())[-keep:]
        assert not gone & set(kept), f"{gone & set(kept)} went from {tier}, which keeps {keep}"
        assert not gone or kept, f"{gone} went from {tier}, where nothing is valid"
        touched = {parse(path.partition("/")[0]) for where, path in self.removed if where == tier}
        assert not touched & in_use, f"{touched & in_use} went from {tier}, and are in use"

    def valid(self, tier):
        """The saves of which a place says rightly that they are committed."""
        return {
            save
            for save in self.stands[tier]
            if self.is_right(tier, save, MANIFEST) and f"{save}/{NOTE}" in self.disks[tier].files
        }

    # --- damage -----------------------------------------------------------------------------------

    @rule(tier=tiers, file=places, at=places, bit=st.integers(0, 7), is_lost=st.booleans())
    def file_is_damaged(self, tier, file, at, bit, is_lost):
        self.damages(tier, lambda path: True, file, None if is_lost else (at, bit))

    @rule(tier=tiers, file=places, at=places, bit=st.integers(0, 7))
    def manifest_is_damaged(self, tier, file, at, bit):
        self.damages(tier, lambda path: path.endswith(MANIFEST), file, (at, bit))

    def damages(self, tier, which, file, flip):
        files = self.disks[tier].files
        names = sorted(path for path in files if (tier, path) not in self.others and which(path))
        if not names:
            return
        path = names[int(file * len(names))]
        data = bytearray(files[path])
        if flip is None:
            self.hurts(tier, path, None)
        elif data and files[path] != ABANDONED:
            at, bit = flip
            data[int(at * len(data))] ^= 1 << bit
            self.hurts(tier, path, bytes(data))

    def hurts(self, tier, path, data):
        self.hurt.add((tier, path))
        if data is None:
            del self.disks[tier].files[path]
            if path.endswith(MANIFEST):  # it is no checkpoint any more, and may go as unfinished
                self.stands[tier].discard(parse(path.partition("/")[0]))
        else:
            self.disks[tier].files[path] = data

    @rule(tier=tiers)
    def another_job_saves(self, tier):
        for save in OTHERS:
            said = {"job": "other", "step": save.step, "attempt": 1, "serial": 1}
            for name, number in ((NOTE, 1), (MANIFEST, 3)):
                text = json.dumps({"format": number, **said})
                self.disks[tier].files[f"{save}/{name}"] = text.encode()
                self.others.add((tier, f"{save}/{name}"))

    @rule(pick=places)
    def mends(self, pick):
        """As ``outlast checkpoints repair``."""
        some = sorted(self.stands["local"] & self.stands["shared"])
        if some and not any(disk.fails for disk in self.disks.values()):
            save = some[int(pick * len(some))]
            if any(self.is_right(tier, save, MANIFEST) for tier in TIERS):
                with contextlib.suppress(StopIteration):
                    mend_all(self.places(is_job=False), save)

    # --- resume -----------------------------------------------------------------------------------

    def places(self, *, is_job=True):
        found = [Place(name, self.disks[name]) for name in TIERS]
        return standing(found, JOB, ()) if is_job else found

    @rule()
    def resumes(self):
        """A start of the job: it goes on from the newest that is right, block by block."""
        wanted = max(filter(self.can_be_read, self.seen()), default=None)
        is_all_there = not any(self.disks[tier].fails == errno.EIO for tier in TIERS)
        found, refused = None, ""
        try:
            found = resume.find(self.places(), Hub(1).link(0), self.told, lambda _: None)
        except (ResumeRefused, StorageError) as error:
            refused = str(error)
        if found is None:
            assert wanted is None, f"{wanted} is right, and was not taken: {refused}"
            is_reason = self.told or self.is_something_there() or not is_all_there
            assert is_reason, f"nothing was ever committed: {refused}"
            return
        if found.loaded is None:
            assert wanted is None, f"{wanted} is right, and the job began anew"
            assert not self.told, "the job began anew, and had committed"
            assert is_all_there, "the job began anew, and not every tier could be asked"
            return
        save = found.loaded.save
        assert save == wanted, f"{save} was taken, {wanted} is the newest that is right"
        self.check_loaded(save, found.loaded)

    def is_something_there(self):
        """Whether a place has what may once have been a checkpoint of the job."""
        return any(
            path.endswith(MANIFEST) and data != ABANDONED and (tier, path) not in self.others
            for tier in TIERS
            for path, data in self.disks[tier].files.items()
        )

    def check_loaded(self, save, loaded):
        number = int(save.nonce, 16)
        assert loaded.data == {"whose": [number, save.serial, 0]}
        names = [own_name("x", rank) for rank in range(WORLD)]
        tensors = [torch.zeros(SIZE, dtype=torch.uint8) for _ in names]
        with contextlib.suppress(OSError):  # it is there no more, or not now
            loaded.read(list(zip(names, tensors, strict=True)))
            for rank, tensor in enumerate(tensors):
                assert tensor.numpy().tobytes() == bytes_of(number, save.serial, rank)

    def seen(self):
        """Saves of which some place that answers has a manifest that is right."""
        return {
            save
            for tier in TIERS
            if self.disks[tier].fails != errno.EIO
            for save in self.truth
            if self.is_right(tier, save, MANIFEST)
        }

    def can_be_read(self, save):
        """Whether each block of each file is right in a place that answers."""
        there = [self.files_of(t, save) for t in TIERS if self.disks[t].fails != errno.EIO]
        for name, right in self.truth[save].items():
            if name in (NOTE, MANIFEST):
                continue
            copies = [one[name] for one in there if len(one.get(name, b"")) == len(right)]
            for start in range(0, len(right), BLOCK_BYTES):
                block = right[start : start + BLOCK_BYTES]
                if not any(one[start : start + BLOCK_BYTES] == block for one in copies):
                    return False
        return True

    def is_right(self, tier, save, name):
        return self.disks[tier].files.get(f"{save}/{name}") == self.truth[save][name]

    # --- what must hold always --------------------------------------------------------------------

    @invariant()
    def nothing_was_seen(self):
        for error in self.broken:
            raise error

    @invariant()
    def what_is_committed_stands(self):
        for tier in TIERS:
            for save in self.stands[tier]:
                for name, right in self.truth[save].items():
                    path = f"{save}/{name}"
                    if self.disks[tier].files.get(path) == right:
                        self.hurt.discard((tier, path))  # it was mended, or brought anew
                    else:
                        assert (tier, path) in self.hurt, f"{path} in {tier} is not what it was"

    @invariant()
    def what_was_told_is_somewhere(self):
        """Or retention has removed it, or it was damaged here."""
        for save in self.told:
            is_ghost = ("local", save) in self.ghosts
            assert save in self.truth or is_ghost, f"{save} was told to be committed"

    @invariant()
    def what_is_not_the_jobs_stays(self):
        for tier, path in self.others:
            assert path in self.disks[tier].files, f"{path} went from {tier}"


class Only:
    """A storage that has one manifest."""

    def __init__(self, data):
        self._data = data

    def read(self, name):
        return self._data
