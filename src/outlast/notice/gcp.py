"""Google Cloud: three keys of the metadata server, each behind a GET that hangs until it changes.

``instance/preempted`` turns from FALSE to TRUE when a Spot machine is taken back: 30 s are left
then. Where ``preemptionNoticeDuration`` is set on the machine it is 120 s more, but the server
does not tell the machine so; our deadline is the earlier one. ``instance/maintenance-event`` is
NONE, MIGRATE_ON_HOST_MAINTENANCE (the machine moves and goes on: an early notice without a
deadline) or TERMINATE_ON_HOST_MAINTENANCE, 60 s ahead, or an hour ahead on machines with GPUs (an
early notice with its deadline, and a hard one for the last two minutes). The server gives the 60 s
only to a machine that has asked since its last maintenance, which these watchers do.
``instance/shutdown-details/stop-state`` turns to PENDING_STOP when somebody stops or deletes a
machine whose graceful shutdown is on (or its maximum run time ends): the system goes on until the
work is done, for at most the time that was set, which is not told. So that is a notice without a
deadline. Machines without the feature answer 404 there, and are asked again each minute. Source:
the guest agent's own watcher (google-guest-agent, ``events/gracefulshutdown``), "Graceful shutdown
overview", "Spot VMs", "Query the metadata server for maintenance event notices" and "View and query
VM metadata" (``wait_for_change``, ``last_etag``, ``timeout_sec``) in the Compute Engine
documentation.

Guarantees: ``poll`` never raises and is over in 22 s. Only an answer with ``Metadata-Flavor:
Google`` and one of the documented values is believed. The first question does not hang, so a word
that stands already is heard at once. What hangs is heard the moment it changes.

What can go wrong: a connection that dies without a word, as in a live migration, is noticed only
when its time is over. That is why a question hangs for 20 s and not for the minutes that are
allowed: less than the 30 s that are left after a preemption. A server that does not wait is asked
once in each polling period, by the thread that polls.

Rejected: one watcher for all keys (``?recursive=true`` on ``instance/`` wakes for each change of
any attribute, and shows us the machine's tokens).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Final
from urllib.parse import quote

from outlast.notice import Notice
from outlast.notice.source import (
    HttpResponse,
    MetadataWatcher,
    NotUnderstoodError,
    RequestFunction,
    iso_utc,
    request,
)

BASE_URL: Final = "http://169.254.169.254"  # by number: a name is looked up in its own time
LEAD_S: Final = 30.0
HANG_S: Final = 20
_SLACK_S: Final = 2.0
MAINTENANCE_LEAD_S: Final = 60.0
GPU_MAINTENANCE_LEAD_S: Final = 3600.0
ABSENT_S: Final = 60.0  # until a key that is not there is asked for again
_HARD_FROM_S: Final = 120.0  # of the hour that machines with GPUs get


class GcpWatcher(MetadataWatcher):
    """Asks one key of the metadata server of this machine.

    Args:
        base_url: the service's address, ``http://HOST[:PORT]``.
        lead_s: how long before the end the key changes; what is documented where None.
        hang_s: how long a question hangs.
        timeout_s: limit on a question that does not hang; see :class:`MetadataWatcher`.
        clock: seconds since the epoch.
        send: sends one request; replaced in tests.
    """

    key = ""
    usual_lead_s = LEAD_S
    hangs = True
    kind_path = "/computeMetadata/v1/instance/machine-type"  # projects/N/machineTypes/KIND

    def __init__(
        self,
        base_url: str = BASE_URL,
        *,
        lead_s: float | None = None,
        hang_s: int = HANG_S,
        timeout_s: float = 1.0,
        clock: Callable[[], float] = time.time,
        send: RequestFunction = request,
    ) -> None:
        super().__init__(base_url, timeout_s, clock, send=send)
        self._lead_s = self.usual_lead_s if lead_s is None else lead_s
        self._hang_s = hang_s
        self._etag = ""

    def _greet(self) -> None:
        self._value(self._get(""))

    def _ask(self) -> Notice | None:
        etag, self._etag = self._etag, ""  # after an error, the value is asked for at once
        hang_s = self._hang_for_s()
        if etag and hang_s > 0:
            query = f"?wait_for_change=true&last_etag={quote(etag, safe='')}&timeout_sec={hang_s}"
            answer = self._get(query, timeout_s=hang_s + _SLACK_S)
        else:
            answer = self._get("")
        notice = self._meant(self._value(answer))
        self._etag = answer.headers.get("etag", "")
        return notice

    def _hang_for_s(self) -> int:
        """How long the next question may hang; less where we have to speak before."""
        return self._hang_s

    def _get(self, query: str, timeout_s: float | None = None) -> HttpResponse:
        target = f"/computeMetadata/v1/instance/{self.key}{query}"
        return self._request("GET", target, {"Metadata-Flavor": "Google"}, timeout_s=timeout_s)

    def _about(self, path: str) -> HttpResponse:
        answer = self._request("GET", path, {"Metadata-Flavor": "Google"})
        self._value(answer)
        return answer

    def _value(self, answer: HttpResponse) -> str:
        if answer.status != 200:
            raise NotUnderstoodError(f"asked for a notice, it answered status {answer.status}")
        if answer.headers.get("metadata-flavor") != "Google":
            raise NotUnderstoodError("what answers is not Google's metadata server")
        return answer.body.decode("ascii", "replace").strip()

    def _meant(self, value: str) -> Notice | None:
        raise NotImplementedError


class PreemptedWatcher(GcpWatcher):
    """Hears that this Spot machine is being taken back."""

    name = "gcp"
    key = "preempted"

    def _meant(self, value: str) -> Notice | None:
        if value == "FALSE":
            self._heard.clear()
            return None
        if value != "TRUE":
            raise NotUnderstoodError("its notice cannot be read: neither TRUE nor FALSE")
        return self._once(
            value,
            action="preempt",
            deadline_t=self._clock() + self._lead_s,
            detail="Compute Engine: this machine is preempted",
        )


class MaintenanceWatcher(GcpWatcher):
    """Hears that this machine's host goes into maintenance."""

    name = "gcp-maintenance"
    key = "maintenance-event"
    usual_lead_s = MAINTENANCE_LEAD_S
    _ends_t: float | None = None

    def _hang_for_s(self) -> int:
        if self._ends_t is None:
            return self._hang_s
        left_s = self._ends_t - _HARD_FROM_S - self._clock()
        return self._hang_s if left_s < 0 else min(self._hang_s, int(left_s))

    def _meant(self, value: str) -> Notice | None:
        if value == "TERMINATE_ON_HOST_MAINTENANCE":
            if self._ends_t is None:
                self._ends_t = self._clock() + self._lead_s
            early = self._ends_t - self._clock() > _HARD_FROM_S
            return self._once(
                (value, early),
                action="terminate",
                deadline_t=self._ends_t,
                early=early,
                detail=f"Compute Engine: ended for maintenance at {iso_utc(self._ends_t)}",
            )
        self._ends_t = None
        if value == "NONE":
            self._heard.clear()
            return None
        if value != "MIGRATE_ON_HOST_MAINTENANCE":
            raise NotUnderstoodError("its notice cannot be read: not a maintenance event")
        return self._once(
            value,
            action="migrate",
            deadline_t=None,
            early=True,
            detail="Compute Engine: this machine moves to another host and goes on",
        )


class StopWatcher(GcpWatcher):
    """Hears that somebody stops this machine, which waits for what runs on it."""

    name = "gcp-stop"
    key = "shutdown-details/stop-state"
    _absent_until = 0.0  # on the monotonic clock

    def _ask(self) -> Notice | None:
        if time.monotonic() < self._absent_until:
            return None
        return super()._ask()

    def _value(self, answer: HttpResponse) -> str:
        if answer.status == 404 and answer.headers.get("metadata-flavor") == "Google":
            self._absent_until = time.monotonic() + ABSENT_S
            return ""
        return super()._value(answer)

    def _meant(self, value: str) -> Notice | None:
        if value == "PENDING_STOP":
            detail = "Compute Engine: this machine is being stopped, and waits for its work"
            return self._once(value, action="stop", deadline_t=None, detail=detail)
        self._heard.clear()
        if not re.fullmatch("[A-Z_]{0,40}", value):
            raise NotUnderstoodError("its notice cannot be read: not a state")
        return None
