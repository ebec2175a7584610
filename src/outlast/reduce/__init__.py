"""Sums with the same bits at any number of workers.

Guarantees and limits: :mod:`outlast.reduce.same_bits`, which is what a training script sees.

Files within: ``exchange`` (which worker adds up what, and how sums cross the network, in flat
buckets), ``parts`` (what a step is made of: gradients, buffers, a message of each worker's) and
``losses`` (what our sums do where another worker is lost, said from above).
"""

from __future__ import annotations

from outlast.reduce.same_bits import SameBits

__all__ = ["SameBits"]
