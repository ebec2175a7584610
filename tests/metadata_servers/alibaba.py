"""Alibaba Cloud's metadata service on 127.0.0.1, with notices on demand and faults.

Its answers are those that the ECS user guide documents ("Instance metadata": normal and
security-hardened mode); guarantees as in ``metadata_server_base``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Literal

from outlast.drill.metadata_server import (
    TOKEN_PATH,
    IncomingRequest,
    MetadataAnswer,
    MetadataServer,
    Tokens,
    stamp,
)

RELEASE_PATH: Final = "/latest/meta-data/instance/spot/termination-time"
ZONE_PATH: Final = "/latest/meta-data/zone-id"
KIND_PATH: Final = "/latest/meta-data/instance/instance-type"


class AlibabaMetadataServer(MetadataServer):
    """Alibaba Cloud's service; see :class:`MetadataServer`.

    Args:
        clock: seconds since the epoch.
        mode: "normal" answers with a token and without, "hardened" only with one; "old" has no
            tokens at all.
    """

    software = "tengine"

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        mode: Literal["normal", "hardened", "old"] = "normal",
    ) -> None:
        super().__init__(clock)
        self.mode = mode
        self._tokens = Tokens("X-aliyun-ecs-metadata-token-ttl-seconds", clock)
        self._release: bytes | None = None

    def preempt(self, in_s: float = 300.0) -> float:
        """Announce that this machine is released ``in_s`` from now; returns when."""
        deadline_t = float(int(self._clock() + in_s))
        with self._changed:
            self._release = stamp(deadline_t).encode()
        return deadline_t

    def withdraw(self, empty: bool = False) -> None:
        """Take the announcement back: 404 again, or 200 with nothing in it."""
        with self._changed:
            self._release = b"" if empty else None

    def expire_tokens(self) -> None:
        """Make every token that was given out invalid."""
        with self._changed:
            self._tokens.expire()

    def _correct(self, asked: IncomingRequest) -> MetadataAnswer:
        if asked.path == TOKEN_PATH:
            return MetadataAnswer(404) if self.mode == "old" else self._tokens.answer(asked)
        if asked.method != "GET":
            return MetadataAnswer(405, b"", (("Allow", "GET"),))
        token = asked.headers.get("X-aliyun-ecs-metadata-token")
        if self.mode != "old" and token is not None and not self._tokens.valid(token):
            return MetadataAnswer(401)
        if self.mode == "hardened" and token is None:
            return MetadataAnswer(403)
        if asked.path == ZONE_PATH:
            return MetadataAnswer(200, b"cn-hangzhou-i")
        if asked.path == KIND_PATH and self.kind:
            return MetadataAnswer(200, self.kind.encode())
        if asked.path != RELEASE_PATH or self._release is None:
            return MetadataAnswer(404)
        return MetadataAnswer(200, self._release)
