"""Where a snapshot that is whole waits until it may be committed.

One thread asks the fence, again and again while the answer is to wait: storage that hangs holds up
that thread, and nobody else. Whoever asked decides how long it is worth waiting for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from typing import Final

from outlast.keeper.fence import Fence, Judgement, Verdict

logger = logging.getLogger(__name__)

AGAIN_S: Final = 0.5


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

    def told(self, attempt: int, reign: str) -> None:
        """This machine takes part in ``attempt``, which ``reign`` has formed."""
        self._fence.told(attempt, reign)
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
            judgement = Judgement(Verdict.WAIT, words)
        with self._changed:
            if self._asked.get(key) is not question:
                return  # given up meanwhile
            if judgement.verdict is Verdict.WAIT:
                question.words = judgement.words
                return
            del self._asked[key]
        try:
            question.then(judgement.words)
        except Exception:
            logger.exception("a save that was judged")  # the others are still to be judged


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
