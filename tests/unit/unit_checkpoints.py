"""Checkpoints written straight from the format's description, for tests of what reads them."""

import itertools
import json

import msgspec
import torch
from unit_fakes import bits
from unit_names import save_name, save_of

from outlast.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    Chunk,
    Contents,
    Holding,
    Manifest,
    Slab,
    TensorEntry,
    as_places,
    decode,
    encode,
    encode_part,
    make_part,
    num_elements,
    own_name,
    part_entry,
    part_file,
    rank_of,
    shard_file,
    sign,
    state_file,
    write_hashed,
)
from outlast.checkpoint.mend import NotMended, mend_copy
from outlast.checkpoint.plan import PieceLocation, World, describe, share
from outlast.checkpoint.tensors import NAMES
from outlast.checkpoint.transfer import inventory_of, look, read_manifest
from outlast.checkpoint.tree import flatten

OWN = "outlast."


def whole(tensor):
    """A tensor as one chunk."""
    return [((0,) * tensor.dim(), tuple(tensor.shape))]


def grid(*cuts):
    """Chunks along the given boundaries of each axis, as in ``grid((0, 2, 5), (0, 3))``."""
    axes = [list(itertools.pairwise(cut)) for cut in cuts]
    return [
        (tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in itertools.product(*axes)
    ]


def region(tensor, offsets, shape):
    return tensor[tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))]


def shares_of(ranks, own):
    """Every rank's share, as each works it out: ``ranks`` are their pieces."""
    described = [
        describe([(piece, PieceLocation(0, ())) for piece in pieces], rank)
        for rank, pieces in enumerate(ranks)
    ]
    return shares_in(described, own)


def shares_in(described, own=(), ranks=None):
    """The shares of some ranks (all) of a world, of whose ranks these are the structures."""
    numbers = {}
    for one in described:
        numbers.setdefault(one.digest(), (len(numbers), one))
    structures = [one for _, one in numbers.values()]
    table = [numbers[one.digest()][0] for one in described]
    return [
        share(World(table, structures), rank, own)
        for rank in (range(len(described)) if ranks is None else ranks)
    ]


def write(storage, states, step=7, *, cut=None, narrow=(), parts=None, **fields):
    """Commit ``states``, one for each rank.

    Args:
        storage: where.
        states: rank → key → state. A tensor with the same bits as rank 0's is replicated.
        step: which step.
        cut: (name, tensor) → chunks of a replicated tensor, dealt out to the ranks in turn.
        narrow: names of tensors that are stored as bfloat16.
        parts: whether the manifest names parts; by default where there are several ranks.
        **fields: of the manifest.
    """
    files, tensors = {}, {}
    first = {}
    pieces = {rank: [] for rank in range(len(states))}
    sizes = dict.fromkeys(pieces, 0)
    small = {}
    held = {}

    def put(name, tensor, chunks, ranks):
        entry = []
        for (offsets, shape), rank in zip(chunks, ranks, strict=False):
            raw = bits(region(tensor, offsets, shape))
            start = sizes[rank]
            sizes[rank] += len(raw)
            pieces[rank].append(raw)
            place = {"file": shard_file(rank), "start": start, "end": start + len(raw)}
            entry.append(Chunk(offsets=offsets, shape=shape, **place))
        tensors[name] = TensorEntry(
            dtype=NAMES[tensor.dtype], shape=tuple(tensor.shape), chunks=tuple(entry)
        )

    for rank, state in enumerate(states):
        data, found, own = {}, {}, []
        for key, value in state.items():
            data[key], more = flatten(value, key)
            found |= more
        for name, tensor in found.items():
            kept = tensor.to(torch.bfloat16) if name in narrow else tensor
            same = name in first and same_as(kept, first[name])
            if name.startswith(OWN) or (name in first and not same):
                own.append(name)
                put(own_name(name, rank), kept, whole(kept), [rank])
            elif not same:
                first[name] = kept
                chunks = cut(name, kept) if cut else whole(kept)
                ranks = [rank] if cut is None else itertools.cycle(range(len(states)))
                put(name, kept, chunks, itertools.cycle(ranks))
        mark(data, narrow)
        held[rank] = [own_name(name, rank) if name in own else name for name in found]
        small[rank] = {"format": FORMAT, "step": step, "rank": rank, "own": own, "state": data}
    name = save_of(step, fields.get("attempt", 1), fields.get("serial", 1))
    directory = str(name)
    sign(storage, name, fields.get("job", "job"))
    for rank, its in pieces.items():
        path = f"{directory}/{shard_file(rank)}"
        if its:
            files[shard_file(rank)] = write_hashed(storage, path, its)
        path = f"{directory}/{state_file(rank)}"
        files[state_file(rank)] = write_hashed(storage, path, [json.dumps(small[rank]).encode()])
    entries = ()
    if len(states) > 1 if parts is None else parts:
        entries = tuple(
            put_part(storage, name, rank, held[rank], files, tensors) for rank in range(len(states))
        )
        files, tensors = {}, {}
    manifest = Manifest(
        **{
            "format": FORMAT,
            "job": "job",
            "step": step,
            "attempt": 1,
            "serial": 1,
            "nonce": name.nonce,
            "world_size": len(states),
            "layout": {},
            "created_t": 0.0,
            "files": files,
            "tensors": tensors,
            "parts": entries,
            **fields,
        }
    )
    data = encode(manifest)
    storage.put(f"{directory}/{MANIFEST}", data)
    return decode(data, name)


