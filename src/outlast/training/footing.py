"""All of a session that belongs to one attempt; one that lives through a loss has another made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from outlast.attempt.agreement import Action
from outlast.config import Settings
from outlast.notice.signals import SignalNotice
from outlast.training.afresh import Afresh
from outlast.training.ending import Ending
from outlast.training.lazy import State
from outlast.training.leaving import Leaving, Where
from outlast.training.objects import Objects
from outlast.training.position import Streams
from outlast.training.rig import Rig


class Footing:
    """Of one attempt.

    Args:
        settings: the job's.
        objects: the session's.
        signals: through which the main thread is made to leave.
        on_decision: told of each agreed action.
        on_written: told (step, error) of each save's end.
        where: says where the training thread is.
        newest: gives what would be saved now.
        snapshot: has a snapshot taken; whether that was possible.
        may_move: on rank 0, whether a drain is only those machines' that leave; told the asks.

    Raises:
        ConfigError, StorageError: the job's directory cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        objects: Objects,
        signals: SignalNotice,
        *,
        on_decision: Callable[[Action], None],
        on_written: Callable[[int, str], None],
        where: Callable[[], Where],
        newest: Callable[[], State],
        snapshot: Callable[[Mapping[str, Any]], bool],
        may_move: Callable[[list[dict[str, Any]]], bool],
    ) -> None:
        hasten = lambda left_s: self.leaving.hasten(left_s)  # noqa: E731, PLW0108 - not yet there
        self.leaving: Leaving
        self.rig = Rig(settings, on_decision, on_written, hasten, may_move)
        self.leaving = Leaving(self.rig, signals, where)
        self.ending = Ending(self.rig, newest, snapshot)
        self.streams = Streams(self.rig.link)
        self.afresh = Afresh(objects, self.rig.link)
        self.meter = self.rig.meter()

    def leave(self) -> None:
        """The attempt is over, and nothing of it is waited for."""
        self.meter.close()
        self.rig.stop(0.0, 0, clean=False)
        self.rig.link.let_go()
        self.leaving.left()
