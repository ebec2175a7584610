"""The watcher's process: it hears of attempts, looks, and says what it has found.

It looks about ten times a second while there is something to watch, and not at all in between. A
symptom that raises begins anew after ``PAUSE_S``; the agent is told, and the others go on. When
the agent has died, what its workers have started is ended here: nobody else is left to do so.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from outlast.health.hang import HangWatch
from outlast.health.processes import end_leftovers, wake_when_alone
from outlast.health.watched import (
    Alive,
    Begin,
    End,
    FromAgent,
    FromWatcher,
    Gap,
    Pace,
    Voice,
    Watched,
)

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.1
ALIVE_S: Final = 1.0
PAUSE_S: Final = 30.0
ALONE_S: Final = 0.5  # until a process that has closed its files has died
LEFTOVERS_S: Final = 60.0


class Symptom(Protocol):
    """Something to look for."""

    def begin(self, watched: Watched) -> Iterable[FromWatcher]:
        """An attempt begins."""

    def look(self, now_s: float) -> Iterable[FromWatcher]:
        """What is to be said at monotonic second ``now_s``; returns within a second or two."""

    def hear(self, message: FromAgent) -> Iterable[FromWatcher]:
        """The agent asks for something."""


SYMPTOMS: Final[list[Callable[[], Symptom]]] = [HangWatch, Pace]


class HealthWatcher:
    """The work of one watcher's process: whichever symptoms it is given, not hangs alone.

    Args:
        sock: to the agent.
        symptoms: made anew for this watcher.
    """

    def __init__(self, sock: socket.socket, symptoms: Iterable[Symptom]) -> None:
        self._voice = Voice(sock)
        self._all = list(symptoms)
        self._symptoms: list[Symptom] = []
        self._failed: list[tuple[float, Symptom, str]] = []  # when, which, and how
        self._watched: Watched | None = None
        self._said_s = 0.0

    def run(self) -> None:
        """Until the agent has gone."""
        self._voice.send(Alive())
        waiting = select.poll()
        waiting.register(self._voice.sock, select.POLLIN)
        while True:
            wait_s = ALIVE_S if self._watched is None else LOOK_S
            if waiting.poll(wait_s * 1000):
                message = self._voice.receive()
                if message is None:
                    return
                self._heard(message)
            else:
                self._look()
            now_s = time.monotonic()
            if now_s - self._said_s >= ALIVE_S:
                self._said_s = now_s
                self._voice.send(Alive())

    def _heard(self, message: FromAgent) -> None:
        if isinstance(message, Begin | End):
            if self._watched is not None:
                self._watched.close()
            self._watched = Watched(message) if isinstance(message, Begin) else None
            self._symptoms = list(self._all) if self._watched is not None else []
            self._failed = []
        watched = self._watched
        if watched is None:
            return
        if isinstance(message, Begin):
            self._each(lambda symptom: symptom.begin(watched))
        else:
            self._each(lambda symptom: symptom.hear(message))

    def _look(self) -> None:
        if self._watched is not None:
            self._watched.look()
            self._take_back(self._watched, time.monotonic())
            self._each(lambda symptom: symptom.look(time.monotonic()))

    def _each(self, ask: Callable[[Symptom], Iterable[FromWatcher]]) -> None:
        for symptom in list(self._symptoms):
            try:
                for message in ask(symptom):
                    self._voice.send(message)
            except Exception as error:
                logger.exception("%s is not looked for now", type(symptom).__name__)
                self._symptoms.remove(symptom)
                reason = f"{type(error).__name__}: {error}"
                self._failed.append((time.monotonic(), symptom, reason))

    def _take_back(self, watched: Watched, now_s: float) -> None:
        """Those that have failed a while ago begin anew."""
        due = [one for one in self._failed if now_s - one[0] >= PAUSE_S]
        for at_s, symptom, reason in due:
            self._failed.remove((at_s, symptom, reason))
            self._symptoms.append(symptom)
            name = type(symptom).__name__
            self._voice.send(Gap(symptom=name, reason=reason, seconds=now_s - at_s))
        if due:
            again = {id(symptom) for _, symptom, _ in due}
            self._each(lambda one: one.begin(watched) if id(one) in again else ())


def main() -> None:
    """``python -m outlast.health.watcher FD PARENT STEM``."""
    fd, parent, stem = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    wake_when_alone()
    try:
        with socket.socket(fileno=fd) as sock:
            HealthWatcher(sock, [make() for make in SYMPTOMS]).run()
    finally:
        _end_orphans(parent, stem)


def _end_orphans(parent: int, stem: str) -> None:
    """If the agent has died, and did not just close its line: its workers end with it anyway."""
    until_s = time.monotonic() + ALONE_S
    while os.getppid() == parent and time.monotonic() < until_s:
        time.sleep(0.01)
    if os.getppid() != parent:
        end_leftovers(stem, limit_s=LEFTOVERS_S)


if __name__ == "__main__":
    main()
