"""The drill: a job is broken on purpose, and it is proved what that changed.

    from outlast.drill import at

    planned = at(step=40).on(rank=1).kill()

``course``           a drill from its first run to its last: undisturbed, then once for each fault
``soak``             one long run with one fault after another
``rehearsal``        one run of a job under test: started, watched, started again, stopped
``workplace``        where it works, so that nothing of the user's is touched
``compare``          two runs beside each other, step by step
``grade``            what a disturbed run shows beside the undisturbed one
``faults``           what can be done to a job, each fault a small object; aiming; the catalogue
``proof``            outlast drill resume: whether a resume changes nothing, and why it does
``target``           a job under test as a fault sees it, and the orders that a worker obeys
``inside``           starts in each worker of a job under test, and runs its script
``recorder``         sees each step from inside the process, whatever kind of script it is
``record``           what a worker consumed and computed, step by step: its format, and reading it
``digests``          digests of whatever a script holds, by which runs are compared
``orders``           what a worker does to itself when it is told to
``clock``            a wall clock that can be moved, for the processes of one job
``network``          several machines on one: namespaces with cables, and what happens to those
``metadata_server``  EC2's metadata service on loopback; the base of such servers in the tests
``demo``             two runs, three faults, one comparison
``demo_train``       the training script of both runs

Each name below is loaded when it is first used: workers import this package, and need little of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.drill.faults.aim import PlannedFault, at, during
    from outlast.drill.faults.fault import Fault, Promise, Struck
    from outlast.drill.target import Target

__all__ = ["Fault", "PlannedFault", "Promise", "Struck", "Target", "at", "during"]

_HOME = {
    **dict.fromkeys(("PlannedFault", "at", "during"), "outlast.drill.faults.aim"),
    **dict.fromkeys(("Fault", "Promise", "Struck"), "outlast.drill.faults.fault"),
    "Target": "outlast.drill.target",
}

if not TYPE_CHECKING:  # else a misspelt name would have a type: Any

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            return getattr(importlib.import_module(_HOME[name]), name)
        raise AttributeError(f"module 'outlast.drill' has no attribute {name!r}")
