"""Machines compared with each other: who cannot be reached, whose clock or version is the odd one.

All machines have all reports and come to the same conclusion, each for itself. Of what two machines
differ in, the many are right; where there are no many, both are named. A slow machine is one that
is both much slower than the middle one and far outside of how the others scatter (median and MAD),
among machines with the same device; two machines cannot tell who of them is slow. A slow GPU is
sick. A slow processor is a warning only: whatever else runs there makes it slow, for a while.

:class:`Company` says which machines take part in one round. Each machine counts on storage while it
is there; one is taken for present when its number was seen to go on, so that no clock is compared
and nothing that a dead process left is waited for. The first by name proposes the round; storage
decides between two proposals (they have the same number).
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from outlast.policy import MAD_SIGMA
from outlast.policy.exclusion import fewest_out
from outlast.policy.fitness import CheckResult, seconds
from outlast.units import gigabytes

CLOCK_WARNED_S: Final = 1.0
CLOCK_FAILED_S: Final = 5.0  # notices say when they end by the clock
SLOW_FACTOR: Final = 1.5
SLOW_MADS: Final = 5.0
JUDGED_AMONG: Final = 3
# A difference in these is one of programs, in others of releases that work together.
SAME: Final = ("outlast", "torch", "python", "numpy", "cuda", "nccl")
SETTLE_S: Final = 5.0  # for more machines than the fewest, after the last one came
STILL_S: Final = 15.0  # without going on, after which one is gone


class PeerLink(msgspec.Struct, frozen=True, kw_only=True):
    """What one machine has seen of the way to another.

    Attributes:
        error: why it was not reached; "" if it was.
        offset_s: the other's clock minus its own, when the answer was quickest.
        bound_s: by how much that may be off: half of the time that the answer took.
        rate_bytes: bytes a second that went there in a sealed stream, None if not tried.
    """

    error: str = ""
    offset_s: float | None = None
    bound_s: float = 0.0
    rate_bytes: float | None = None


class MachineReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one machine tells the others.

    Attributes:
        node: a name that no other has.
        machine: its name for people.
        versions: package → version.
        device: what it computes on.
        has_gpu: whether that is a GPU.
        matmul_gflops, all_reduce_bytes: its speeds, None where they could not be measured.
        links: node → what was seen of the way there.
        failed: what it found out about itself for which it should not start, in words.
    """

    node: str
    machine: str
    versions: dict[str, str] = {}
    device: str = ""
    has_gpu: bool = False
    matmul_gflops: float | None = None
    all_reduce_bytes: float | None = None
    links: dict[str, PeerLink] = {}
    failed: list[str] = []


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What all machines conclude.

    Attributes:
        findings: node → findings of the comparison.
        sick: node → why it is left out, in words; the others are fit.
    """

    findings: dict[str, list[CheckResult]]
    sick: dict[str, str]


def compare(
    reports: Sequence[MachineReport], missing: Mapping[str, str] | None = None
) -> Comparison:
    """Compare the machines of one round.

    Args:
        reports: of those that reported.
        missing: node → name of those that were there and did not report.
    """
    missing = missing or {}
    findings: dict[str, list[CheckResult]] = {one.node: [] for one in reports}
    for found in (_reach(reports, missing), _clocks(reports), _versions(reports), _speeds(reports)):
        for node, finding in found.items():
            findings[node].append(finding)
    sick = dict.fromkeys(missing, "it came and did not report")
    for one in reports:
        own = [*one.failed, *(f.seen for f in findings[one.node] if f.status == "failed")]
        if own:
            sick[one.node] = "; ".join(own)
    return Comparison(findings=findings, sick=sick)


def _reach(reports: Sequence[MachineReport], missing: Mapping[str, str]) -> dict[str, CheckResult]:
    names = {one.node: one.machine for one in reports} | dict(missing)
    broken: dict[str, dict[str, str]] = {node: {} for node in names}
    for one in reports:
        for node, link in one.links.items():
            if link.error and node in broken:
                broken[one.node][node] = link.error
                broken[node].setdefault(one.node, link.error)
    pairs = {frozenset((node, other)) for node, others in broken.items() for other in others}
    out = fewest_out((pair for pair in pairs if pair.isdisjoint(missing)), rank=str)
    found = {}
    for one in reports:
        others = broken[one.node]
        number = len(names) - 1
        said = join_names([f"{names[node]} ({why})" for node, why in sorted(others.items())])
        if not others:
            waits_s = [2 * link.bound_s for link in one.links.values() if not link.error]
            worst_s = f", an answer takes {seconds(max(waits_s))}" if waits_s else ""
            seen = f"{number} other machine{'s' * (number != 1)} reached{worst_s}"
            found[one.node] = CheckResult("peers", "ok", seen)
        elif one.node in out:
            todo = "look at the network and its firewall; name its address with --local-addr"
            found[one.node] = CheckResult("peers", "failed", f"does not reach {said}", todo)
        else:
            found[one.node] = CheckResult(
                "peers",
                "warning",
                f"does not reach {said}",
                f"look at {join_names([names[node] for node in sorted(others)])}",
            )
    return found


def _clocks(reports: Sequence[MachineReport]) -> dict[str, CheckResult]:
    names = {one.node: one.machine for one in reports}
    ahead: dict[str, list[tuple[float, float, str]]] = {one.node: [] for one in reports}
    for one in reports:
        for node, link in one.links.items():
            if node in ahead and link.offset_s is not None:
                ahead[node].append((link.offset_s, link.bound_s, names[one.node]))
                ahead[one.node].append((-link.offset_s, link.bound_s, names[node]))
    found = {}
    for node, seen_by in ahead.items():
        if seen_by:
            # The lower middle: of two others the one that agrees, so that one odd clock is alone.
            by_size = sorted(seen_by, key=lambda one: abs(one[0]))
            offset_s, bound_s, other = by_size[(len(by_size) - 1) // 2]
            whom = f"those of {len(names) - 1} others" if len(names) > 2 else f"that of {other}"
            found[node] = judge_clock(offset_s, bound_s, whom)
    return found


def judge_clock(offset_s: float, bound_s: float, whom: str, name: str = "clock") -> CheckResult:
    """A clock against another one.

    Args:
        offset_s: how far it is ahead of the other.
        bound_s: by how much that may be off.
        whom: whose clock the other is, such as "that of node-b".
        name: of the check.
    """
    certain_s = max(abs(offset_s) - bound_s, 0.0)
    figures = {"offset_s": round(offset_s, 6), "bound_s": round(bound_s, 6)}
    way = "ahead of" if offset_s > 0 else "behind"
    seen = f"{seconds(abs(offset_s))} (±{seconds(bound_s)}) {way} {whom}"
    if certain_s <= CLOCK_WARNED_S:
        return CheckResult(name, "ok", seen, figures=figures)
    failed = certain_s > CLOCK_FAILED_S
    todo = "set it (chronyd or systemd-timesyncd): notices end by the clock, stores refuse by it"
    return CheckResult(name, "failed" if failed else "warning", seen, todo, figures=figures)


def _versions(reports: Sequence[MachineReport]) -> dict[str, CheckResult]:
    odd: dict[str, list[str]] = {one.node: [] for one in reports}
    for package in SAME:
        has = {one.node: one.versions.get(package, "none") for one in reports}
        count = collections.Counter(has.values())
        if len(count) == 1:
            continue
        common, number = count.most_common(1)[0]
        for one in reports:
            mine = has[one.node]
            if 2 * number > len(reports):
                if mine != common:
                    said = f"{package} {mine} here, {common} on {number} of {len(reports)} machines"
                    odd[one.node].append(said)
            else:
                others = {
                    f"{version} on {join_names(_with(reports, package, version))}"
                    for version in count
                    if version != mine
                }
                odd[one.node].append(f"{package} {mine} here, {join_names(sorted(others))}")
    found = {}
    for node, words in odd.items():
        if words:
            todo = "install the same on every machine (one container image does)"
            found[node] = CheckResult("versions alike", "failed", "; ".join(words), todo)
        elif len(reports) > 1:
            seen = f"the same on {len(reports)} machines"
            if any(odd.values()):
                seen = "what most machines have"
            found[node] = CheckResult("versions alike", "ok", seen)
    return found


def _with(reports: Sequence[MachineReport], package: str, version: str) -> list[str]:
    return [one.machine for one in reports if one.versions.get(package, "none") == version]


class _Speed(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    unit_gflops: bool
    values: dict[str, float]  # node → the larger the better


def _speeds(reports: Sequence[MachineReport]) -> dict[str, CheckResult]:
    slow: dict[str, list[str]] = {}
    doubted: dict[str, list[str]] = {}
    for device in {one.device for one in reports}:
        alike = [one for one in reports if one.device == device]
        for speed in _measured(alike):
            for node, (said, is_certain) in _slow(speed).items():
                is_sick = is_certain and alike[0].has_gpu
                (slow if is_sick else doubted).setdefault(node, []).append(said)
    found = {}
    todo = "look at its cooling, its power limit and who else runs on it; leave it out until then"
    for one in reports:
        name, node = "speed alike", one.node
        if node in slow:
            seen = "; ".join(slow[node])
            found[node] = CheckResult(name, "failed", seen, todo)
        elif node in doubted:
            seen = "; ".join(doubted[node])
            found[node] = CheckResult(name, "warning", seen, todo)
        elif len(reports) > 1:
            found[node] = CheckResult(name, "ok", "as fast as its peers")
    return found


def _measured(alike: Sequence[MachineReport]) -> list[_Speed]:
    matmul = {one.node: one.matmul_gflops for one in alike if one.matmul_gflops is not None}
    reduce = {one.node: one.all_reduce_bytes for one in alike if one.all_reduce_bytes is not None}
    streams: dict[str, float] = {}
    for one in alike:
        rates = [link.rate_bytes for link in one.links.values() if link.rate_bytes is not None]
        if rates:
            streams[one.node] = min(rates)
    return [
        _Speed(what="matmul", unit_gflops=True, values=matmul),
        _Speed(what="all-reduce", unit_gflops=False, values=reduce),
        _Speed(what="network", unit_gflops=False, values=streams),
    ]


def _slow(speed: _Speed) -> dict[str, tuple[str, bool]]:
    """Node → why it is slow in words, and whether that is certain."""
    values = speed.values
    if len(values) < 2:
        return {}
    if len(values) < JUDGED_AMONG:
        middle = max(values.values())
        floor = middle / (2 * SLOW_FACTOR)
    else:
        middle = statistics.median(values.values())
        mad = statistics.median(abs(value - middle) for value in values.values())
        floor = min(middle / SLOW_FACTOR, middle - SLOW_MADS * MAD_SIGMA * mad)
    return {
        node: (
            f"{speed.what} {_shown(value, speed)}, its peers {_shown(middle, speed)}",
            # A network's slowness may be the other end's.
            len(values) >= JUDGED_AMONG and speed.what != "network",
        )
        for node, value in values.items()
        if value < floor
    }


def _shown(value: float, speed: _Speed) -> str:
    return f"{value:,.0f} GFLOP/s" if speed.unit_gflops else f"{gigabytes(value)}/s"


def join_names(names: Sequence[str]) -> str:
    """Names for people: a, b and c."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


