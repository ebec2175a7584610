"""AWS EC2: the spot service's word on this machine, read from its metadata service (IMDSv2).

Each poll asks for ``spot/instance-action``: 404 says that nothing is planned, 200 names the action
and its time, 401 says that our session token is no longer good. The lead time is 120 s at best;
a machine that will hibernate gets none at all, so its deadline is the moment it was heard.
Source: "Spot Instance interruption notices" and "Use IMDSv2" in the EC2 user guide.

Guarantees: ``poll`` never raises and makes at most four requests, each over in ``timeout_s``;
anything but a 200 with an action that we know and a time within a day of now is no notice. The
token is in no log and no error.

What can go wrong: in a container behind a bridge the service's hop limit of 1 swallows the token's
answer, so every poll times out; ``last_error`` says so. Raise the hop limit to 2.

Rejected: IMDSv1 (may be switched off, and needs no token from whoever can make us send a GET); the
rebalance recommendation (it may come hours early or never lead to anything: not word that the
machine *will* go).
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

import msgspec

from outlast.errors import ConfigError
from outlast.notice import Notice
from outlast.notice.exchange import Answer, Request, request

logger = logging.getLogger(__name__)

BASE_URL: Final = "http://169.254.169.254"
LONGEST_TIMEOUT_S: Final = 2.0
_TOKEN_PATH: Final = "/latest/api/token"  # noqa: S105
_ACTION_PATH: Final = "/latest/meta-data/spot/instance-action"
_TOKEN_TTL_S: Final = 21_600
_TOKEN_RENEWED_AFTER_S: Final = _TOKEN_TTL_S - 600
# What goes back to the service in a header: nothing that could break out of it.
_TOKEN: Final = re.compile(rb"[A-Za-z0-9+/=_-]{8,1024}")
# Word of another year comes from an emulator's zero time or a broken service, not from EC2.
_PLAUSIBLE_S: Final = 86_400.0


class _Action(msgspec.Struct, frozen=True):
    """The document at ``spot/instance-action``."""

    action: Literal["terminate", "stop", "hibernate"]
    time: Annotated[datetime, msgspec.Meta(tz=True)]


class _NotUnderstoodError(Exception):
    """The service answered, but not with what it documents."""


class AwsWatcher:
    """Asks the metadata service of this EC2 machine.

    Args:
        base_url: the service's address, ``http://HOST[:PORT]``.
        timeout_s: limit on each whole request, at most 2 s.
        clock: seconds since the epoch.
        max_body_bytes: the largest answer that is believed.
        send: sends one request; replaced in tests.

    Attributes:
        polls: how often the service was asked.
        errors: how many of these polls got no answer that could be understood.
        last_error: the last of them in words, or "".

    Raises:
        ConfigError: an address or a timeout that cannot be used.
    """

    name = "aws"

    def __init__(
        self,
        base_url: str = BASE_URL,
        timeout_s: float = 1.0,
        clock: Callable[[], float] = time.time,
        max_body_bytes: int = 16_384,
        send: Request = request,
    ) -> None:
        if not 0 < timeout_s <= LONGEST_TIMEOUT_S:
            raise ConfigError(f"a timeout of {timeout_s:g} s cannot be used; write up to 2 s")
        self.base_url = _checked(base_url)
        self.polls = 0
        self.errors = 0
        self.last_error = ""
        self._timeout_s = timeout_s
        self._clock = clock
        self._max_body_bytes = max_body_bytes
        self._send = send
        self._token = ""
        self._token_t = 0.0
        self._heard: tuple[_Action, Notice] | None = None

    def poll(self) -> Notice | None:
        """Ask once; never raises, see :class:`outlast.notice.Watcher`."""
        self.polls += 1
        try:
            answer = self._get(_ACTION_PATH)
            return None if answer.status == 404 else self._understood(answer)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not a notice
            self._count(error)
            return None

    def answers(self) -> bool:
        """Whether the service gives a token (one request); if not, ``last_error`` says why."""
        try:
            self._renew_token()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not a token
            self._count(error)
            return False
        return True

    def _get(self, path: str) -> Answer:
        age_s = self._clock() - self._token_t
        # An age below 0 means that the clock was set back: how old the token is, is not known.
        if not self._token or not 0 <= age_s < _TOKEN_RENEWED_AFTER_S:
            self._renew_token()
        answer = self._request("GET", path, {"X-aws-ec2-metadata-token": self._token})
        if answer.status == 401:
            self._renew_token()
            answer = self._request("GET", path, {"X-aws-ec2-metadata-token": self._token})
        return answer

    def _renew_token(self) -> None:
        asked_t = self._clock()
        ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
        answer = self._request("PUT", _TOKEN_PATH, ttl)
        if answer.status != 200:
            raise _NotUnderstoodError(f"asked for a token, it answered status {answer.status}")
        if not _TOKEN.fullmatch(answer.body):
            raise _NotUnderstoodError("asked for a token, it answered something else")
        self._token = answer.body.decode("ascii")
        self._token_t = asked_t

    def _request(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        return self._send(
            method,
            self.base_url + path,
            headers=headers,
            timeout_s=self._timeout_s,
            max_body_bytes=self._max_body_bytes,
        )

    def _understood(self, answer: Answer) -> Notice:
        if answer.status != 200:
            raise _NotUnderstoodError(f"asked for a notice, it answered status {answer.status}")
        try:
            found = msgspec.json.decode(answer.body, type=_Action)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _NotUnderstoodError(f"its notice cannot be read: {error}") from None
        now = self._clock()
        due_t = found.time.timestamp()
        if abs(due_t - now) > _PLAUSIBLE_S:
            raise _NotUnderstoodError(f"its notice is for {found.time.isoformat()}, not for today")
        # Said again, it is the notice that was heard: a hibernation's deadline must not move.
        if self._heard is None or self._heard[0] != found:
            self._heard = (
                found,
                Notice(
                    source=self.name,
                    action=found.action,
                    deadline_t=now if found.action == "hibernate" else due_t,
                    heard_t=now,
                    detail=f"EC2 spot: {found.action} at {found.time.isoformat()}",
                ),
            )
        return self._heard[1]

    def _count(self, error: Exception) -> None:
        self.errors += 1
        self.last_error = f"{self.base_url}: {error or type(error).__name__}"
        # Once for people; a service that is away for an hour must not fill the log.
        level = logging.WARNING if self.errors == 1 else logging.DEBUG
        logger.log(level, "no notice can be heard, asking again: %s", self.last_error)


def _checked(base_url: str) -> str:
    try:
        parts = urlsplit(base_url)
        usable = parts.scheme == "http" and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment or parts.username:
        raise ConfigError(
            f"{base_url!r} is not a metadata service's address; write it as http://HOST[:PORT] "
            "(the service does not speak https)"
        )
    return base_url.rstrip("/")
