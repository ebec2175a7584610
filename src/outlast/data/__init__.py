"""The order of samples, and where a run stands in it.

Guarantees: a run that is cut off anywhere and resumed sees the batches that it would have seen
undisturbed, and draws the same random numbers. With :class:`Loader` and :class:`Stream` that holds
at any number of workers, and which samples went into which steps is proved afterwards; with other
loaders at the same number, as exactly as ``feed.py`` says for each kind. Loader processes live
through the signals that announce an end (``shield.py``).

What can go wrong: data that changed between two attempts. What can be checked (size, seed, batch
size, generators, kind of loader) is, and refused in words.

Rooms within: ``order`` (a pure function of seed, epoch and size, and its cut into shards),
``loader`` with ``drawn`` (orders of samplers, steps of several sizes) and ``stream`` with ``lanes``
(ours), ``usage`` (their wrong uses), ``feed`` with ``epochs``, ``replay`` and ``own_state``
(anybody's; also which worker goes on with what), ``trail`` and ``audit`` (which samples came),
``generators``, ``random_state`` and ``shield``.
"""

from __future__ import annotations

from outlast.data.feed import Feed, open_feed
from outlast.data.loader import Loader
from outlast.data.order import Shards, held, sample_ids
from outlast.data.stream import Stream

__all__ = ["Feed", "Loader", "Shards", "Stream", "held", "open_feed", "sample_ids"]
