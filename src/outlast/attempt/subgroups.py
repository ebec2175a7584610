"""Process groups besides the default one: those of device meshes, made again after a loss.

HSDP sums over groups of some of the workers, which ``init_device_mesh`` makes. They go with the
default group, and are asked for again, each as it was, in the same order and under the same names:
a mesh knows its groups by name, and finds the new ones. What holds a group itself (torch's FSDP
does, an object of the script may) is given the new one in its place.

Guarantees: whoever holds a group that is gone is found, or the worker says that it cannot go on. As
many references are to be found as Python counts. A variable of a function that runs, a tuple, and a
dict of nothing but groups are not found, and could not all be given another one.

What can go wrong: a group that only code of C++ holds; torch's own is DDP's reducer, and a DDP
object with a group of its own is refused elsewhere.
Rejected: torch's ``ProcessGroup`` with another backend inside (it keeps the first one of a kind).
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from outlast.errors import NotInProcess

_MESH: Final = "mesh_"  # what a mesh's groups are described by
OTHERS: Final = "it has process groups besides the default one and those of device meshes"
HELD: Final = (
    "its script holds a process group where it cannot be replaced, in a variable of a function for "
    "instance: call get_group() of the device mesh where the group is needed"
)
MOVED: Final = (
    "connection closed by a loss elsewhere, and this process starts anew: its device mesh is of "
    "{size} workers with this one as rank {rank}, and the next attempt's is another"
)


class _Asked(NamedTuple):
    """How a group was asked for."""

    args: tuple[Any, ...]  # its size, this rank in it, its ranks, the backend, a store, its name
    options: dict[str, Any]
    group: Any


class Subgroups:
    """The process groups besides one default group."""

    def __init__(self) -> None:
        self._asked: list[_Asked] = []
        self._place = 0, 0  # rank and number of workers that they are for
        self._num_others = 0
        self._holders: list[Any] = []
        self._gone: list[Any] = []  # groups of before, in the order of what was asked

    def note(self, args: tuple[Any, ...], options: dict[str, Any], made: Any) -> None:
        """Torch was asked for one, and has made it, unless this worker has no part in it."""
        if not str(options.get("group_desc")).startswith(_MESH):
            self._num_others += 1
        elif isinstance(group := made[0], dist.ProcessGroup):
            self._place = dist.get_rank(), dist.get_world_size()
            self._asked.append(_Asked((*args[:4], None, *args[5:]), options, group))

    def why_not(self, made: Sequence[Any]) -> str:
        """Why they could not be made again; "" if they can.

        Args:
            made: what torch's function has given; it is held there.
        """
        known = {id(dist.group.WORLD), *(id(one.group) for one in self._asked)}
        c10d: Any = dist.distributed_c10d
        if self._num_others or any(id(group) not in known for group in c10d._world.pg_names):
            return OTHERS  # among them those that were split from others
        return "" if self._find_holders(made) else HELD

    def _find_holders(self, made: Sequence[Any]) -> bool:
        """Note what holds them; whether that is all."""
        self._holders.clear()
        if not self._asked:
            return True
        unheld = _Asked((), {}, object())  # counted like the others, so that they can be compared
        groups = [one.group for one in (*self._asked, unheld)]
        found = gc.get_referrers(*groups)
        found += [getattr(mesh, "_pg_registry", None) for mesh in gc.get_referrers(DeviceMesh)]
        known = {id(one): one for one in found if one is not groups and _inside(one) is not None}
        self._holders += known.values()
        tables = [one for one in vars(dist.distributed_c10d).values() if type(one) is dict]
        num = [
            sys.getrefcount(groups[at])
            - sum(_num_of(groups[at], _inside(one)) for one in self._holders)
            - sum(groups[at] in table for table in tables)
            - sum(_num_of(groups[at], one) for one in made)
            for at in range(len(groups))
        ]
        return num == num[-1:] * len(num)

    def let_go(self, made: Sequence[Any]) -> None:
        """The default group was taken down, and they with it.

        Args:
            made: as above.

        Raises:
            NotInProcess: what holds one could not be given another.
        """
        if self._gone:
            return  # another loss came before they were made again
        if not self._find_holders(made):
            raise NotInProcess(f"connection closed by a loss elsewhere: {HELD}")
        self._gone = [one.group for one in self._asked]

    def make(self, make: Callable[..., tuple[Any, Any]], backend: str) -> None:
        """Make them again, in the default group of the next attempt.

        Args:
            make: torch's function for it.
            backend: of groups that were to have the default one's, where that was none.

        Raises:
            NotInProcess: they are of another number of workers, or for another rank.
            OSError, RuntimeError: another rank is gone.
        """
        if not self._asked:
            return
        if self._place != (dist.get_rank(), dist.get_world_size()):
            rank, size = self._place
            raise NotInProcess(MOVED.format(rank=rank, size=size))
        world: Any = dist.distributed_c10d._world
        store = world.pg_map[dist.group.WORLD][1]
        for number, (args, options, _) in enumerate(self._asked):
            kind = backend if args[3] == "fake" else args[3]
            group, _ = make(*args[:3], kind, store, *args[5:], **options)
            world.pg_group_ranks[group] = {rank: at for at, rank in enumerate(args[2])}
            self._asked[number] = _Asked(args, options, group)

    def replace(self) -> list[Any]:
        """Give whatever holds one of before the new one; those of before, to be freed."""
        gone, self._gone = self._gone, []
        for before, now in zip(gone, (one.group for one in self._asked), strict=False):
            for holder in self._holders:
                _put(_inside(holder), before, now)
        self._holders.clear()
        return gone


def _inside(holder: Any) -> Any:
    """What it holds, where that can be replaced; else None."""
    if isinstance(holder, types.CellType | dict | list):
        return holder
    return getattr(holder, "__dict__", None)


def _num_of(group: Any, inside: Any) -> int:
    return sum(value is group for _, value in _values(inside))


def _values(inside: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(inside, types.CellType):
        return iter([("cell_contents", inside.cell_contents)])
    return iter(inside.items() if isinstance(inside, dict) else enumerate(inside))


def _put(inside: Any, before: Any, now: Any) -> None:
    for key in [key for key, value in _values(inside) if value is before]:
        if isinstance(inside, types.CellType):
            inside.cell_contents = now
        else:
            inside[key] = now
