"""Azure: the scheduled events of this machine, from the instance metadata service.

Each poll reads ``scheduledevents``: an incarnation and a list of events, each for some machines of
the availability or scale set. Ours is found by this machine's name from ``instance/compute``,
which for scale sets is of the form ``set_3``. Preempt (at least 30 s ahead), Terminate (5 to 15
min, as set), Reboot (15 min) and Redeploy (10 min) end what runs here: hard notices, due at
NotBefore, or now when the event has started. Freeze pauses the machine for seconds: an early
notice without a deadline. Hardware that is expected to fail is announced days ahead: what is due
in more than 20 minutes is an early notice until then. Source: "Scheduled Events for Linux VMs",
API 2020-07-01.

Guarantees: ``poll`` never raises and makes at most two requests. An event for other machines, or of
a type that we do not know, is no notice; one that cannot be read does not hide the next. Of
several, the one that is due first is told. ``acknowledge`` never raises, is over in one request,
and speaks for no machine but this one.

What can go wrong: the first question switches the service on and may be answered after two
minutes. We do not wait for it: each question is given up after its time, and asked again.

Rejected: matching by the host name (a scale set's differs from the name that events use); skipping
a list whose incarnation is known (it is short, and what was heard in it must be said again).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final

import msgspec

from outlast.notice import Notice
from outlast.notice.source import (
    HttpResponse,
    MetadataWatcher,
    NotUnderstoodError,
    RequestFunction,
    iso_utc,
    request,
    understood,
)

BASE_URL: Final = "http://169.254.169.254"
LEAD_S: Final = 30.0  # the least that is documented for Preempt
_EVENTS: Final = "/metadata/scheduledevents?api-version=2020-07-01"
_COMPUTE: Final = "/metadata/instance/compute?api-version=2021-02-01"
_HEADERS: Final = {"Metadata": "true"}
_BODY_BYTES_MAX: Final = 262_144  # an event may name each machine of a large scale set
_HARD: Final = ("Preempt", "Terminate", "Reboot", "Redeploy")
_HARD_FROM_S: Final = 1200.0  # above the longest that a planned event is announced ahead, 15 min
_PLAUSIBLE_S: Final = 30 * 86_400.0


class _ScheduledEvent(msgspec.Struct, frozen=True):
    """One scheduled event; what else is in it does not matter here."""

    id: str = msgspec.field(name="EventId")
    type: str = msgspec.field(name="EventType")
    status: str = msgspec.field(name="EventStatus")
    resources: tuple[str, ...] = msgspec.field(name="Resources")
    not_before: str = msgspec.field(name="NotBefore", default="")


class _Events(msgspec.Struct, frozen=True):
    """The document at ``scheduledevents``."""

    incarnation: int = msgspec.field(name="DocumentIncarnation")
    events: tuple[_ScheduledEvent, ...] = msgspec.field(name="Events")


class _Compute(msgspec.Struct, frozen=True):
    """What we need of the document at ``instance/compute``."""

    name: str


class AzureWatcher(MetadataWatcher):
    """Asks the metadata service of this Azure machine; see :class:`MetadataWatcher`."""

    name = "azure"
    kind_path = "/metadata/instance/compute/vmSize?api-version=2021-02-01&format=text"

    def __init__(
        self,
        base_url: str = BASE_URL,
        timeout_s: float = 1.0,
        clock: Callable[[], float] = time.time,
        send: RequestFunction = request,
    ) -> None:
        super().__init__(base_url, timeout_s, clock, _BODY_BYTES_MAX, send)
        self._own_name = ""
        self._only_ours: set[str] = set()  # events that name no other machine

    def acknowledge(self, notice: Notice) -> bool:
        """Tell Azure that it need not wait; see :class:`outlast.notice.Acknowledger`.

        Not for an event that names other machines too: approved by one, it begins on all of them.
        """
        if notice.source != self.name or notice.event not in self._only_ours:
            return False
        body = msgspec.json.encode({"StartRequests": [{"EventId": notice.event}]})
        headers = {**_HEADERS, "Content-Type": "application/json"}
        try:
            return self._request("POST", _EVENTS, headers, body=body).status == 200
        except Exception as error:  # noqa: BLE001 - not approved: the machine goes when it is due
            self._count(error)
            return False

    def _greet(self) -> None:
        self._learn_name()

    def _ask(self) -> Notice | None:
        # The events first: this question switches the service on, which takes a while.
        answer = self._request("GET", _EVENTS, _HEADERS)
        found = understood(answer, _Events)
        if not self._own_name:
            self._learn_name()
        own = self._own_name.lower()
        ours = [event for event in found.events if own in map(str.lower, event.resources)]
        self._only_ours = {event.id for event in ours if len(event.resources) == 1}
        told: list[Notice] = []
        for event in ours:
            try:
                if notice := self._meant(event):
                    told.append(notice)
            except NotUnderstoodError as error:
                self._count(error)  # what the others say still holds
        return min(told, key=_due_t, default=None)

    def _about(self, path: str) -> HttpResponse:
        return self._request("GET", path, _HEADERS)

    def _learn_name(self) -> None:
        name = understood(self._request("GET", _COMPUTE, _HEADERS), _Compute).name
        if not name:
            raise NotUnderstoodError("it does not say what this machine is called")
        self._own_name = name

    def _meant(self, event: _ScheduledEvent) -> Notice | None:
        now = self._clock()
        if event.status not in ("Scheduled", "Started"):
            return None
        if event.type == "Freeze":
            return self._tell(event, None, early=True)
        if event.type not in _HARD:
            return None
        if event.status == "Started" or not event.not_before:
            return self._tell(event, now, early=False)
        due_t = _moment(event.not_before)
        if abs(due_t - now) > _PLAUSIBLE_S:
            raise NotUnderstoodError(f"its notice is for {event.not_before}")
        early = event.type != "Preempt" and due_t - now > _HARD_FROM_S
        return self._tell(event, due_t, early=early)

    def _tell(self, event: _ScheduledEvent, due_t: float | None, *, early: bool) -> Notice:
        return self._once(
            (event, early),
            action=event.type.lower(),
            deadline_t=due_t,
            early=early,
            event=event.id,
            detail=f"Azure: {event.type}" + (f" at {iso_utc(due_t)}" if due_t is not None else ""),
        )


def _moment(text: str) -> float:
    """Seconds since the epoch of an RFC 1123 date, such as Mon, 19 Sep 2016 18:29:47 GMT."""
    try:
        found = parsedate_to_datetime(text)
        return found.replace(tzinfo=found.tzinfo or UTC).timestamp()
    except (ValueError, TypeError, OverflowError, IndexError):
        raise NotUnderstoodError("its notice cannot be read: NotBefore is not a date") from None


def _due_t(notice: Notice) -> float:
    return float("inf") if notice.deadline_t is None else notice.deadline_t
