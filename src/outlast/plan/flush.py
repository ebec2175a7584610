"""Whether the state leaves the machine within the notice.

Feasible if and only if poll + http + agreement + step tail + bytes/bandwidth + fsync + margin ≤
notice. Bytes and bandwidth are one machine's; bandwidths of machines that write to one place are
not independent, which only a measurement shows.
"""

from __future__ import annotations

import math

import msgspec


class Flush(msgspec.Struct, frozen=True, kw_only=True):
    """An emergency save, in seconds, one machine's bytes and bytes per second.

    Attributes:
        state_bytes: what this machine has to write.
        bandwidth_bytes_per_s: to a place that outlives the machine.
        notice_s: from the platform's word until the machine is gone.
        poll_s: until we ask the platform again, at worst.
        http_s: until it has answered.
        agreement_s: until all ranks know at which step they stop.
        step_s: until that step is over.
        fsync_s: until what was written is durable.
        margin_s: kept for what was not thought of.
    """

    state_bytes: float
    bandwidth_bytes_per_s: float
    notice_s: float
    poll_s: float = 5.0
    http_s: float = 2.0
    agreement_s: float = 0.0
    step_s: float = 10.0
    fsync_s: float = 0.0
    margin_s: float = 10.0

    @property
    def before_s(self) -> float:
        """Seconds that pass before the first byte is written."""
        return self.poll_s + self.http_s + self.agreement_s + self.step_s

    @property
    def write_s(self) -> float:
        """Seconds of writing: bytes over bandwidth."""
        return self.state_bytes / self.bandwidth_bytes_per_s

    @property
    def total_s(self) -> float:
        """Everything, with the margin."""
        return self.before_s + self.write_s + self.fsync_s + self.margin_s

    @property
    def fits(self) -> bool:
        """Whether everything is over when the machine goes."""
        return self.total_s <= self.notice_s

    @property
    def left_s(self) -> float:
        """Seconds that are left for writing."""
        return self.notice_s - self.before_s - self.fsync_s - self.margin_s

    @property
    def needed_bytes_per_s(self) -> float:
        """Bandwidth at which it just fits; inf when nothing is left for writing."""
        return self.state_bytes / self.left_s if self.left_s > 0 else math.inf

    @property
    def needed_bare_bytes_per_s(self) -> float:
        """The same if nothing but writing took any time."""
        return self.state_bytes / self.notice_s
