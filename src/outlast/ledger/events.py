"""What one line of the ledger says.

Every line has the same head (time, monotonic time, job, attempt, node, rank, event name) and a
few fields that depend on the event. The table below is the contract: an event may gain fields, it
never loses one. Times are seconds, sizes are bytes, and the unit stands last in each name.

=================  ============================================================================
event              fields besides the head
=================  ============================================================================
job_started        command, versions, pid, age_s (how long that process had run; null if unknown),
                   boot (of the machine; null if unknown), joins (true: one machine's start,
                   perhaps of several)
planned            what `outlast plan --save` had found before this start (see ledger/job.py):
                   failures_per_h and its range, productive_fraction, interval_s, costs, price
preflight          machine, fit, findings [{name, status, seen}] (that ask for something),
                   unfit {machine: why} of the others, seconds
machine            kind (of the machine, as its cloud or the setting price.kind calls it), source
                   (who says so)
attempt_formed     world_size, nodes, hosts {name: workers} (null where nobody says)
resumed            step (0 on a first start), source ("from memory, local"), places, read_s,
                   skipped [{step, reason}], from_world_size, building_s (since the script's first
                   model, or its session's opening)
initialised        source (as it was named) of a new job's first state, digest, step, save (null
                   and "" where there are none), objects (that took it), remarks
round_closed       step, local_step, from_replicas, replicas, averaged (ranks): a resume of local
                   updates with another number of replicas has ended the round (see
                   docs/local-updates.md)
step               step, seconds, stalled_s, data_s (waits for batches), script_s (outside of
                   loops), catch_up_s (the loop's data brought to where it was, after a resume),
                   scalars (sampled; since the sample before), until (the step at which the loop
                   ends; null where it does not say)
rank_steps         seconds (since this machine's line before), ranks (of this machine, in step with
                   the next ones), kinds (of their work; one number where it is all ranks'), num
                   (steps in this time), step_s, own_s, wait_s (for other ranks), data_s (for
                   batches): medians, longest_s
session_ended      step, stalled_s (since the newest sample); rank 0's session ended well
snapshot           step, blocked_s, bytes, reason, kind ("full" or "weights"), timings
each_step          step, bytes (of a machine), memory_bytes (of it, at most), cost_s (of a step:
                   median), share (of the time), num (steps that this rests on), copies (on other
                   machines)
not_kept           step, reason: that step has no copy elsewhere (with checkpoint.each_step)
commit             step, durable_s, bytes, files, tier, kind, timings {part: seconds}
save_skipped       step, reason, tier (of one tier only, if it is there)
cadence            interval_s, before_s (null for the first), cost_s, failures_per_h, num_seen,
                   seen_h (what the rate rests on), reason: another interval between checkpoints;
                   tier (null: the job's own), every (that tier takes every Nth from now on),
                   burst (whether failures come in one)
tier_copied        step, tier, seconds, bytes
verify_failed      step, file, reason, tier (of one file; without them the whole step)
repaired           step, file, tier, source (of `checkpoints repair`)
notice             source, action, deadline_t, detail
drain_agreed       step, reason, left_s, how it is planned (choice, tiers, needs_s, why); or leaves
                   (ranks whose machines leave behind that step, while the others go on)
drained            step, committed
worker_lost        rank's pid, exit_code, signal, step, beat_t, error, kind
node_lost          node, reason (how, in words that go on from its name; "" if unknown)
left_out           node (a machine), reason, until_t, for_s, spare_only (only if another waits for
                   a place), goes (false: too few others, it stays)
let_in             node (a machine that takes part again at its owner's word)
hang               rank, ranks, nodes (of the culprits), step (completed), phase, place, sentence,
                   proven, beat_t, silent_s, limit_s, longest_s, begun {rank: collectives}, stacks
straggler          node, ranks (of that machine), cause (compute, loader, burst), of (which of
                   the first two, of a burst too), factor, since_step, step (the newest judged),
                   own_s, others_s, lost_s (of each step), saving, over (it has recovered), action
late_moved         step (behind which it was decided), from_step (the first one made so), counts (of
                   shards, by rank), late (ranks), factors (of these: times as long as the others),
                   back (ranks that are late no more), probes (ranks without shards that get one
                   for some steps, to see how fast they are)
late_dropped       first_step, step (since the line before), steps (of these: in which something was
                   dropped), samples {rank: how many} (that are in no step's sum)
anomaly            step, first (the first step that it may have begun in), what ("loss"), kind
                   ("nan", "infinity", "spike"), value, usual, limit, ranks, action
rollback           step (to go on from; 0: the start), first, batches {loop, first, last} that are
                   left out from now on (null: the job is stopped), reason, seen (steps completed),
                   windows (as in healthy)
healthy            step (of a checkpoint: so many steps have passed without a sign, see settings),
                   windows {what: good values up to there} that the next attempt compares with
survived           ranks (whose processes go on), ended {rank: why it could not}, seconds
restart            reason, restarts, kind (of the failure, see docs/failures.md), action, own
                   (it counts against this machine), wait_s, without_progress (attempts in a row),
                   weighed (in words: what a machine's failures cost, and what it adds),
                   cause (the same where the same failed), hosts (that had it; both empty where it
                   was nobody's own), step
storage_error      operation (save, claim, copy, prune, wait: for a save of
                   an earlier attempt), path, error, step, tier
replicated         step, machine (that keeps the copy), bytes, seconds
replica_failed     step, machine, reason (of the first failure; it is tried again)
replica_refused    peer (its address), reason: traffic between machines that was not believed
held               what (a process that was killed and has not ended, in words), seconds (since it
                   was killed), over (true: it has gone)
watch_gap          what (watcher, keeper, a symptom), reason, from_t, seconds: nobody watched; with
                   what "ledger" and lost: so many events are missing, as it could not be written
not_told           of a message to people that was given up (see docs/tell.md): addresses (that did
                   not take it), of (so many), why (no part of an address is in it), since_t (when
                   it was tried first); over (true: a later one was taken by all)
job_finished       exit_code, reason, kind (of the failure that ended it, or null), idle (drains in
                   a row, this one included, between which nothing was committed; null for none),
                   copying_s (at its end: the keeper's copies to slower tiers)
=================  ============================================================================

``wrong``, ``back`` and ``left`` say in words what the ledger has of a loss that went wrong, of a
rollback, and of a machine that left.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal, get_args

import msgspec

EventName = Literal[
    "job_started",
    "planned",
    "preflight",
    "machine",
    "attempt_formed",
    "resumed",
    "initialised",
    "round_closed",
    "step",
    "rank_steps",
    "session_ended",
    "snapshot",
    "each_step",
    "not_kept",
    "commit",
    "save_skipped",
    "cadence",
    "tier_copied",
    "verify_failed",
    "repaired",
    "notice",
    "drain_agreed",
    "drained",
    "worker_lost",
    "node_lost",
    "left_out",
    "let_in",
    "hang",
    "straggler",
    "late_moved",
    "late_dropped",
    "anomaly",
    "rollback",
    "healthy",
    "survived",
    "restart",
    "storage_error",
    "replicated",
    "replica_failed",
    "replica_refused",
    "held",
    "watch_gap",
    "not_told",
    "job_finished",
]
EVENT_NAMES: Final[frozenset[str]] = frozenset(get_args(EventName))


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):  # plain data: no cycles
    """One event of the ledger: one line of the file.

    Attributes:
        t: wall-clock time in seconds since the epoch, comparable within one machine.
        mono: monotonic time in seconds, comparable within one process.
        job: the job's id.
        attempt: number of the attempt, from 1; 0 before the first one has formed.
        node: the machine's name.
        rank: the worker's rank, or None for the agent.
        event: one of ``EVENT_NAMES`` (a reader keeps names that it does not know).
        fields: what else the line holds.
    """

    t: float
    mono: float
    job: str
    attempt: int
    node: str
    rank: int | None
    event: str
    fields: dict[str, Any] = msgspec.field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The field ``name``, or ``default`` where the event does not have it."""
        return self.fields.get(name, default)


