"""Regions are found in the parts that have them, whatever the layout then and now."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit_layouts import ROW, Job, laid_out, layouts

from outlast.checkpoint.chunks import Coverage, check_parts, covers
from outlast.checkpoint.manifest import (
    Contents,
    decode_part,
    encode_part,
    make_part,
    num_bytes,
    part_entry,
    part_file,
    shard_file,
    state_file,
)
from outlast.checkpoint.spreads import WHOLE, overlap, pieces_of, spread_over
from outlast.checkpoint.transfer import Inventory
from outlast.errors import CheckpointInvalid
from thorough import examples

LOST = Contents()


def brute_force(job, name, box):
    """All chunks of a tensor in a box, from all parts."""
    found = []
    for rank in range(len(job.ranks)):
        chunks = job.part(rank).chunks(name)
        found += [one for one in chunks if overlap((one.offsets, one.shape), box)]
    return sorted(found, key=lambda chunk: chunk.offsets)


@examples(80)
@given(layouts(), st.data())
def test_any_region_is_found_as_if_all_parts_had_been_read(ranks, data):
    job = Job(ranks)
    inventory = Inventory(job.manifest, job.read_file)
    rank = data.draw(st.integers(0, len(ranks) - 1))
    wanted = {}
    for name, (shape, _) in {
        name: one for tensors in ranks for name, one in tensors.items()
    }.items():
        if data.draw(st.booleans()):
            low = tuple(data.draw(st.integers(0, max(0, size - 1))) for size in shape)
            extents = [data.draw(st.integers(0, s - o)) for s, o in zip(shape, low, strict=True)]
            wanted[name] = [(low, tuple(extents))]
    found = inventory.locate(wanted, rank)
    for name, (box,) in wanted.items():
        assert list(found[name].chunks) == brute_force(job, name, box)
        assert covers(found[name].chunks, box)


@examples(80)
@given(layouts())
def test_a_rank_finds_all_that_it_holds_itself(ranks):
    """And what its part says it holds is what it held."""
    job = Job(ranks)
    for rank, tensors in enumerate(ranks):
        inventory = Inventory(job.manifest, job.read_file)
        wanted = {
            name: pieces_of(shape, spread, rank)
            for name, (shape, spread) in tensors.items()
            if math.prod(shape) * 4 >= 4 * ROW and pieces_of(shape, spread, rank)
        }
        job.read.clear()
        inventory.locate(wanted, rank)
        writers = {one for ones in inventory.part(rank).contents.elsewhere.values() for one in ones}
        assert set(job.read) <= {rank, *writers}


@examples(40)
@given(layouts(), st.data())
def test_hints_that_are_wrong_cost_time_and_change_nothing(ranks, data):
    job = Job(ranks)
    entries = list(job.manifest.parts)
    for rank in range(len(ranks)):
        part = job.part(rank)
        contents = msgspec.structs.replace(
            part.contents,
            elsewhere={},
            spreads=(),
            tensors={
                name: msgspec.structs.replace(held, spread=-1)
                for name, held in part.contents.tensors.items()
            },
        )
        job.data[rank] = encode_part(make_part(job.step, rank, part.files, contents))
        number = data.draw(st.integers(0, 3))
        entries[rank] = part_entry(job.data[rank], number, part.files.values())
    manifest = msgspec.structs.replace(job.manifest, parts=tuple(entries))
    inventory = Inventory(manifest, job.read_file)
    for name, (shape, _) in ranks[0].items():
        box = (0,) * len(shape), shape
        (entry,) = inventory.locate({name: [box]}, len(ranks) - 1).values()
        assert list(entry.chunks) == brute_force(job, name, box)


@examples(60)
@given(layouts(), st.data())
def test_a_hole_and_an_overlap_are_refused_by_readers_and_by_verification(ranks, data):
    job = Job(ranks)
    names = sorted(
        (rank, name)
        for rank in range(len(ranks))
        for name, held in job.part(rank).contents.tensors.items()
        if any(math.prod(slab.shape) for slab in held.slabs) and "@" not in name
    )
    every = [decode_part(job.data[rank], 7, rank, len(ranks)) for rank in range(len(ranks))]
    coverage = Coverage(7)
    for part in every:
        coverage.add(part)
    coverage.finish()
    if not names:
        return
    rank, name = data.draw(st.sampled_from(names))
    is_hole = data.draw(st.booleans())
    held = every[rank].contents.tensors[name]
    slabs = held.slabs[1:] if is_hole else (*held.slabs, held.slabs[0])
    tensors = {
        **every[rank].contents.tensors,
        name: msgspec.structs.replace(held, slabs=slabs),
    }
    bad = msgspec.structs.replace(
        every[rank], contents=msgspec.structs.replace(every[rank].contents, tensors=tensors)
    )
    coverage = Coverage(7)
    for part in [*every[:rank], bad, *every[rank + 1 :]]:
        coverage.add(part)
    with pytest.raises(CheckpointInvalid, match="do not cover it"):
        coverage.finish()
    job.data[rank] = encode_part(bad)
    inventory = Inventory(job.manifest, job.read_file)
    with pytest.raises(CheckpointInvalid, match="do not cover, once each"):
        inventory.locate({name: [((0,) * len(held.shape), held.shape)]}, 0)


def fsdp(num_ranks, num_layers=4, rows=8192):
    flat = spread_over(range(num_ranks), (num_ranks,), ((0, 1),))
    return [{f"layers.{n}.w": ((rows, 64), flat) for n in range(num_layers)}] * num_ranks


@pytest.mark.parametrize(
    ("then", "now", "most"), [(4096, 4096, 1), (4096, 2048, 2), (4096, 512, 8)]
)
def test_a_rank_reads_the_parts_it_needs_whatever_the_number_of_ranks(then, now, most):
    ranks = fsdp(then)
    after = spread_over(range(now), (now,), ((0, 1),))
    rank = now // 3
    job = Job(ranks, some={rank})
    inventory = Inventory(job.manifest, job.read_file)
    wanted = {name: pieces_of(shape, after, rank) for name, (shape, _) in ranks[0].items()}
    found = inventory.locate(wanted, rank)
    assert all(covers(found[name].chunks, boxes[0]) for name, boxes in wanted.items())
    # Its own part tells where to look; it need not be one of those that have what is wanted.
    assert inventory.num_parts_read <= most + (then != now)


def test_another_rank_of_a_group_of_replicas_leads_to_its_writers():
    a, b = 64, 8
    hybrid = spread_over(range(a * b), (a, b), ((WHOLE, 1), (0, 1)))
    ranks = [{f"t{n}": ((8, ROW), hybrid) for n in range(12)}] * (a * b)
    job = Job(ranks, some={5})
    inventory = Inventory(job.manifest, job.read_file)
    entry = inventory.locate({"t3": [((0, 0), (8, ROW))]}, 5)["t3"]
    assert covers(entry.chunks, ((0, 0), (8, ROW)))
    assert inventory.num_parts_read <= 1 + 2 * b


def test_a_stage_finds_what_only_another_stage_has():
    ranks = laid_out("stages", 8, 16, [(32, ROW)] * 3, lambda one: one[0])
    job = Job(ranks)
    inventory = Inventory(job.manifest, job.read_file)
    assert inventory.tensor("s5.t1", 0) == ("F32", (32, ROW))
    found = inventory.locate({"s5.t1": [((0, 0), (32, ROW))]}, 0)
    assert [chunk.file for chunk in found["s5.t1"].chunks] == [
        shard_file(rank) for rank in range(80, 96)
    ]
    assert inventory.num_parts_read <= len(inventory.firsts()) + 16
    assert {"s0.t0", "s7.t2", "tied"} <= inventory.tensors().keys()
    with pytest.raises(KeyError):
        inventory.tensor("nobody's", 0)
    with pytest.raises(CheckpointInvalid, match="no part names the wanted elements of nobody's"):
        inventory.locate({"nobody's": [((0,), (1,))]}, 0)


def test_files_are_found_by_name_and_a_part_comes_before_what_it_names():
    job = Job(fsdp(3, rows=3 * ROW))
    inventory = Inventory(job.manifest, job.read_file)
    names = [name for name, _ in inventory.walk()]
    assert names == [
        name for rank in range(3) for name in (part_file(rank), state_file(rank), shard_file(rank))
    ]
    assert dict(inventory.walk()) == {name: inventory.file(name) for name in names}
    assert set(inventory.files(1)) == {part_file(1), state_file(1), shard_file(1)}
    assert inventory.num_bytes == sum(entry.size for _, entry in inventory.walk())
    assert num_bytes(job.manifest) == inventory.num_bytes
    for name in ("rank-00003.json", "rank-00003.part.json", "other"):
        with pytest.raises(CheckpointInvalid, match="does not name"):
            inventory.file(name)


def test_parts_that_disagree_about_a_tensor_are_refused():
    job = Job(fsdp(2, rows=2 * ROW))
    part = job.part(1)
    tensors = {
        name: msgspec.structs.replace(held, dtype="I32")
        for name, held in part.contents.tensors.items()
    }
    contents = msgspec.structs.replace(part.contents, tensors=tensors)
    job.data[1] = encode_part(msgspec.structs.replace(part, contents=contents))
    inventory = Inventory(job.manifest, job.read_file)
    name, (shape, _) = next(iter(job.ranks[0].items()))
    with pytest.raises(CheckpointInvalid, match="F32"):
        inventory.locate({name: [((0, 0), shape)]}, 0)
    coverage = Coverage(7)
    coverage.add(inventory.part(0))
    with pytest.raises(CheckpointInvalid, match="I32"):
        coverage.add(inventory.part(1))


def test_a_piece_that_is_there_twice_does_not_stand_for_one_that_is_not():
    job = Job(fsdp(2, rows=2 * ROW))
    (name, (shape, _)), *_ = job.ranks[0].items()
    part = job.part(1)
    held = part.contents.tensors[name]
    moved = [msgspec.structs.replace(slab, offsets=(0, 0)) for slab in held.slabs]
    tensors = {**part.contents.tensors, name: msgspec.structs.replace(held, slabs=tuple(moved))}
    contents = msgspec.structs.replace(part.contents, tensors=tensors)
    job.data[1] = encode_part(msgspec.structs.replace(part, contents=contents))
    inventory = Inventory(job.manifest, job.read_file)
    with pytest.raises(CheckpointInvalid, match="do not cover, once each"):
        inventory.locate({name: [((0, 0), shape)]}, 0)
    with pytest.raises(CheckpointInvalid, match="do not cover it"):
        check_parts(inventory)
