"""A checkpoint in several places: what is wrong in one is taken from the next, and mended."""

import itertools
import shutil
import threading

import pytest
import torch
from unit_checkpoints import damage, read_flat, rewrite, write
from unit_fakes import WatchedStorage, bits, num_descriptors, same
from unit_names import save_name

from outlast.checkpoint import manifest, transfer
from outlast.checkpoint.manifest import Place
from outlast.checkpoint.reader import open_checkpoint
from outlast.checkpoint.transfer import read_manifest
from outlast.errors import CheckpointInvalid
from outlast.storage import Directory
from whole_reads import load

STEP = save_name(7)
TENSORS, SMALL, MANIFEST = "rank-00000.safetensors", "rank-00000.json", "manifest.json"
NAMES = ("local", "shared", "object")


def state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"model": {"w": torch.rand(3000, generator=generator)}, "n": 3}


class Job:
    """A checkpoint in several directories that are all alike."""

    def __init__(self, path, count=2):
        self.paths = [path / name for name in NAMES[:count]]
        self.manifest = write(Directory(self.paths[0]), [state()])
        for other in self.paths[1:]:
            shutil.copytree(self.paths[0], other)
        self.whole = self.files()
        self.places = [Place(one.name, Directory(one)) for one in self.paths]
        self.told, self.mended = [], []

    def files(self):
        return [
            {file.name: file.read_bytes() for file in (path / STEP).iterdir()}
            for path in self.paths
            if (path / STEP).is_dir()
        ]

    def open(self, places=None):
        def on_damaged(file, place, reason):
            self.told.append((file, place.name, reason))

        return open_checkpoint(places or self.places, 7, on_damaged=on_damaged)

    def repair(self, checkpoint):
        return checkpoint.repair(lambda file, place: self.mended.append((file, place.name)))


@pytest.fixture(name="job")
def _job(tmp_path, monkeypatch):
    for room in (transfer, manifest):
        monkeypatch.setattr(room, "BLOCK_BYTES", 4096)
    return Job(tmp_path)


@pytest.fixture(name="three")
def _three(tmp_path, monkeypatch):
    for room in (transfer, manifest):
        monkeypatch.setattr(room, "BLOCK_BYTES", 4096)
    return Job(tmp_path, 3)


def filled(checkpoint):
    target = torch.full((3000,), float("nan"))
    checkpoint.read([("model.w", target)])
    return target


@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_bad_block_is_taken_from_the_next_place_told_of_and_mended(job, block):
    damage(job.paths[0], 7, TENSORS, block * 4096 + 5)
    checkpoint = job.open()
    for _ in range(2):
        assert bits(filled(checkpoint)) == bits(state()["model"]["w"])
    reason = f"{TENSORS} does not match its checksum (block {block} of 3)"
    assert job.told == [(TENSORS, "local", reason)]
    assert checkpoint.sources[TENSORS] == "local and shared"
    assert job.files() != job.whole
    (repaired,) = job.repair(checkpoint)
    assert tuple(repaired) == (TENSORS, "local", "shared")
    assert job.mended == [(TENSORS, "local")]
    assert job.files() == job.whole
    assert job.repair(checkpoint) == []


def test_two_damaged_copies_make_a_whole_one(job):
    damage(job.paths[0], 7, TENSORS, 5)
    damage(job.paths[1], 7, TENSORS, 4096 + 5)
    damage(job.paths[1], 7, SMALL)
    checkpoint = job.open()
    checkpoint.read([], share=(0, 1))
    assert {(file, place) for file, place, _ in job.told} == {(TENSORS, "local")}
    job.repair(checkpoint)
    assert job.files()[0] == job.whole[0]


@pytest.mark.parametrize("trouble", ["missing", "short", "long", "empty"])
@pytest.mark.parametrize("name", [TENSORS, SMALL])
def test_a_file_that_is_missing_or_of_another_size(job, trouble, name):
    file = job.paths[0] / STEP / name
    data = file.read_bytes()
    if trouble == "missing":
        file.unlink()
    else:
        file.write_bytes({"short": data[:-1], "long": data + b"x", "empty": b""}[trouble])
    checkpoint = job.open()
    assert same(checkpoint.state("model"), state()["model"])
    ((told, place, reason),) = job.told
    assert (told, place) == (name, "local")
    assert ("is missing" if trouble == "missing" else "bytes and should have") in reason
    assert checkpoint.sources[name] == "shared"
    job.repair(checkpoint)
    assert job.files() == job.whole


