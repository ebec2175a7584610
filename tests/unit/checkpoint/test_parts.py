"""A rank's part: it comes back as it was, and one that does not fit itself is refused."""

import msgspec
import pytest

from outlast.checkpoint.manifest import (
    BLOCK_BYTES,
    FORMAT,
    Contents,
    Holding,
    Manifest,
    PartEntry,
    Slab,
    decode,
    decode_part,
    encode,
    encode_part,
    hashed,
    make_part,
    part_entry,
    rank_of_own,
    shard_file,
    state_file,
)
from outlast.checkpoint.names import SaveName
from outlast.checkpoint.spreads import Spread
from outlast.errors import CheckpointInvalid
from part_contents import contents_of

HALVES = Spread((2,), ((0, 1),), 0, (1,))
FILES = {shard_file(1): hashed(b"x" * 80), state_file(1): hashed(b"{}")}
CONTENTS = Contents(
    structure="ab",
    spreads=(HALVES,),
    tensors={
        "w": Holding("F32", (4, 2), 0, (Slab((2, 0), (2, 2), 0),)),
        "b": Holding("F32", (8,)),
        "rng@rank-00001": Holding("U8", (16,), -1, (Slab((0,), (16,), 16),)),
    },
    elsewhere={"b": (0,)},
    num_elements=4,
)
PART = make_part(7, 1, FILES, CONTENTS)


def test_a_part_comes_back_as_it_was():
    data = encode_part(PART)
    assert decode_part(data, 7, 1, 2) == PART
    entry = PART.entry("w")
    assert (entry.dtype, entry.shape) == ("F32", (4, 2))
    (chunk,) = entry.chunks
    assert (chunk.file, chunk.start, chunk.end) == (shard_file(1), 0, 16)
    assert PART.spread("w") == HALVES
    assert PART.spread("b") is None
    assert PART.chunks("b") == PART.chunks("nobody's") == []
    again = contents_of({name: PART.entry(name) for name in CONTENTS.tensors})
    assert again.num_elements == CONTENTS.num_elements
    assert again.tensors["w"].slabs == CONTENTS.tensors["w"].slabs


def test_the_manifest_has_size_and_hashes_of_a_part():
    data = encode_part(PART)
    entry = part_entry(data, 3, FILES.values())
    assert entry.file == hashed(data)
    assert (entry.structure, entry.num_bytes) == (3, 82)
    long = part_entry(b"x" * (BLOCK_BYTES + 1), 0, ())
    assert long.file == hashed(b"x" * (BLOCK_BYTES + 1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": 8}, "that of rank 1 at step 8"),
        ({"rank": 0}, "that of rank 0"),
        ({"files": {shard_file(0): hashed(b"")}}, "not a file of rank 1"),
        ({"files": {"../../etc/passwd": hashed(b"")}}, "not a file of rank 1"),
        ({"files": {shard_file(1): msgspec.structs.replace(hashed(b"x"), size=9 << 24)}}, "hashes"),
        ({"files": {}}, "does not fit its tensor or its file"),
    ],
)
def test_a_part_that_is_not_about_its_rank_is_refused(changes, words):
    data = encode_part(msgspec.structs.replace(PART, **changes))
    with pytest.raises(CheckpointInvalid, match=words):
        decode_part(data, 7, 1, 2)


@pytest.mark.parametrize(
    ("name", "held", "words"),
    [
        ("w", Holding("F12", (4,)), "unknown dtype"),
        ("w", Holding("F32", (-4,)), "has the shape"),
        ("w", Holding("F32", (4,), 1), "not named"),
        ("w", Holding("F32", (), 0), "a dimension that it has not"),
        ("w@rank-00000", Holding("F32", (4,)), "another rank's own"),
        ("w", Holding("F32", (4,), -1, (Slab((0,), (5,), 0),)), "does not fit"),
        ("w", Holding("F32", (4,), -1, (Slab((-1,), (2,), 0),)), "does not fit"),
        ("w", Holding("F32", (4,), -1, (Slab((0,), (4,), 72),)), "does not fit"),
        ("w", Holding("F32", (4,), -1, (Slab((0, 0), (4, 1), 0),)), "does not fit"),
    ],
)
def test_a_tensor_that_does_not_fit_its_part_is_refused(name, held, words):
    tensors = {**CONTENTS.tensors, name: held}
    part = msgspec.structs.replace(
        PART, contents=msgspec.structs.replace(CONTENTS, tensors=tensors)
    )
    with pytest.raises(CheckpointInvalid, match=words):
        decode_part(encode_part(part), 7, 1, 2)


@pytest.mark.parametrize(
    "contents",
    [
        msgspec.structs.replace(CONTENTS, elsewhere={"b": (2,)}),
        msgspec.structs.replace(CONTENTS, elsewhere={"c": (0,)}),
        msgspec.structs.replace(CONTENTS, spreads=(Spread((2,), (), 0, (1,)),)),
        msgspec.structs.replace(CONTENTS, spreads=(Spread((2, 2), ((0, 1), (1, 1)), 0, (1, 1)),)),
        msgspec.structs.replace(CONTENTS, spreads=(Spread((2,), ((0, 1),), ranks=(1, 1)),)),
    ],
)
def test_hints_that_cannot_be_are_refused(contents):
    data = encode_part(msgspec.structs.replace(PART, contents=contents))
    with pytest.raises(CheckpointInvalid):
        decode_part(data, 7, 1, 2)


@pytest.mark.parametrize("cut", [0, 1, 50, -1])
def test_a_torn_part_is_refused(cut):
    with pytest.raises(CheckpointInvalid, match="not understood"):
        decode_part(encode_part(PART)[:cut], 7, 1, 2)


def root(parts, **changes):
    return Manifest(
        **{
            "format": FORMAT,
            "job": "j",
            "step": 7,
            "attempt": 1,
            "world_size": len(parts),
            "layout": {},
            "created_t": 0.0,
            "parts": tuple(parts),
            **changes,
        }
    )


def test_a_manifest_of_parts_is_checked():
    entry = part_entry(encode_part(PART), 0, FILES.values())
    assert decode(encode(root([entry, entry])), SaveName(7)).parts == (entry, entry)
    for bad, words in (
        (root([entry], world_size=2), "1 parts of 2"),
        (root([entry], files=FILES), "parts and what belongs into them"),
        (root([PartEntry(0, (), 0, 0)]), "what cannot be"),
        (root([PartEntry(5, (), 0, 0)]), "0 hashes for 5 bytes"),
        (root([PartEntry(5, ("0",), -1, 0)]), "what cannot be"),
    ):
        with pytest.raises(CheckpointInvalid, match=words):
            decode(encode(bad), SaveName(7))


def test_own_names_say_whose_they_are():
    assert rank_of_own("rng@rank-00012") == 12
    assert rank_of_own("rng") is None
