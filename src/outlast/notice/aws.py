"""AWS EC2: the spot service's word on this machine, read from its metadata service (IMDSv2).

Each poll asks for ``spot/instance-action`` first: 404 says that nothing is planned, 200 names the
action and its time, 401 says that our session token is no longer good. The lead time is 120 s at
best; a machine that will hibernate gets none at all, so its deadline is the moment it was heard.
Where nothing is planned, two softer questions follow: ``spot/termination-time`` (the older form of
the notice, kept "for backward compatibility"; a value that is no time means none) and
``events/recommendations/rebalance`` (an early notice: it may come well before the other, with it,
or lead to nothing). Source: "Spot Instance interruption notices", "EC2 instance rebalance
recommendations" and "Use IMDSv2" in the EC2 user guide.

Guarantees: ``poll`` never raises; anything but a documented answer is no notice. What is said at
``instance-action`` wins, and counts whatever the softer questions meet; they share 0.4 s, and after
one that failed both are left out for 10 s, so they do not make the next poll late.

Rejected: IMDSv1 (may be switched off, and needs no token from whoever can make us send a GET); a
thread for the rebalance recommendation (a second token and twice the requests, for word that may
come a poll later without harm).
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import Final, Literal

import msgspec

from outlast.notice import Notice
from outlast.notice.exchange import Answer
from outlast.notice.metadata import (
    Moment,
    TokenHeaders,
    TokenWatcher,
    understood,
)
from outlast.notice.source import NotUnderstoodError, iso_utc

BASE_URL: Final = "http://169.254.169.254"
LEAD_S: Final = 120.0  # what EC2 means to give; hibernation gives none
_ACTION_PATH: Final = "/latest/meta-data/spot/instance-action"
_TIME_PATH: Final = "/latest/meta-data/spot/termination-time"
_REBALANCE_PATH: Final = "/latest/meta-data/events/recommendations/rebalance"
_HEADERS: Final = TokenHeaders("X-aws-ec2-metadata-token-ttl-seconds", "X-aws-ec2-metadata-token")
_SOFTER_S: Final = 0.4  # for both questions; with the first they fit into a polling period of 1 s
_LEFT_OUT_S: Final = 10.0
_REBALANCE_PAST_S: Final = 30 * 86_400.0  # a recommendation stands until the machine goes


class _Action(msgspec.Struct, frozen=True):
    """The document at ``spot/instance-action``."""

    action: Literal["terminate", "stop", "hibernate"]
    time: Moment


class _Rebalance(msgspec.Struct, frozen=True):
    """The document at ``events/recommendations/rebalance``."""

    notice_time: Moment = msgspec.field(name="noticeTime")


class AwsWatcher(TokenWatcher):
    """Asks the metadata service of this EC2 machine; see :class:`TokenWatcher`."""

    name = "aws"

    address = BASE_URL
    token_headers = _HEADERS
    _softer_from = 0.0  # on the monotonic clock

    def _greet(self) -> None:
        self._token.renew()

    def _ask(self) -> Notice | None:
        answer = self._get(_ACTION_PATH)
        if answer.status != 404:
            return self._planned(understood(answer, _Action))
        if time.monotonic() < self._softer_from:
            return None
        until = time.monotonic() + _SOFTER_S
        try:
            return self._terminated(until) or self._recommended(until)
        except Exception:
            self._softer_from = time.monotonic() + _LEFT_OUT_S
            raise

    def _get(self, path: str) -> Answer:
        answer = self._request("GET", path, self._token.header())
        if answer.status == 401:
            self._token.renew()
            answer = self._request("GET", path, self._token.header())
        return answer

    def _softer(self, path: str, until: float) -> Answer | None:
        # 1 ms: what is over is asked, and fails, in the words of every other answer that is late.
        left_s = min(max(0.001, until - time.monotonic()), self._timeout_s)
        answer = self._request("GET", path, self._token.header(), timeout_s=left_s)
        return None if answer.status == 404 else answer

    def _planned(self, found: _Action) -> Notice:
        due_t = self._plausible(found.time.timestamp())
        return self._once(
            found,
            action=found.action,
            deadline_t=self._clock() if found.action == "hibernate" else due_t,
            detail=f"EC2 spot: {found.action} at {found.time.isoformat()}",
        )

    def _terminated(self, until: float) -> Notice | None:
        answer = self._softer(_TIME_PATH, until)
        if answer is None:
            return None
        if answer.status != 200:
            raise NotUnderstoodError(f"asked for a notice, it answered status {answer.status}")
        try:
            due = datetime.fromisoformat(answer.body.decode("ascii").strip())
        except ValueError:
            return None  # documented: "a value that is not a time value" is no notice
        if due.tzinfo is None:
            raise NotUnderstoodError("its termination time has no time zone")
        due_t = self._plausible(due.timestamp())
        return self._once(
            due,
            action="terminate",
            deadline_t=due_t,
            detail=f"EC2 spot: terminate at {iso_utc(due_t)}",
        )

    def _recommended(self, until: float) -> Notice | None:
        answer = self._softer(_REBALANCE_PATH, until)
        if answer is None:
            return None
        found = understood(answer, _Rebalance)
        given_t = self._plausible(found.notice_time.timestamp(), past_s=_REBALANCE_PAST_S)
        return self._once(
            found,
            action="rebalance",
            deadline_t=None,
            early=True,
            detail=f"EC2 spot: rebalance recommended at {iso_utc(given_t)}",
        )
