"""Tencent Cloud, Volcengine and BytePlus: one address that holds the time when this machine goes.

Each poll asks for it. 404 or nothing means that none is planned; a time is the notice. Neither
service has session tokens.

- Tencent Cloud: ``latest/meta-data/spot/termination-time``, such as ``2018-08-18 12:05:33``, in
  UTC+8 and without saying so. Source: "Querying the Reclamation Status of a Spot Instance" in the
  CVM documentation. How far ahead it comes, the page does not say; two minutes were reported. The
  service is asked by its number: its name (``metadata.tencentyun.com``) is looked up in the
  system's own time.
- Volcengine and BytePlus: ``latest/spot_instance_termination_time``, five minutes ahead, in UTC.
  Source: "View spot instance interruption event" in BytePlus's ECS documentation. That page does
  not show the form, so a time is taken with its "Z" or without.

Guarantees: ``poll`` never raises and makes one request; 5xx, silence, a time of another form or
another year are no notice, and are counted.

What can go wrong: other clouds answer 404 at these paths too, and 404 is how nothing is said. So
with ``notice.base_url`` a service is known by what it says of the machine itself.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone
from typing import ClassVar, Final

from outlast.notice import Notice
from outlast.notice.source import MetadataWatcher, NotUnderstoodError, iso_utc, said

_CHINA: Final = timezone(timedelta(hours=8))


class SpotTimeWatcher(MetadataWatcher):
    """Asks a service that says when, and nothing else; see :class:`MetadataWatcher`.

    Attributes:
        address: of the service, where no other is given.
        lead_s: how far ahead it says so.
        path: where it says so.
        zone: of its times.
        form: of its times.
        about, known_by: where it says something of the machine, and what only it says there.
    """

    address: ClassVar[str]
    lead_s: ClassVar[float]
    path: ClassVar[str]
    zone: ClassVar[timezone]
    form: ClassVar[re.Pattern[str]]
    about: ClassVar[str]
    known_by: ClassVar[re.Pattern[bytes]]

    def _greet(self) -> None:
        answer = self._request("GET", self.about, {})
        if answer.status != 200 or not self.known_by.fullmatch(answer.body):
            raise NotUnderstoodError(f"asked about the machine, it answered status {answer.status}")

    def _ask(self) -> Notice | None:
        text = said(self._request("GET", self.path, {}))
        if not text:
            return None
        try:
            if not self.form.fullmatch(text):
                raise ValueError
            due = datetime.fromisoformat(text.removesuffix("Z")).replace(tzinfo=self.zone)
            due_t = self._plausible(due.timestamp())
        except ValueError:
            raise NotUnderstoodError("its notice cannot be read: not a time") from None
        detail = f"{self.name}: this spot machine is taken back at {iso_utc(due_t)}"
        return self._once(text, action="terminate", deadline_t=due_t, detail=detail)


class TencentWatcher(SpotTimeWatcher):
    """Asks Tencent Cloud's service."""

    name = "tencent"
    address = "http://169.254.0.23"
    lead_s = 120.0
    path = "/latest/meta-data/spot/termination-time"
    zone = _CHINA
    form = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}")
    about = "/latest/meta-data/instance-id"
    known_by = re.compile(rb"ins-[a-z0-9]{4,32}\s*")
    kind_path = "/latest/meta-data/instance/instance-type"


class VolcengineWatcher(SpotTimeWatcher):
    """Asks Volcengine's and BytePlus's service."""

    name = "volcengine"
    address = "http://100.96.0.96"
    lead_s = 300.0
    path = "/latest/spot_instance_termination_time"
    zone = UTC
    form = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}Z?")
    about = "/latest/region_id"
    kind_path = "/latest/instance_type_id"
    known_by = re.compile(rb"[a-z0-9-]{4,64}\s*")
