"""Only the attempt that the job's storage names as its newest commits; a snapshot waits for that.

A machine that is cut off may still hold a whole snapshot, and storage may be all that it reaches.
By then the others have claimed a new attempt's number there; or, after storage had stalled, two
halves of the job go on under the same number, and the claim is that of one of them. So each
attempt comes with the term that formed it (one agent's time as coordinator, a name that nobody
else has), and a snapshot is committed only when the newest number is claimed by the term of the
newest attempt that this machine takes part in. A number's claim is never written anew: of two
terms one at most passes for it.

A keeper that takes part in the new attempt still brings to an end what the one before has left; its
workers wait for that. Claims that cannot be read, or are not there yet, let nobody pass and refuse
nobody: the gate asks the fence again and again while the answer is to wait, in one thread. Storage
that hangs holds up that thread alone. The caller decides how long an answer is worth waiting for.

Rejected: to let a snapshot pass while storage does not answer (where tiers lie elsewhere than the
claims, two halves commit); to refuse it (a second's stall costs a checkpoint).
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Hashable
from typing import Final, NamedTuple

from outlast.peer.claims import claimed, claimed_numbers
from outlast.storage import Storage

logger = logging.getLogger(__name__)

TOLD_S: Final = 3.0  # between a claim and word of the attempt to all its keepers
TERMS_MAX: Final = 64  # that are remembered
AGAIN_S: Final = 0.5


class FenceVerdict(enum.Enum):
    """What becomes of a snapshot now."""

    COMMIT = "commit"
    WAIT = "wait"
    REFUSE = "refuse"


class Judgement(NamedTuple):
    """A verdict, and why it is not to commit."""

    verdict: FenceVerdict
    words: str = ""


PASSES: Final = Judgement(FenceVerdict.COMMIT)


class Fence:
    """Judges commits.

    Args:
        storage: where attempts are claimed.
        told_s: how long word of a newer attempt may take to come here, in seconds.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        storage: Storage,
        told_s: float = TOLD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage = storage
        self._told_s = told_s
        self._clock = clock
        self._lock = threading.Lock()
        self._terms: dict[int, str] = {}  # of the attempts that this machine took part in
        self._ours: set[int] = set()  # numbers that were seen to be claimed by them
        self._newer: tuple[int, float] = (0, 0.0)  # a number we are not part of, and since when

    @property
    def place(self) -> str:
        """Where the claims are, for people."""
        return self._storage.describe()

    def told(self, attempt: int, term: str) -> None:
        """This machine takes part in ``attempt``, which ``term`` has formed."""
        with self._lock:
            self._terms[attempt] = term
            for old in sorted(self._terms)[:-TERMS_MAX]:
                del self._terms[old]

    def judge(self, attempt: int) -> Judgement:
        """Whether a snapshot of ``attempt`` may be committed; takes as long as storage does.

        Raises:
            OSError: storage cannot be asked.
        """
        newest = max(claimed_numbers(self._storage), default=0)
        with self._lock:
            told = max(self._terms, default=0)
        if newest > told and self._is_of_our_agent(newest):
            told = newest
        if newest > max(attempt, told):
            return self._behind(attempt, newest)
        if attempt > told:
            return Judgement(
                FenceVerdict.WAIT, f"nobody has told this keeper who formed attempt {attempt}"
            )
        if newest < told:
            return Judgement(FenceVerdict.WAIT, f"attempt {told} is not claimed yet")
        for number in sorted({attempt, told}, reverse=True):
            if not self._is_ours(number, told):
                return Judgement(
                    FenceVerdict.REFUSE,
                    f"attempt {number} was claimed by other machines; what this one held of "
                    f"attempt {attempt} is not committed",
                )
        return PASSES

    def _is_of_our_agent(self, number: int) -> bool:
        """Whether the agent that runs the job on this machine alone has claimed ``number``.

        It may be gone before it could say so, and nobody else takes part in its attempts.
        """
        claim = claimed(self._storage, number)
        with self._lock:
            is_ours = claim.is_for_one and claim.term in self._terms.values()
        if is_ours:
            self.told(number, claim.term)
        return is_ours

    def _behind(self, attempt: int, newest: int) -> Judgement:
        """The job has gone on; word of that may be on its way to us."""
        now_s = self._clock()
        with self._lock:
            if self._newer[0] != newest:
                self._newer = (newest, now_s)
            since_s = self._newer[1]
        if now_s - since_s < self._told_s:
            return Judgement(FenceVerdict.WAIT, f"attempt {newest} is claimed, perhaps with us")
        return Judgement(
            FenceVerdict.REFUSE,
            f"attempt {newest} has begun without this machine; what it held of attempt {attempt} "
            "is not committed",
        )

    def _is_ours(self, number: int, told: int) -> bool:
        """Whether the term that formed our attempt ``number`` has claimed it.

        Attempts of one term follow each other, so the last one's claim stands for all of them.
        """
        with self._lock:
            term, last = self._terms.get(number, ""), self._terms[told]
            if number in self._ours or (number < told and term == last and told in self._ours):
                return True
        if not term or claimed(self._storage, number).term != term:
            return False
        with self._lock:
            self._ours.add(number)
            self._ours.intersection_update(self._terms)
        return True


