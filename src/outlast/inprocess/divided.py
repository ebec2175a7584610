"""State that is divided over workers, and who has the same part of it.

HSDP: the workers are replica groups, and each of these has the whole state, divided over its
workers by FSDP2. So each part is held by as many workers as there are replica groups, its *twins*.
Whoever takes a lost one's place takes its part from a twin. A state that is divided in another way
has parts that one worker alone holds, and these are gone with it.

A step that is complete in one part and void in another would leave a state of two halves. A part's
sums can come to their end while another part's wait for the worker that was lost. So all workers
vote before the optimizer's step: once all have come to it, all sums are complete, everywhere.
The vote can be lost as well: one worker hears its end, and another does not. That one makes its
step, and keeps the state of before aside until the workers that are left have told each other:

- one has heard the end of the vote: all sums are complete, and all of them make the step;
- nobody has: all have the state of before, aside or in place.

Guarantees: the parts that an attempt goes on from are all of one step.

Rejected: a copy of each part before each step (twice the memory, which is why state is divided);
no vote, and survivors whose sums may still end left to end them (a network that is cut proves
nothing).
"""

from __future__ import annotations

import itertools
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from outlast.checkpoint.tensors import is_spread
from outlast.script.objects import Objects

ALONE: Final = (
    "its state is divided over the workers, and no other worker has the part of the one that is "
    "lost (HSDP has one in each replica group)"
)
WITH_TWINS: Final = ", where another replica group has what it has"
ON_GPUS: Final = "its state is divided over GPUs (on CPUs it could be gone on from)"

Dims = tuple[tuple[int, ...], int | None]  # of a divided tensor: its whole shape, where it is cut


class Division(NamedTuple):
    """What a worker has of the state.

    Attributes:
        part: the lowest rank that has the same; 0 where nothing is divided.
        twins: all that have it; none where nothing is divided: then all ranks do.
        group: theirs.
        like: a tensor that is divided so.
        why_not: why nobody could have what a worker has that is lost; "" where somebody has.
    """

    part: int = 0
    twins: frozenset[int] = frozenset()
    group: Any = None
    like: Any = None
    why_not: str = ""


WHOLE: Final = Division()


def division_of(objects: Objects) -> Division:
    """How the state of these objects is divided."""
    parameters = itertools.chain(*(model.parameters() for model in objects.models.values()))
    spread: list[Any] = [one for one in parameters if is_spread(one)]
    if not spread:
        return WHOLE
    mesh = spread[0].device_mesh
    ways = {tuple(one.is_replicate() for one in tensor.placements) for tensor in spread}
    is_even = all(one.device_mesh == mesh for one in spread) and len(ways) == 1
    replicated = ways.pop()
    if not is_even or sorted(replicated) != [False, True] or mesh.size() != dist.get_world_size():
        return Division(why_not=ALONE)
    axis = replicated.index(True)
    twins = mesh.mesh.select(1 - axis, mesh.get_coordinate()[1 - axis]).tolist()
    if len(twins) == 1:
        return Division(why_not=ALONE)
    if mesh.device_type != "cpu":
        return Division(why_not=ON_GPUS)
    return Division(min(twins), frozenset(twins), mesh.get_group(axis), spread[0])


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this worker has of it, where it lies; the same object each time."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def dims_of(tensor: Any) -> Dims | None:
    """Of one that is divided: its whole shape, and the dimension that is cut, if any; else None."""
    if not is_spread(tensor):
        return None
    cut = (one.dim for one in tensor.placements if not one.is_replicate())
    return tuple(tensor.shape), next(cut, None)


def joined(part: torch.Tensor, dims: Dims | None, division: Division) -> Any:
    """The tensor of which ``part`` came from a twin, as ``dims_of`` told it there."""
    if dims is None:
        return part
    from torch.distributed.tensor import DTensor, Replicate, Shard

    shape, dim = dims
    like = division.like
    cut = Replicate() if dim is None else Shard(dim)
    placements = [one if one.is_replicate() else cut for one in like.placements]
    whole = torch.empty(shape, dtype=part.dtype, device="meta")
    return DTensor.from_local(
        part.to(local(like).device),
        like.device_mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
