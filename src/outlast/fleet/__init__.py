"""Fleets over thin links: replicas that train apart, and exchange what they have learned seldom.

``local_updates``  LocalUpdates: DiLoCo and Streaming DiLoCo, as a script sees them
``fragments``      a model's trained parameters in fragments, as flat vectors in the host's memory
``averaging``      means over replicas with the same bits everywhere: fp32, or int8 with feedback
"""

from __future__ import annotations

from outlast.fleet.local_updates import LocalUpdates

__all__ = ["LocalUpdates"]