class _Question:
    """About one snapshot."""

    def __init__(self, attempt: int, then: Callable[[str], None], words: str) -> None:
        self.attempt = attempt
        self.then = then
        self.words = words


class Gate:
    """Asks ``fence`` in a thread of its own.

    Args:
        fence: judges.
        again_s: between two questions about what waits, in seconds.
    """

    def __init__(self, fence: Fence, again_s: float = AGAIN_S) -> None:
        self._fence = fence
        self._again_s = again_s
        self._asked: dict[Hashable, _Question] = {}
        self._changed = threading.Condition()
        self._has_news = False
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="outlast-gate", daemon=True)
        self._thread.start()

    @property
    def place(self) -> str:
        """Where the claims are, for people."""
        return self._fence.place

    def told(self, attempt: int, term: str) -> None:
        """This machine takes part in ``attempt``, which ``term`` has formed."""
        self._fence.told(attempt, term)
        self._wake()

    def ask(self, key: Hashable, attempt: int, then: Callable[[str], None]) -> None:
        """Whether a snapshot of ``attempt`` may be committed.

        Args:
            key: what the question is known by.
            attempt: the snapshot's.
            then: told once, in the gate's thread: "" or why it must not. It must not wait.
        """
        words = f"the attempts' claims in {self.place} are not answered for"
        with self._changed:
            self._asked[key] = _Question(attempt, then, words)
        self._wake()

    def forget(self, key: Hashable) -> str:
        """Nobody waits for the answer any more; returns why there was none."""
        with self._changed:
            question = self._asked.pop(key, None)
        return question.words if question is not None else ""

    def why(self, key: Hashable) -> str:
        """Why there is no answer yet, in words."""
        with self._changed:
            question = self._asked.get(key)
        return question.words if question is not None else ""

    def stop(self) -> None:
        """End the thread, unless storage holds it."""
        with self._changed:
            self._is_over = True
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            self._has_news = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                wait_s = self._again_s if self._asked else None
                self._changed.wait_for(lambda: self._has_news, wait_s)
                self._has_news = False
                if self._is_over:
                    return
                asked = list(self._asked.items())
            for key, question in asked:
                self._look(key, question)

    def _look(self, key: Hashable, question: _Question) -> None:
        try:
            judgement = self._fence.judge(question.attempt)
        except Exception as error:
            if not isinstance(error, OSError):
                logger.exception("the claims of attempts")
            words = f"the attempts' claims in {self.place} cannot be read: {_why(error)}"
            judgement = Judgement(FenceVerdict.WAIT, words)
        with self._changed:
            if self._asked.get(key) is not question:
                return  # given up meanwhile
            if judgement.verdict is FenceVerdict.WAIT:
                question.words = judgement.words
                return
            del self._asked[key]
        try:
            question.then(judgement.words)
        except Exception:
            logger.exception("a save that was judged")  # the others are still to be judged


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
