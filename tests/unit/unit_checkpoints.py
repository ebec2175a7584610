"""Checkpoints written straight from the format's description, for tests of what reads them."""

import itertools
import json

import msgspec
import torch
from unit_fakes import bits

from outlast.checkpoint.blocks import write_hashed
from outlast.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    Chunk,
    Manifest,
    TensorEntry,
    decode,
    encode,
    own_name,
    shard_file,
    state_file,
    step_name,
)
from outlast.checkpoint.shard import NAMES
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


def write(storage, states, step=7, *, cut=None, narrow=(), **fields):
    """Commit ``states``, one for each rank.

    Args:
        storage: where.
        states: rank → key → state. A tensor with the same bits as rank 0's is replicated.
        step: which step.
        cut: (name, tensor) → chunks of a replicated tensor, dealt out to the ranks in turn.
        narrow: names of tensors that are stored as bfloat16.
        **fields: of the manifest.
    """
    files, tensors = {}, {}
    first = {}
    pieces = {rank: [] for rank in range(len(states))}
    sizes = dict.fromkeys(pieces, 0)
    small = {}

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
        small[rank] = {"format": FORMAT, "step": step, "rank": rank, "own": own, "state": data}
    for rank, its in pieces.items():
        path = f"{step_name(step)}/{shard_file(rank)}"
        if its:
            files[shard_file(rank)] = write_hashed(storage, path, its)
        path = f"{step_name(step)}/{state_file(rank)}"
        files[state_file(rank)] = write_hashed(storage, path, [json.dumps(small[rank]).encode()])
    manifest = Manifest(
        **{
            "format": FORMAT,
            "job": "job",
            "step": step,
            "attempt": 1,
            "world_size": len(states),
            "layout": {},
            "created_t": 0.0,
            "files": files,
            "tensors": tensors,
            **fields,
        }
    )
    data = encode(manifest)
    storage.put(f"{step_name(step)}/{MANIFEST}", data)
    return decode(data, step)


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
    storage.put(f"{step_name(manifest.step)}/{MANIFEST}", encode(changed))


def damage(path, step, name, at=-1):
    """Flip a bit of a file."""
    file = path / step_name(step) / name
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
