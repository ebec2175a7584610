"""Numbers of attempts, claimed on the job's own storage: the one arbiter that needs no majority.

A claim is a small file ``attempt-000000000012.json`` that is created if it does not exist, which a
directory and a bucket can both decide for everybody at once. Whoever has made it coordinates the
attempt of that number, or runs it alone (:mod:`outlast.peer.term`); keepers look there before
each commit (:mod:`outlast.keeper.conclude`). A majority may begin without one, and makes up for it.
Nobody's clock is compared with anybody else's: whether a coordinator lives is seen from a counter
that goes on or does not.

What can go wrong: storage answers with errors or not at all. Both are an OSError or silence here;
:class:`Clerk` does the asking in a thread of its own, so that nobody waits for it.

``claimed`` and ``claimed_numbers`` only read what is there.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import re
import threading
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from outlast.storage import Storage
from outlast.storage.trust import distrust, doubt_of_mount

if TYPE_CHECKING:
    from outlast.storage import Storage

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


logger = logging.getLogger(__name__)

KEPT: Final = 8
FORMED_VARIABLE: Final = "OUTLAST_FORMED"  # an attempt of several machines, for their workers
_ALIVE: Final = f"{FOLDER}/alive.json"
_LOOKED: Final = f"{FOLDER}/probed.json"


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Who coordinates an attempt.

    Attributes:
        attempt: its number.
        node: the agent's own name.
        term: one time of its being coordinator, a name that nobody else has.
        host: its machine's name.
        address: where its hub listens, host:port; "" for one that runs the job alone.
        members: of the attempt, the coordinator first; empty while they gather.
        process: the one that runs the job alone (see ``term``); "" for several machines.
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
