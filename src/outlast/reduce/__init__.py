"""Sums with the same bits at any number of workers.

``same_bits``  SameBits: what a training script sees, what it guarantees; what is told of it
``exchange``   which worker adds up what, and how sums cross the network, in flat buckets
``parts``      what a step is made of: gradients, buffers, a message of each worker's
``losses``     what rooms above have hooked into our sums: waits measured, lost workers borne
"""

from __future__ import annotations

from outlast.reduce.same_bits import SameBits

__all__ = ["SameBits"]
