"""Who says that this machine will go, and by when; what is done about it is decided elsewhere.

Guarantees: a notice is only ever what a platform said in full and in its documented form. A
service that cannot be reached, is slow, answers 5xx or answers garbage has said nothing: it is
counted, and asked again. No watcher touches the training loop; each runs in a thread of its own
(``source``).

What can go wrong: the platform gives no notice at all, or a shorter one than it documents (all of
them promise "best effort"). A job must survive a machine that goes without a word.

Rejected: the platforms' own client libraries (heavy, they retry for minutes, they go through
proxies); treating a metadata service that has stopped answering as a sign of the end (it is
throttled and restarted on healthy machines).

Who says it:

``source``     what all watchers share: how they ask, and the thread that does
``aws``        Amazon EC2
``gcp``        Google Cloud
``azure``      Azure
``alibaba``    Alibaba Cloud
``spot_time``  Tencent Cloud, Volcengine and BytePlus
``slurm``      the end of a job's time limit; ``outlast requeue``
``manual``     whoever runs the machine: a file, a command, a known end
``signals``    SIGTERM and SIGUSR1; heard at once, without a watcher

Who hears it:

``platform``   which of these watchers this machine needs
``desk``       a job's agent, or a session without one
``lookout``    ``outlast watch``, for jobs that Outlast does not run
"""

from __future__ import annotations

from typing import Final, Protocol, runtime_checkable

import msgspec

__all__ = ["UNKNOWN_GRACE_S", "Acknowledger", "Notice", "Watcher"]

# How long a machine is thought to stay where nobody says so, for what can wait until then.
UNKNOWN_GRACE_S: Final = 20.0


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """Word that this machine will go.

    Attributes:
        source: who said so, such as "aws" or "signal".
        action: what will happen to the machine, in the platform's word, such as "terminate".
        deadline_t: when, in seconds since the epoch; None when the platform did not say.
        heard_t: when it was heard first, in seconds since the epoch.
        detail: one line for people.
        early: softer word: the machine may go, or not soon. Checkpoints come more often from then
            on; it is not a reason to stop in the middle of things.
        event: the platform's own id of what it announced, "" where it has none.
    """

    source: str
    action: str
    deadline_t: float | None
    heard_t: float
    detail: str
    early: bool = False
    event: str = ""

    def seconds_left(self, now: float) -> float | None:
        """Seconds from ``now`` (since the epoch) to the deadline, at least 0; None without one."""
        return None if self.deadline_t is None else max(0.0, self.deadline_t - now)


class Watcher(Protocol):
    """One source of notices.

    Attributes:
        name: what people call it, such as "aws".
    """

    name: str

    def poll(self) -> Notice | None:
        """Ask once; the notice that stands now, or None.

        Never raises, and returns in a bounded time. A source that cannot be reached or understood
        gives None.
        """


@runtime_checkable
class Acknowledger(Protocol):
    """A watcher whose platform goes ahead sooner when told that nobody needs the machine."""

    def acknowledge(self, notice: Notice) -> bool:
        """Tell the platform that it need not wait for the deadline; whether it agreed.

        Never raises, and returns in a bounded time. It may be called from any thread.
        """
