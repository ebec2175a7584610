"""Copying and mending without torch: in full and verified, or not at all."""

import shutil
import subprocess
import sys

import pytest
import torch
from unit_checkpoints import damage, flat, mend_all, rewrite, write
from unit_fakes import WatchedStorage, listing
from unit_names import save_name, save_of

from outlast.checkpoint import manifest, transfer
from outlast.checkpoint.manifest import MANIFEST, NOTE, Place, decode
from outlast.checkpoint.mend import NotMended, Repaired, copy_file, mend_copy
from outlast.errors import CheckpointInvalid
from outlast.storage import Directory
from whole_reads import verify

STEP = save_name(7)
TENSORS, SMALL, PART = "rank-00000.safetensors", "rank-00000.json", "rank-00000.part.json"
PATH = f"{STEP}/{TENSORS}"


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    for room in (transfer, manifest):
        monkeypatch.setattr(room, "BLOCK_BYTES", 4096)


def state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"model": {"w": torch.rand(3000, generator=generator)}}


class Tiers:
    def __init__(self, path, count):
        self.paths = [path / f"tier-{number}" for number in range(count)]
        self.root = write(Directory(self.paths[0]), [state(), {"more": 1}])
        self.manifest = flat(Directory(self.paths[0]), self.root)
        for other in self.paths[1:]:
            shutil.copytree(self.paths[0], other)
        self.places = [Place(one.name, Directory(one)) for one in self.paths]
        self.whole = self.files()

    def files(self):
        return [
            {file.name: file.read_bytes() for file in (path / STEP).iterdir()}
            for path in self.paths
        ]

    def repair(self, places=None, progress=lambda _: None):
        return mend_all(places or self.places, save_of(7), progress)


@pytest.fixture(name="two")
def _two(tmp_path):
    return Tiers(tmp_path, 2)


@pytest.fixture(name="three")
def _three(tmp_path):
    return Tiers(tmp_path, 3)


def test_no_torch_is_needed():
    code = "import sys, outlast.checkpoint.transfer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- one file ------------------------------------------------------------------------------------


def test_a_file_is_copied_and_its_progress_told(two, tmp_path):
    target, told = Directory(tmp_path / "new"), []
    entry = two.manifest.files[TENSORS]
    copy_file(two.places[0].storage, target, PATH, entry, lambda *at: told.append(at))
    assert (tmp_path / "new" / PATH).read_bytes() == two.whole[0][TENSORS]
    assert told == [(4096, 12000), (8192, 12000), (12000, 12000)]


@pytest.mark.parametrize("at", [5, 4096 + 5, -1])
def test_a_damaged_file_is_not_copied(two, tmp_path, at):
    damage(two.paths[0], 7, TENSORS, at)
    with pytest.raises(CheckpointInvalid, match="does not match its checksum"):
        copy_file(
            two.places[0].storage, Directory(tmp_path / "new"), PATH, two.manifest.files[TENSORS]
        )
    assert listing(tmp_path / "new" / STEP) == [], "not even a part is left"


def test_a_missing_file_and_a_target_that_fails(two, tmp_path):
    entry = two.manifest.files[TENSORS]
    with pytest.raises(CheckpointInvalid, match="is missing"):
        copy_file(Directory(tmp_path / "none"), Directory(tmp_path / "new"), PATH, entry)
    error = OSError(28, "No space left on device")
    target = WatchedStorage(
        Directory(tmp_path / "new"), lambda did, _: error if did == "write_at" else None
    )
    with pytest.raises(OSError, match="No space") as caught:
        copy_file(two.places[0].storage, target, PATH, entry)
    assert caught.value is error
    assert listing(tmp_path / "new" / STEP) == []


def test_what_progress_raises_ends_the_copy(two, tmp_path):
    def enough(done, total):
        raise KeyboardInterrupt

    target = Directory(tmp_path / "new")
    with pytest.raises(KeyboardInterrupt):
        copy_file(two.places[0].storage, target, PATH, two.manifest.files[TENSORS], enough)
    assert listing(tmp_path / "new" / STEP) == []


# --- a step --------------------------------------------------------------------------------------


def test_nothing_to_mend(two):
    told = []
    assert two.repair(progress=told.append) == []
    assert sum(told) == 2 * sum(entry.size for entry in two.manifest.files.values())


def test_two_damaged_copies_mend_each_other_block_by_block(two):
    damage(two.paths[0], 7, TENSORS, 5)
    damage(two.paths[1], 7, TENSORS, 4096 + 5)
    damage(two.paths[1], 7, SMALL)
    assert two.repair() == [
        Repaired(TENSORS, "tier-0", "tier-1"),
        Repaired(SMALL, "tier-1", "tier-0"),
        Repaired(TENSORS, "tier-1", "tier-0"),
    ]
    assert two.files() == two.whole


def test_a_part_is_mended_before_the_files_that_it_names(two):
    damage(two.paths[0], 7, PART)
    damage(two.paths[0], 7, TENSORS, 5)
    (two.paths[1] / STEP / PART.replace("00000", "00001")).write_bytes(b"{}")
    with pytest.raises(CheckpointInvalid, match=r"rank-00000\.part\.json does not match"):
        verify(two.places[0].storage, 7)
    assert two.repair() == [
        Repaired(PART, "tier-0", "tier-1"),
        Repaired(TENSORS, "tier-0", "tier-1"),
        Repaired(PART.replace("00000", "00001"), "tier-1", "tier-0"),
    ]
    assert two.files() == two.whole


