"""The order of samples, and where a run stands in it.

Guarantees: a run that is cut off anywhere and resumed sees the batches that it would have seen
undisturbed, and draws the same random numbers. With :class:`Loader` that holds at any number of
workers; with other loaders at the same number, as exactly as ``feed.py`` says for each kind.
Loader processes live through the signals that announce an end (``shield.py``).

What can go wrong: data that changed between two attempts. What can be checked (size, seed, batch
size, generators, kind of loader) is, and refused in words.

Rooms within: ``order`` (a pure function of seed, epoch and size), ``loader`` (ours), ``feed`` with
``epochs`` and ``stock`` (anybody's), ``random_state`` and ``shield``.
"""

from __future__ import annotations

from outlast.data.feed import Feed, open_feed
from outlast.data.loader import Loader
from outlast.data.order import sample_ids

__all__ = ["Feed", "Loader", "open_feed", "sample_ids"]
