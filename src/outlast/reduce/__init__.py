"""Sums with the same bits at any number of workers.

Guarantees and limits: :mod:`outlast.reduce.same_bits`, which is what a training script sees.

Rooms within: ``tree`` (who adds up what: pure), ``exchange`` (how sums cross the
network, in flat buckets), ``gradients``, ``buffers`` and ``summary`` (what a step is made of).
"""

from __future__ import annotations

from outlast.reduce.same_bits import SameBits

__all__ = ["SameBits"]
