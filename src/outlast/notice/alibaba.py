"""Alibaba Cloud ECS: the time at which a preemptible machine is released.

Each poll asks for ``instance/spot/termination-time``: 404 or nothing means none, a time such as
2015-01-05T18:02:00Z is the notice. Five minutes are documented; three were reported, so we count
on three. A session token goes with the question where the service gives one. A service that has no
tokens (404, 403, nobody accepts the connection for one, or no answer: in a container a hop limit of
1 swallows the token, and only the token) is asked without, and for a token again after ten minutes,
or at once when it refuses to answer without. Source: "Instance metadata" and
"Perceive interruption events of preemptible instances" in the ECS user guide.

Guarantees: ``poll`` never raises and makes at most four requests; 5xx, silence and garbage are no
notice, and are counted.
"""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Final

from outlast.notice import Notice
from outlast.notice.source import (
    HttpResponse,
    NotUnderstoodError,
    TokenHeaders,
    TokenRefusedError,
    TokenWatcher,
    iso_utc,
    said,
)

BASE_URL: Final = "http://100.100.100.200"
LEAD_S: Final = 180.0
_TIME_PATH: Final = "/latest/meta-data/instance/spot/termination-time"
_ZONE_PATH: Final = "/latest/meta-data/zone-id"
_HEADERS: Final = TokenHeaders(
    "X-aliyun-ecs-metadata-token-ttl-seconds", "X-aliyun-ecs-metadata-token"
)
_WITHOUT_S: Final = 600.0
_ZONE: Final = re.compile(rb"[a-z0-9-]{4,64}\s*")
_TIME: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")


class AlibabaWatcher(TokenWatcher):
    """Asks the metadata service of this ECS machine; see :class:`TokenWatcher`."""

    name = "alibaba"

    address = BASE_URL
    token_headers = _HEADERS
    kind_path = "/latest/meta-data/instance/instance-type"
    _token_from = 0.0  # on the monotonic clock

    def _greet(self) -> None:
        # A zone is what EC2's service, whose tokens are had at the same path, does not have there.
        answer = self._request("GET", _ZONE_PATH, self._header())
        if answer.status != 200 or not _ZONE.fullmatch(answer.body):
            raise NotUnderstoodError(f"asked for its zone, it answered status {answer.status}")

    def _ask(self) -> Notice | None:
        text = said(self._get(_TIME_PATH))
        if not text:
            return None
        try:
            if not _TIME.fullmatch(text):
                raise ValueError
            due_t = self._plausible(datetime.fromisoformat(text).timestamp())
        except ValueError:
            raise NotUnderstoodError("its notice cannot be read: not a time") from None
        return self._once(
            text,
            action="terminate",
            deadline_t=due_t,
            detail=f"ECS: released at {iso_utc(due_t)}",
        )

    def _get(self, path: str) -> HttpResponse:
        answer = self._request("GET", path, self._header())
        if answer.status in (401, 403):
            self._token.forget()
            self._token_from = 0.0
            answer = self._request("GET", path, self._header())
        return answer

    def _about(self, path: str) -> HttpResponse:
        return self._get(path)

    def _header(self) -> dict[str, str]:
        if time.monotonic() < self._token_from:
            return {}
        try:
            return self._token.header()
        except TokenRefusedError as refused:
            if refused.status not in (403, 404):
                raise
        except (ConnectionRefusedError, TimeoutError):
            pass
        self._token_from = time.monotonic() + _WITHOUT_S
        return {}
