"""Each protection of a checkpoint switched off in turn: the model of checkpoints notices.

What is switched off here is switched off in the code under test, in one place each; the model runs
on fixed draws until something does not hold.
"""

import pytest
import saving_sessions
from checkpoint_machine import Checkpoints
from switched_off import is_noticed

from outlast.checkpoint import catalog, manifest
from outlast.checkpoint.catalog import Standing
from outlast.checkpoint.manifest import MANIFEST, NOTE
from outlast.checkpoint.transfer import FileCopies
from outlast.keeper import conclude, copies, flight
from outlast.keeper.conclude import PASSES, Fence
from thorough import some


def manifest_last_in_a_copy(monkeypatch):
    copy = copies.Copier._copy

    def copy_manifest_first(self, committed, brought):
        if self._is_there(committed):
            return
        path = f"{committed.manifest.save}/{MANIFEST}"
        self.tier.storage.put_new(path, committed.data)
        monkeypatch.setattr(self, "_is_there", lambda _: False)
        copy(self, committed, brought)

    monkeypatch.setattr(copies.Copier, "_copy", copy_manifest_first)


def checksum_of_blocks(monkeypatch):
    look = FileCopies._from

    def believe(self, place, index, buffer):
        data, problem = look(self, place, index, buffer)
        if "does not match its checksum" in problem:
            start, end = self.block_range(index)
            return buffer[: end - start], ""
        return data, problem

    monkeypatch.setattr(FileCopies, "_from", believe)


def checksum_of_the_manifest(monkeypatch):
    class Lenient:
        def __getattr__(self, name):
            return getattr(manifest_xxhash, name)

        @staticmethod
        def xxh3_128_hexdigest(data):
            is_manifest = b'"checksum":"' in bytes(data)
            return "0" * 32 if is_manifest else manifest_xxhash.xxh3_128_hexdigest(data)

    manifest_xxhash = manifest.xxhash
    monkeypatch.setattr(manifest, "xxhash", Lenient())


def retention_of_the_newest(monkeypatch):
    removable = catalog.removable
    monkeypatch.setattr(catalog, "removable", lambda *a, **k: removable(*a, **{**k, "keep": 1}))


def damaged_ones_count_for_nothing(monkeypatch):
    removable = catalog.removable

    def count_all(ours, *a, **k):
        return removable(ours, *a, **{**k, "invalid": ()})

    monkeypatch.setattr(catalog, "removable", count_all)


def a_damaged_one_supersedes_nothing(monkeypatch):
    superseded = catalog._superseded

    def of_all(read):
        rotten, read.rotten = read.rotten, set()
        try:
            return superseded(read)
        finally:
            read.rotten = rotten

    monkeypatch.setattr(catalog, "_superseded", of_all)


def what_is_in_use_stays(monkeypatch):
    removable = catalog.removable
    monkeypatch.setattr(catalog, "removable", lambda *a, **k: removable(*a, **{**k, "in_use": ()}))


def the_manifest_goes_first(monkeypatch):
    def remove(storage, save, *, is_unfinished=False):
        for name in sorted(storage.children(str(save)), key=lambda name: name == MANIFEST):
            storage.remove(f"{save}/{name}")
        return True

    monkeypatch.setattr(catalog, "remove_save", remove)


def an_unfinished_one_is_marked_before_it_goes(monkeypatch):
    remove = catalog.remove_save

    def unmarked(storage, save, *, is_unfinished=False):
        if not is_unfinished:
            return remove(storage, save)
        storage.remove_tree(str(save), (NOTE,))
        return True

    monkeypatch.setattr(catalog, "remove_save", unmarked)


def a_manifest_is_put_once(monkeypatch):
    def put(storage, save, data):
        storage.put(f"{save}/{MANIFEST}", data)

    monkeypatch.setattr(conclude, "put_manifest", put)


def the_note_comes_first(monkeypatch):
    monkeypatch.setattr(flight, "sign", lambda *_: None)


def a_name_of_its_own(monkeypatch):
    monkeypatch.setattr(saving_sessions, "nonce_of", lambda number: "00000001")


def the_fence(monkeypatch):
    monkeypatch.setattr(Fence, "judge", lambda self, attempt: PASSES)


def the_term_in_a_claim(monkeypatch):
    monkeypatch.setattr(Fence, "_is_ours", lambda self, number, told: True)


def other_jobs_are_not_seen(monkeypatch):
    monkeypatch.setattr(Standing, "_stands", lambda self, name, data: True)


def other_jobs_are_not_removed(monkeypatch):
    monkeypatch.setattr(catalog._ManifestsRead, "is_signed", lambda self, storage, save, job: True)


PROTECTIONS = [
    manifest_last_in_a_copy,
    checksum_of_blocks,
    checksum_of_the_manifest,
    retention_of_the_newest,
    damaged_ones_count_for_nothing,
    a_damaged_one_supersedes_nothing,
    what_is_in_use_stays,
    the_manifest_goes_first,
    an_unfinished_one_is_marked_before_it_goes,
    a_manifest_is_put_once,
    the_note_comes_first,
    a_name_of_its_own,
    the_fence,
    the_term_in_a_claim,
    other_jobs_are_not_seen,
    other_jobs_are_not_removed,
]


def test_with_all_of_them_the_model_holds():
    """On the draws that the others begin with."""
    assert not is_noticed(Checkpoints, most=100)


@pytest.mark.parametrize("protection", some(PROTECTIONS, 6), ids=lambda one: one.__name__)
def test_without_it_the_model_fails(protection, monkeypatch):
    protection(monkeypatch)
    assert is_noticed(Checkpoints)
