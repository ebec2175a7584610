"""The order of samples, and where a run stands in it.

Our own loaders:

``loader``        Loader: batches of a map-style data set
``drawn``         its orders that samplers and weights draw; batches of several sizes
``stream``        Stream: batches of what comes in shards
``lanes``         the parts of a stream that are read on their own
``order``         the order: a pure function of seed, epoch and size; a batch cut into shards
``usage``         wrong uses of loaders, answered in one line

Any loader, fed to a loop with a position that is saved:

``feed``          which feed suits a loader; which worker goes on with what
``epochs``        what feeds over finite epochs share
``replay``        loaders without a state: the epoch is gone through again
``own_state``     loaders with a state of their own, believed once it was tried

Which samples went into which steps:

``trail``         each worker's record
``audit``         the proof from all records

In any process that loads:

``generators``    random generators that the script holds; loader processes that draw
``random_state``  the global random states: Python's, NumPy's, torch's, CUDA's
``shield``        loader processes live through the signals that announce an end

Guarantees: a run that is cut off anywhere and resumed sees the batches that it would have seen
undisturbed, and draws the same random numbers. With :class:`Loader` and :class:`Stream` that holds
at any number of workers, and which samples went into which steps is proved afterwards; with other
loaders at the same number, as exactly as ``feed.py`` says for each kind.

What can go wrong: data that changed between two attempts. What can be checked (size, seed, batch
size, generators, kind of loader) is, and refused in words.
"""

from __future__ import annotations

from outlast.data.feed import Feed, open_feed
from outlast.data.loader import Loader
from outlast.data.order import Shards, held, sample_ids
from outlast.data.stream import Stream

__all__ = ["Feed", "Loader", "Shards", "Stream", "held", "open_feed", "sample_ids"]
