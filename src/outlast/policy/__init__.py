"""Decisions as small pure objects: facts and times come in as arguments, a decision comes out.

================  ===============================================================================
saving            ``cadence`` when the next checkpoint is due; ``tier_cadence`` which tiers take
                  it; ``retention`` what is kept, and where
their formulas    ``interval`` the interval that is best; ``hazard`` how often the job fails
failures          ``failures`` of what kind; ``attribution`` whose; ``restart`` what follows;
                  ``regain`` which state survivors go on from
notices           ``drain`` what can still be saved before the machine goes
machines          ``membership`` who takes part; ``exclusion`` who is kept out; ``succession``
                  who coordinates next
watching          ``hang`` no progress, since when and by whom; ``stragglers`` slow ranks;
                  ``late`` what is done about them; ``rollbacks`` a training loss that goes
                  wrong, and what is undone then
fitness           ``fitness`` one machine; ``fitness_peers`` machines beside each other
================  ===============================================================================

Guarantees: nothing here reads a clock, a file, a socket or chance. So the simulator runs the very
objects of the runtime, and the same facts give the same decision on every machine.
"""

from __future__ import annotations

from typing import Final

MAD_SIGMA: Final = (
    1.4826  # standard deviations of normal noise, for a median absolute deviation of 1
)
