"""AWS EC2: the spot service's word on this machine, read from its metadata service (IMDSv2).

Each poll asks for ``spot/instance-action`` first: 404 says that nothing is planned, 200 names the
action and its time, 401 says that our session token is no longer good. The lead time is 120 s at
best; a machine that will hibernate gets none at all, so its deadline is the moment it was heard.
Where nothing is planned, three softer questions follow: ``spot/termination-time`` (the older form
of the notice, kept "for backward compatibility"; a value that is no time means none),
``autoscaling/target-lifecycle-state`` (of a machine that an Auto Scaling group ends by itself, as
capacity rebalancing does before any interruption is announced: a notice without a time, since only
the group knows how long its lifecycle hooks wait) and ``events/recommendations/rebalance`` (an
early notice: it may come well before the others, with them, or lead to nothing). Source: "Spot
Instance interruption notices", "EC2 instance rebalance recommendations" and "Use IMDSv2" in the EC2
user guide, "Retrieve the target lifecycle state through instance metadata" in that of EC2 Auto
Scaling.

Guarantees: ``poll`` never raises; anything but a documented answer is no notice. What is said at
``instance-action`` wins, and counts whatever the softer questions meet. These are put in the first
poll and then in every fifth, or 5 s after the last time if that comes first: a poll is processor
time that training could have had. They share 0.4 s, and after one that failed all are left out
for 10 s, so they do not make the next poll late.

What can go wrong: a notice that is given at ``termination-time`` alone is heard 5 s later than it
could be, of the 120 s. Where a group has no termination hook, its machine may be shut down before
that state is asked for; the system's own SIGTERM is heard then.

Rejected: IMDSv1 (may be switched off, and needs no token from whoever can make us send a GET); a
thread for the rebalance recommendation (a second token and twice the requests, for word that may
come a poll later without harm).
"""

from __future__ import annotations

import math
import time
from datetime import datetime
from typing import Final, Literal

import msgspec

from outlast.notice import Notice
from outlast.notice.source import (
    HttpResponse,
    Moment,
    NotUnderstoodError,
    TokenHeaders,
    TokenWatcher,
    iso_utc,
    said,
    understood,
)

BASE_URL: Final = "http://169.254.169.254"
LEAD_S: Final = 120.0  # what EC2 means to give; hibernation gives none
_ACTION_PATH: Final = "/latest/meta-data/spot/instance-action"
_TIME_PATH: Final = "/latest/meta-data/spot/termination-time"
_LIFECYCLE_PATH: Final = "/latest/meta-data/autoscaling/target-lifecycle-state"
_ENDED: Final = ("Terminated", "Warmed:Terminated")
_REBALANCE_PATH: Final = "/latest/meta-data/events/recommendations/rebalance"
_HEADERS: Final = TokenHeaders("X-aws-ec2-metadata-token-ttl-seconds", "X-aws-ec2-metadata-token")
_SOFTER_S: Final = 0.4  # for both questions; with the first they fit into a polling period of 1 s
_SOFTER_EVERY_S: Final = 5.0
_SOFTER_EVERY: Final = 5  # polls
_LEFT_OUT_S: Final = 10.0
_REBALANCE_PAST_S: Final = 30 * 86_400.0  # a recommendation stands until the machine goes


class _InstanceAction(msgspec.Struct, frozen=True):
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
    kind_path = "/latest/meta-data/instance-type"
    _softer_from = 0.0  # on the monotonic clock
    _softer_poll = 0.0  # the number of the poll, if that comes first
    _softer_said: Notice | None = None

    def _greet(self) -> None:
        self._token.renew()

    def _ask(self) -> Notice | None:
        answer = self._get(_ACTION_PATH)
        if answer.status != 404:
            return self._planned(understood(answer, _InstanceAction))
        if not self._is_softer_due():
            return self._softer_said
        until = time.monotonic() + _SOFTER_S
        try:
            self._softer_said = (
                self._terminated(until) or self._scaled_in(until) or self._recommended(until)
            )
        except Exception:
            self._softer_said = None
            self._next_softer(_LEFT_OUT_S, math.inf)
            raise
        self._next_softer(_SOFTER_EVERY_S, _SOFTER_EVERY)
        return self._softer_said

    def _is_softer_due(self) -> bool:
        return time.monotonic() >= self._softer_from or self.polls >= self._softer_poll

    def _next_softer(self, wait_s: float, polls: float) -> None:
        self._softer_from = time.monotonic() + wait_s
        self._softer_poll = self.polls + polls

    def _get(self, path: str) -> HttpResponse:
        answer = self._request("GET", path, self._token.header())
        if answer.status == 401:
            self._token.renew()
            answer = self._request("GET", path, self._token.header())
        return answer

    def _about(self, path: str) -> HttpResponse:
        return self._get(path)

    def _softer(self, path: str, until: float) -> HttpResponse | None:
        # 1 ms: what is over is asked, and fails, in the words of every other answer that is late.
        left_s = min(max(0.001, until - time.monotonic()), self._timeout_s)
        answer = self._request("GET", path, self._token.header(), timeout_s=left_s)
        return None if answer.status == 404 else answer

    def _planned(self, found: _InstanceAction) -> Notice:
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
        try:
            due = datetime.fromisoformat(said(answer))
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

    def _scaled_in(self, until: float) -> Notice | None:
        answer = self._softer(_LIFECYCLE_PATH, until)
        if answer is None:
            return None
        state = said(answer)
        if state not in _ENDED:
            return None
        detail = "EC2 Auto Scaling: the group ends this machine"
        return self._once(state, action="terminate", deadline_t=None, detail=detail)

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
            event=iso_utc(given_t),  # it has no id, and two of them are two
            detail=f"EC2 spot: rebalance recommended at {iso_utc(given_t)}",
        )
