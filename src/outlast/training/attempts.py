"""Which attempt this is, whose it is, and what was before it.

Under our agent it is the agent's. A session that no agent has started claims a number of its own
(:mod:`outlast.peer.reign`), or goes by the claim of the machines where torch's own launcher has
formed them through our rendezvous.

With what command this process was started, where nobody of ours has started it.

Known for a script (``python train.py``, torchrun, a console script), for a directory or zip file
with a ``__main__.py``, and for the script's own module (``python -m train``), also where Python's
profilers, its tracer or its debugger run the script. A notebook, ``python -c`` and an interactive
session have none. Neither have other programs of Python's or a library's own that call the script
in their way: pytest, a notebook's kernel and Ray's workers are given other arguments at each start.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from outlast.attempt.link import ATTEMPT_VARIABLE, Link
from outlast.checkpoint.names import new_nonce
from outlast.data.generators import is_users
from outlast.ledger.command import Command, module_command, script_command
from outlast.ledger.past import VARIABLE as PAST_VARIABLE
from outlast.ledger.past import Past
from outlast.peer.claims import FORMED_VARIABLE
from outlast.peer.reign import Reign
from outlast.training.restore import READ_TIMEOUT_S

# They stay the main module, and leave to the script the arguments that are its own.
_RUNNERS: Final = frozenset({"cProfile", "profile", "trace"})


def own_command() -> Command | None:
    """The script of this process and its arguments; None where it has none."""
    main = sys.modules.get("__main__")
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if spec is not None and spec.name in _RUNNERS:
        file, spec = sys.argv[0], None
        if not Path(file).is_file():  # a module that the runner was told to run
            return None
    if not isinstance(file, str) or not is_users(file):
        return None
    if spec is not None and spec.loader is None:  # a script that a newer profiler runs
        spec = None
    if spec is not None and spec.name == "__main__":  # of a directory, or of a zip file
        return script_command(file, _arguments(str(Path(file).parent)))
    if spec is not None:
        return module_command(spec.name, _arguments(spec.name.removesuffix(".__main__")))
    return script_command(file, _arguments(file))


def _arguments(what: str) -> list[str]:
    """What the interpreter was given behind ``what``: scripts take from ``sys.argv``.

    Where it was given something else (in a child of ``multiprocessing``) ``sys.argv`` tells.
    """
    name = Path(what).name
    for at, given in enumerate(sys.orig_argv[1:], 2):
        if given == what or Path(given).name == name:
            return sys.orig_argv[at:]
    return sys.argv[1:]


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
