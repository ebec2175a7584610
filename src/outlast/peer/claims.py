"""Claim the numbers of attempts on the job's own storage: the one arbiter that needs no majority.

**A claim** is a small file ``attempt-000000000012.json`` that is created if it does not exist,
which a directory and a bucket can both decide for everybody at once. The process that has made it
coordinates the attempt of that number, or runs it alone; keepers look there before each commit
(:mod:`outlast.keeper.conclude`), and refuse what a predecessor still wants to commit that was
paused for an hour. A majority may begin without one, and makes up for it. No clock is compared with
another: whether a coordinator lives is seen from a counter that goes on or does not. What
can go wrong: storage answers with errors or not at all. Both are an OSError or silence here;
:class:`Clerk` does the asking in a thread of its own, so that nobody waits for it. ``claimed`` and
``claimed_numbers`` only read what is there.

**A term** (:class:`Term`) is one launcher's time at a job that runs on one machine. ``outlast run``
on one machine, and a session that no agent has started, take their attempts' numbers here before
they write anything into the job's directory. So two of them never have the same number, whatever
the file system's locks are worth. A predecessor is passed over when it has said that it is over;
when its process is known here, and has ended; when the job's lock, which it held, is ours on a file
system of this kernel's; and otherwise when its sign of life has stood still as long as one machine
of several waits for another (:mod:`outlast.policy.succession`). One that lives is waited for, and
then ours is refused: a new start never ends an old one that is alive. A launcher that finds itself
passed over (``overtaken``) ends.

Storage is asked in a thread of its own, for as long as the term lasts. Where it does not answer,
the launcher begins without a claim after a second, as a majority of machines does; what it saves is
held by its keeper until the claim is there. Later attempts of one term wait for nothing. What can
go wrong: a predecessor that has claimed and died before it wrote anything, while storage fails at
the start of the next one: the number that was begun with is taken, and this term ends.

A word on shared storage says which process is meant; where this kernel knows it, it also knows
whether it still runs. The word names the kernel's boot, the namespace that the number counts in,
the number, and when the process began: a number that was given to another process since is not
taken for it. A process on another machine, or in another container, is not known here.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from outlast.errors import ConfigError, StorageError, remedy
from outlast.policy.succession import AGAIN_S, STRANGER_S, CounterWatch
from outlast.storage import Directory, Storage
from outlast.storage.trust import distrust, doubt_of_mount, is_local

logger = logging.getLogger(__name__)

FOLDER: Final = "membership"
_NAME: Final = re.compile(r"attempt-(\d{12})\.json")


class Claimed(msgspec.Struct, frozen=True):
    """As much of a claim as says whose it is; ``term`` is "" where nobody can tell."""

    term: str = msgspec.field(default="", name="reign")
    members: tuple[str, ...] = ()

    @property
    def is_for_one(self) -> bool:
        """Whether it is of an agent that runs the job by itself: it names nobody else."""
        return bool(self.term) and self.members == (self.term,)


def claimed_numbers(storage: Storage) -> list[int]:
    """The numbers that are claimed and not forgotten yet, the newest last.

    Raises:
        OSError: storage cannot be asked.
    """
    found = (_NAME.fullmatch(name) for name in storage.children(FOLDER))
    return sorted(int(match[1]) for match in found if match)


def claimed(storage: Storage, number: int) -> Claimed:
    """Who has claimed ``number``, as far as it can be told.

    Raises:
        OSError: storage cannot be asked.
    """
    with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(storage.read(name_of(number)), type=Claimed)
    return Claimed()


def name_of(number: int) -> str:
    """The file that claims ``number``."""
    return f"{FOLDER}/attempt-{number:012d}.json"


KEPT: Final = 8
FORMED_VARIABLE: Final = "OUTLAST_FORMED"  # an attempt of several machines, for their workers
_ALIVE: Final = f"{FOLDER}/alive.json"
_LOOKED: Final = f"{FOLDER}/probed.json"


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Who has claimed an attempt's number: its coordinator.

    Attributes:
        attempt: its number.
        node: the agent's own name.
        term: one time of its being coordinator, a name that nobody else has.
        host: its machine's name.
        address: where its hub listens, host:port; "" for one that runs the job alone.
        members: of the attempt, the coordinator first; empty while they gather.
        process: the one that runs the job alone (see ``Term``); "" for several machines.
    """

    attempt: int
    node: str
    host: str
    address: str
    term: str = msgspec.field(default="", name="reign")
    members: tuple[str, ...] = ()
    process: str = ""


