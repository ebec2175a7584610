"""Google Cloud's metadata server on 127.0.0.1, with notices on demand and faults.

Its answers are those that the Compute Engine documentation describes ("View and query VM
metadata"): ``Metadata-Flavor: Google`` is needed and sent, ``X-Forwarded-For`` refused, each value
has an ETag, and with ``wait_for_change=true`` a question hangs until the value is another than
``last_etag``, or for ``timeout_sec``. Guarantees as in ``metadata_server_base``.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from typing import Final

from outlast.drill.metadata_server import IncomingRequest, MetadataAnswer, MetadataServer

_ROOT: Final = "/computeMetadata/v1/instance/"
PREEMPTED_PATH: Final = _ROOT + "preempted"
MAINTENANCE_PATH: Final = _ROOT + "maintenance-event"
KIND_PATH: Final = _ROOT + "machine-type"
STOP_PATH: Final = _ROOT + "shutdown-details/stop-state"


class GcpMetadataServer(MetadataServer):
    """Google's server; see :class:`MetadataServer`.

    Args:
        clock: seconds since the epoch.
        waits: whether it honours ``wait_for_change``.
    """

    software = "Metadata Server for VM"

    def __init__(self, clock: Callable[[], float] = time.time, waits: bool = True) -> None:
        super().__init__(clock)
        self.waits = waits
        self.num_hanging = 0
        self._num_changes = 0
        self._values = {PREEMPTED_PATH: "FALSE", MAINTENANCE_PATH: "NONE"}

    def preempt(self, in_s: float = 30.0) -> float:
        """Announce that this Spot machine is taken back; it always goes 30 s later."""
        self._set(PREEMPTED_PATH, "TRUE")
        return self._clock() + in_s

    def maintain(self, event: str = "TERMINATE_ON_HOST_MAINTENANCE") -> None:
        """Announce host maintenance."""
        self._set(MAINTENANCE_PATH, event)

    def stop_gracefully(self, state: str = "PENDING_STOP") -> None:
        """Begin to stop a machine whose graceful shutdown is on; or say another state."""
        with self._changed:
            self._values.setdefault(STOP_PATH, "")
        self._set(STOP_PATH, state)

    def withdraw(self) -> None:
        """Take all announcements back."""
        self._set(PREEMPTED_PATH, "FALSE")
        self._set(MAINTENANCE_PATH, "NONE")

    def _set(self, path: str, value: str) -> None:
        with self._changed:
            self._num_changes += self._values[path] != value
            self._values[path] = value
            self._changed.notify_all()

    def _etag(self, path: str) -> str:
        # As Google's: what it is made of is nobody's business, and it differs between values.
        return hashlib.sha256(f"{path} {self._values[path]}".encode()).hexdigest()[:16]

    def _correct(self, asked: IncomingRequest) -> MetadataAnswer:
        if asked.headers.get("Metadata-Flavor") != "Google" or "X-Forwarded-For" in asked.headers:
            return MetadataAnswer(403)
        flavor = ("Metadata-Flavor", "Google")
        if asked.method != "GET":
            return MetadataAnswer(405, b"", (("Allow", "GET"), flavor))
        if asked.path == KIND_PATH and self.kind:
            said = f"projects/4711/machineTypes/{self.kind}"
            return MetadataAnswer(200, said.encode(), (flavor,))
        if asked.path not in self._values:
            return MetadataAnswer(404, b"", (flavor,))
        if asked.query.get("wait_for_change") == ["true"] and self.waits:
            self._hang(asked)
        headers = (flavor, ("ETag", self._etag(asked.path)), ("Content-Type", "application/text"))
        return MetadataAnswer(200, self._values[asked.path].encode(), headers)

    def _hang(self, asked: IncomingRequest) -> None:
        """Wait until there is something else to say; the lock is free meanwhile."""
        (last,) = asked.query.get("last_etag", [self._etag(asked.path)])
        (limit,) = asked.query.get("timeout_sec", ["inf"])
        until = time.monotonic() + (float(limit) if limit.isdigit() else math.inf)
        self.num_hanging += 1
        self._changed.notify_all()
        try:
            while self._etag(asked.path) == last and not self.closing:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    return
                self._changed.wait(min(left_s, 3600.0))
        finally:
            self.num_hanging -= 1

    def wait_for_hanging(self, num: int = 1, within_s: float = 60.0) -> bool:
        """Wait until ``num`` questions hang; whether they do."""
        with self._changed:
            return self._changed.wait_for(lambda: self.num_hanging >= num, within_s)