# --- who takes part ------------------------------------------------------------------------------


class Company:
    """What one machine sees of the others, on any one clock.

    Args:
        me: its own name.
        min_nodes, max_nodes: machines that the job wants.
        settle_s: see ``SETTLE_S``.
        still_s: see ``STILL_S``.
    """

    def __init__(
        self,
        me: str,
        min_nodes: int,
        max_nodes: int,
        *,
        settle_s: float = SETTLE_S,
        still_s: float = STILL_S,
    ) -> None:
        self._me = me
        self._min, self._max = min_nodes, max_nodes
        self._settle_s, self._still_s = settle_s, still_s
        self._counts: dict[str, int] = {}
        self._moved_s: dict[str, float] = {}  # node → when its number was last seen to go on
        self._taken: set[str] = set()
        self._arrival_s: float | None = None

    def seen(self, counts: Mapping[str, int], now_s: float) -> None:
        """What storage holds now: node → its number."""
        for node, count in counts.items():
            before = self._counts.get(node)
            if before is not None and before != count:
                if node not in self._moved_s:
                    self._arrival_s = now_s
                self._moved_s[node] = now_s
            self._counts[node] = count
        for node in self._moved_s.keys() - counts.keys():  # it has gone on purpose
            del self._moved_s[node]

    def taken(self, nodes: Iterable[str]) -> None:
        """These are in a round already."""
        self._taken |= set(nodes)

    def present(self, now_s: float) -> list[str]:
        """Those who are here and free, this machine among them, by name."""
        alive = {
            node for node, moved_s in self._moved_s.items() if now_s - moved_s <= self._still_s
        }
        return sorted((alive | {self._me}) - (self._taken - {self._me}))

    def is_gone(self, node: str, now_s: float) -> bool:
        """Whether one that was here goes on no more."""
        moved_s = self._moved_s.get(node)
        return moved_s is None or now_s - moved_s > self._still_s

    def proposal(self, now_s: float) -> list[str]:
        """The machines of a round that this one should propose now; none while it should not."""
        present = self.present(now_s)
        if len(present) < self._min or present[0] != self._me:
            return []
        since_s = self._arrival_s if self._arrival_s is not None else now_s
        if len(present) < self._max and now_s - since_s < self._settle_s:
            return []
        return present[: self._max]
