"""DCP on Outlast's checkpoints: any box of any tensor, and no wrong byte in it."""

import gc
import itertools
import pickle
import threading

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_state import SHARD, STEP, blank, flip, loaded_state, refused, saved_state
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from unit_fakes import num_descriptors, same, same_tensor

import outlast
from outlast.checkpoint import manifest, reader, transfer
from outlast.checkpoint.dcp import StorageReader
from outlast.checkpoint.manifest import (
    FORMAT,
    Chunk,
    Manifest,
    Place,
    TensorEntry,
    encode,
    write_hashed,
)
from outlast.checkpoint.reader import Wanted, open_checkpoint
from outlast.checkpoint.tensors import DTYPES
from outlast.checkpoint.transfer import read_manifest
from outlast.errors import CheckpointInvalid
from outlast.keeper.wire import NO_NONCE
from outlast.storage import Directory
from thorough import examples

pytestmark = pytest.mark.filterwarnings("ignore:.*single process.*")  # DCP says so each time


# --- boxes of chunks -----------------------------------------------------------------------------


@examples(60)
@given(st.data())
def test_any_box_of_any_tensor_cut_in_any_way(tmp_path_factory, data):
    """What DCP may ask for, with blocks and slices so small that every edge is met."""
    shape = tuple(data.draw(st.lists(st.integers(1, 9), max_size=3)))
    dtype = data.draw(st.sampled_from([torch.float64, torch.bfloat16, torch.int8]))
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    pad = data.draw(st.integers(0, 70)) * dtype.itemsize
    cuts = [sorted(data.draw(st.sets(st.integers(1, max(n - 1, 1)), max_size=2))) for n in shape]
    with pytest.MonkeyPatch.context() as patch:
        for room in (manifest, transfer):
            patch.setattr(room, "BLOCK_BYTES", 64)
        patch.setattr(reader, "STAGE_BYTES", data.draw(st.sampled_from([8, 48, 1000])))
        storage = Directory(tmp_path_factory.mktemp("boxes"))
        entry = put_chunks(storage, whole, chunks_of(shape, cuts), pad)
        source = open_checkpoint([Place("a", storage)], 7, rank=None)
        assert same_tensor(next(source.tensors([entry])), whole)
        target = torch.full(shape, -1).to(dtype)
        source.fill([("t", half) for half in halves(data, entry, target)])
        assert same_tensor(target, whole)


def chunks_of(shape, cuts):
    boxes = [((), ())]
    for extent, points in zip(shape, cuts, strict=True):
        edges = [0, *(p for p in points if p < extent), extent]
        boxes = [
            ((*offsets, low), (*sizes, high - low))
            for offsets, sizes in boxes
            for low, high in itertools.pairwise(edges)
        ]
    return boxes


def put_chunks(storage, whole, boxes, pad):
    chunks, pieces, position = [], [bytes(pad)], pad
    for offsets, sizes in boxes:
        box = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        raw = box.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        end = position + len(raw)
        file = "rank-00000.safetensors"
        chunks.append(Chunk(offsets=offsets, shape=sizes, file=file, start=position, end=end))
        pieces.append(raw)
        position = end
    names = {dtype: name for name, dtype in DTYPES.items()}
    entry = TensorEntry(dtype=names[whole.dtype], shape=tuple(whole.shape), chunks=tuple(chunks))
    files = {"rank-00000.safetensors": write_hashed(storage, SHARD, pieces)}
    manifest = Manifest(
        format=FORMAT,
        job="",
        step=7,
        attempt=0,
        serial=1,
        nonce=NO_NONCE,
        world_size=1,
        layout={},
        created_t=0.0,
        files=files,
        tensors={"t": entry},
    )
    storage.put(f"{STEP}/manifest.json", encode(manifest))
    return entry


def halves(data, entry, target):
    """A tensor as two boxes, cut anywhere along any axis, whatever chunks it was saved in."""
    if not entry.shape:
        return [Wanted(entry, (), target)]
    axis = data.draw(st.integers(0, len(entry.shape) - 1))
    at = data.draw(st.integers(0, entry.shape[axis]))
    zeros = (0,) * len(entry.shape)
    later = (*zeros[:axis], at, *zeros[axis + 1 :])
    return [
        Wanted(entry, zeros, target.narrow(axis, 0, at)),
        Wanted(entry, later, target.narrow(axis, at, entry.shape[axis] - at)),
    ]


# --- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [4096, -1])
def test_a_flipped_byte_is_refused_and_file_and_block_are_named(tmp_path, place):
    state = saved_state(tmp_path)
    flip(tmp_path / SHARD, place)
    error = refused(lambda: loaded_state(tmp_path, like=state))
    assert isinstance(error, CheckpointInvalid)
    assert error.reason == ("rank-00000.safetensors does not match its checksum (block 0 of 1)")