_EXCEPTION: Final = re.compile(r"[\w.]+(Error|Exception|Interrupt|Warning)\b")
HEAD: Final = ("t", "mono", "job", "attempt", "node", "rank", "event")


def encode(event: Event) -> bytes:
    """One line, newline included. NaN and infinity become null: JSON has no word for them.

    A field that JSON cannot hold is kept as its representation: an event is never lost over it.
    """
    head: dict[str, Any] = {name: getattr(event, name) for name in HEAD}
    try:
        return msgspec.json.encode(head | event.fields) + b"\n"
    except _NOT_JSON:
        fields = {name: _as_json(value) for name, value in event.fields.items()}
        return msgspec.json.encode(head | fields) + b"\n"


_NOT_JSON: Final = (TypeError, ValueError, OverflowError, RecursionError)


def _as_json(value: Any) -> Any:
    try:
        msgspec.json.encode(value)
    except _NOT_JSON:  # among them: a path that is not UTF-8
        return ascii(value)
    return value


def decode(line: bytes) -> Event | None:
    """The event in ``line``, or None when the line is torn or is not an event."""
    try:
        raw = msgspec.json.decode(line)
        t, mono, job, attempt, node, rank, event = [raw.pop(name) for name in HEAD]
        found = Event(
            t=t, mono=mono, job=job, attempt=attempt, node=node, rank=rank, event=event, fields=raw
        )
        if (
            type(t) is type(mono) is float
            and type(attempt) is int
            and type(job) is type(event) is type(node) is str
            and (rank is None or type(rank) is int)
        ):
            return found  # as nearly all are; this takes half as long
        return msgspec.convert(found, Event, from_attributes=True)
    except (msgspec.MsgspecError, ValueError, RecursionError):  # ValueError: not UTF-8
        return None
    except (KeyError, AttributeError, TypeError):
        return None


