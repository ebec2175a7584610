"""What the owner wants of the machines, and what the coordinator's mind can order."""

from __future__ import annotations

import enum

import msgspec

from outlast.policy.exclusion import Exclusion
from outlast.policy.succession import ASKS_PER_S


class MembershipRules(msgspec.Struct, frozen=True, kw_only=True):
    """What the owner wants, and how long things are waited for; times in seconds.

    Attributes:
        min_nodes, max_nodes: machines in an attempt.
        gather_s: for more machines than the fewest, when nothing runs, after the last one came.
        warm_s: for machines that are warming up, when nothing runs.
        gather_max_s: for more machines than the fewest, however steadily they come.
        stop_s: for a living member to end its workers.
        gentle_s: for the same at a step's end, which may take long.
        gentle_factor: times the longest step and save that were seen lately, once they were.
        gentle_least_s: for the same, however short they were.
        drain_s: for the same where a machine leaves and the workers of the first have ended.
        patience_s: that those without a majority leave to the others.
        begin_s: for an agent to start its workers once it was told to.
        settle_s: for more words about who cannot reach whom.
        expect_s: for members of the last attempt to come to a new coordinator, after the last.
        expect_max_s: the same, however steadily they come.
    """

    min_nodes: int
    max_nodes: int
    gather_s: float = 3.0
    gather_max_s: float = 15.0
    warm_s: float = 60.0
    stop_s: float = 5.0
    gentle_s: float = 600.0
    gentle_factor: float = 5.0
    gentle_least_s: float = 10.0
    drain_s: float = 30.0
    patience_s: float = 6.0
    begin_s: float = 2.0
    settle_s: float = 1.0
    expect_s: float = 3.0
    expect_max_s: float = 15.0

    @property
    def gather_longest_s(self) -> float:
        """As ``gather_max_s``, and longer for very many machines, which come one by one."""
        return max(self.gather_max_s, 2 * self.max_nodes / ASKS_PER_S)


class RosterPhase(enum.Enum):
    """Where the job is."""

    GATHERING = "gathering"
    STOPPING = "stopping"
    FORMING = "forming"
    RUNNING = "running"
    ENDED = "ended"


class StopWorkers(msgspec.Struct, frozen=True, kw_only=True):
    """To all members: end your workers (``gentle``: at a step's end) and get ready."""

    reason: str
    gentle: bool = False


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """Claim ``attempt`` on storage, then start it; without the claim only if not ``required``."""

    attempt: int
    members: tuple[str, ...]
    required: bool


class Leaves(msgspec.Struct, frozen=True, kw_only=True):
    """To all: ``node`` will go; ``goes_on``: enough others stay."""

    node: str
    goes_on: bool


class Excludes(msgspec.Struct, frozen=True, kw_only=True):
    """To all: a machine is left out; ``goes``: enough others stay, so that it really is."""

    out: Exclusion
    goes: bool


class EndJob(msgspec.Struct, frozen=True, kw_only=True):
    """To all: the job is over."""

    exit_code: int
    reason: str


Order = StopWorkers | Form | Leaves | Excludes | EndJob