@pytest.mark.parametrize("torn", [b"", b"{", b"nonsense"])
def test_a_torn_manifest_is_taken_from_the_next_place_and_mended(job, torn):
    (job.paths[0] / STEP / MANIFEST).write_bytes(torn)
    assert read_manifest(job.places, 7) == job.manifest
    checkpoint = job.open()
    assert [(file, place) for file, place, _ in job.told] == [(MANIFEST, "local")]
    assert same(checkpoint.state("model"), state()["model"])
    assert set(checkpoint.sources.values()) == {"local"}, "its files are read all the same"
    assert [tuple(one) for one in job.repair(checkpoint)] == [(MANIFEST, "local", "shared")]
    assert job.files() == job.whole


def test_a_torn_manifest_is_mended_after_the_files_that_it_counts_on(job):
    (job.paths[0] / STEP / MANIFEST).write_bytes(b"{")
    (job.paths[0] / STEP / SMALL).unlink()
    checkpoint = job.open()
    assert [one.file for one in job.repair(checkpoint)] == [SMALL, MANIFEST]
    assert job.files() == job.whole


def test_a_torn_manifest_behind_the_first_is_found_with_the_damage(job):
    (job.paths[1] / STEP / MANIFEST).write_bytes(b"{")
    damage(job.paths[0], 7, SMALL)
    damage(job.paths[1], 7, SMALL, 0)
    with pytest.raises(CheckpointInvalid):
        job.open()
    assert {(file, place) for file, place, _ in job.told} == {
        (SMALL, "local"),
        (SMALL, "shared"),
        (MANIFEST, "shared"),
    }


def test_right_in_no_place(three):
    damage(three.paths[0], 7, TENSORS, 5)
    (three.paths[1] / STEP / TENSORS).unlink()
    (three.paths[2] / STEP / TENSORS).write_bytes(b"short")
    target = torch.full((3000,), float("nan"))
    checkpoint = three.open()
    with pytest.raises(CheckpointInvalid) as caught:
        checkpoint.read([("model.w", target)])
    size = len(three.whole[0][TENSORS])
    assert caught.value.reason == (
        f"local: {TENSORS} does not match its checksum (block 0 of 3); "
        f"shared: {TENSORS} is missing; object: {TENSORS} has 5 bytes and should have {size}"
    )
    assert len(three.told) == 3
    assert three.repair(checkpoint) == [], "nothing can be mended, and nothing is raised"


def test_no_manifest_anywhere_says_each_places_reason(job):
    (job.paths[0] / STEP / MANIFEST).unlink()
    (job.paths[1] / STEP / MANIFEST).write_bytes(b"")
    with pytest.raises(CheckpointInvalid) as caught:
        job.open()
    assert caught.value.reason == "local: manifest.json is missing; shared: manifest.json is empty"
    with pytest.raises(CheckpointInvalid, match=r"manifest\.json is missing"):
        read_manifest(job.places[0].storage, 7)


def test_a_place_without_the_step_is_neither_asked_nor_called_damaged(job):
    shutil.rmtree(job.paths[0] / STEP)
    storage = WatchedStorage(Directory(job.paths[0]))
    checkpoint = job.open([Place("local", storage), job.places[1]])
    assert same(checkpoint.state("model"), state()["model"])
    assert job.told == []
    assert "open" not in [did for did, _ in storage.log]
    assert set(checkpoint.sources.values()) == {"shared"}


def test_a_copy_in_the_making_gives_its_bytes_and_is_left_alone(job):
    """Its manifest is not there yet; what lies there already is right."""
    (job.paths[1] / STEP / MANIFEST).unlink()
    (job.paths[1] / STEP / SMALL).unlink()
    damage(job.paths[0], 7, TENSORS, 5)
    checkpoint = job.open()
    assert bits(filled(checkpoint)) == bits(state()["model"]["w"])
    assert {place for _, place, _ in job.told} == {"local"}
    assert len(job.repair(checkpoint)) == 1
    assert not (job.paths[1] / STEP / SMALL).exists()


