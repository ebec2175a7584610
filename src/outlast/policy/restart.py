"""Whether a failed attempt is worth another.

The rules, in order; the first that holds decides:

=============================================  =======  ==================================
what the workers left behind                   action   exit code of ``outlast run``
=============================================  =======  ==================================
a worker left with 2 (usage, configuration)    stop     2
a worker left with 77 (storage unusable)       stop     77
a worker left with 78 (refuses to resume)      stop     78
a worker left with 75 (drained and committed)  stop     75
a worker left with 76 (the loss went wrong)    stop     76
a notice was heard and a worker failed         stop     75
a worker left with 79 (rolled back)            restart  (it is not counted)
the same traceback at the same step, twice     stop     76 (a bug in the script)
k attempts in a row without progress           stop     76
the budget of restarts is spent                stop     76
anything else                                  restart
=============================================  =======  ==================================

Progress is a new step; of a script that does not tell its steps, an attempt of over a minute.

Without a rule for bugs a typo would burn every restart; without one for progress a job that dies
during start-up would do so for ever.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from outlast.errors import Exit

ROLLED_BACK: Final = "rolled back"
WITHOUT_PROGRESS_MAX: Final = 5
SHORT_ATTEMPT_S: Final = 60.0
ON_PURPOSE: Final = (Exit.USAGE, Exit.STORAGE, Exit.REFUSED)
# All workers leave so at the same step: none of them is lost.
TOGETHER: Final = (Exit.DRAINED, Exit.ROLLED_BACK, Exit.GAVE_UP)
_ECHOES: Final = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "remote process exited",
    "communicator was aborted",
)
_ADDRESS: Final = re.compile(r"0x[0-9a-f]+|\bpid \d+")


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker left behind.

    Attributes:
        rank: its rank.
        exit_code: its exit code; negative is the signal that ended it.
        traceback: the exception as text, or "" when there was none.
        message: the exception's last line, or what is known instead.
        step: the last step it completed, or None.
    """

    rank: int
    exit_code: int
    traceback: str = ""
    message: str = ""
    step: int | None = None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What to do: restart, or stop with an exit code; and why, in words."""

    restart: bool
    exit_code: int
    reason: str


class RestartPolicy:
    """Judges one failed attempt after the other.

    Args:
        max_restarts: how many restarts the job has in all.
        without_progress_max: how many attempts in a row may end without progress.
    """

    def __init__(self, max_restarts: int, without_progress_max: int = WITHOUT_PROGRESS_MAX) -> None:
        self.max_restarts = max_restarts
        self.restarts = 0
        self._without_progress_max = without_progress_max
        self._without_progress = 0
        self._furthest = -1
        self._last_bug: tuple[str, int | None] | None = None

    def judge(self, failures: list[Failure], *, lasted_s: float, leaving: bool = False) -> Verdict:
        """Decide what follows an attempt in which ``failures`` happened.

        Args:
            failures: of this machine's workers, the first to fail first.
            lasted_s: how long the attempt lasted.
            leaving: a notice was heard, so that this machine is not worth another attempt.
        """
        codes = {failure.exit_code for failure in failures}
        for code in ON_PURPOSE:
            if code in codes:
                return _stop(code, _message(failures, code))
        if Exit.DRAINED in codes:
            return _stop(Exit.DRAINED, "drained; start me again")
        if Exit.GAVE_UP in codes:
            return _stop(Exit.GAVE_UP, "the loss went wrong; the line above says how")
        if leaving:
            return _stop(
                Exit.DRAINED,
                "the workers ended before they drained; the newest commit, if any, stands",
            )
        if Exit.ROLLED_BACK in codes:  # how many of these there may be is decided where they are
            return Verdict(restart=True, exit_code=int(Exit.FINISHED), reason=ROLLED_BACK)
        return self._judge_crash(failures, lasted_s)

    def _judge_crash(self, failures: list[Failure], lasted_s: float) -> Verdict:
        furthest = max((f.step for f in failures if f.step is not None), default=None)
        unknown = furthest is None and lasted_s >= SHORT_ATTEMPT_S
        # Of a long attempt that told no step, an equal traceback proves nothing.
        bug = None if unknown else _bug(failures)
        repeated = bug is not None and bug == self._last_bug
        self._last_bug = bug
        if repeated:
            return _stop(
                Exit.GAVE_UP, "the same failure at the same step twice: a bug in the script"
            )
        progress = unknown or (furthest is not None and furthest > self._furthest)
        self._without_progress = 0 if progress else self._without_progress + 1
        self._furthest = max(furthest or 0, self._furthest)
        if self._without_progress >= self._without_progress_max:
            return _stop(
                Exit.GAVE_UP, f"{self._without_progress} attempts in a row without progress"
            )
        if self.restarts >= self.max_restarts:
            return _stop(Exit.GAVE_UP, f"all {self.max_restarts} restarts are spent")
        self.restarts += 1
        return Verdict(restart=True, exit_code=Exit.FINISHED, reason=_reason(failures))


def _bug(failures: list[Failure]) -> tuple[str, int | None] | None:
    """The first traceback that is not an echo of another worker's death, and its step."""
    for failure in failures:
        if failure.traceback and not is_echo(failure):
            return _ADDRESS.sub("…", failure.traceback), failure.step
    return None


def is_echo(failure: Failure) -> bool:
    """Whether it is what torch raises in a survivor when its peer's process goes."""
    return reads_as_echo(failure.message)


def reads_as_echo(message: str) -> bool:
    """Whether these words are such an error's."""
    text = message.lower()
    return any(sign in text for sign in _ECHOES)


def _reason(failures: list[Failure]) -> str:
    cause = next((f for f in failures if not is_echo(f)), None)
    if cause is None:
        return "a peer was lost"
    how = f"signal {-cause.exit_code}" if cause.exit_code < 0 else f"exit code {cause.exit_code}"
    return f"rank {cause.rank} failed ({cause.message or how})"


def _message(failures: list[Failure], code: int) -> str:
    return next((f.message for f in failures if f.exit_code == code and f.message), "")


def _stop(code: int, reason: str) -> Verdict:
    return Verdict(restart=False, exit_code=int(code), reason=reason)