def flat(storage, manifest):
    """The manifest with all its files and tensors in it, where its parts have them."""
    if not manifest.parts:
        return manifest
    inventory = inventory_of(manifest, as_places(storage))
    files, tensors = dict(inventory.walk()), {}
    for rank in range(manifest.world_size):
        part = inventory.part(rank)
        for name in part.contents.tensors:
            entry = part.entry(name)
            before = tensors[name].chunks if name in tensors else ()
            tensors[name] = msgspec.structs.replace(entry, chunks=before + entry.chunks)
    return msgspec.structs.replace(manifest, files=files, tensors=tensors, parts=())


def read_flat(storage, which):
    """``flat`` of the manifest that a reader of this step or save finds."""
    return flat(storage, read_manifest(storage, which))


def put_part(storage, save, rank, held, files, tensors):
    """Write the part of one rank; its entry in the manifest."""
    mine = {name: files[name] for name in (shard_file(rank), state_file(rank)) if name in files}
    known, elsewhere = {}, {}
    for name, entry in tensors.items():
        by_rank = {}
        for chunk in entry.chunks:
            by_rank.setdefault(rank_of(chunk.file), []).append(
                Slab(chunk.offsets, chunk.shape, chunk.start)
            )
        if rank in by_rank or name in held:
            known[name] = Holding(entry.dtype, entry.shape, -1, tuple(by_rank.pop(rank, ())))
        if name in held and by_rank:
            elsewhere[name] = tuple(sorted(by_rank))
    contents = Contents(tensors=known, elsewhere=elsewhere, num_elements=num_elements(known))
    data = encode_part(make_part(save.step, rank, mine, contents))
    write_hashed(storage, f"{save}/{part_file(rank)}", [data])
    return part_entry(data, 0, mine.values())


def mark(data, narrow):
    if isinstance(data, dict) and data.get("$") == "tensor" and data["name"] in narrow:
        data["dtype"] = "float32"
    for value in data.values() if isinstance(data, dict) else data if type(data) is list else ():
        mark(value, narrow)


def same_as(one, other):
    return (one.dtype, one.shape) == (other.dtype, other.shape) and bits(one) == bits(other)


def rewrite(storage, manifest, **fields):
    """Commit the step again with other words in its manifest."""
    changed = msgspec.structs.replace(manifest, **fields)
    storage.put(f"{manifest.save}/{MANIFEST}", encode(changed))


def damage(path, step, name, at=-1, *, attempt=1):
    """Flip a bit of a file."""
    file = path / save_name(step, attempt) / name
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def mend_all(places, save, progress=lambda _: None):
    """Mend every copy of a save: each file that is whole again, and the names of those left."""
    found = {place: look(place, save) for place in places}
    copies = [place for place in places if found[place].is_there]
    first = next(place for place in places if found[place].manifest is not None)
    done = []
    for place in copies:
        source = None if found[place].manifest is not None else first
        manifest = found[source or place].manifest
        done += mend_copy(place, copies, manifest, source, progress)
    return [one.file if isinstance(one, NotMended) else one for one in done]
