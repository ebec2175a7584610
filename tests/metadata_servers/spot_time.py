"""Tencent Cloud's and Volcengine's metadata services on 127.0.0.1, with notices on demand.

Their answers are those of "Querying the Reclamation Status of a Spot Instance" (CVM) and "View
spot instance interruption event" (BytePlus ECS); guarantees as in ``metadata_server_base``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from outlast.drill.metadata_server import IncomingRequest, MetadataAnswer, MetadataServer, stamp

TENCENT_PATH: Final = "/latest/meta-data/spot/termination-time"
VOLCENGINE_PATH: Final = "/latest/spot_instance_termination_time"
_CHINA_S: Final = 8 * 3600


class TencentMetadataServer(MetadataServer):
    """Tencent Cloud's service; see :class:`MetadataServer`."""

    software = "nginx"
    path = TENCENT_PATH
    about = ("/latest/meta-data/instance-id", b"ins-3g445roi")
    kind_path = "/latest/meta-data/instance/instance-type"

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        super().__init__(clock)
        self._due: bytes | None = None

    def preempt(self, in_s: float = 120.0) -> float:
        """Announce that this machine is taken back ``in_s`` from now; returns when."""
        deadline_t = float(int(self._clock() + in_s))
        with self._changed:
            self._due = self._written(deadline_t).encode()
        return deadline_t

    def withdraw(self) -> None:
        """Take the announcement back."""
        with self._changed:
            self._due = None

    def _written(self, t: float) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(t + _CHINA_S))

    def _correct(self, asked: IncomingRequest) -> MetadataAnswer:
        if asked.method != "GET":
            return MetadataAnswer(405, b"", (("Allow", "GET"),))
        if asked.path == self.about[0]:
            return MetadataAnswer(200, self.about[1])
        if asked.path == self.kind_path and self.kind:
            return MetadataAnswer(200, self.kind.encode())
        if asked.path != self.path or self._due is None:
            return MetadataAnswer(404)
        return MetadataAnswer(200, self._due)


class VolcengineMetadataServer(TencentMetadataServer):
    """Volcengine's and BytePlus's service; see :class:`MetadataServer`."""

    path = VOLCENGINE_PATH
    about = ("/latest/region_id", b"ap-southeast-1")
    kind_path = "/latest/instance_type_id"

    def _written(self, t: float) -> str:
        return stamp(t)
