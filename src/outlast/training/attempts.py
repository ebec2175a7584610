"""Which attempt this is, whose it is, and what was before it.

Under our agent it is the agent's. A session that no agent has started claims a number of its own
(:mod:`outlast.peer.reign`), or goes by the claim of the machines where torch's own launcher has
formed them through our rendezvous.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from outlast.attempt.link import ATTEMPT_VARIABLE, Link
from outlast.checkpoint.names import new_nonce
from outlast.ledger.past import VARIABLE as PAST_VARIABLE
from outlast.ledger.past import Past
from outlast.peer.claims import FORMED_VARIABLE
from outlast.peer.reign import Reign
from outlast.training.resume import READ_TIMEOUT_S


class Attempt(msgspec.Struct, frozen=True):
    """The attempt that a session is in.

    Attributes:
        number: of it.
        reign: what its claim carries; "" where the agent tells the keeper, or nobody has claimed.
        claims: where it is claimed, a directory or URL; "" likewise.
        nonce: drawn anew by each session, the same on all ranks: no other one's saves have it in
            their names, whatever its number is.
    """

    number: int
    reign: str = ""
    claims: str = ""
    nonce: str = ""
    finished_t: float = 0.0


def look_back(link: Link, directory: Path) -> Past | None:
    """What the job's ledger says of before; read by rank 0 alone, None on others."""
    return None if link.rank else Past(directory, os.environ.get(PAST_VARIABLE, "")).look()


def agree_on_attempt(
    link: Link, past: Past | None, directory: Path, begin: Callable[[], Reign]
) -> Attempt:
    """The attempt that all ranks are in: the agent's, or without one the next.

    Args:
        link: the other ranks.
        past: on rank 0.
        directory: the job's.
        begin: has this process begin a reign; called on rank 0 where nobody else has claimed.

    Raises:
        ConfigError, StorageError: the job runs already, here or elsewhere.
    """
    if past is not None:
        given = os.environ.get(ATTEMPT_VARIABLE)
        attempt = Attempt(int(given)) if given else _formed(directory, past.attempt)
        if attempt is None:
            reign = begin()
            number = reign.open(past.attempt)
            reign.begin()
            past.look()  # whoever was waited for may have written meanwhile
            attempt = Attempt(number, reign.name, str(directory))
        attempt = msgspec.structs.replace(attempt, nonce=new_nonce(), finished_t=past.finished_t)
        link.publish("session/attempt", msgspec.json.encode(attempt))
    return msgspec.json.decode(link.fetch("session/attempt", READ_TIMEOUT_S), type=Attempt)


def _formed(directory: Path, known: int) -> Attempt | None:
    """What the machines of torch's launcher have claimed; None where they have not."""
    word = os.environ.get(FORMED_VARIABLE)
    if not word:
        return None
    formed = msgspec.json.decode(word, type=Attempt)
    if formed.number > known:
        return formed
    # An older ledger counts further: their claims are in the way of others in the same place.
    return Attempt(known + 1) if formed.claims == str(directory) else None
