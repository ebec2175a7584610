"""Whatever is wrong with a file of a checkpoint, and the parts are files too: found, and mended."""

import itertools
import shutil

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from unit_checkpoints import grid, mend_all, rewrite, write
from unit_fakes import same
from unit_names import save_name, save_of

from outlast.checkpoint.manifest import (
    MANIFEST,
    NOTE,
    Place,
    as_places,
    encode_part,
    part_entry,
    part_file,
    state_file,
    write_hashed,
)
from outlast.checkpoint.reader import open_checkpoint
from outlast.checkpoint.transfer import inventory_of, read_manifest
from outlast.errors import CheckpointInvalid
from outlast.storage import Directory
from thorough import examples
from whole_reads import load, verify

STEP = save_name(7)
WORLD = 3


def state(rank):
    return {
        "model": {"w": torch.arange(600.0).view(6, 100), "b": torch.ones(3)},
        "outlast": {"rng": torch.tensor([rank])},
        "n": rank,
    }


@pytest.fixture(name="saved", scope="module", params=[True, False], ids=["parts", "inline"])
def _saved(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    write(
        Directory(path),
        [state(rank) for rank in range(WORLD)],
        cut=lambda _, tensor: (
            grid((0, 2, 4, 6), (0, 100)) if tensor.dim() == 2 else grid((0, tensor.shape[0]))
        ),
        parts=request.param,
    )
    return path


@pytest.fixture(name="fresh", scope="module")
def _fresh(saved, tmp_path_factory):
    numbers = itertools.count()

    def copy():
        path = tmp_path_factory.mktemp("copy") / str(next(numbers))
        shutil.copytree(saved, path)
        return path

    return copy


def files(path):
    names = sorted(file.name for file in (path / STEP).iterdir())
    return [name for name in names if name != NOTE]


def harm(path, name, kind, at):
    """Flip a bit of a file, end it early, or remove it; whether anything changed."""
    file = path / STEP / name
    data = bytearray(file.read_bytes())
    if kind == "remove":
        file.unlink()
        return True
    if not data:
        return False
    position = int(at * (len(data) - 1))
    if kind == "flip":
        data[position] ^= 1 << (position % 8)
    else:
        del data[position:]
    file.write_bytes(data)
    return True


DAMAGE = st.tuples(st.sampled_from(["flip", "cut", "remove"]), st.floats(0, 1), st.integers(0, 99))


@examples(60)
@given(DAMAGE, st.integers(0, WORLD - 1))
def test_what_is_damaged_is_found_and_nothing_else_is_believed(fresh, damage, rank):
    kind, at, which = damage
    path = fresh()
    name = files(path)[which % len(files(path))]
    if not harm(path, name, kind, at):
        return
    storage = Directory(path)
    with pytest.raises(CheckpointInvalid):
        verify(storage, save_of(7))
    try:
        found = load(storage, save_of(7), rank=rank, everything=False)
    except CheckpointInvalid:
        return
    assert same(found.state("model"), state(rank)["model"])
    assert same(found.state("outlast"), state(rank)["outlast"])
    assert found.state("n") == rank


@examples(60)
@given(DAMAGE, DAMAGE)
def test_two_places_make_each_other_whole(fresh, one, other):
    paths = [fresh(), fresh()]
    whole = {name: (paths[0] / STEP / name).read_bytes() for name in files(paths[0])}
    names = list(whole)
    first, second = (names[which % len(names)] for _, _, which in (one, other))
    harm(paths[0], first, *one[:2])
    if second != first:
        harm(paths[1], second, *other[:2])
    if MANIFEST in (first, second) and "remove" in (one[0], other[0]):
        return  # a place without a manifest is a copy in the making
    places = [Place(f"tier-{number}", Directory(path)) for number, path in enumerate(paths)]
    found = load(places, save_of(7), rank=1)
    assert same(found.state("model"), state(1)["model"])
    mend_all(places, save_of(7))
    for path in paths:
        assert {name: (path / STEP / name).read_bytes() for name in files(path)} == whole


def test_a_reader_that_found_a_damaged_part_mends_it(saved, fresh):
    paths = [fresh(), fresh()]
    name = part_file(1)
    if name not in files(saved):
        return
    harm(paths[0], name, "flip", 0.5)
    places = [Place(f"tier-{number}", Directory(path)) for number, path in enumerate(paths)]
    told = []
    checkpoint = open_checkpoint(
        places, save_of(7), rank=1, on_damaged=lambda *what: told.append(what[0])
    )
    checkpoint.read((), share=(0, 1))
    assert told == [name]
    assert [one.file for one in checkpoint.repair()] == [name]
    assert (paths[0] / STEP / name).read_bytes() == (paths[1] / STEP / name).read_bytes()


def test_a_region_is_read_through_dcps_eyes(saved):
    """A box across what three ranks wrote."""
    source = open_checkpoint(Directory(saved), save_of(7), rank=None)
    found = source.merged(2)
    assert found.stored["outlast.rng"] == "outlast.rng@rank-00002"
    source.locate(found, {"model.w": [((1, 10), (4, 5))]}, 2)
    assert len(found.entries["model.w"].chunks) == WORLD


@examples(40)
@given(st.floats(0, 1), st.booleans())
def test_no_part_is_believed_that_is_not_what_was_committed(fresh, at, is_cut):
    """A flipped bit may leave it readable, with another shape in it, say."""
    paths = [fresh(), fresh()]
    name = part_file(1)
    if name not in files(paths[0]):
        return
    right = (paths[0] / STEP / name).read_bytes()
    harm(paths[0], name, "cut" if is_cut else "flip", at)
    places = [Place(f"tier-{number}", Directory(path)) for number, path in enumerate(paths)]
    manifest = read_manifest(places, save_of(7))
    with pytest.raises(CheckpointInvalid, match=r"rank-00001\.part\.json"):
        inventory_of(manifest, places[:1]).part(1)
    assert encode_part(inventory_of(manifest, places).part(1)) == right


def test_the_file_that_is_named_is_the_one_that_is_damaged(tmp_path):
    """A small state names a tensor that another rank's part knows, and that part is damaged."""
    storage, save = Directory(tmp_path), save_of(7)
    model = {"w": torch.ones(2)}
    manifest = write(storage, [{"model": model}, {"model": model, "stage": {"v": torch.ones(3)}}])
    text = (tmp_path / STEP / state_file(1)).read_bytes()
    part = inventory_of(manifest, as_places(storage)).part(0)
    entry = write_hashed(storage, f"{save}/{state_file(0)}", [text])
    data = encode_part(msgspec.structs.replace(part, files=part.files | {state_file(0): entry}))
    write_hashed(storage, f"{save}/{part_file(0)}", [data])
    rewrite(storage, manifest, parts=(part_entry(data, 0, []), manifest.parts[1]))
    assert open_checkpoint(storage, save).leaf("stage.v").shape == (3,)
    harm(tmp_path, part_file(1), "flip", 0.5)
    with pytest.raises(CheckpointInvalid) as caught:
        open_checkpoint(storage, save)
    assert caught.value.reason == (
        "rank-00001.part.json does not match its checksum (block 0 of 1)"
    )
