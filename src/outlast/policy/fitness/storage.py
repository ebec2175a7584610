"""Judging a place for checkpoints: does it do what a commit needs, has it room, is it fast enough.

A commit is a file written and fsynced, then a small file that names it. So what is looked at is
what those need: writing, fsync, a rename that lasts, a put that only one of two can win, free
space, and bytes per second against the seconds that a notice leaves.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Final

import msgspec

from outlast.policy.drain import AGREEMENT_S, HTTP_S, bandwidth_needed, leaving_s
from outlast.policy.fitness.finding import CheckResult, gigabytes, seconds

SLOW_COMMIT_S: Final = 5.0  # a small file, durable: claims and manifests wait for it
LEAST_FREE_BYTES: Final = 1 << 30
_TODO: Final = {
    errno.EROFS: "remount it for writing, or name another place",
    errno.ENOSPC: "free some space (outlast checkpoints prune), or name another place",
    errno.EDQUOT: "free some of the quota, or name another place",
    errno.EACCES: "give this user the right to write there, or name another place",
    errno.EPERM: "give this user the right to write there, or name another place",
    errno.EIO: "look at the disk and at the kernel's log (dmesg), or name another place",
    errno.ESTALE: "mount it anew",
    errno.ETIMEDOUT: "look at the server and at the network to it",
}
_STAGES: Final = {
    "open": "cannot be used",
    "small": "takes no small file",
    "conditional": "cannot decide who of two comes first (conditional put)",
    "big": "takes no data",
    "lock": "cannot be locked",
    "read": "does not give back what was written",
    "remove": "lets nothing be removed",
}


class PlaceFacts(msgspec.Struct, kw_only=True):
    """What a probe has found at one place; fields keep their defaults where it did not get so far.

    Attributes:
        stage: where it failed, a key of ``_STAGES``; "" where it did not.
        error: why, in words.
        number: the system's number for that, or 0.
        free_bytes, total_bytes: of a directory's file system.
        held_steps: checkpoints that are there already.
        small_s: seconds until a small file is durable, the better of some.
        put_new: whether it can say who of two comes first, as claims of attempts need it.
        doubt, todo: why not, or why others may see it late; and what to do about it.
        locks: whether the job's lock works there; None where it was not tried.
        written_bytes, written_s: of the largest file that was written, fsync included.
        outlasts: whether it is there when the machine is not.
        clock_offset_s: the place's clock minus this machine's; None where it has none of its own.
        clock_bound_s: by how much that may be off.
    """

    stage: str = ""
    error: str = ""
    number: int = 0
    free_bytes: int | None = None
    total_bytes: int | None = None
    held_steps: int = 0
    small_s: float | None = None
    put_new: bool | None = None
    doubt: str = ""
    todo: str = ""
    locks: bool | None = None
    written_bytes: int = 0
    written_s: float = 0.0
    outlasts: bool = False
    clock_offset_s: float | None = None
    clock_bound_s: float = 0.0

    @property
    def rate_bytes(self) -> float | None:
        """Bytes a second, fsync included; None where nothing was written."""
        return self.written_bytes / self.written_s if self.written_s > 0 else None


def judge_place(name: str, where: str, facts: PlaceFacts) -> CheckResult:
    """Whether a place does what a commit needs.

    Args:
        name: of the check.
        where: the place, as a person would write it.
        facts: what the probe found.
    """
    if facts.stage:
        todo = _TODO.get(facts.number, "mend that, or name another place")
        if "://" in where and facts.number in {errno.EIO, errno.EACCES}:
            todo = "look at the endpoint, the region and the credentials in the environment"
        seen = f"{where} {_STAGES[facts.stage]}: {facts.error}"
        return CheckResult(
            name=name, status="failed", seen=seen, todo=todo, figures=_figures(facts)
        )
    if facts.put_new is False:
        return CheckResult(
            name=name,
            status="failed",
            seen=f"{where}: {facts.doubt}, so two machines could both lead",
            todo=facts.todo,
            figures=_figures(facts),
        )
    parts = []
    if facts.rate_bytes is not None:
        parts.append(f"{gigabytes(facts.rate_bytes)}/s written and durable")
    if facts.small_s is not None:
        parts.append(f"a small commit {seconds(facts.small_s)}")
    if facts.free_bytes is not None:
        parts.append(f"{gigabytes(facts.free_bytes)} free")
    seen = f"{where}: {', '.join(parts)}"
    if facts.small_s is not None and facts.small_s > SLOW_COMMIT_S:
        todo = "every commit and every claim waits so long: look at the server, or name another"
        return CheckResult(
            name=name, status="warning", seen=seen, todo=todo, figures=_figures(facts)
        )
    if facts.doubt:
        seen = f"{seen}; {facts.doubt}"
        return CheckResult(
            name=name, status="warning", seen=seen, todo=facts.todo, figures=_figures(facts)
        )
    if facts.locks is False:
        todo = "its file system has no locks: see to it that the job is started only once"
        return CheckResult(
            name=name, status="warning", seen=seen, todo=todo, figures=_figures(facts)
        )
    return CheckResult(name=name, status="ok", seen=seen, figures=_figures(facts))


def not_in_time(name: str, where: str, limit_s: float) -> CheckResult:
    """The place's probe hangs, and was left behind."""
    return CheckResult(
        name=name,
        status="failed",
        seen=f"{where} did not answer within {limit_s:.0f} s",
        todo="look at the mount, its server and the network to it; a save would hang there too",
    )


