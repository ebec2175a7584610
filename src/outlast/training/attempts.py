"""Which attempt this is, and what was before it."""

from __future__ import annotations

import os
from pathlib import Path

from outlast.attempt.link import ATTEMPT_VARIABLE, Link
from outlast.ledger.past import VARIABLE as PAST_VARIABLE
from outlast.ledger.past import Past
from outlast.training.resume import READ_TIMEOUT_S


def look_back(link: Link, directory: Path) -> Past | None:
    """What the job's ledger says of before; read by rank 0 alone, None on others."""
    return None if link.rank else Past(directory, os.environ.get(PAST_VARIABLE, "")).look()


def agree_on_attempt(link: Link, past: Past | None) -> int:
    """The number of this attempt: the agent's, or without one the next, on all ranks."""
    given = os.environ.get(ATTEMPT_VARIABLE)
    if given:
        return int(given)
    if past is not None:
        link.publish("attempt", str(past.attempt + 1).encode())
    return int(link.fetch("attempt", READ_TIMEOUT_S))
