"""After a rollback, what it has undone is not there for whoever reads, in no tier."""

import pytest
from unit_names import committed, save_name, save_of, unfinished

from outlast.checkpoint.catalog import KnownHealth, expendable, prune, standing
from outlast.checkpoint.manifest import Manifest, encode
from outlast.checkpoint.names import Place, sign
from outlast.checkpoint.transfer import read_manifest
from outlast.errors import CheckpointInvalid
from outlast.keeper.wire import NO_NONCE
from outlast.policy.rollbacks import Rollback
from outlast.storage import Directory

JOB = "0123456789ab"
BACK = Rollback(attempt=2, step=20, first=25)


def steps(saves):
    return [save.step for save in saves]


def commit(storage, step, attempt, kind="full"):
    manifest = Manifest(
        format=3,
        job=JOB,
        step=step,
        attempt=attempt,
        serial=1,
        nonce=NO_NONCE,
        world_size=1,
        layout={},
        created_t=1.0,
        files={},
        tensors={},
        kind=kind,
    )
    sign(storage, manifest.save, JOB)
    storage.put(f"{manifest.save}/manifest.json", encode(manifest))


@pytest.fixture
def storage(tmp_path):
    one = Directory(tmp_path / "tier")
    for step, attempt in ((10, 1), (20, 2), (30, 2), (40, 3)):
        commit(one, step, attempt)
    one.put(f"{save_name(50)}/manifest.json", b"{}")  # damaged: whoever reads it finds out
    return one


def test_what_was_undone_is_not_there(storage):
    (place,) = standing([Place("local", storage)], JOB, [BACK])
    assert committed(place.storage) == [10, 20, 40, 50]
    assert unfinished(place.storage) == [30]
    assert read_manifest([place], 20).attempt == 2
    with pytest.raises(CheckpointInvalid, match=r"manifest\.json is missing"):
        read_manifest([place], 30)
    assert place.storage.describe() == storage.describe()


def test_another_place_may_have_the_step_of_a_later_attempt(storage, tmp_path):
    other = Directory(tmp_path / "other")
    commit(other, 30, 3)
    places = standing([Place("local", storage), Place("shared", other)], JOB, [BACK])
    assert read_manifest(places, 30).attempt == 3


def test_it_does_not_count_among_those_that_are_kept(storage):
    storage.remove_tree(save_name(50))
    assert steps(prune(storage, JOB, keep=2, invalid=())) == [10, 20]
    health = KnownHealth(healthy=frozenset(), rollbacks=(BACK,))
    for step in (10, 20):
        commit(storage, step, 2)
    assert expendable(storage, JOB, keep=2, health=health).saves == (save_of(30, 2),), (
        "and the oldest stays"
    )
    gone = expendable(storage, JOB, keep=1, health=KnownHealth(rollbacks=(BACK,))).saves
    assert steps(gone) == [10, 20, 30]


def test_checkpoints_of_other_jobs_are_not_there(storage):
    """Be they whole, or damaged: the note says whose they are."""
    (place,) = standing([Place("local", storage)], "another", ())
    assert committed(place.storage) == [50], "nobody says whose that is"
    sign(storage, save_of(50), JOB)
    assert committed(place.storage) == []
    assert place.storage.others == {JOB: 40}
    with pytest.raises(CheckpointInvalid, match=r"manifest\.json is missing"):
        read_manifest([place], 20)
