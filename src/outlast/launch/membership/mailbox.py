"""What the hub's thread tells the agent's main thread."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

from outlast.launch.membership.messages import (
    Departs,
    Excluded,
    Go,
    Halt,
    JobEnded,
    Refused,
    Remains,
    Waits,
)
from outlast.policy.membership import MembershipRules


class JobOver(RendezvousClosedError):
    """The job has ended on all machines.

    Attributes:
        exit_code: what ``outlast run`` is to leave with.
        reason: why, in words.
    """

    def __init__(self, exit_code: int, reason: str) -> None:
        super().__init__(reason or "the job is over")
        self.exit_code = exit_code
        self.reason = reason


class Mailbox:
    """What the hub's thread tells the agent's main thread."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.go: Go | None = None
        self.halt: Halt | None = None
        self.halted = ""  # why the last attempt that ended here did
        self.over: JobEnded | None = None
        self.departs: dict[str, Departs] = {}
        self.members: set[str] = set()  # of the last attempt
        self.words = ""
        self.runs = False  # an attempt, without this machine
        self.refused = ""  # why this machine may not take part
        self.rules: MembershipRules | None = None  # of the job, where they are not ours
        self.on_left_out: Callable[[Excluded], None] = lambda _: None
        self.failed: Exception | None = None
        self.news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def tell(self, message: Any) -> None:
        """Take a message; from the hub's thread."""
        with self.changed:
            match message:
                case Go():
                    self.go, self.halt, self.words, self.runs = message, None, "", False
                    here = {member.node for member in message.members}
                    # One attempt longer: who is not in this one has left, and was not lost. Who is
                    # in it has said so too soon, and says it again.
                    left = self.members - here
                    self.departs = {n: word for n, word in self.departs.items() if n in left}
                    self.members = here
                case Halt():
                    self.halt, self.halted, self.runs = message, message.reason, False
                case JobEnded():
                    self.over = message
                case Departs():
                    self.departs[message.node] = message
                case Remains():
                    self.departs.pop(message.node, None)
                case Waits():
                    self.words, self.runs = message.words, message.runs
                case Excluded():
                    self.on_left_out(message)
                case Refused():
                    self.refused = message.reason
                case MembershipRules():
                    self.rules = message
            self._notify()

    def fail(self, error: Exception) -> None:
        """The hub's thread has ended."""
        with self.changed:
            self.failed = error
            self._notify()

    def look(self) -> None:
        """There is no news until something is told."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.news)

    def _notify(self) -> None:
        self.changed.notify_all()
        os.eventfd_write(self.news, 1)
