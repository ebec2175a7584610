"""One machine as the coordinator sees it, and how a few of many are named."""

from __future__ import annotations

from typing import Final

NAMES_MAX: Final = 3


class Seat:
    """One connected machine."""

    def __init__(self, node: str, host: str, order: int) -> None:
        self.node = node
        self.host = host
        self.order = order
        self.ready_s: float | None = None


def names(some: list[str], count: int | None = None) -> str:
    """A few names in words, and how many more there are of ``count``."""
    count = len(some) if count is None else count
    shown = some[:NAMES_MAX]
    more = count - len(shown)
    if more:
        return f"{', '.join(shown)} and {more} others"
    return " and ".join(shown)
