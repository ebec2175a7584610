"""Nothing is committed by machines that the job has gone on without.

A machine that is cut off may still hold a whole snapshot, and storage may be all that it reaches.
By then the others have claimed a new attempt's number there, and this machine's keeper was not told
of that attempt: what it would commit is refused. A keeper that takes part in the new attempt still
brings to an end what the one before has left; its workers wait for that.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

from outlast.peer.numbers import claimed_numbers
from outlast.storage import Storage

logger = logging.getLogger(__name__)

TOLD_S: Final = 3.0  # between a claim and word of the attempt to all its keepers


class Fence:
    """Judges commits.

    Args:
        storage: where attempts are claimed; None on one machine, where nothing is refused.
    """

    def __init__(self, storage: Storage | None, told_s: float = TOLD_S) -> None:
        self._storage = storage
        self._told_s = told_s
        self._attempt = 0  # the newest that this machine takes part in
        self._changed = threading.Condition()

    def told(self, attempt: int) -> None:
        """This machine takes part in ``attempt``."""
        with self._changed:
            self._attempt = max(self._attempt, attempt)
            self._changed.notify_all()

    def refuses(self, attempt: int) -> str:
        """Why a snapshot of ``attempt`` must not be committed, or ""; may wait for some seconds."""
        if self._storage is None:
            return ""
        try:
            newest = max(claimed_numbers(self._storage), default=0)
        except OSError as error:
            # Nobody can have claimed there either; a commit to this storage fails by itself.
            logger.warning("attempts cannot be looked up: %s", error)
            return ""
        until_s = time.monotonic() + self._told_s
        with self._changed:
            while newest > max(attempt, self._attempt):
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return (
                        f"attempt {newest} has begun without this machine; what it held of attempt "
                        f"{attempt} is not committed"
                    )
                self._changed.wait(left_s)
        return ""
