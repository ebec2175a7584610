"""Whether the machines that are here begin, or wait a little for others that are on their way."""

from __future__ import annotations

from outlast.policy.orders import MembershipRules


class Gathering:
    """Remembers since when enough are here.

    Attributes:
        waits_for: in words, what is waited for; "" when an attempt begins.
    """

    def __init__(self) -> None:
        self.waits_for = ""
        self._enough_s: float | None = None

    def begins(
        self,
        count: int,
        now_s: float,
        rules: MembershipRules,
        *,
        at_once: bool,
        warming: bool,
        arrival_s: float,
        fixed: int,
    ) -> bool:
        """Whether ``count`` machines begin now.

        Args:
            count: those that are ready and may be in the attempt.
            now_s: now.
            rules: of the job.
            at_once: whether an attempt ran just now, so that nobody else is waited for.
            warming: whether others are here that will be ready soon.
            arrival_s: when the last one came.
            fixed: the number of machines that the data are tied to, or 0.
        """
        self.waits_for = ""
        if count < rules.min_nodes:
            self.waits_for = f"machines: {count} of {rules.min_nodes} are here"
            if fixed:
                self.waits_for += f", and the job's loader is tied to {fixed}"
            self._enough_s = None
            return False
        if self._enough_s is None:
            self._enough_s = now_s
        if at_once or count >= rules.max_nodes:
            return True
        if warming and now_s - self._enough_s < rules.warm_s:
            self.waits_for = "machines that warm up"
            return False
        is_quiet = now_s - arrival_s >= rules.gather_s
        if is_quiet or now_s - self._enough_s >= rules.gather_longest_s:
            return True
        self.waits_for = f"more machines: {count} of at most {rules.max_nodes} are here"
        return False
