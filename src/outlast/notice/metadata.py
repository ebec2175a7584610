"""What the clouds' metadata services share: an address, bounded requests, session tokens.

Guarantees: the address is checked once, where it comes in; each request is over in its time; a
token is in no log and no error; times that cannot be meant are not believed.

What can go wrong: in a container behind a bridge EC2's and Alibaba's hop limit of 1 swallows the
token's answer, so every poll times out (Alibaba's only where tokens are required); ``last_error``
says so. Raise the hop limit to 2.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, ClassVar, Final, NamedTuple, TypeVar

import msgspec

from outlast.config import parse_address
from outlast.errors import ConfigError
from outlast.notice.exchange import HttpResponse, RequestFunction, request
from outlast.notice.source import NoticeSource, NotUnderstoodError

LONGEST_TIMEOUT_S: Final = 2.0
# Word of another year comes from an emulator's zero time or a broken service, not from a cloud.
PLAUSIBLE_S: Final = 86_400.0
_TOKEN_TTL_S: Final = 21_600
_TOKEN_RENEWED_AFTER_S: Final = _TOKEN_TTL_S - 600
# What goes back to the service in a header: nothing that could break out of it.
_TOKEN: Final = re.compile(rb"[A-Za-z0-9+/=_-]{8,1024}")
_DOCUMENT = TypeVar("_DOCUMENT")

Moment = Annotated[datetime, msgspec.Meta(tz=True)]


class MetadataWatcher(NoticeSource):
    """Asks a metadata service over HTTP.

    Args:
        base_url: the service's address, ``http://HOST[:PORT]``.
        timeout_s: limit on each whole request, at most 2 s.
        clock: seconds since the epoch.
        max_body_bytes: the largest answer that is believed.
        send: sends one request; replaced in tests.

    Raises:
        ConfigError: an address or a timeout that cannot be used.
    """

    def __init__(
        self,
        base_url: str,
        timeout_s: float = 1.0,
        clock: Callable[[], float] = time.time,
        max_body_bytes: int = 16_384,
        send: RequestFunction = request,
    ) -> None:
        if not 0 < timeout_s <= LONGEST_TIMEOUT_S:
            raise ConfigError(f"a timeout of {timeout_s:g} s cannot be used; write up to 2 s")
        self.base_url = parse_address(base_url)
        super().__init__(self.base_url, clock)
        self._timeout_s = timeout_s
        self._max_body_bytes = max_body_bytes
        self._send = send

    def answers(self) -> bool:
        """Whether it is this platform that answers there; if not, ``last_error`` says why."""
        try:
            self._greet()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not an answer
            self._count(error, quiet=True)  # whoever asks says what they make of it
            return False
        return True

    def _greet(self) -> None:
        """Ask what only this platform answers, in at most two requests, or raise."""
        raise NotImplementedError

    def _request(
        self,
        method: str,
        target: str,
        headers: dict[str, str],
        *,
        timeout_s: float | None = None,
        body: bytes = b"",
    ) -> HttpResponse:
        return self._send(
            method,
            self.base_url + target,
            headers=headers,
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
            max_body_bytes=self._max_body_bytes,
            **({"body": body} if body else {}),
        )

    def _plausible(self, t: float, *, past_s: float = PLAUSIBLE_S) -> float:
        """``t``, if it can be meant: at most a day ahead and ``past_s`` ago."""
        if not -past_s <= t - self._clock() <= PLAUSIBLE_S:
            when = time.strftime("%Y-%m-%d", time.gmtime(max(t, -6e10)))
            raise NotUnderstoodError(f"its notice is for {when}, not for today")
        return t


class TokenHeaders(NamedTuple):
    """What a platform calls the headers of its session tokens."""

    ttl: str
    token: str


class SessionToken:
    """A token that the service gives for a while and wants to see in each question.

    Args:
        ask: sends a request: method, path, headers.
        path: where tokens are given.
        headers: the platform's names.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        ask: Callable[[str, str, dict[str, str]], HttpResponse],
        path: str,
        headers: TokenHeaders,
        clock: Callable[[], float],
    ) -> None:
        self._ask = ask
        self._path = path
        self._headers = headers
        self._clock = clock
        self._token = ""
        self._given_t = 0.0

    def header(self) -> dict[str, str]:
        """What goes with a question; asks for a token where there is none, or an old one."""
        age_s = self._clock() - self._given_t
        # An age below 0 means that the clock was set back: how old the token is, is not known.
        if not self._token or not 0 <= age_s < _TOKEN_RENEWED_AFTER_S:
            self.renew()
        return {self._headers.token: self._token}

    def forget(self) -> None:
        """Ask for another one next time."""
        self._token = ""

    def renew(self) -> None:
        """Ask for another one now.

        Raises:
            TokenRefusedError: the service answered, and gave none.
            NotUnderstoodError: what it gave is no token.
        """
        asked_t = self._clock()
        answer = self._ask("PUT", self._path, {self._headers.ttl: str(_TOKEN_TTL_S)})
        if answer.status != 200:
            raise TokenRefusedError(answer.status)
        if not _TOKEN.fullmatch(answer.body):
            raise NotUnderstoodError("asked for a token, it answered something else")
        self._token = answer.body.decode("ascii")
        self._given_t = asked_t


class TokenRefusedError(NotUnderstoodError):
    """The service gave no token; ``status`` is what it answered."""

    def __init__(self, status: int) -> None:
        super().__init__(f"asked for a token, it answered status {status}")
        self.status = status


class TokenWatcher(MetadataWatcher):
    """One whose service gives session tokens, at the path where EC2's does.

    Attributes:
        address: of the service, where no other is given.
        token_headers: what it calls its tokens' headers.
    """

    address: ClassVar[str]
    token_headers: ClassVar[TokenHeaders]

    def __init__(
        self,
        base_url: str | None = None,
        timeout_s: float = 1.0,
        clock: Callable[[], float] = time.time,
        max_body_bytes: int = 16_384,
        send: RequestFunction = request,
    ) -> None:
        super().__init__(
            self.address if base_url is None else base_url, timeout_s, clock, max_body_bytes, send
        )
        self._token = SessionToken(self._request, "/latest/api/token", self.token_headers, clock)


def understood(answer: HttpResponse, kind: type[_DOCUMENT]) -> _DOCUMENT:
    """The JSON document in an answer.

    Raises:
        NotUnderstoodError: another status than 200, or not such a document.
    """
    if answer.status != 200:
        raise NotUnderstoodError(f"asked for a notice, it answered status {answer.status}")
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotUnderstoodError(f"its notice cannot be read: {error}") from None
