"""Who writes what, at thousands of ranks: every piece once, by one whom all its holders name."""

import math

from hypothesis import given
from unit_checkpoints import shares_in
from unit_layouts import ROW, held_by, layouts

from outlast.checkpoint.plan import PieceLocation, World, describe, make, num_bytes, share
from outlast.checkpoint.spreads import WHOLE, spread_over
from thorough import examples


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
