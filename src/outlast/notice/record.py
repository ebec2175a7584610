"""A notice as the ledger's event ``notice`` has it, and as workers are told of it."""

from __future__ import annotations

import time
from typing import Any, Final

from outlast.config import Settings
from outlast.notice import Notice
from outlast.policy.drain import on_early

LEAST_S: Final = 1.0


def fields_of(notice: Notice, settings: Settings) -> dict[str, Any]:
    """What the ledger keeps; of an early one also what is done about it."""
    fields: dict[str, Any] = {
        "source": notice.source,
        "action": notice.action,
        "deadline_t": notice.deadline_t,
        "detail": notice.detail,
    }
    if notice.early:
        fields["early"] = True
        fields["answer"] = answer_to(notice, settings)
    return fields


def answer_to(notice: Notice, settings: Settings) -> str:
    """What is done about an early notice: "leave", "save" or "ignore"."""
    return on_early(settings.notice_early, has_deadline=notice.deadline_t is not None)


def request_of(notice: Notice, settings: Settings) -> dict[str, Any]:
    """What the ranks are told: seconds instead of a time, since their clocks may differ."""
    left_s = notice.seconds_left(time.time())
    info: dict[str, Any] = {
        "reason": f"notice from {notice.source}",
        # A deadline that is past is tried: nothing is lost by it, and no platform is that exact.
        "left_s": None if left_s is None else max(left_s, LEAST_S),
    }
    if notice.early:
        info["answer"] = answer_to(notice, settings)
    return info