def test_another_save_of_the_step_serves_where_the_newest_cannot_be_opened(job, caplog):
    write(Directory(job.paths[1]), [state(seed=1)], attempt=9)
    assert same(job.open().state("model"), state(seed=1)["model"]), "the newest counts"
    before = job.files()[1]
    damage(job.paths[1], 7, SMALL, attempt=9)
    assert same(job.open().state("model"), state()["model"])
    assert job.files()[1] == before, "which is the older save's"
    assert "rank-00000.json does not match" in caplog.text


def test_a_place_that_fails_is_passed_over_and_a_failing_repair_is_not_heard(job, caplog):
    error = OSError(5, "Input/output error")
    calls = {"open": True, "create": True}
    storage = WatchedStorage(
        Directory(job.paths[0]), lambda did, name: error if calls.get(did) else None
    )
    places = [Place("local", storage), job.places[1]]
    checkpoint = job.open(places)
    assert same(checkpoint.state("model"), state()["model"])
    assert (TENSORS, "local", f"{TENSORS}: EIO: Input/output error") in job.told
    assert job.repair(checkpoint) == []
    assert job.mended == []
    assert "was not mended: EIO: Input/output error" in caplog.text


@pytest.mark.parametrize("operation", ["open", "read"])
def test_what_a_failing_place_may_have_is_not_called_invalid(job, operation):
    error = OSError(5, "Input/output error")
    storage = WatchedStorage(
        Directory(job.paths[0]), lambda did, _: error if did == operation else None
    )
    (job.paths[1] / STEP / TENSORS).unlink()
    (job.paths[1] / STEP / MANIFEST).unlink()
    with pytest.raises(OSError, match="EIO: Input/output error") as caught:
        load([Place("local", storage), job.places[1]], 7)
    assert caught.value.errno == 5
    assert "shared: " in str(caught.value)


def test_no_byte_of_a_bad_block_reaches_its_destination(job):
    data = (job.paths[0] / STEP / TENSORS).read_bytes()
    for path in job.paths:
        damage(path, 7, TENSORS, 4096 + 5)
    target = torch.full((3000,), float("nan"))
    with pytest.raises(CheckpointInvalid):
        job.open().read([("model.w", target)])
    got = target.view(torch.uint8).numpy().tobytes()
    untouched = bits(torch.full((3000,), float("nan")))
    for block in range(3):
        here = slice(block * 4096, (block + 1) * 4096)
        assert got[here] in (untouched[here], data[here])
    assert got[4096:8192] == untouched[4096:8192]


@pytest.mark.parametrize("which", ["first", "last"])
def test_memory_is_read_where_it_lies_and_hashed_there(job, which):
    class Memory:
        def __init__(self, path):
            self.bytes = {
                f"{STEP}/{file.name}": bytearray(file.read_bytes())
                for file in (path / STEP).iterdir()
            }

        def children(self, name=""):
            return [STEP]

        def exists(self, name):
            return name in self.bytes

        def view(self, name):
            return memoryview(self.bytes[name]).toreadonly() if name in self.bytes else None

        def read(self, name):
            return bytes(self.bytes[name])

        def open(self, name):
            if name not in self.bytes:
                raise FileNotFoundError(name)
            raise AssertionError("it was opened though it can be seen")

    memory = Memory(job.paths[0])
    places = [Place("memory", memory), job.places[1]]
    checkpoint = job.open(places)
    assert bits(filled(checkpoint)) == bits(state()["model"]["w"])
    assert set(checkpoint.sources.values()) == {"memory"}
    if which == "first":
        memory.bytes[f"{STEP}/{TENSORS}"][3] ^= 1
        reason = f"{TENSORS} does not match its checksum (block 0 of 3)"
    else:
        del memory.bytes[f"{STEP}/{TENSORS}"][-1]
        reason = f"{TENSORS} has 11999 bytes and should have 12000"
    checkpoint = job.open(places)
    assert bits(filled(checkpoint)) == bits(state()["model"]["w"])
    assert job.told == [(TENSORS, "memory", reason)]