def wrong(event: Event) -> str:
    """What an anomaly was, in words."""
    names = {"nan": "is no number", "infinity": "is infinite"}
    value, usual = event.get("value"), event.get("usual")
    how = names.get(str(event.get("kind")), f"jumped to {_short(value)}")
    before = f", usually {_short(usual)}" if usual is not None else ""
    ranks = [str(rank) for rank in _listed(event.get("ranks"))]
    where = f" on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}" if ranks else ""
    return f"the {event.get('what')} of step {event.get('step')} {how}{before}{where}"


def raised(error: str) -> str:
    """What a process ended with, in one line: an exception's type and its whole message.

    Args:
        error: the exception in words, or a traceback that ends with it; no line of it is indented
            but those of frames, and of a message that goes on.
    """
    lines = error.strip().splitlines() or [""]
    if lines[0].startswith("Traceback"):
        named = [at for at, line in enumerate(lines) if _EXCEPTION.match(line)]
        behind_frames = [at for at in named if at == 1 or lines[at - 1][:1].isspace()]
        lines = lines[behind_frames[-1] if behind_frames else -1 :]
    return " ".join(" ".join(lines).split())


def _listed(value: object) -> list[object]:
    """A list's items; of anything else, which a damaged line may hold, none."""
    return value if isinstance(value, list) else []


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "?"


def back(event: Event) -> str:
    """What a rollback does, in words."""
    step, batches = event.get("step"), event.get("batches")
    where = f"step {step}" if step else "the start"
    if not isinstance(batches, dict):
        return f"stopping; {where} stands, what came after it is undone"
    first, last = batches.get("first"), batches.get("last")
    if not isinstance(first, int) or not isinstance(last, int):
        return f"rolling back to {where}, leaving out batches"
    num = last - first + 1
    return f"rolling back to {where}, leaving out {num} batch{'es' * (num != 1)}"


def left(event: Event) -> str:
    """Who has left where the others went on, in words; "" where all ranks have stopped."""
    ranks = [str(rank) for rank in _listed(event.get("leaves"))]
    if not ranks:
        return ""
    who = f"rank{'s'[: len(ranks) > 1]} {', '.join(ranks)}"
    return f"{who} left after step {event.get('step')}, and the others went on"
