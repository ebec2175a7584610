"""The agent's end of its watcher: started, listened to, replaced when it dies or hangs.

What is heard is passed on in a thread of its own, message by message; the agent's loop is never
held up. A watcher that is gone, or says nothing for ``SILENT_S``, is ended and another one takes
its place with what its predecessor had learned; the ledger has the gap.

What can go wrong: watchers cannot live here (no memory left, say): after ``YOUNG_MAX`` in a row
that die young nobody watches any more, one line says so, and training goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from outlast.health.watched import (
    Alive,
    Begin,
    End,
    FromAgent,
    FromWatcher,
    Gap,
    Learned,
    RankSteps,
    State,
    Voice,
    WatchedWorker,
    pair,
)
from outlast.ipc import readable
from outlast.ledger.file import Ledger
from outlast.ledger.narrator import say
from outlast.policy.hang import HangSettings

logger = logging.getLogger(__name__)

SILENT_S: Final = 5.0  # five times as long as a watcher is ever silent
FIRST_S: Final = 30.0  # the same of one that is being started
YOUNG_MAX: Final = 20  # watchers in a row that die young
PAUSE_S: Final = 0.2  # before a watcher is started again, doubled each time that it dies young
PAUSE_MAX_S: Final = 30.0
YOUNG_S: Final = 60.0
LEAVE_S: Final = 2.0
M = TypeVar("M", bound=FromWatcher)


class Health:
    """One machine's watcher, as its agent deals with it.

    Args:
        ledger: the job's.
        log: a file for what the watcher's process says of itself.
        stem: of the marks of what the watcher ends when the agent has died.

    Attributes:
        pid: the watcher's process id, or None while there is none.
    """

    def __init__(self, ledger: Ledger, log: Path, stem: str) -> None:
        self.pid: int | None = None
        self._ledger = ledger
        self._log = log
        self._stem = stem
        self._hearers: dict[type, Callable[[Any], None]] = {
            Learned: self._learned_more,
            RankSteps: self._note_steps,
            Gap: lambda gap: note_gap(ledger, gap.symptom, gap.reason, gap.seconds),
        }
        self._lock = threading.Lock()
        self._voice: Voice | None = None
        self._begin: Begin | None = None  # of the attempt that is watched
        self._learned: dict[str, State] = {}
        self._taught: set[str] = set()
        self._missing: tuple[str, float] | None = None  # nobody watches: why, and since when
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outlast-health", daemon=True)

    def hear(self, kind: type[M], hearer: Callable[[M], None]) -> None:
        """From now on ``hearer`` is given each message of this kind, in the thread that listens."""
        self._hearers[kind] = hearer

    def open(self) -> None:
        """Start a watcher; returns at once."""
        self._thread.start()

    def begin(self, begin: Begin) -> None:
        """Workers have started; what was learned of earlier ones is added."""
        with self._lock:
            self._begin = begin
            self._taught.clear()
            self._tell(self._with_learned(begin))

    def end(self) -> None:
        """They have ended, or are being ended."""
        with self._lock:
            if self._begin is not None:
                self._begin = None
                self._tell(End())

    def tell(self, message: FromAgent) -> bool:
        """Ask a symptom for something; whether there is a watcher that may hear it."""
        with self._lock:
            return self._tell(message)

    def learned(self, symptom: str) -> State:
        """What a symptom has said last that it has learned."""
        return self._learned.get(symptom, {})

    def teach(self, symptom: str, state: State) -> None:
        """Have the next attempt's watcher know this, whatever this one's still says."""
        self._learned[symptom] = state
        self._taught.add(symptom)

    def close(self) -> None:
        """End the watcher."""
        self._closing.set()
        with self._lock:
            if self._voice is not None:
                self._voice.close()
        if self._thread.is_alive():
            self._thread.join(LEAVE_S * 2)

    def _tell(self, message: FromAgent) -> bool:
        return self._voice is not None and self._voice.send(message)

    def _with_learned(self, begin: Begin) -> Begin:
        return Begin(
            **{name: getattr(begin, name) for name in Begin.__struct_fields__ if name != "learned"},
            learned={**begin.learned, **self._learned},
        )

    def _learned_more(self, learned: Learned) -> None:
        begin = self._begin
        is_of_now = begin is not None and begin.attempt == learned.attempt
        if is_of_now and learned.symptom not in self._taught:
            self._learned[learned.symptom] = learned.state

    def _note_steps(self, told: RankSteps) -> None:
        begin = self._begin
        if begin is None or begin.attempt != told.attempt:
            return
        fields = msgspec.structs.asdict(told)
        for name, value in fields.items():
            if name.endswith("_s"):
                fields[name] = [float(f"{seconds:.3g}") for seconds in value]
        del fields["attempt"]
        fields["seconds"] = round(told.seconds, 3)
        if len(set(told.kinds)) == 1:
            fields["kinds"] = told.kinds[:1]
        self._ledger.append("rank_steps", durable=False, **fields)

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s, young = PAUSE_S, 0
        while young < YOUNG_MAX:
            begun_s = time.monotonic()
            try:
                reason, last_s = self._one_life()
            except OSError as error:
                reason, last_s = f"it cannot be started: {error.strerror}", time.monotonic()
            if self._closing.is_set():
                return
            is_young = last_s - begun_s <= YOUNG_S
            young = young + 1 if is_young else 0
            pause_s = min(pause_s * 2, PAUSE_MAX_S) if is_young else PAUSE_S
            logger.warning("a watcher has gone: %s", reason)
            self._missing = self._missing or (reason, last_s)
            if self._closing.wait(pause_s):
                return
        say("the watcher does not stay alive here: hangs and slow ranks go unseen from now on")

    def _one_life(self) -> tuple[str, float]:
        """One watcher from its start to its end: why it ended, and when it was last heard."""
        ours, theirs = pair()
        voice = Voice(ours)
        with contextlib.closing(voice), theirs:
            with self._log.open("ab") as log:
                process = subprocess.Popen(
                    [
                        *(sys.executable, "-P", "-m", "outlast.health.watcher"),
                        *(str(theirs.fileno()), str(os.getpid()), self._stem),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # a Ctrl-C is for the training
                    cwd="/",
                )
            theirs.close()
            try:
                with self._lock:
                    self._voice = voice
                    if self._begin is not None:
                        self._tell(self._with_learned(self._begin))
                self.pid = process.pid
                return self._listen(voice, process)
            finally:
                with self._lock:
                    self._voice = None
                self.pid = None
                process.kill()  # it has gone, or hangs, or is not needed any more
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LEAVE_S)

    def _listen(self, voice: Voice, process: subprocess.Popen[bytes]) -> tuple[str, float]:
        heard_s = time.monotonic()
        is_first = True
        while not self._closing.is_set():
            silent_s = FIRST_S if is_first else SILENT_S
            if not readable([voice.sock.fileno()], silent_s):
                return f"it has said nothing for {silent_s:.0f} s", heard_s
            message = voice.receive()
            if message is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LEAVE_S)
                return _end_of(process.returncode), heard_s
            heard_s = time.monotonic()
            if is_first:
                is_first = False
                self._is_back()
            if not isinstance(message, Alive):
                self._pass_on(message)
        return "", heard_s

    def _is_back(self) -> None:
        missing, self._missing = self._missing, None
        if missing is not None:
            reason, last_s = missing
            note_gap(self._ledger, "watcher", reason, time.monotonic() - last_s)

    def _pass_on(self, message: Any) -> None:
        hearer = self._hearers.get(type(message))
        if hearer is None:
            return
        try:
            hearer(message)
        except Exception:
            logger.exception("what the watcher said was lost: %s", message.__struct_config__.tag)


def note_gap(ledger: Ledger, what: str, reason: str, seconds: float) -> None:
    """Write down that for so long, up to now, nobody did what ``what`` does."""
    from_t = time.time() - seconds
    ledger.append("watch_gap", what=what, reason=reason, from_t=from_t, seconds=round(seconds, 3))


def begin_of(
    group: Any, pids: dict[int, int], ledger: Ledger, beats: Path, hang: HangSettings | None
) -> Begin:
    """What the watcher is to know of the workers ``group``, just started with these process ids."""
    return Begin(
        attempt=ledger.attempt,
        node=ledger.node,
        beats=str(beats),
        world_size=group.workers[0].world_size,
        workers=tuple(
            WatchedWorker(local_rank=one.local_rank, rank=one.global_rank, pid=pids[one.local_rank])
            for one in group.workers
        ),
        hang=hang,
    )


def _end_of(code: int | None) -> str:
    if code is None:
        return "it has closed its line"
    return f"it was ended by signal {-code}" if code < 0 else f"it left with exit code {code}"