def test_a_share_of_the_files_is_verified_besides_what_is_wanted(tmp_path):
    storage = WatchedStorage(Directory(tmp_path))
    write(Directory(tmp_path), [{"outlast": {"r": torch.tensor([rank])}} for rank in range(5)])
    seen = []
    for number, of in itertools.product(range(2), [2]):
        storage.log.clear()
        checkpoint = open_checkpoint(storage, 7, rank=number)
        checkpoint.read([], share=(number, of))
        checkpoint.read([], share=(number, of))
        opened = [name.rpartition("/")[2] for did, name in storage.log if did == "open"]
        assert len(opened) == len(set(opened)), "what is verified is not read again"
        seen += opened
    assert set(seen) == set(read_flat(storage, 7).files)


def test_a_step_that_is_written_anew_while_it_is_open_is_not_mixed(job):
    checkpoint = job.open()
    for path in job.paths:
        write(Directory(path), [state(seed=1)])
    with pytest.raises(CheckpointInvalid, match="does not match its checksum"):
        filled(checkpoint)


def test_values_stored_in_fewer_bits_come_back_in_their_own_dtype(tmp_path):
    moments = torch.rand(5, 3)
    saved = {"o": {"m": moments, "other": torch.ones(2)}}
    write(Directory(tmp_path), [saved], narrow=["o.m"], exact=False)
    checkpoint = load(Directory(tmp_path), 7)
    assert checkpoint.manifest.tensors["o.m"].dtype == "BF16"
    assert checkpoint.outline("o")["m"].dtype == torch.float32
    found = checkpoint.state("o")["m"]
    assert found.dtype == torch.float32
    assert bits(found) == bits(moments.to(torch.bfloat16).float())


def test_a_tensor_without_elements(tmp_path):
    empty = {"m": {"a": torch.empty(0, 3), "b": torch.tensor(1.5)}}
    manifest = write(Directory(tmp_path), [empty])
    assert same(load(Directory(tmp_path), 7).state("m"), empty["m"])
    entry = manifest.tensors["m.a"].__class__(dtype="F32", shape=(0, 3), chunks=())
    rewrite(Directory(tmp_path), manifest, tensors=manifest.tensors | {"m.a": entry})
    assert same(load(Directory(tmp_path), 7).state("m"), empty["m"])


class Shrinking:
    """A storage whose files end, while they are read, after their first block."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, operation):
        return getattr(self.inner, operation)

    def open(self, name):
        return Shrunk(self.inner.open(name))


class Shrunk:
    def __init__(self, inner):
        self.inner, self.size = inner, inner.size

    def read_into(self, buffer, offset):
        return 0 if offset else self.inner.read_into(buffer, offset)

    def close(self):
        self.inner.close()


def test_a_file_that_shrinks_while_it_is_read_is_not_taken_for_what_was_read_before(job):
    """All blocks are alike: what the memory holds of the one before has the right hash."""
    zeros = {"model": {"w": torch.zeros(2048)}}
    write(Directory(job.paths[0]), [zeros], step=9)
    checkpoint = open_checkpoint(Shrinking(Directory(job.paths[0])), 9)
    with pytest.raises(CheckpointInvalid, match="ended while it was read"):
        checkpoint.read([("model.w", torch.zeros(2048))])


def test_nothing_more_is_begun_after_a_block_that_is_right_nowhere(job):
    entry = job.manifest.files[TENSORS]
    copies = transfer.FileCopies(job.places, f"{STEP}/{TENSORS}", entry)
    run = transfer._ReadRun([transfer.job_for(copies, [], everything=True)], None)
    assert run._next() is not None
    run.error = ValueError("another thread's")
    assert run._next() is None


def test_few_files_are_open_at_a_time(tmp_path):
    """A thousand ranks' files are more than a process may open."""
    write(Directory(tmp_path), [{"outlast": {"r": torch.tensor([rank])}} for rank in range(30)])
    before, most = num_descriptors(), []
    open_checkpoint(Directory(tmp_path), 7).read(
        [], share=(0, 1), progress=lambda _: most.append(num_descriptors() - before)
    )
    assert len(most) == 89
    assert max(most) < 20
    assert num_descriptors() == before


def test_reading_ends_its_threads_also_when_it_fails(job):
    for path in job.paths:
        damage(path, 7, TENSORS, 5)
    with pytest.raises(CheckpointInvalid):
        filled(job.open())
    assert not [one for one in threading.enumerate() if one.name.startswith("outlast-read")]
