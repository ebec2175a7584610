"""After a rollback, what it has undone is not there for whoever reads, in no tier."""

import pytest

from outlast.checkpoint.catalog import Health, expendable, find_steps, prune
from outlast.checkpoint.load import read_manifest
from outlast.checkpoint.manifest import Manifest, encode, step_name
from outlast.checkpoint.places import Place
from outlast.checkpoint.standing import standing
from outlast.errors import CheckpointInvalid
from outlast.policy.rollbacks import Rollback
from outlast.storage import Directory

BACK = Rollback(attempt=2, step=20, first=25)


def commit(storage, step, attempt, kind="full"):
    manifest = Manifest(
        format=2,
        job="0123456789ab",
        step=step,
        attempt=attempt,
        world_size=1,
        layout={},
        created_t=1.0,
        files={},
        tensors={},
        kind=kind,
    )
    storage.put(f"{step_name(step)}/manifest.json", encode(manifest))


@pytest.fixture
def storage(tmp_path):
    one = Directory(tmp_path / "tier")
    for step, attempt in ((10, 1), (20, 2), (30, 2), (40, 3)):
        commit(one, step, attempt)
    one.put(f"{step_name(50)}/manifest.json", b"{}")  # damaged: whoever reads it finds out
    return one


def test_what_was_undone_is_not_there(storage):
    (place,) = standing([Place("local", storage)], [BACK])
    assert find_steps(place.storage).committed == [10, 20, 40, 50]
    assert find_steps(place.storage).unfinished == [30]
    assert read_manifest([place], 20).attempt == 2
    with pytest.raises(CheckpointInvalid, match=r"manifest\.json is missing"):
        read_manifest([place], 30)
    assert place.storage.describe() == storage.describe()
    assert standing([Place("local", storage)], []) == [Place("local", storage)]


def test_another_place_may_have_the_step_of_a_later_attempt(storage, tmp_path):
    other = Directory(tmp_path / "other")
    commit(other, 30, 3)
    places = standing([Place("local", storage), Place("shared", other)], [BACK])
    assert read_manifest(places, 30).attempt == 3


def test_it_does_not_count_among_those_that_are_kept(storage):
    storage.remove_tree(step_name(50))
    assert prune(storage, keep=2, invalid=()) == [10, 20]
    health = Health(healthy=frozenset(), rollbacks=(BACK,))
    for step in (10, 20):
        commit(storage, step, 2)
    assert expendable(storage, keep=2, health=health).steps == (30,), "and the oldest stays"
    assert expendable(storage, keep=1, health=Health(rollbacks=(BACK,))).steps == (10, 20, 30)