class SignOfLife(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator's sign of life: ``count`` goes on while it lives; ``over``: the job is."""

    attempt: int
    node: str
    count: int
    over: bool = False
    exit_code: int = 0
    reason: str = ""


class _Looked(msgspec.Struct, frozen=True):
    """That a storage was probed, and what was found: once for each place that a job has had."""

    place: str
    words: str = ""


def new_term() -> str:
    """A word that no other coordinator's claims have."""
    return uuid.uuid4().hex[:12]


class Claims:
    """The claims on one storage; each call may take as long as the storage does.

    Args:
        storage: where they are.
        on_doubt: told, before the first claim, why claims there cannot be trusted, if they cannot;
            without it nothing is probed.
    """

    def __init__(self, storage: Storage, on_doubt: Callable[[str], None] | None = None) -> None:
        self._storage = storage
        self._on_doubt = on_doubt

    def newest(self) -> Claim | None:
        """The claim of the largest number; nobody's (``node`` is "") where it cannot be read.

        Raises:
            OSError: storage cannot be asked.
        """
        for number in reversed(self._numbers()):
            try:
                data = self._storage.read(name_of(number))
                return msgspec.json.decode(data, type=Claim)
            except FileNotFoundError:  # an old one, just removed
                continue
            except (msgspec.MsgspecError, UnicodeDecodeError):
                return Claim(attempt=number, node="", host="", address="")
        return None

    def newest_number(self) -> int:
        """The largest number that is claimed; 0 for none."""
        return max(self._numbers(), default=0)

    def take(self, claim: Claim, known: int) -> bool:
        """Whether ``claim`` is now there, and ours.

        Two that claim at once may want different numbers (each has tried some in vain): they meet
        at the number after the newest, which is claimed as well and first.

        Args:
            claim: the claim; the second try of one whose answer was lost finds it there.
            known: the largest number that is rightly claimed, as far as the claimant knows:
                somebody else's that is larger comes before it.

        Raises:
            OSError: storage cannot be asked; the claim may be there or not.
        """
        self._look_once()
        numbers = self._numbers()
        newest = numbers[-1] if numbers else 0
        if newest > claim.attempt or (newest > known and not self._is_there(claim, newest)):
            return False
        wanted = sorted({min(newest + 1, claim.attempt), claim.attempt})
        return all(self._put(msgspec.structs.replace(claim, attempt=one)) for one in wanted)

    def _look_once(self) -> None:
        """Say what speaks against this storage; one that does not answer is none that lies."""
        told, self._on_doubt = self._on_doubt, None
        if told is None:
            return
        with contextlib.suppress(OSError):
            if words := self._doubt():
                told(f"claims of attempts in {self._storage.describe()} cannot be trusted: {words}")

    def _doubt(self) -> str:
        place = self._storage.describe()
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
            looked = msgspec.json.decode(self._storage.read(_LOOKED), type=_Looked)
            if looked.place == place:
                return looked.words
        found = distrust(self._storage, FOLDER)
        looked = _Looked(place, "" if found is None else str(found))
        self._storage.put(_LOOKED, msgspec.json.encode(looked))
        on_mount = doubt_of_mount(self._storage)
        return looked.words or ("" if on_mount is None else str(on_mount))

    def _put(self, claim: Claim) -> bool:
        name = name_of(claim.attempt)
        is_new = self._storage.put_new(name, msgspec.json.encode(claim))
        return is_new or self._is_there(claim, claim.attempt)

    def _is_there(self, claim: Claim, number: int) -> bool:
        """Whether ``number`` is claimed by the term of ``claim``."""
        return bool(claim.term) and claimed(self._storage, number).term == claim.term

    def forget_old(self) -> None:
        """Remove all but the newest claims."""
        for number in self._numbers()[:-KEPT]:
            self._storage.remove(name_of(number))

    def say_alive(self, alive: SignOfLife) -> None:
        """Leave a sign of life."""
        self._storage.put(_ALIVE, msgspec.json.encode(alive))

    def alive(self) -> SignOfLife | None:
        """The last sign of life."""
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
            return msgspec.json.decode(self._storage.read(_ALIVE), type=SignOfLife)
        return None

    def _numbers(self) -> list[int]:
        return claimed_numbers(self._storage)


class Clerk:
    """Asks storage in a thread of its own, one thing after the other."""

    def __init__(self, answer: Callable[[Callable[[], None]], None]) -> None:
        """``answer`` runs a function in the thread that asked."""
        self._answer = answer
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waiting = 0
        self._thread = threading.Thread(target=self._run, name="outlast-claims", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether an answer is due."""
        return self._waiting > 0

    def ask(self, what: Callable[[], Any], then: Callable[[Any, OSError | None], None]) -> None:
        """Do ``what``, and tell ``then`` its result or why there is none."""
        self._waiting += 1
        self._orders.put((what, then))

    def close(self, timeout_s: float) -> None:
        """Finish what was asked, as far as that takes no longer than this."""
        self._orders.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            what, then = order
            result, problem = None, None
            try:
                result = what()
            except OSError as error:
                problem = error
            except Exception as error:  # a failure of ours is a failure of storage to others
                logger.exception("membership storage")
                problem = OSError(str(error))
            self._answer(functools.partial(self._done, then, result, problem))

    def _done(self, then: Callable[[Any, OSError | None], None], result: Any, problem: Any) -> None:
        self._waiting -= 1
        then(result, problem)


_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE: Final = Path("/proc/self/ns/pid")
_ENDED: Final = ("Z", "X", "x")  # states of one that nobody has heard of yet


def this_process() -> str:
    """The word for this process; "" where the kernel does not say."""
    try:
        return f"{_here()}/{os.getpid()}/{_began(os.getpid())}"
    except (OSError, ValueError, IndexError):
        return ""


def is_alive(word: str) -> bool | None:
    """Whether the process that ``word`` means runs, be it stopped; None where nobody here knows."""
    here, _, rest = word.rpartition("/")[0].rpartition("/")
    try:
        if not word or here != _here():
            return None
        pid = int(rest)
    except (OSError, ValueError):
        return None
    try:
        return _began(pid) == word.rpartition("/")[2]
    except (OSError, ValueError, IndexError):
        return False


def pid_of(word: str) -> int:
    """The number in ``word``; 0 for none."""
    number = word.rpartition("/")[0].rpartition("/")[2]
    return int(number) if number.isdecimal() else 0


def _here() -> str:
    return f"{_BOOT.read_text().strip()}/{_NAMESPACE.stat().st_ino}"


def _began(pid: int) -> str:
    """When a process began, in the kernel's ticks; "" for one that has ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return "" if fields[0] in _ENDED else fields[19]


ALIVE_S: Final = 2.0  # between two signs of life, and two looks for a newer claim
CLAIM_S: Final = 1.0  # that storage is waited for at the start
WAIT_S: Final = 600.0  # for a predecessor that is alive elsewhere to end
CLOSE_S: Final = 2.0
_LOOK_S: Final = 0.05


def term_over(directory: Path, say: Callable[[str], None], *, is_locked: bool) -> Term:
    """The term of this process over the job in ``directory``; ``open`` begins it.

    Args:
        directory: the job's.
        say: tells people.
        is_locked: whether this process holds the job's lock.
    """
    alone = is_locked and is_local(str(directory))
    return Term(Directory(directory), str(directory), alone=alone, say=say)


class Term:
    """One launcher's time at a job on one machine; it takes its attempts' numbers.

    Args:
        storage: the job's.
        place: the job's directory, for people.
        alone: whether the job's lock is held on a file system that this kernel alone sees.
        say: tells people what is waited for, and what speaks against the storage.

    Attributes:
        name: what its claims carry; nobody else has it.
        attempt: the newest number that it has asked for.
        overtaken: why it must end, in words; "" while it need not.
        on_claimed: told of each attempt that has begun and is claimed, in the term's thread: a
            keeper that heard of it before would hold what the attempt before has left.
    """

    def __init__(
        self,
        storage: Storage,
        place: str,
        *,
        alone: bool,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.name = new_term()
        self.attempt = 0
        self.overtaken = ""
        self.on_claimed: Callable[[int], object] = lambda _: None
        self._claims = Claims(storage, on_doubt=say)
        self._place = place
        self._alone = alone
        self._say = say
        self._host = socket.gethostname()
        self._held = 0  # the newest number that is claimed
        self._told = 0  # the newest that was told of
        self._is_begun = False  # whether an attempt runs
        self._refused: ConfigError | StorageError | None = None
        self._has_failed = False  # the last try to claim
        self._has_doubted = False  # whether it was said that the first claim fails
        self._asked_s: float | None = None  # since when storage alone is waited for
        self._count = 0
        self._end = (0, "")
        self._changed = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="outlast-term", daemon=True)

    def open(self, known: int) -> int:
        """Claim the first attempt; waits for a predecessor, and a second for storage.

        Args:
            known: the largest number of an attempt that the ledger knows.

        Returns:
            Its number.

        Raises:
            ConfigError: the job runs on this machine already.
            StorageError: it runs elsewhere, and has not ended in time.
        """
        self.attempt = known + 1
        self._asked_s = time.monotonic()
        self._thread.start()
        with self._changed:
            while not (self._held or self._refused or self._is_late()):
                self._changed.wait(_LOOK_S)
            if self._refused is not None:
                raise self._refused
            self.attempt = max(self.attempt, self._held)
            return self.attempt

    def begin(self) -> int:
        """An attempt begins: its number, which is claimed meanwhile if it is not the first."""
        with self._changed:
            if self._is_begun:
                self.attempt += 1
            self._is_begun = True
            self._changed.notify_all()
            return self.attempt

    def close(self, exit_code: int, reason: str = "") -> None:
        """It is over: the next one need not wait. Storage has two seconds to take the word."""
        with self._changed:
            if self._is_over:
                return
            self._is_over, self._end = True, (exit_code, reason)
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)

    def _is_late(self) -> bool:
        """Whether storage has not answered for so long that it is not waited for."""
        since_s = self._asked_s
        return since_s is not None and time.monotonic() - since_s > CLAIM_S

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._seek()
            while self._held and not self.overtaken:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_over or self._is_due, ALIVE_S)
                if self._is_over:
                    self._say_over()
                    return
                self._live()
        except Exception:
            logger.exception("the job's claims are not looked after any more")

    @property
    def _is_due(self) -> bool:
        """Whether an attempt has begun that is neither claimed nor tried to be, or not told of."""
        is_missing = self.attempt > self._held and not self._has_failed
        return is_missing or (self._is_begun and self._told < self._held)

    def _seek(self) -> None:
        """Look who runs the job until it is ours, or ours is refused."""
        before = _Before(self._place)
        while not self._is_over and self._refused is None:
            asked_s = time.monotonic()
            try:
                claim, alive = self._claims.newest(), self._claims.alive()
                is_over = claim is None or self._is_over_for(claim, alive)
                if is_over or before.is_silent:
                    if self._take(claim):
                        return
                    before = _Before(self._place)  # somebody else was quicker
                    continue
            except OSError as error:
                if not self._has_doubted:  # not at each try: it may be hours until there is room
                    words = f"{error.strerror or error}; {remedy(error)}"
                    logger.warning("the attempts of %s cannot be claimed: %s", self._place, words)
                self._has_doubted = True
                before.sign.failed()
            else:
                assert claim is not None  # noqa: S101 - there is somebody to wait for
                before.seen(claim, alive, asked_s)
                self._asked_s = None
                self._wait_for(before)
            with self._changed:
                self._changed.wait_for(lambda: self._is_over, AGAIN_S)

    def _is_over_for(self, claim: Claim, alive: SignOfLife | None) -> bool:
        """Whether the one before is known to be over, without a look at how long it is silent."""
        if claim.term == self.name or (claim.process and claim.process == this_process()):
            return True  # the answer to our claim was lost; or it is this process's last session
        if alive is not None and alive.over and alive.attempt >= claim.attempt:
            return True
        lives = is_alive(claim.process)
        return self._alone if lives is None else not lives

    def _wait_for(self, before: _Before) -> None:
        """Say what is waited for, or that this start is one too many."""
        claim = before.claim
        if is_alive(claim.process):
            self._refuse(
                ConfigError(
                    f"the job in {self._place} is running already (process "
                    f"{pid_of(claim.process)}); wait for it, or give another --dir"
                )
            )
        elif before.waited_s > WAIT_S:
            words = f"another attempt of this job is in the way: {before.words}"
            self._refuse(StorageError(f"{words}; end it, or give another --dir"))
        elif before.has_news:
            limit = f"for at most {WAIT_S / 60:.0f} min"
            self._say(f"waiting {limit} for the attempt before this one: {before.words}")

    def _refuse(self, error: ConfigError | StorageError) -> None:
        with self._changed:
            if self._is_begun:  # without a claim, while storage was away
                self.overtaken = str(error)
            self._refused = error
            self._changed.notify_all()

    def _take(self, before: Claim | None) -> bool:
        known = before.attempt if before is not None else 0
        number = max(known + 1, self.attempt)
        if not self._claims.take(self._claim(number), known):
            return False
        if not self._alone:
            self._sign_of_life(number)
        with self._changed:
            if self._is_begun and number != self.attempt:
                self.overtaken = (
                    f"attempt {self.attempt} had been claimed before while storage did not "
                    "answer; start me again"
                )
            self._held = number
            self._changed.notify_all()
        if self._has_doubted:
            logger.warning("attempt %d of %s is claimed now", number, self._place)
        return True

    def _claim(self, number: int) -> Claim:
        return Claim(
            attempt=number,
            node=self.name,
            host=self._host,
            address="",
            term=self.name,
            members=(self.name,),
            process=this_process(),
        )

    def _live(self) -> None:
        """Claim the attempt that has begun, look for whoever came after, leave a sign of life."""
        number = self.attempt
        try:
            if number > self._held and self._claims.take(self._claim(number), self._held):
                self._held = number
            if self._is_begun and self._told < self._held:
                self._told = self._held
                self.on_claimed(self._told)
                self._claims.forget_old()
            newest = self._claims.newest()
            if newest is not None and newest.attempt > self._held:
                where = f"on {newest.host}" if newest.host else "elsewhere"
                self.overtaken = (
                    f"attempt {newest.attempt} of this job was begun {where} meanwhile: this one, "
                    f"attempt {self._held}, ends, and commits nothing any more"
                )
            elif not self._alone:
                self._sign_of_life(self._held)
        except OSError as error:
            if not self._has_failed:
                logger.warning("the claims in %s are not answered for: %s", self._place, error)
            self._has_failed = True
        else:
            self._has_failed = False

    def _sign_of_life(self, number: int) -> None:
        self._count += 1
        self._claims.say_alive(SignOfLife(attempt=number, node=self.name, count=self._count))

    def _say_over(self) -> None:
        exit_code, reason = self._end
        with contextlib.suppress(OSError):
            if self._claims.newest_number() <= self._held:
                over = SignOfLife(
                    attempt=self._held,
                    node=self.name,
                    count=self._count + 1,
                    over=True,
                    exit_code=exit_code,
                    reason=reason,
                )
                self._claims.say_alive(over)


