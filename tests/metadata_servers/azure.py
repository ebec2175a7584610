"""Azure's metadata service on 127.0.0.1, with scheduled events on demand and faults.

Its answers are those of "Scheduled Events for Linux VMs" (2020-07-01): ``Metadata: true`` and a
known ``api-version`` are needed, each change has another incarnation, the first question switches
the service on and takes a while, an approved event is started. Guarantees as in
``metadata_server_base``.
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Callable, Sequence
from email.utils import formatdate
from typing import Any, Final

from outlast.drill.metadata_server import IncomingRequest, MetadataAnswer, MetadataServer

EVENTS_PATH: Final = "/metadata/scheduledevents"
COMPUTE_PATH: Final = "/metadata/instance/compute"
KIND_PATH: Final = "/metadata/instance/compute/vmSize"
_VERSIONS: Final = {
    EVENTS_PATH: ("2019-08-01", "2020-07-01"),
    COMPUTE_PATH: ("2020-09-01", "2021-02-01"),
    KIND_PATH: ("2020-09-01", "2021-02-01"),
}
_JSON: Final = (("Content-Type", "application/json; charset=utf-8"),)


class AzureMetadataServer(MetadataServer):
    """Azure's service; see :class:`MetadataServer`.

    Args:
        clock: seconds since the epoch.
        own_name: what this machine is called, in a scale set such as ``set_3``.
        first_answer_s: how long after the first question about events the service is on.
    """

    software = "IMDS/150.870.65.1854"

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        own_name: str = "set_3",
        first_answer_s: float = 0.0,
    ) -> None:
        super().__init__(clock)
        self.own_name = own_name
        self._first_answer_s = first_answer_s
        self._on_from: float | None = None
        self._incarnations = itertools.count(1)
        self._incarnation = next(self._incarnations)
        self._events: dict[str, dict[str, Any]] = {}

    def preempt(
        self,
        in_s: float = 30.0,
        kind: str = "Preempt",
        resources: Sequence[str] | None = None,
    ) -> float:
        """Schedule an event for this machine, or for ``resources``; returns when it is due."""
        deadline_t = float(int(self._clock() + in_s))
        event = str(uuid.uuid4()).upper()
        with self._changed:
            self._events[event] = {
                "EventId": event,
                "EventStatus": "Scheduled",
                "EventType": kind,
                "ResourceType": "VirtualMachine",
                "Resources": [self.own_name] if resources is None else list(resources),
                "NotBefore": formatdate(deadline_t, usegmt=True),
                "Description": "",
                "EventSource": "Platform",
                "DurationInSeconds": 5 if kind == "Freeze" else -1,
            }
            self._incarnation = next(self._incarnations)
        return deadline_t

    def begin(self) -> None:
        """Start all events that are scheduled."""
        with self._changed:
            for event in self._events:
                self._start(event)

    def withdraw(self) -> None:
        """Take all events back."""
        with self._changed:
            self._events.clear()
            self._incarnation = next(self._incarnations)

    def _start(self, event: str) -> None:
        self._events[event] |= {"EventStatus": "Started", "NotBefore": ""}
        self._incarnation = next(self._incarnations)

    def _correct(self, asked: IncomingRequest) -> MetadataAnswer:
        if asked.path not in _VERSIONS:
            return MetadataAnswer(404)
        if asked.headers.get("Metadata", "").lower() != "true":
            return MetadataAnswer(
                400, b'{"error":"Bad request. Required metadata header not specified"}'
            )
        if "X-Forwarded-For" in asked.headers:
            return MetadataAnswer(400)
        (version,) = asked.query.get("api-version", [""])
        if version not in _VERSIONS[asked.path]:
            return MetadataAnswer(400, b'{"error":"Bad request. api-version is invalid"}')
        if asked.path == COMPUTE_PATH:
            return self._compute(asked)
        if asked.path == KIND_PATH:
            is_text = asked.query.get("format") == ["text"]
            return MetadataAnswer(200, self.kind.encode()) if is_text else MetadataAnswer(400)
        self._switch_on()
        if asked.method == "POST":
            return self._approved(asked.body)
        if asked.method != "GET":
            return MetadataAnswer(405, b"", (("Allow", "GET, POST"),))
        return _json(
            {"DocumentIncarnation": self._incarnation, "Events": list(self._events.values())}
        )

    def _compute(self, asked: IncomingRequest) -> MetadataAnswer:
        if asked.method != "GET":
            return MetadataAnswer(405, b"", (("Allow", "GET"),))
        return _json(
            {
                "azEnvironment": "AzurePublicCloud",
                "name": self.own_name,
                "osProfile": {"computerName": "set000003"},
                "vmScaleSetName": self.own_name.partition("_")[0],
            }
        )

    def _switch_on(self) -> None:
        if self._on_from is None:
            self._on_from = time.monotonic() + self._first_answer_s
        while not self.closing and (left_s := self._on_from - time.monotonic()) > 0:
            self._changed.wait(left_s)

    def _approved(self, body: bytes) -> MetadataAnswer:
        try:
            wanted = [str(one["EventId"]) for one in json.loads(body)["StartRequests"]]
        except (ValueError, KeyError, TypeError):
            return MetadataAnswer(400)
        if not wanted or any(event not in self._events for event in wanted):
            return MetadataAnswer(400)
        for event in wanted:
            self._start(event)
        return MetadataAnswer(200)


def _json(document: object) -> MetadataAnswer:
    return MetadataAnswer(200, json.dumps(document).encode(), _JSON)
