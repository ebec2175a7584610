"""What the ledger says of losses that went wrong, and of machines that left, in words."""

from __future__ import annotations

from outlast.ledger.events import Event


def wrong(event: Event) -> str:
    """What an anomaly was, in words."""
    names = {"nan": "is no number", "infinity": "is infinite"}
    value, usual = event.get("value"), event.get("usual")
    how = names.get(str(event.get("kind")), f"jumped to {_short(value)}")
    before = f", usually {_short(usual)}" if usual is not None else ""
    ranks = [str(rank) for rank in event.get("ranks") or []]
    where = f" on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}" if ranks else ""
    return f"the {event.get('what')} of step {event.get('step')} {how}{before}{where}"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "?"


def back(event: Event) -> str:
    """What a rollback does, in words."""
    step, batches = event.get("step"), event.get("batches")
    where = f"step {step}" if step else "the start"
    if not isinstance(batches, dict):
        return f"stopping; {where} stands, what came after it is undone"
    num = int(batches.get("last", 0)) - int(batches.get("first", 0)) + 1
    return f"rolling back to {where}, leaving out {num} batch{'es' * (num != 1)}"


def left(event: Event) -> str:
    """Who has left where the others went on, in words; "" where all ranks have stopped."""
    ranks = [str(rank) for rank in event.get("leaves") or []]
    if not ranks:
        return ""
    who = f"rank{'s'[: len(ranks) > 1]} {', '.join(ranks)}"
    return f"{who} left after step {event.get('step')}, and the others went on"
