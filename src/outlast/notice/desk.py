"""Hearing the platform: which one it is, found out behind the training's back, and its watchers.

Used by the agent of each machine, and by the first worker of a machine where there is no agent.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from typing import Final

from outlast.config import Settings
from outlast.errors import ConfigError
from outlast.notice import Acknowledger, Notice
from outlast.notice.platform import Chosen, choose
from outlast.notice.source import WatchThread

LIMIT_WARNED_S: Final = 180.0  # ahead of a time limit: two minutes, and Slurm may be one early

logger = logging.getLogger(__name__)


def chosen_for(settings: Settings) -> Chosen:
    """The sources of notices that the settings ask for."""
    return choose(
        settings.notice_platform,
        settings.notice_base_url,
        file=settings.notice_file,
        command=settings.notice_command,
    )


def checked(settings: Settings) -> Settings:
    """The settings, if what they name as a source of notices can be asked.

    Raises:
        ConfigError: ``notice.command`` is a program that is not there.
    """
    command = settings.notice_command
    if command and shutil.which(command[0]) is None:
        source = settings.origin.get("notice.command", "")
        raise ConfigError(
            f"notice.command{f' (from {source})' if source else ''}: there is no program "
            f"{command[0]}, so no notice would be heard from it; check the path"
        )
    return settings


class PlatformDesk:
    """Listens to the platform's watchers.

    Args:
        settings: the job's.
        on_notice: told of each distinct notice, in a watcher's thread.
        on_found: told which platform it is, in a thread.

    Attributes:
        chosen: what was found out, None until then.
    """

    def __init__(
        self,
        settings: Settings,
        on_notice: Callable[[Notice], None],
        on_found: Callable[[Chosen], None],
    ) -> None:
        self.chosen: Chosen | None = None
        self._settings = settings
        self._on_notice = on_notice
        self._on_found = on_found
        self._watches: list[WatchThread] = []
        self._closing = threading.Event()
        self._finder = threading.Thread(target=self._find, name="outlast-platform", daemon=True)

    def open(self) -> None:
        """Begin to find out; returns at once."""
        self._finder.start()

    def close(self) -> None:
        """Stop listening."""
        self._closing.set()
        self._finder.join(timeout=3)
        for watch in self._watches:
            watch.stop()

    def acknowledge(self, notice: Notice) -> bool:
        """Everything is saved: tell the platform that it need not wait, if that was asked for.

        Returns:
            Whether the platform was told, and agreed.
        """
        if not self._settings.notice_approve or self.chosen is None:
            return False
        return any(
            watcher.acknowledge(notice)
            for watcher in self.chosen.watchers
            if watcher.name == notice.source and isinstance(watcher, Acknowledger)
        )

    def grace_s(self) -> float | None:
        """Seconds from a signal to the end: as set, as the platform has it, or None.

        Slurm sends the same signal ahead of a job's time limit as when it takes the machine: near
        the limit it is taken for the former.
        """
        set_s = self._settings.notice_grace_s
        if set_s is not None or self.chosen is None:
            return set_s
        ends_t = [getattr(watcher, "end_t", None) for watcher in self.chosen.watchers]
        left_s = [end_t - time.time() for end_t in ends_t if end_t is not None]
        near_s = [one for one in left_s if 0 < one <= LIMIT_WARNED_S]
        return max([*near_s, self.chosen.grace_s or 0.0]) or None

    def _find(self) -> None:
        try:
            chosen = chosen_for(self._settings)
        except Exception:  # whatever it is, signals are still heard
            logger.exception("the platform was not found out: notices from signals only")
            return
        self.chosen = chosen
        for watcher in chosen.watchers:
            if self._closing.is_set():
                return
            watch = WatchThread(watcher, self._on_notice, interval_s=self._settings.notice_poll_s)
            self._watches.append(watch)
            watch.start()
        self._on_found(chosen)