def judge_space(
    tier: str, facts: PlaceFacts, share_bytes: int | None, keep: int
) -> CheckResult | None:
    """Whether the checkpoints that are kept have room; None where nobody knows how much there is.

    Args:
        tier: its name.
        facts: what the probe found.
        share_bytes: what one checkpoint takes there, or None where that is not known.
        keep: how many stay; while one is written there is one more.
    """
    if facts.stage or facts.free_bytes is None:
        return None
    name, free = f"space {tier}", facts.free_bytes
    if share_bytes is None:
        status = "ok" if free >= LEAST_FREE_BYTES else "warning"
        return CheckResult(
            name=name,
            status=status,  # type: ignore[arg-type]
            seen=f"{gigabytes(free)} free; how large a checkpoint is, is not known yet",
            todo="say how large the state is (--state 640GB) to have it compared",
            figures={"free_bytes": free},
        )
    wanted = (keep + 1) * share_bytes
    left = free + min(facts.held_steps, keep) * share_bytes
    figures = {"free_bytes": free, "held_steps": facts.held_steps, "needed_bytes": wanted}
    seen = f"{keep} checkpoints and one in the making take {gigabytes(wanted)}, " + (
        f"{gigabytes(left)} are theirs or free"
        if facts.held_steps
        else f"{gigabytes(free)} are free"
    )
    if left >= wanted:
        return CheckResult(name=name, status="ok", seen=seen, figures=figures)
    fits = max(left // share_bytes - 1, 0) if share_bytes else keep
    todo = f"keep = {fits} would fit; or free some space" if fits else "free some space"
    # With one and one in the making a job runs, with fewer checkpoints than its owner wanted.
    return CheckResult(
        name=name, status="warning" if fits else "failed", seen=seen, todo=todo, figures=figures
    )


class Flush(msgspec.Struct, frozen=True, kw_only=True):
    """One durable tier against the notice.

    Attributes:
        tier: its name.
        rate_bytes: bytes a second that were measured there.
        small_s: seconds for the manifest.
        outlasts: whether it is there when the machine is not.
    """

    tier: str
    rate_bytes: float
    small_s: float
    outlasts: bool


def judge_notice(
    flushes: Sequence[Flush],
    *,
    share_bytes: int | None,
    notice_s: float | None,
    heard_s: float = HTTP_S,
    step_s: float = 0.0,
) -> CheckResult:
    """Whether the state can be flushed in the seconds between the notice and the end.

    Args:
        flushes: durable tiers that can be written, the fastest first.
        share_bytes: what this machine has to write, or None where that is not known.
        notice_s: what the platform (or ``notice.grace``) gives; None where nobody says.
        heard_s: longest time until the notice is heard.
        step_s: a slow step; 0 where that is not known.
    """
    name = "notice"
    if notice_s is None:
        seen = "nobody says how many seconds there are between a notice and the end"
        return CheckResult(
            name=name, status="skipped", seen=seen, todo="set notice.grace if you know"
        )
    if share_bytes is None:
        seen = f"{notice_s:.0f} s of notice; how large the state is, is not known yet"
        return CheckResult(
            name=name, status="skipped", seen=seen, todo="say it with --state, such as 640GB"
        )
    before_s = heard_s + AGREEMENT_S + step_s
    out_s = leaving_s(notice_s)
    needs_s = {
        one.tier: before_s + share_bytes / one.rate_bytes + one.small_s + out_s for one in flushes
    }
    if not needs_s:
        seen = f"{notice_s:.0f} s of notice, and no place that checkpoints could be written to"
        return CheckResult(name=name, status="failed", seen=seen, todo="mend a tier, see above")
    best = min(flushes, key=lambda one: needs_s[one.tier])
    lasting = [one for one in flushes if one.outlasts]
    shown = min(lasting, key=lambda one: needs_s[one.tier]) if lasting else best
    if needs_s[shown.tier] > notice_s:
        shown = best
    took_s = needs_s[shown.tier]
    figures = {"notice_s": notice_s, "needs_s": took_s, "share_bytes": share_bytes}
    seen = (
        f"{gigabytes(share_bytes)} to {shown.tier} at {gigabytes(shown.rate_bytes)}/s: needs "
        f"{seconds(took_s)} of the {notice_s:.0f} s between a notice and the end"
    )
    if took_s > notice_s:
        needed = bandwidth_needed(
            share_bytes, notice_s, step_s=before_s + shown.small_s, margin_s=out_s
        )
        todo = (
            f"it would fit at {gigabytes(needed)}/s: put a faster [[tier]] first, or use more "
            "machines"
            if needed < float("inf")
            else "the notice is over before a save begins: checkpoint.every bounds what is lost"
        )
        return CheckResult(name=name, status="failed", seen=seen, todo=todo, figures=figures)
    if not shown.outlasts:
        return CheckResult(
            name=name,
            status="warning",
            seen=f"{seen}; {shown.tier} is on this machine's own disk",
            todo="if the disk goes with the machine, add a faster [[tier]] that stays",
            figures=figures,
        )
    return CheckResult(name=name, status="ok", seen=seen, figures=figures)


def _figures(facts: PlaceFacts) -> dict[str, float]:
    figures: dict[str, float] = {}
    if facts.rate_bytes is not None:
        figures["write_bytes_per_s"] = round(facts.rate_bytes)
    if facts.small_s is not None:
        figures["small_commit_s"] = round(facts.small_s, 6)
    if facts.free_bytes is not None:
        figures["free_bytes"] = facts.free_bytes
    return figures
