"""Every piece is written once, evenly, whatever the order of things and the number of ranks."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from unit_checkpoints import shares_in, shares_of
from unit_layouts import ROW, held_by, layouts

from outlast.checkpoint.manifest import BLOCK_BYTES, shard_file
from outlast.checkpoint.plan import (
    SHARE_MIN_BYTES,
    HeldPiece,
    PieceLocation,
    Share,
    World,
    describe,
    make,
    num_bytes,
    outline,
    share,
    structure,
)
from outlast.checkpoint.spreads import WHOLE, spread_over
from outlast.checkpoint.tensors import NAMES
from outlast.errors import ConfigError
from thorough import examples

DTYPES = ("F32", "BF16", "I64", "U8")


def piece(name, num_elements=1, dtype="F32", *, offset=0, whole=None):
    return HeldPiece(name, dtype, (whole or num_elements,), (offset,), (num_elements,))


def held(pieces):
    return [(one, PieceLocation(0, ())) for one in pieces]


@st.composite
def worlds(draw):
    """Structures of 1 to 4 ranks: replicas, chunks, stages, and one name for several things."""
    world_size = draw(st.integers(1, 4))
    ranks = [[] for _ in range(world_size)]
    for number in range(draw(st.integers(1, 12))):
        size = draw(
            st.sampled_from([0, 1, 100, SHARE_MIN_BYTES, 3 * SHARE_MIN_BYTES + 5, 3 * BLOCK_BYTES])
        )
        dtype = draw(st.sampled_from(DTYPES))
        name = f"t{number}"
        kind = draw(st.sampled_from(["replica", "chunks", "some", "shapes", "own"]))
        if kind == "own":
            name = f"outlast.{name}"
        if kind == "chunks" and size:
            whole = size * world_size
            for rank in range(world_size):
                ranks[rank].append(piece(name, size, dtype, offset=rank * size, whole=whole))
        else:
            some = draw(st.sets(st.integers(0, world_size - 1), min_size=1))
            for rank in range(world_size) if kind != "some" else some:
                more = rank if kind == "shapes" else 0
                ranks[rank].append(piece(name, size + more, dtype))
    own = draw(st.sets(st.sampled_from([f"t{number}" for number in range(12)])))
    return ranks, own


def plans(ranks, own):
    shares = shares_of(ranks, own)
    return [make(held(pieces), rank, shares[rank], {}) for rank, pieces in enumerate(ranks)]


@examples(200)
@given(worlds())
def test_every_piece_is_written_once_or_is_its_ranks_own(world):
    ranks, own = world
    written = plans(ranks, own)
    for rank, pieces in enumerate(ranks):
        plan = written[rank]
        mine = {write.piece.key: write for write in plan.writes}
        checked = {check.piece.key for check in plan.checks}
        elsewhere = {one.key for one in pieces if one.name in own and one.shape != one.whole}
        assert {one.key for one in pieces} - elsewhere <= mine.keys() | checked
        assert not mine.keys() & checked
        # What one rank only checks, exactly one other writes, and reports its digest.
        for key in checked:
            found = [w for other in written for w in other.writes if w.piece.key == key]
            assert len(found) == 1
            assert found[0].shared
    # A name in the manifest stands for one thing: no element of it is written twice.
    covered = {}
    for plan in written:
        for name, entry in plan.tensors.items():
            for chunk in entry.chunks:
                at = covered.setdefault(name, {})
                assert entry.shape not in {shape for shape in at if shape != entry.shape}
                where = at.setdefault(entry.shape, [])
                span = (chunk.offsets[0], chunk.offsets[0] + chunk.shape[0])
                assert all(span[1] <= a or b <= span[0] for a, b in where if b > a), name
                where.append(span)
    for name, shapes in covered.items():
        assert len(shapes) == 1, f"{name} has several shapes"
        (shape, spans), *_ = shapes.items()
        assert sum(b - a for a, b in spans) == math.prod(shape)


@examples(100)
@given(worlds(), st.randoms())
def test_the_plan_does_not_depend_on_the_order_of_things(world, rng):
    ranks, own = world
    shuffled = [rng.sample(pieces, len(pieces)) for pieces in ranks]
    assert shares_of(shuffled, sorted(own)) == shares_of(ranks, own)
    for one, other in zip(plans(ranks, own), plans(shuffled, own), strict=True):
        assert [w.piece for w in one.writes] == [w.piece for w in other.writes]
        assert (one.head, one.size, one.tensors) == (other.head, other.size, other.tensors)
        assert sorted(c.piece.key for c in one.checks) == sorted(c.piece.key for c in other.checks)


@examples(100)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=30), st.integers(1, 5))
def test_replicas_are_shared_evenly(sizes, world_size):
    pieces = [piece(f"t{n}", size * SHARE_MIN_BYTES) for n, size in enumerate(sizes)]
    written = plans([pieces] * world_size, ())
    loads = [sum(w.end - w.start for w in plan.writes) for plan in written]
    assert max(loads) - min(loads) <= max(num_bytes(one) for one in pieces)
    assert sum(loads) == sum(num_bytes(one) for one in pieces)


@examples(100)
@given(worlds())
def test_a_file_is_laid_out_without_holes_and_aligned(world):
    for rank, plan in enumerate(plans(*world)):
        position = len(plan.head)
        assert len(plan.head) % 4096 == 0
        for write in plan.writes:
            assert write.start == position
            assert write.end - write.start == num_bytes(write.piece)
            assert write.start % write.dtype.itemsize == 0
            assert [start for start, _ in write.parts][:1] == [write.start][: len(write.parts)]
            assert sum(size for _, size in write.parts) == write.end - write.start
            for start, size in write.parts:
                assert start // BLOCK_BYTES == (start + size - 1) // BLOCK_BYTES
            position = write.end
        assert plan.size == (position if plan.writes else 0)
        assert all(c.file == shard_file(rank) for e in plan.tensors.values() for c in e.chunks)


def test_what_the_optimizer_touches_first_lies_first():
    pieces = held([piece("a", 8), piece("b", 8), piece("c", 8, "I64"), piece("d", 8)])
    plan = make(pieces, 0, Share(), {"d": 0, "b": 1})
    assert [write.piece.name for write in plan.writes] == ["c", "d", "b", "a"]


def test_small_and_named_tensors_belong_to_their_rank():
    ranks = [[piece("small", 10), piece("large", SHARE_MIN_BYTES), piece("outlast.rng", 10)]] * 3
    shares = shares_of(ranks, {"large"})
    assert [one.private for one in shares] == [
        frozenset(),
        {"large", "small"},
        {"large", "small"},
    ]
    assert all(not one.writers for one in shares)
    plan = make(held(ranks[2]), 2, shares[2], {})
    assert sorted(plan.tensors) == [
        "large@rank-00002",
        "outlast.rng@rank-00002",
        "small@rank-00002",
    ]


def test_pieces_of_a_spread_tensor_that_differ_are_written_once_and_not_compared():
    chunks = [piece("w", 100, offset=at, whole=200) for at in (0, 100, 0, 100)]
    shares = shares_of([[one] for one in chunks], {"w"})
    written = [make(held([one]), rank, shares[rank], {}) for rank, one in enumerate(chunks)]
    assert [len(plan.writes) for plan in written] == [1, 1, 0, 0]
    assert not any(write.shared for plan in written for write in plan.writes)
    assert not any(plan.checks for plan in written)
    assert [plan.own for plan in written] == [()] * 4


def test_stages_with_other_names_write_what_they_have():
    written = plans([[piece("a", SHARE_MIN_BYTES)], [piece("b", SHARE_MIN_BYTES)]], ())
    assert [[w.piece.name for w in plan.writes] for plan in written] == [["a"], ["b"]]
    assert [plan.own for plan in written] == [(), ()]


def test_the_structure_says_what_is_held_and_notices_what_changes():
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros((), dtype=torch.int64)}
    found = structure(tensors, {"a"})
    assert [one for one, _ in found] == [
        HeldPiece("a", "BF16", (2, 3), (0, 0), (2, 3)),
        HeldPiece("b", "I64", (), (), ()),
    ]
    before = outline(tensors)
    assert outline(dict(tensors)) == before
    for changed in (
        {**tensors, "a": torch.zeros(3, 2)},
        {**tensors, "a": torch.zeros(2, 3).half()},
        {**tensors, "c": torch.zeros(1)},
        {"a": tensors["a"]},
    ):
        assert outline(changed) != before
    with pytest.raises(ConfigError, match=r"c has dtype torch\.complex128"):
        structure({"c": torch.zeros(1, dtype=torch.complex128)})


def test_sizes_are_those_of_torch():
    for dtype, name in NAMES.items():
        tensor = torch.empty(random.Random(0).randrange(1, 9), 3, dtype=dtype)
        (one, _), *_ = structure({"t": tensor})
        assert (one.dtype, num_bytes(one)) == (name, tensor.numel() * tensor.element_size())


# --- which rank writes what, at thousands of ranks ------------------------------------------------


def check(ranks, described, shares):
    """Every piece is written once or is its ranks' own; every element of a name once."""
    held = [held_by(rank, tensors) for rank, tensors in enumerate(ranks)]
    by_piece = {}
    for rank, pieces in enumerate(held):
        for piece, _ in pieces:
            by_piece.setdefault(piece, []).append(rank)
    written = {}
    for rank, pieces in enumerate(held):
        assert not shares[rank].problem
        plan = make(pieces, rank, shares[rank], {})
        for write in plan.writes:
            name = write.piece.name + (f"@{rank}" if write.piece.name in plan.own else "")
            written.setdefault(name, []).append((write.piece, rank))
        for check_ in plan.checks:
            writer = shares[rank].writers[check_.piece.key]
            assert writer in by_piece[check_.piece]
            group = by_piece[check_.piece]
            assert {shares[one].writers[check_.piece.key] for one in group} == {writer}
            assert len({shares[one].groups[check_.piece.key] for one in group}) == 1
            assert writer in plan.contents.elsewhere[check_.piece.name]
    for name, pieces in written.items():
        assert len({(piece.offsets, piece.shape) for piece, _ in pieces}) == len(pieces), name
        whole = math.prod(pieces[0][0].whole)
        assert sum(math.prod(piece.shape) for piece, _ in pieces) == whole, name
    total = sum(
        math.prod(piece.shape)
        for name, pieces in written.items()
        for piece, _ in pieces
        if "@" not in name
    )
    assert total == shares[0].num_elements