def test_bytes_are_not_looked_at_before_they_are_verified(tmp_path):
    saved_state(tmp_path)
    flip(tmp_path / SHARD, -1)
    target = {"model": {"w": torch.zeros(4, 3)}}
    refused(lambda: dcp.load(target, storage_reader=outlast.dcp_reader(tmp_path)))
    assert not target["model"]["w"].any()


def test_damage_elsewhere_does_not_stop_who_does_not_need_it(tmp_path, monkeypatch):
    for room in (manifest, transfer):
        monkeypatch.setattr(room, "BLOCK_BYTES", 4096)
    state = {"a": torch.arange(2048.0), "b": torch.arange(2048.0)}
    dcp.save(state, storage_writer=outlast.dcp_writer(tmp_path, 7))
    flip(tmp_path / SHARD, -1)
    found = {"a": torch.zeros(2048)}
    dcp.load(found, storage_reader=outlast.dcp_reader(tmp_path))
    assert same_tensor(found["a"], state["a"])
    found = {"b": torch.zeros(2048)}
    error = refused(lambda: dcp.load(found, storage_reader=outlast.dcp_reader(tmp_path)))
    assert "(block 4 of 5)" in error.reason


def test_missing_and_short_files_are_named(tmp_path):
    saved_state(tmp_path)
    path = tmp_path / SHARD
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert "rank-00000.safetensors has" in refused(lambda: loaded_state(tmp_path)).reason
    path.unlink()
    assert refused(lambda: loaded_state(tmp_path)).reason == "rank-00000.safetensors is missing"


@pytest.mark.parametrize("name", ["rank-00000.json", "manifest.json"])
def test_damage_to_small_files_is_seen_at_once(tmp_path, name):
    saved_state(tmp_path)
    flip(tmp_path / STEP / name, 40)
    with pytest.raises(CheckpointInvalid, match=name):
        outlast.dcp_reader(tmp_path, step=7)


@pytest.mark.parametrize("state", ["[]", '{"a": {"$": "nonsense"}}', '{"a": {"$": "tensor"}}'])
def test_small_state_that_is_not_understood(tmp_path, state):
    saved_state(tmp_path)
    storage = Directory(tmp_path)
    text = f'{{"state": {state}, "own": []}}'.encode()
    entry = write_hashed(storage, f"{STEP}/rank-00000.json", [text])
    manifest = read_manifest(storage, 7)
    files = manifest.files | {"rank-00000.json": entry}
    storage.put(f"{STEP}/manifest.json", encode(msgspec.structs.replace(manifest, files=files)))
    with pytest.raises(CheckpointInvalid, match="not understood"):
        outlast.dcp_reader(tmp_path, step=7)


def test_no_file_and_no_thread_is_left_open(tmp_path):
    state = saved_state(tmp_path)
    gc.collect()  # what other tests have left
    before = num_descriptors(), threading.active_count()
    for _ in range(3):
        loaded_state(tmp_path)
        _load_state_dict_from_keys(storage_reader=outlast.dcp_reader(tmp_path))
        for number, _ in enumerate(
            open_checkpoint(Directory(tmp_path), 7, rank=None).tensors(entries(tmp_path))
        ):
            if number == 2:
                break
    flip(tmp_path / SHARD, -1)
    refused(lambda: loaded_state(tmp_path, like=state))
    gc.collect()
    assert (num_descriptors(), threading.active_count()) == before


def entries(path):
    return list(read_manifest(Directory(path), 7).tensors.values())


def test_a_block_that_is_wrong_in_one_place_is_taken_from_the_other(tmp_path):
    state = saved_state(tmp_path / "fast")
    saved = Directory(tmp_path / "slow")
    for name in (tmp_path / "fast" / STEP).iterdir():
        saved.put(f"{STEP}/{name.name}", name.read_bytes())
    flip(tmp_path / "fast" / SHARD, 5000)
    places = [Place(name, Directory(tmp_path / name)) for name in ("fast", "slow")]
    found = blank(state)
    dcp.load(found, storage_reader=StorageReader(lambda _: open_checkpoint(places, 7, rank=None)))
    assert same(state, found)
    flip(tmp_path / "slow" / SHARD, 5000)
    reader = StorageReader(lambda _: open_checkpoint(places, 7, rank=None))
    reason = refused(lambda: dcp.load(found, storage_reader=reader)).reason
    assert "fast: rank-00000.safetensors" in reason
    assert "slow: rank-00000.safetensors" in reason


def test_an_error_of_ours_survives_the_way_to_other_ranks():
    StorageReader  # noqa: B018 - importing it is what makes this so
    error = pickle.loads(pickle.dumps(CheckpointInvalid(7, "a reason")))
    assert (type(error), error.step, error.reason) == (CheckpointInvalid, 7, "a reason")