class Onlooker:
    """Tells whether a job still has somebody who runs it, without any part in it.

    As a new launcher does: by the process that has claimed the newest attempt, where this kernel
    knows it; elsewhere by the sign of life, which goes on or has stood still for ``STRANGER_S``.
    Nothing is locked or written.

    Args:
        storage: the job's; it need not be writable.
    """

    def __init__(self, storage: Storage) -> None:
        self._claims = Claims(storage)
        self._sign = CounterWatch()
        self._seen: object = None
        self._moves = False

    def lives(self) -> bool | None:
        """Whether somebody runs it; None where nobody here knows (yet).

        Raises:
            OSError: storage cannot be asked.
        """
        asked_s = time.monotonic()
        claim, alive = self._claims.newest(), self._claims.alive()
        if claim is None:
            return None
        if alive is not None and alive.over and alive.attempt >= claim.attempt:
            return False
        lives = is_alive(claim.process)
        if lives is not None or alive is None:
            return lives
        now = (claim, alive)
        self._moves |= self._seen is not None and now != self._seen
        self._seen = now
        self._sign.seen(now, asked_s=asked_s, answered_s=time.monotonic())
        if self._sign.stands_still(STRANGER_S):
            return False
        return True if self._moves else None


class _Before:
    """The one before, as far as storage shows it."""

    def __init__(self, place: str) -> None:
        self.sign = CounterWatch()
        self.claim = Claim(attempt=0, node="", host="", address="")
        self._place = place
        self._alive: SignOfLife | None = None
        self._begun_s = time.monotonic()
        self._moved_s = 0.0  # when its counter was seen to go on; 0 before
        self._said: object = None

    def seen(self, claim: Claim, alive: SignOfLife | None, asked_s: float) -> None:
        """Storage was asked then, and has answered now."""
        now_s = time.monotonic()
        self.sign.seen((claim, alive), asked_s=asked_s, answered_s=now_s)
        if claim == self.claim and alive != self._alive:
            self._moved_s = now_s
        self.claim, self._alive = claim, alive

    @property
    def is_silent(self) -> bool:
        """Whether it gives no sign of life any more."""
        return self.sign.stands_still(STRANGER_S)

    @property
    def waited_s(self) -> float:
        """How long it was waited for."""
        return time.monotonic() - self._begun_s

    @property
    def has_news(self) -> bool:
        """Whether there is something to say that was not said yet; once for each answer."""
        now = (self.claim.term, bool(self._moved_s))
        is_news, self._said = now != self._said, now
        return is_news

    @property
    def words(self) -> str:
        """What is known of it."""
        where = f"on {self.claim.host}" if self.claim.host else f"as number {self.claim.attempt}"
        if not self._moved_s:
            return (
                f"it was begun {where}, and has not said that it ended; without a sign of life "
                f"for {STRANGER_S:.0f} s it is taken for gone"
            )
        ago_s = time.monotonic() - self._moved_s
        return f"it is running {where} in {self._place} (last sign of life {ago_s:.0f} s ago)"
