"""No damage to a manifest or a part goes unseen, and nothing in them can point outside."""

import msgspec
import pytest
import xxhash

from outlast.checkpoint.manifest import (
    BLOCK_BYTES,
    FORMAT,
    Chunk,
    Contents,
    FileEntry,
    Holding,
    Manifest,
    PartEntry,
    SaveName,
    Slab,
    TensorEntry,
    decode,
    decode_part,
    encode,
    encode_part,
    hashed,
    make_part,
    own_name,
    part_entry,
    rank_of_own,
    shard_file,
    state_file,
)
from outlast.checkpoint.spreads import Spread
from outlast.errors import CheckpointInvalid
from part_contents import contents_of

HASH = xxhash.xxh3_128_hexdigest(b"")
FILE = "rank-00000.safetensors"


def chunk(offsets, shape, *, file=FILE, start=0, end=None, item=4):
    size = item
    for extent in shape:
        size *= extent
    return Chunk(
        offsets=offsets,
        shape=shape,
        file=file,
        start=start,
        end=start + size if end is None else end,
    )


def tensor(shape, *chunks, dtype="F32"):
    return TensorEntry(dtype=dtype, shape=shape, chunks=chunks)


def manifest(tensors=None, files=None, **other):
    fields = {
        "format": 1,
        "job": "0123456789ab",
        "step": 7,
        "attempt": 1,
        "world_size": 1,
        "layout": {"data_parallel": 1},
        "created_t": 1700000000.25,
        "files": files
        if files is not None
        else {
            FILE: FileEntry(size=8192, xxh3_128=(HASH,)),
            "rank-00000.json": FileEntry(size=3, xxh3_128=(HASH,)),
        },
        "tensors": tensors if tensors is not None else {"w": tensor((2, 3), chunk((0, 0), (2, 3)))},
    }
    return Manifest(**fields | other)


def reason(data, step=7):
    with pytest.raises(CheckpointInvalid) as caught:
        decode(data, SaveName(step))
    assert caught.value.step == step
    assert caught.value.reason
    return caught.value.reason


def test_names():
    assert shard_file(3) == "rank-00003.safetensors"
    assert state_file(3) == "rank-00003.json"
    assert own_name("a.b", 3) == "a.b@rank-00003"


def test_round_trip():
    one = manifest()
    data = encode(one)
    again = decode(data, SaveName(7))
    assert msgspec.structs.replace(again, checksum=one.checksum) == one
    assert encode(again) == data
    assert again.checksum.encode() in data
    assert again.checksum != "0" * 32


def test_a_checksum_like_text_elsewhere_does_not_mislead():
    trap = f'"checksum":"{"0" * 32}"'
    one = manifest(job=trap, layout={trap: 1})
    assert decode(encode(one), SaveName(7)).job == trap


def test_every_flipped_bit_of_every_byte_is_detected():
    data = encode(manifest())
    assert len(data) < 1000
    for place in range(len(data)):
        for bit in range(8):
            altered = bytearray(data)
            altered[place] ^= 1 << bit
            with pytest.raises(CheckpointInvalid):
                decode(bytes(altered), SaveName(7))


def test_every_byte_set_to_anything_is_detected_or_the_same():
    data = encode(manifest(tensors={}, files={}))
    for place in range(len(data)):
        for value in (0x00, 0x20, 0x22, 0x30, 0x7D, 0x80, 0xC3, 0xFF):
            altered = data[:place] + bytes([value]) + data[place + 1 :]
            if altered != data:
                with pytest.raises(CheckpointInvalid):
                    decode(altered, SaveName(7))


def test_every_truncation_and_anything_appended_is_detected():
    data = encode(manifest())
    for length in range(len(data)):
        with pytest.raises(CheckpointInvalid):
            decode(data[:length], SaveName(7))
    assert "torn or altered" in reason(b'{"format":1,"job":' + b"[" * 100_000)
    for extra in (b" ", b"\n", b"\x00", b"}", data):
        with pytest.raises(CheckpointInvalid):
            decode(data + extra, SaveName(7))
    assert reason(b"") == "manifest.json is empty"
    assert "torn or altered" in reason(data[:-1])


def test_a_hole_of_zeros_is_detected():
    data = encode(manifest())
    for start in range(0, len(data), 16):
        with pytest.raises(CheckpointInvalid):
            decode(
                data[:start] + bytes(len(data[start : start + 16])) + data[start + 16 :],
                SaveName(7),
            )


def test_a_removed_checksum_is_detected():
    raw = msgspec.json.decode(encode(manifest()))
    del raw["checksum"]
    assert reason(msgspec.json.encode(raw)) == "manifest.json does not match its own checksum"


def test_a_later_format_says_upgrade():
    raw = msgspec.json.encode({"format": FORMAT + 1, "all": "new"})
    assert (
        reason(raw)
        == f"it has format {FORMAT + 1} and this version reads up to {FORMAT}; upgrade outlast"
    )


def test_another_steps_manifest_is_refused():
    assert reason(encode(manifest()), 8) == "manifest.json is that of step 7"


@pytest.mark.parametrize(
    "name",
    [
        "../rank-00000.json",
        "/etc/passwd",
        "a/rank-00000.json",
        "rank-00000.json/../../x",
        "rank-0.json",
        "rank-00000.pkl",
        "rank-00000.json\n",
        "manifest.json",
        "",
        ".rank-00000.json",
    ],
)
def test_a_name_that_is_no_file_of_a_checkpoint_is_refused(name):
    one = manifest({}, {name: FileEntry(size=1, xxh3_128=(HASH,))})
    assert "is not the name of a file of a checkpoint" in reason(encode(one))