@examples(150)
@given(layouts())
def test_every_piece_has_one_writer_whom_all_its_holders_name(ranks):
    described = [describe(held_by(rank, tensors), rank) for rank, tensors in enumerate(ranks)]
    check(ranks, described, shares_in(described))


@examples(60)
@given(layouts())
def test_a_spread_that_cannot_be_described_changes_nothing_but_time(ranks):
    """Pieces without the spread they follow from: as of a placement that nobody knows."""
    described = [
        describe(
            [(piece, PieceLocation(where.number, ())) for piece, where in held_by(rank, tensors)],
            rank,
        )
        for rank, tensors in enumerate(ranks)
    ]
    check(ranks, described, shares_in(described))


def test_ranks_that_hold_the_like_have_one_structure():
    spread = spread_over(range(4096), (4096,), ((0, 1),))
    tensors = {"a": ((8192, 64), spread), "b": ((4097, 3), spread), "outlast.rng": ((9,), None)}
    found = {describe(held_by(rank, tensors), rank).digest() for rank in range(4096)}
    # Of 4,097 rows cut by two, the last 2,047 ranks hold none.
    assert len(found) == 2


def test_a_group_of_replicas_shares_its_work_evenly_at_any_size():
    ranks, shards = 512, 8
    spread = spread_over(range(ranks), (ranks // shards, shards), ((WHOLE, 1), (0, 1)))
    tensors = {f"t{n}": ((8 * (n % 7 + 1), ROW), spread) for n in range(90)}
    one = describe(held_by(0, tensors), 0)
    world = World([0] * ranks, [one])
    load = []
    for rank in range(0, ranks, shards):
        writers = share(world, rank, ()).writers
        mine = [piece for piece, _ in held_by(rank, tensors)]
        load.append(sum(num_bytes(piece) for piece in mine if writers[piece.key] == rank))
    assert sum(load) == sum(num_bytes(piece) for piece, _ in held_by(0, tensors))
    assert max(load) - min(load) <= 7 * ROW * 4


def test_pieces_that_cannot_become_one_tensor_are_named():
    flat = spread_over(range(2), (2,), ((0, 1),))
    other = spread_over(range(2, 5), (3,), ((0, 1),))
    for there, words in (
        (((6, ROW), other), "is cut into other pieces on rank 0 than on rank 2"),
        (((6, ROW), None), "is cut into other pieces on rank 0 than on rank 2"),
        (((9, ROW), other), "is F32"),
    ):
        ranks = [{"w": ((6, ROW), flat)}] * 2 + [{"w": there}] * 3
        described = [describe(held_by(rank, tensors), rank) for rank, tensors in enumerate(ranks)]
        for found in shares_in(described):
            assert found.problem.startswith("w is ")
        assert words in shares_in(described)[0].problem
