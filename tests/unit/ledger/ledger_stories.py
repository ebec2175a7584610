"""Events, and the stories that tests of the ledger tell with them.

Small enough to be checked by hand: times in seconds from 0, two workers, a sample a second.
"""

import itertools

from outlast.ledger.events import Event

_MONO = itertools.count()


def ev(t, event, attempt=1, rank=None, **fields):
    return Event(
        t=t,
        mono=float(next(_MONO)),
        job="j",
        attempt=attempt,
        node="n",
        rank=rank,
        event=event,
        fields=fields,
    )


def formed(t, attempt=1, world_size=2, nodes=1):
    return ev(t, "attempt_formed", attempt, world_size=world_size, nodes=nodes)


def resumed(t, step=0, attempt=1):
    return ev(t, "resumed", attempt, 0, step=step, source="local", read_s=0.1, skipped=[])


def sample(t, step, attempt=1, rank=0, **fields):
    return ev(t, "step", attempt, rank, step=step, seconds=1.0, **{"stalled_s": 0.0, **fields})


def lost(t, rank=1, attempt=1, **fields):
    return ev(t, "worker_lost", attempt, rank, **fields)


def finished(t, exit_code=0, attempt=1):
    return ev(t, "job_finished", attempt, exit_code=exit_code, reason="")


def start(world_size=2):
    """Ready to train at 3 s."""
    return [ev(0.0, "job_started", 0), formed(1.0, world_size=world_size), resumed(3.0)]


def undisturbed():
    return [
        *start(),
        sample(4.0, 10),
        sample(5.0, 20, stalled_s=0.25),
        ev(5.1, "snapshot", 1, 1, step=20, blocked_s=0.25, bytes=8, reason="cadence"),
        ev(5.2, "commit", 1, 0, step=20, durable_s=0.1, bytes=8, files=2),
        sample(6.0, 30),
        finished(6.5),
    ]


def killed():
    return [
        *undisturbed()[:-1],
        lost(7.0, beat_t=6.4, step=34, signal="SIGKILL"),
        lost(7.1, rank=0, beat_t=6.5, step=34, signal="SIGTERM"),
        ev(7.1, "restart", reason="worker lost", restarts=1),
        formed(8.0, 2),
        resumed(9.0, 20, 2),
        sample(10.0, 30, 2),
        sample(11.0, 40, 2),
        sample(12.0, 50, 2),
        finished(12.5, attempt=2),
    ]


def killed_twice():
    return [
        *killed()[:-1],
        lost(13.0, attempt=2, beat_t=12.2, step=52),
        formed(13.5, 3),
        resumed(14.0, 20, 3),
        sample(16.0, 60, 3),
        finished(16.0, attempt=3),
    ]


def drained():
    return [
        *start(),
        sample(4.0, 10),
        ev(4.2, "notice", source="aws", action="terminate", deadline_t=124.2, detail=""),
        ev(4.3, "drain_agreed", 1, 0, step=14),
        sample(4.5, 14),
        ev(4.9, "commit", 1, 0, step=14, durable_s=0.4, bytes=8, files=2),
        ev(5.0, "drained", step=14, committed=True),
        finished(5.1, 75),
        ev(65.0, "job_started", 1),
        formed(66.0, 2, world_size=4, nodes=2),
        resumed(67.0, 14, 2),
        sample(68.0, 24, 2),
        finished(68.0, attempt=2),
    ]


STORIES = [undisturbed, killed, killed_twice, drained]