@pytest.mark.parametrize(
    ("size", "num_hashes", "fine"),
    [
        (0, 0, True),
        (0, 1, False),
        (1, 0, False),
        (1, 1, True),
        (BLOCK_BYTES, 1, True),
        (BLOCK_BYTES, 2, False),
        (BLOCK_BYTES + 1, 1, False),
        (BLOCK_BYTES + 1, 2, True),
        (-1, 0, False),
    ],
)
def test_a_file_needs_a_hash_for_each_block(size, num_hashes, fine):
    data = encode(manifest({}, {FILE: FileEntry(size=size, xxh3_128=(HASH,) * num_hashes)}))
    if fine:
        decode(data, SaveName(7))
    else:
        assert FILE in reason(data)


FIT = "a chunk of w does not fit its tensor or its file"
COVER = "the chunks of w do not cover it"


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (tensor((2, 3), chunk((0, 0), (2, 3), start=8168 + 1)), FIT),  # beyond the file's end
        (tensor((2, 3), chunk((0, 0), (2, 3), start=-4)), FIT),
        (tensor((2, 3), chunk((0, 0), (2, 3), end=23)), FIT),
        (tensor((2, 3), chunk((0, 0), (2, 3), end=-24)), FIT),
        (tensor((2, 3), chunk((0, 0), (2, 3), file="rank-00001.safetensors")), FIT),
        (tensor((2, 3), chunk((0, 1), (2, 3))), FIT),
        (tensor((2, 3), chunk((-1, 0), (2, 3))), FIT),
        (tensor((2, 3), chunk((0, 0, 0), (2, 3, 1))), FIT),
        (tensor((2, 3), chunk((0,), (6,))), FIT),
        (tensor((2, 3), chunk((0,), (2, 3))), FIT),
        (tensor((1, 1), chunk((0, 0), (-1, -1))), FIT),
        (tensor((2, 3), chunk((0, 0), (3, 2))), FIT),
        (tensor((2, 3)), COVER),
        (tensor((2, 3), chunk((0, 0), (1, 3))), COVER),
        (tensor((2, 3), chunk((0, 0), (2, 3)), chunk((0, 0), (1, 3))), COVER),
        (tensor((2, 3), chunk((0, 0), (1, 3)), chunk((0, 0), (1, 3))), COVER),  # one half twice
        (tensor((4,), chunk((0,), (2,)), chunk((1,), (2,))), COVER),
        (tensor((2, 2), chunk((0, 0), (2, 1)), chunk((0, 0), (1, 2))), COVER),
        (tensor(()), COVER),
        (tensor((), chunk((), ()), chunk((), ())), COVER),
        (tensor((2, 3), chunk((0, 0), (2, 3)), dtype="F128"), "w has the unknown dtype 'F128'"),
        (tensor((2, 3), chunk((0, 0), (2, 3)), dtype="F64"), FIT),
    ],
)
def test_chunks_that_do_not_fit_are_refused(entry, says):
    assert reason(encode(manifest({"w": entry}))) == f"manifest.json: {says}"


def split(shape, rows, columns):
    """Chunks of a grid, one file range after the other."""
    chunks, start = [], 0
    for row in range(0, shape[0], rows):
        for column in range(0, shape[1], columns):
            extent = (min(rows, shape[0] - row), min(columns, shape[1] - column))
            piece = chunk((row, column), extent, start=start)
            chunks.append(piece)
            start = piece.end
    return chunks


@pytest.mark.parametrize(
    "entry",
    [
        tensor((), chunk((), ())),
        tensor((0, 3)),
        tensor((0, 3), chunk((0, 0), (0, 3))),
        tensor((0,), chunk((0,), (0,), start=8192)),  # an empty one may stand at the very end
        tensor((4,), chunk((2,), (2,), start=8), chunk((0,), (2,))),
        tensor((5, 7), *split((5, 7), 2, 7)),
        tensor((5, 7), *split((5, 7), 5, 2)),
        tensor((5, 7), *reversed(split((5, 7), 2, 3))),
        tensor((2, 3), chunk((0, 0), (2, 3)), chunk((1, 1), (0, 2))),
    ],
)
def test_chunks_that_cover_are_accepted(entry):
    assert decode(encode(manifest({"w": entry})), SaveName(7)).tensors["w"] == entry


@pytest.mark.parametrize("lost", range(12))
def test_a_grid_with_one_piece_lost_or_doubled_is_refused(lost):
    chunks = split((5, 7), 2, 2)
    assert len(chunks) == 12
    short = chunks[:lost] + chunks[lost + 1 :]
    assert COVER in reason(encode(manifest({"w": tensor((5, 7), *short)})))
    same_size = (
        next(c for c in chunks if c.shape == chunks[lost].shape and c is not chunks[lost])
        if chunks[lost].shape != (1, 1)
        else None
    )
    if same_size:
        assert COVER in reason(encode(manifest({"w": tensor((5, 7), *short, same_size)})))


def test_many_chunks_are_checked_quickly():
    chunks = [chunk((row, 0), (1, 1), start=4 * (row % 2000)) for row in range(20_000)]
    entry = tensor((20_000, 1), *chunks)
    assert len(decode(encode(manifest({"w": entry})), SaveName(7)).tensors["w"].chunks) == 20_000


def test_nobody_wrote_it():
    assert "world size" in reason(encode(manifest(world_size=0)))


# --- a rank's part --------------------------------------------------------------------------------


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
