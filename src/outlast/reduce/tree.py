"""The fixed tree over shards, and who computes which part of it.

A sum of floating-point numbers depends on how it is bracketed, and on nothing else: IEEE addition
commutes. So there is one binary tree over the shards 0 … V-1, and whatever the number of workers,
the sum is the one that this tree brackets. It cuts V into as many groups as its largest prime
factor says, each of these by the next one, and so on; the groups are added in halves. A worker
holds consecutive shards, which some few nodes of the tree cover exactly; it adds up those by
itself, and only they cross the network.

What it costs: with W workers that have K nodes each, a worker sends K·(W-1)/W gradients to those
who add them up, and (W-1)/W of the result. K is 1 where the tree has a row of W nodes of V/W
shards, as it has for V = W·2^k: the volume of a ring all-reduce. Elsewhere it is 2 or a little
more.

Rejected: a tree that is aligned for 3 and for 4 workers at once. There is none: nodes of 3 and of 4
out of 12 shards overlap. Hence the largest factor first, so that whoever mostly has W workers can
choose V for them, whatever W is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from outlast.data.order import held

Node = tuple[int, int]  # the shards from … up to


def cut(node: Node, num_shards: int) -> tuple[Node, Node]:
    """The two parts of a node of two shards or more, in the tree of ``num_shards``."""
    first, stop = node
    size = _group(num_shards, stop - first)
    middle = first + -(-(stop - first) // size // 2) * size
    return (first, middle), (middle, stop)


@functools.cache
def _group(num_shards: int, length: int) -> int:
    """The size of the groups that a node of ``length`` shards is made of."""
    size = num_shards
    while size >= length:
        size //= _largest_factor(size)
    return size


def _largest_factor(number: int) -> int:
    """The largest prime factor of 2 and more."""
    factor = 2
    while factor * factor <= number:
        if number % factor:
            factor += 1
        else:
            number //= factor
    return number


def cover(shards: range, num_shards: int, node: Node | None = None) -> Iterator[Node]:
    """The largest nodes that hold nothing but ``shards``, in order; at or below ``node``."""
    node = node or (0, num_shards)
    first, stop = node
    if stop <= shards.start or shards.stop <= first or not shards:
        return
    if shards.start <= first and stop <= shards.stop:
        yield node
        return
    for part in cut(node, num_shards):
        yield from cover(shards, num_shards, part)


def folds(leaves: Sequence[Node], node: Node, num_shards: int) -> list[int]:
    """How often to add up the last two of what is there, after each of ``leaves`` has come.

    Args:
        leaves: nodes that cover ``node`` exactly, in order.
        node: what they add up to.
        num_shards: of the tree.
    """
    ends = set(leaves)
    counts: list[int] = []

    def walk(at: Node) -> None:
        if at in ends:
            counts.append(0)
            return
        for part in cut(at, num_shards):
            walk(part)
        counts[-1] += 1

    walk(node)
    return counts


@dataclass(frozen=True)
class Turn:
    """What to do with one shard of this worker when it has been computed.

    Attributes:
        merges: how many sums are complete with it: the last two of what is held are added up.
        node: index of this worker's node that is complete then, or None.
    """

    merges: int
    node: int | None


@dataclass(frozen=True)
class ReductionPlan:
    """The tree of ``num_shards``, divided among ``world_size`` workers, as ``rank`` sees it.

    Attributes:
        num_shards: V, at least 1.
        rank: this worker's, from 0.
        world_size: number of workers, at least 1; more than shards leaves some without any.
    """

    num_shards: int
    rank: int
    world_size: int

    @property
    def held(self) -> range:
        """The shards of this worker."""
        return held(self.num_shards, self.rank, self.world_size)

    @cached_property
    def nodes(self) -> list[list[Node]]:
        """The nodes of each worker, in order: all together they are all shards, in order."""
        shares = (held(self.num_shards, rank, self.world_size) for rank in range(self.world_size))
        return [list(cover(share, self.num_shards)) for share in shares]

    @property
    def mine(self) -> list[Node]:
        """The nodes of this worker."""
        return self.nodes[self.rank]

    @cached_property
    def turns(self) -> list[Turn]:
        """What to do with each shard of this worker, in order."""
        found: list[Turn] = []
        for number, (first, stop) in enumerate(self.mine):
            leaves = [(shard, shard + 1) for shard in range(first, stop)]
            merges = folds(leaves, (first, stop), self.num_shards)
            found += [Turn(count, None) for count in merges[:-1]]
            found.append(Turn(merges[-1], number))
        return found

    @cached_property
    def upper(self) -> list[int]:
        """The folds of all workers' nodes, in order, up to the root."""
        return self.folds([node for nodes in self.nodes for node in nodes])

    @cached_property
    def shard_folds(self) -> list[int]:
        """The folds of single shards, in order, up to the root."""
        return self.folds([(shard, shard + 1) for shard in range(self.num_shards)])

    def folds(self, leaves: Sequence[Node]) -> list[int]:
        """The folds of nodes that cover all shards, up to the root."""
        return folds(leaves, (0, self.num_shards), self.num_shards)

    def sent(self, rank: int) -> Fraction:
        """Gradients that a worker sends; a ring all-reduce sends 2·(W-1)/W."""
        return (len(self.nodes[rank]) + 1) * Fraction(self.world_size - 1, self.world_size)


class Fold:
    """A sum in the tree's order, of what comes leaf by leaf; like the carries of a binary counter.

    At most log2 of the leaves are held at a time.

    Args:
        add: adds its second argument to its first, in place.
    """

    def __init__(self, add: Callable[[Any, Any], object]) -> None:
        self._add = add
        self._held: list[Any] = []

    def push(self, leaf: Any, merges: int) -> None:
        """Take the next leaf, and add up the last two of what is held ``merges`` times."""
        self._held.append(leaf)
        for _ in range(merges):
            right = self._held.pop()
            self._add(self._held[-1], right)

    def pop(self) -> Any:
        """What the leaves so far came to; nothing is held afterwards."""
        (total,) = self._held
        self._held = []
        return total
