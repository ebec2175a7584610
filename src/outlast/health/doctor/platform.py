"""Asks whoever gives notice here whether it would be heard."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path

from outlast.notice import Watcher
from outlast.notice.platform import choose
from outlast.notice.source import LONGEST_TIMEOUT_S, MetadataWatcher
from outlast.policy.fitness import PlatformFacts


def probe(
    platform: str, base_url: str, *, file: str, command: list[str], grace_s: float | None
) -> PlatformFacts:
    """The sources of notices that the settings ask for, each asked once.

    Args:
        platform: ``notice.platform``.
        base_url: ``notice.base_url``.
        file: ``notice.file``, or "".
        command: ``notice.command``.
        grace_s: ``notice.grace``, or None.
    """
    chosen = choose(platform, base_url, file=Path(file) if file else None, command=command)
    silent = []
    if chosen.watchers:
        with concurrent.futures.ThreadPoolExecutor(len(chosen.watchers)) as pool:
            silent = [said for said in pool.map(_asked, chosen.watchers) if said]
    return PlatformFacts(
        reason=chosen.reason,
        was_set=platform not in ("auto", "none"),
        silent=silent,
        num_sources=len(chosen.watchers),
        notice_s=grace_s or chosen.lead_s or chosen.grace_s,
    )


def _asked(watcher: Watcher) -> str:
    """Why this source would not be heard; "" if it would."""
    if isinstance(watcher, MetadataWatcher):
        watcher._timeout_s = LONGEST_TIMEOUT_S  # the first answer of some takes longer
        return "" if watcher.answers() else watcher.last_error
    watcher.poll()
    return getattr(watcher, "last_error", "")
