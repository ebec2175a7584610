"""EC2's metadata service (IMDSv2) on 127.0.0.1, with notices on demand and faults.

For the demo and for tests, over real HTTP: what is tried against it is the code that will talk to
EC2. Guarantees: those of ``metadata_server_base``; its answers are those that the EC2 user guide
documents ("Use IMDSv2", "Spot Instance interruption notices")::

    with AwsMetadataServer() as server:
        server.inject(Fault(drip_s=0.1), times=1, method="GET")
        server.preempt(in_s=120.0)
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Final

from outlast.drill.metadata_server_base import (
    TOKEN_PATH,
    Answer,
    Asked,
    MetadataServer,
    Tokens,
    stamp,
)

ACTION_PATH: Final = "/latest/meta-data/spot/instance-action"
TIME_PATH: Final = "/latest/meta-data/spot/termination-time"
REBALANCE_PATH: Final = "/latest/meta-data/events/recommendations/rebalance"


class AwsMetadataServer(MetadataServer):
    """EC2's service; see :class:`MetadataServer`."""

    software = "EC2ws"

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        super().__init__(clock)
        self._tokens = Tokens("X-aws-ec2-metadata-token-ttl-seconds", clock)
        self._documents: dict[str, bytes] = {}  # path → what it holds now

    def preempt(self, in_s: float = 120.0, action: str = "terminate") -> float:
        """Announce that this machine will go ``in_s`` from now; returns when, since the epoch."""
        deadline_t = float(int(self._clock() + in_s))
        with self._changed:
            said = {"action": action, "time": stamp(deadline_t)}
            self._documents[ACTION_PATH] = json.dumps(said).encode()
            if action == "terminate":
                self._documents[TIME_PATH] = stamp(deadline_t).encode()
        return deadline_t

    def withdraw(self) -> None:
        """Take the announcement back: 404 again."""
        with self._changed:
            self._documents.pop(ACTION_PATH, None)
            self._documents.pop(TIME_PATH, None)

    def only_termination_time(self, value: str) -> None:
        """Say the older form of the notice alone, or what stands there when there is none."""
        with self._changed:
            self._documents.pop(ACTION_PATH, None)
            self._documents[TIME_PATH] = value.encode()

    def recommend_rebalance(self) -> None:
        """Recommend, from now on, to move work to another machine."""
        with self._changed:
            said = {"noticeTime": stamp(self._clock())}
            self._documents[REBALANCE_PATH] = json.dumps(said).encode()

    def expire_tokens(self) -> None:
        """Make every token that was given out invalid."""
        with self._changed:
            self._tokens.expire()

    def _correct(self, asked: Asked) -> Answer:
        if asked.path == TOKEN_PATH:
            return self._tokens.answer(asked)
        if asked.method != "GET":
            return Answer(405, b"", (("Allow", "GET"),))
        if not self._tokens.valid(asked.headers.get("X-aws-ec2-metadata-token", "")):
            return Answer(401)
        document = self._documents.get(asked.path)
        return Answer(404) if document is None else Answer(200, document)