def test_what_a_part_names_is_left_alone_where_the_part_is_lost(two):
    """Nothing of it can be told from what it should be."""
    for path in two.paths:
        damage(path, 7, PART)
    damage(two.paths[1], 7, "rank-00001.json")
    mended = Repaired("rank-00001.json", "tier-1", "tier-0")
    assert two.repair() == [PART, PART, mended]
    assert two.files()[1]["rank-00001.json"] == two.whole[1]["rank-00001.json"]


@pytest.mark.parametrize("torn", [b"", b"{}", b"x"])
def test_a_torn_manifest_comes_last_and_is_anothers_to_the_byte(three, torn):
    (three.paths[0] / STEP / MANIFEST).write_bytes(torn)
    (three.paths[0] / STEP / SMALL).unlink()
    order = []
    storage = WatchedStorage(three.places[0].storage)
    repaired = three.repair([Place("tier-0", storage), *three.places[1:]])
    assert repaired == [
        Repaired(SMALL, "tier-0", "tier-1"),
        Repaired(MANIFEST, "tier-0", "tier-1"),
    ]
    order = [entry for entry in storage.log if entry[0] in ("finish", "put")]
    assert order[0] == ("finish", f"{STEP}/{SMALL}")
    assert order[1:] == [("put", f"{STEP}/{NOTE}"), ("put", f"{STEP}/{MANIFEST}")]
    assert three.files() == three.whole


def test_what_cannot_be_mended_is_said_and_the_rest_is_mended(two):
    for path in two.paths:
        damage(path, 7, TENSORS, 5)
    damage(two.paths[1], 7, SMALL)
    assert two.repair() == [TENSORS, Repaired(SMALL, "tier-1", "tier-0"), TENSORS]
    assert two.files()[1][SMALL] == two.whole[1][SMALL]


def test_a_place_whose_files_cannot_be_mended_gets_no_manifest(two):
    for path in two.paths:
        damage(path, 7, TENSORS, 5)
    (two.paths[0] / STEP / MANIFEST).write_bytes(b"torn")
    assert two.repair() == [TENSORS, TENSORS]
    assert (two.paths[0] / STEP / MANIFEST).read_bytes() == b"torn"


def without_its_manifest(two, at, do):
    """Mend the second place's manifest; ``do`` is done there when ``at`` comes up."""
    path = two.paths[1] / STEP
    (path / MANIFEST).unlink()
    done = []

    def watch(did, name):
        if (did, name) == (at[0], f"{STEP}/{at[1]}") and not done:
            done.append(do(path))

    here = Place("tier-1", WatchedStorage(Directory(two.paths[1]), watch))
    source = two.places[0]
    model = decode(source.storage.read(f"{STEP}/{MANIFEST}"), save_of(7))
    found = list(mend_copy(here, [source, here], model, source, lambda _: None))
    assert done, "it never came to that"
    return found, path


@pytest.mark.parametrize("at", [("put", NOTE), ("exists", MANIFEST), ("put_new", MANIFEST)])
def test_a_save_that_is_pruned_while_it_is_mended_does_not_come_back(two, at):
    found, path = without_its_manifest(two, at, shutil.rmtree)
    assert [one.file for one in found if isinstance(one, NotMended)] == [MANIFEST]
    assert not (path / MANIFEST).exists()


def test_a_save_that_is_being_removed_keeps_that_word(two):
    found, path = without_its_manifest(
        two,
        ("put_new", MANIFEST),
        lambda folder: (folder / MANIFEST).write_bytes(manifest.ABANDONED),
    )
    assert [one.error.reason for one in found] == ["it is being removed"]
    assert (path / MANIFEST).read_bytes() == manifest.ABANDONED


def test_another_save_of_the_step_is_mended_by_its_own_manifest(three):
    """Two tiers hold an older attempt's save besides."""
    for path in three.paths[:2]:
        write(Directory(path), [state(1), {"more": 1}], attempt=2)
    before = [path.joinpath(save_name(7, 2), TENSORS).read_bytes() for path in three.paths[:2]]
    damage(three.paths[1], 7, TENSORS, attempt=2)
    damage(three.paths[0], 7, TENSORS)
    assert mend_all(three.places, save_of(7, 2)) == [Repaired(TENSORS, "tier-1", "tier-0")]
    after = [path.joinpath(save_name(7, 2), TENSORS).read_bytes() for path in three.paths[:2]]
    assert after == before
    assert not (three.paths[2] / save_name(7, 2)).exists()
    with pytest.raises(CheckpointInvalid, match=r"rank-00000\.safetensors does not match"):
        verify(three.places[0].storage, save_of(7))
    assert three.repair() == [Repaired(TENSORS, "tier-0", "tier-1")]


def test_a_place_that_cannot_be_written_is_said(two):
    damage(two.paths[0], 7, SMALL)
    full = WatchedStorage(
        two.places[0].storage,
        lambda did, _: OSError(28, "No space left on device") if did == "create" else None,
    )
    assert two.repair([Place("tier-0", full), two.places[1]]) == [SMALL]


def test_a_step_of_the_future_is_not_overwritten(two):
    """A manifest of a later format says itself that it is not for this version."""
    rewrite(Directory(two.paths[0]), two.root, format=99)
    before = two.files()
    assert two.repair() == [MANIFEST]
    assert two.files() == before
