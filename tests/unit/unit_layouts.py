"""Jobs as they lay out their state over ranks, drawn, and what each rank then writes."""

import json

from hypothesis import strategies as st

from outlast.checkpoint.manifest import (
    FORMAT,
    FileEntry,
    Manifest,
    encode_part,
    hashed,
    make_part,
    part_entry,
    shard_file,
    state_file,
)
from outlast.checkpoint.plan import (
    SHARE_MIN_BYTES,
    HeldPiece,
    PieceLocation,
    World,
    describe,
    make,
    share,
)
from outlast.checkpoint.spreads import WHOLE, pieces_of, spread_over

ROW = SHARE_MIN_BYTES // 4  # elements of float32 in a row that is large enough to be shared
KINDS = ("ddp", "fsdp", "hsdp", "tp_fsdp", "stages", "mixed")


def held_by(rank, tensors):
    """What ``rank`` holds of {name: (shape, spread or None)}."""
    found = []
    for name, (shape, spread) in tensors.items():
        for number, box in enumerate(pieces_of(shape, spread, rank)):
            found.append((HeldPiece(name, "F32", shape, *box), PieceLocation(number, (), spread)))
    return found


def laid_out(kind, a, b, shapes, choose):
    """For each of a x b ranks, the tensors it has: {name: (shape, spread)}."""
    num_ranks = a * b
    every = range(num_ranks)
    flat = spread_over(every, (num_ranks,), ((0, 1),))
    hybrid = spread_over(every, (a, b), ((WHOLE, 1), (0, 1)))
    strided = spread_over(every, (a, b), ((0, b), (0, 1)))
    crossed = spread_over(every, (a, b), ((0, 1), (1, 1)))
    chosen = {
        "ddp": [None],
        "fsdp": [flat],
        "hsdp": [hybrid],
        "tp_fsdp": [strided, crossed],
        "stages": [None],
        "mixed": [None, flat, hybrid, strided, crossed],
    }[kind]
    tensors = {f"t{n}": (shape, choose(chosen)) for n, shape in enumerate(shapes)}
    if kind != "stages":
        return [tensors] * num_ranks
    # Stages have other names, each on its own part of the ranks; one tensor is in two of them.
    ranks = []
    for rank in every:
        stage = rank // b
        mine = spread_over(range(stage * b, stage * b + b), (b,), ((0, 1),))
        own = {f"s{stage}.{name}": (shape, mine) for name, (shape, _) in tensors.items()}
        if stage in (0, a - 1):
            own["tied"] = ((7, ROW), mine)
        ranks.append(own)
    return ranks


@st.composite
def layouts(draw, kinds=KINDS):
    """For each rank of a drawn job, the tensors it has."""
    shapes = [
        (draw(st.integers(0, 7)), draw(st.sampled_from([1, 2, ROW])))
        for _ in range(draw(st.integers(1, 5)))
    ]
    return laid_out(
        draw(st.sampled_from(kinds)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 3)),
        shapes,
        lambda several: draw(st.sampled_from(several)),
    )


class Job:
    """A checkpoint of a job that was laid out so: its manifest and its parts, made when asked for.

    Attributes:
        manifest: names parts; of those not in ``some`` only the structure is right.
        read: names of the parts that were read.
    """

    def __init__(self, ranks, *, some=None, step=7):
        self.ranks, self.step = ranks, step
        described, numbers, table = {}, {}, []
        for rank, tensors in enumerate(ranks):
            key = id(tensors), tuple(len(pieces_of(s, p, rank)) for s, p in tensors.values())
            if key not in described:
                described[key] = describe(held_by(rank, tensors), rank)
            one = described[key]
            table.append(numbers.setdefault(one.digest(), len(numbers)))
        structures = {one.digest(): one for one in described.values()}
        self.world = World(table, [structures[word] for word in numbers])
        self.data = {}
        self.read = []
        entries = [
            self._entry(rank) if some is None or rank in some else None
            for rank in range(len(ranks))
        ]
        stand_in = next(one for one in entries if one is not None)
        self.manifest = Manifest(
            format=FORMAT,
            job="j",
            step=step,
            attempt=1,
            world_size=len(ranks),
            layout={},
            created_t=0.0,
            parts=tuple(
                one or type(stand_in)(stand_in.size, stand_in.xxh3_128, table[rank], 0)
                for rank, one in enumerate(entries)
            ),
        )

    def part(self, rank):
        """The part of one rank."""
        shared = share(self.world, rank, ())
        plan = make(held_by(rank, self.ranks[rank]), rank, shared, {})
        small = json.dumps({"rank": rank}).encode()
        files = {state_file(rank): hashed(small)}
        if plan.size:
            blocks = -(-plan.size // (16 << 20))
            files[shard_file(rank)] = FileEntry(size=plan.size, xxh3_128=("0" * 32,) * blocks)
        return make_part(self.step, rank, files, plan.contents)

    def _entry(self, rank):
        part = self.part(rank)
        self.data[rank] = encode_part(part)
        return part_entry(self.data[rank], self.world.table[rank], part.files.values())

    def read_file(self, name, entry):
        """As a reader of files would give it, hashed."""
        rank = int(name[5:10])
        self.read.append(rank)
        if rank not in self.data:
            self._entry(rank)
        return self.data[rank]
