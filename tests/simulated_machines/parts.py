"""What surrounds the decisions: costs, storage, and what a machine remembers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from outlast.planner.job import Clock


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """How long things take, in seconds; the first five are of one thread of the coordinator.

    Attributes:
        receive_s, send_s: one small message.
        accept_s: one connection, with both proofs.
        seal_bytes_s: bytes sealed and handed to the kernel in a second.
        member_bytes: of one machine in the list that an attempt starts with, packed.
        wire_bytes_s: bytes that leave its machine in a second.
        latency_s: of the network.
        silence_s: how long a machine may be silent.
        storage_s: median of one question to storage.
        stop_s: median for a machine to end its workers.
        warm_s: until a machine that comes back is ready.
    """

    receive_s: float = 40e-6
    send_s: float = 25e-6
    accept_s: float = 300e-6
    seal_bytes_s: float = 1e9
    member_bytes: float = 24.0
    wire_bytes_s: float = 3e9
    latency_s: float = 0.2e-3
    silence_s: float = 3.0
    storage_s: float = 0.02
    stop_s: float = 0.08
    warm_s: float = 30.0


class Server:
    """Something that does one thing after the other, such as a thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._free_s = 0.0
        self.busy_s = 0.0

    def spend(self, cost_s: float) -> float:
        """Be busy for so long, after what was asked before: how long from now until it is done."""
        self._free_s = max(self._free_s, self._clock.now_s) + cost_s
        self.busy_s += cost_s
        return self._free_s - self._clock.now_s


class Storage:
    """Claims and signs of life, with a latency, counted by kind and second."""

    def __init__(self, clock: Clock, chance: random.Random, median_s: float) -> None:
        self._clock, self._chance, self._median_s = clock, chance, median_s
        self.claims: dict[int, int] = {}
        self.sign: tuple[int, int] = (0, 0)
        self.counts: Counter[str] = Counter()
        self.by_second: Counter[int] = Counter()

    def ask(self, kinds: tuple[str, ...], then: Callable[[], None]) -> None:
        """Some questions, one after the other; ``then`` looks at what is there."""
        self.counts.update(kinds)
        self.by_second[int(self._clock.now_s)] += len(kinds)
        took_s = sum(self._median_s * self._chance.lognormvariate(0, 0.5) for _ in kinds)
        self._clock.after(took_s, then)

    @property
    def newest(self) -> int:
        """The largest number that is claimed."""
        return max(self.claims, default=0)

    def take(self, node: int, number: int, known: int) -> bool:
        """As the runtime's claims are taken."""
        newest = self.newest
        if newest > number or (newest > known and self.claims[newest] != node):
            return False
        wanted = sorted({min(newest + 1, number), number})
        return all(self.claims.setdefault(one, node) == node for one in wanted)


class Machine:
    """One machine; ``life`` counts its processes, so that words to a dead one are not heard."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.life = 0
        self.is_up = False
        self.is_warming = False
        self.follows: Any = None  # a coordinator
        self.attempt = 0
        self.members: tuple[str, ...] = ()
        self.past = 0  # attempts whose workers have ended
        self.leaves = False
        self.sign: tuple[tuple[int, int], float] | None = None

    @property
    def name(self) -> str:
        """Its agent's name: another in each life."""
        return f"{self.number}.{self.life}"


class Formed(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt: moments in seconds of the virtual clock.

    Attributes:
        attempt: its number.
        machines: in it.
        lost_s: of what ended the one before: the first loss since, or the order to stop.
        stop_s: of the order to stop.
        form_s: when all were ready.
        claimed_s: when its number was claimed.
        told_s: when the last machine had heard.
        cause: in words.
    """

    attempt: int
    machines: int
    lost_s: float
    stop_s: float
    form_s: float
    claimed_s: float
    told_s: float
    cause: str
