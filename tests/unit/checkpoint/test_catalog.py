"""Which saves go, in which order, and which must never go: any history of saves, rot and pruning.

After a rollback, no reader finds what it has undone, in any tier.
"""

import contextlib
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from unit_fakes import WatchedStorage
from unit_names import committed, save_name, save_of, unfinished

from outlast.checkpoint.catalog import (
    KnownHealth,
    expendable,
    find_saves,
    prune,
    remove_save,
    standing,
)
from outlast.checkpoint.manifest import FORMAT, Manifest, Place, encode, sign
from outlast.checkpoint.transfer import read_manifest
from outlast.errors import CheckpointInvalid
from outlast.keeper.wire import NO_NONCE
from outlast.policy.rollbacks import Rollback
from outlast.storage import Directory
from thorough import examples


def one_of(step):
    """Saves follow each other in one attempt."""
    return save_of(step, serial=step)


def name_of(step):
    return str(one_of(step))


def saved(*steps):
    return [one_of(step) for step in steps]


def add(storage, step, *, save=None, manifest=True, kind="full", job="j", form=FORMAT):
    save = save or one_of(step)
    sign(storage, save, job)
    storage.put(f"{save}/rank-00000.json", b"{}")
    if manifest:
        written = Manifest(
            format=form,
            job=job,
            step=save.step,
            attempt=save.attempt,
            serial=save.serial,
            nonce=save.nonce,
            world_size=1,
            layout={},
            created_t=0.0,
            files={},
            tensors={},
            kind=kind,
        )
        storage.put(f"{save}/manifest.json", encode(written))


def test_steps_are_told_apart(tmp_path):
    storage = Directory(tmp_path)
    for step in (300, 20, 1000):
        add(storage, step)
    add(storage, 400, manifest=False)
    storage.put("step-12/manifest.json", b"")
    storage.put("other/manifest.json", b"")
    storage.put("step-000000000005x/manifest.json", b"")
    storage.put("report.html", b"")
    found = find_saves(storage)
    assert found.committed == saved(20, 300, 1000)
    assert found.unfinished == saved(400)


def test_nothing_there(tmp_path):
    found = find_saves(Directory(tmp_path / "none"))
    assert (found.committed, found.unfinished) == ([], [])
    assert prune(Directory(tmp_path / "none"), "j", keep=1, invalid=set()) == []


def test_the_manifest_goes_first_and_then_the_rest(tmp_path):
    storage = WatchedStorage(Directory(tmp_path))
    add(storage.inner, 7)
    remove_save(storage, one_of(7))
    assert storage.log == [
        ("remove", f"{name_of(7)}/manifest.json"),
        ("remove_tree", name_of(7)),
    ]
    assert not (tmp_path / name_of(7)).exists()


def test_files_stay_when_the_manifest_cannot_be_removed(tmp_path):
    error = OSError(5, "Input/output error")
    storage = WatchedStorage(Directory(tmp_path), lambda did, _: error if did == "remove" else None)
    add(storage.inner, 7)
    with pytest.raises(OSError, match="Input/output"):
        remove_save(storage, one_of(7))
    assert sorted(path.name for path in (tmp_path / name_of(7)).iterdir()) == [
        "manifest.json",
        "rank-00000.json",
        "save.json",
    ]


def test_a_prune_that_fails_half_way_leaves_an_unfinished_step_that_goes_next_time(tmp_path):
    fails = [OSError(5, "Input/output error")]
    storage = WatchedStorage(
        Directory(tmp_path), lambda did, _: fails.pop() if did == "remove_tree" and fails else None
    )
    for step in (1, 2, 3):
        add(storage.inner, step)
    with pytest.raises(OSError, match="Input/output"):
        prune(storage, "j", keep=1, invalid=set())
    assert unfinished(storage) == [1]
    assert committed(storage) == [3]  # the others were tried all the same
    assert prune(storage, "j", keep=1, invalid=set()) == saved(1)
    assert committed(storage) == [3]


def test_an_invalid_step_is_removed_once_and_not_missed_after(tmp_path):
    """What a resume rejected stays in the writer's books when it is long gone from the disk."""
    storage = Directory(tmp_path)
    for step in (100, 200, 300):
        add(storage, step)
    invalid = set(saved(50, 200))  # 50: the ledger had its commit, the disk had nothing
    assert prune(storage, "j", keep=1, invalid=invalid) == saved(100, 200)
    add(storage, 400)
    assert prune(storage, "j", keep=1, invalid=invalid) == saved(300)
    assert committed(storage) == [400]


def test_weights_go_with_what_was_kept_before_them(tmp_path):
    storage = Directory(tmp_path)
    for step, kind in [(10, "full"), (20, "weights"), (30, "full"), (40, "weights")]:
        add(storage, step, kind=kind)
    assert prune(storage, "j", keep=2, invalid=set()) == []
    assert prune(storage, "j", keep=1, invalid=set()) == saved(10, 20)
    assert committed(storage) == [30, 40]


def test_a_torn_manifest_is_not_counted_among_those_that_are_kept(tmp_path):
    storage = Directory(tmp_path)
    for step in (10, 20, 30):
        add(storage, step)
    torn = storage.read(f"{name_of(30)}/manifest.json")[:-9]
    storage.put(f"{name_of(30)}/manifest.json", torn)
    assert prune(storage, "j", keep=1, invalid=set()) == saved(10)
    assert committed(storage) == [20, 30]


def test_a_manifest_that_cannot_be_read_is_left_alone_and_not_counted(tmp_path):
    for step in (10, 20, 30):
        add(Directory(tmp_path), step)
    error = OSError(5, "Input/output error")
    storage = WatchedStorage(
        Directory(tmp_path),
        lambda did, name: error if did == "read" and name_of(30) in name else None,
    )
    assert expendable(storage, "j", keep=1).saves == (*saved(10),)
    with pytest.raises(OSError, match="Input/output"):
        prune(storage, "j", keep=1, invalid=set())
    assert committed(storage) == [20, 30]


def test_a_step_in_use_stays(tmp_path):
    storage = Directory(tmp_path)
    for step in (10, 20, 30):
        add(storage, step)
    assert expendable(storage, "j", keep=1, in_use=lambda: saved(30)).saves == (
        *saved(10, 20),
    )  # and is counted
    assert prune(storage, "j", keep=1, invalid=set(), in_use=lambda: saved(10)) == saved(20)
    assert prune(storage, "j", keep=1, invalid=set()) == saved(10)


def test_what_is_in_use_is_asked_once_it_is_known_what_is_there(tmp_path):
    """What is committed meanwhile, and read from then on, would be missing otherwise."""
    for step in (10, 20):
        add(Directory(tmp_path), step)
    done = []
    storage = WatchedStorage(Directory(tmp_path), lambda did, name: done.append(did))

    def in_use():
        done.append("asked")
        return saved(10)

    assert expendable(storage, "j", keep=1, in_use=in_use).saves == ()
    assert done.index("asked") > max(at for at, did in enumerate(done) if did == "read")


# --- what is not recognised is left alone --------------------------------------------------------


def test_checkpoints_of_a_later_format_stay_and_do_not_count(tmp_path):
    storage = Directory(tmp_path)
    for step, form in ((100, FORMAT), (200, FORMAT + 1), (300, FORMAT + 1), (400, FORMAT)):
        add(storage, step, form=form)
    assert prune(storage, "j", keep=3, invalid=()) == []
    assert prune(storage, "j", keep=1, invalid=()) == saved(100)
    assert committed(storage) == [200, 300, 400]


def test_checkpoints_of_other_jobs_stay_and_do_not_count(tmp_path):
    storage = Directory(tmp_path)
    for step in (10, 20):
        add(storage, step)
        add(storage, step + 5, job="other")
        add(storage, step + 7, job="other", manifest=False)
    storage.put(f"{name_of(35)}/manifest.json", b"torn")  # and nobody's
    storage.put("step-000000000003/manifest.json", b"torn")
    storage.put("step-000000000004/rank-00000.json", b"{}")
    assert prune(storage, "j", keep=2, invalid=()) == []
    assert prune(storage, "j", keep=1, invalid=()) == saved(10)
    assert committed(storage) == [3, 15, 20, 25, 35]
    assert unfinished(storage) == [4, 17, 27]


def test_a_step_that_was_saved_again_has_one_save_once_the_new_one_is_whole(tmp_path):
    storage = Directory(tmp_path)
    old, new, late = save_of(7, 1, 3), save_of(7, 2, 1), save_of(7, 1, 4)
    add(storage, 7, save=old)
    add(storage, 7, save=new, manifest=False)
    assert prune(storage, "j", keep=1, invalid=()) == []
    add(storage, 7, save=new)
    add(storage, 7, save=late)  # a machine of the older attempt goes on after a pause
    assert prune(storage, "j", keep=1, invalid=()) == [old, late]
    assert find_saves(storage).committed == [new]


def test_weights_do_not_supersede_what_can_be_resumed_from(tmp_path):
    storage = Directory(tmp_path)
    full, weights = save_of(7, 1, 1), save_of(7, 1, 2)
    add(storage, 7, save=full)
    add(storage, 7, save=weights, kind="weights")
    assert prune(storage, "j", keep=1, invalid=()) == []
    add(storage, 7, save=save_of(7, 1, 3))
    assert prune(storage, "j", keep=1, invalid=()) == [full, weights]


def test_of_a_writer_and_whoever_removes_its_save_one_gets_the_manifests_name(tmp_path):
    storage = Directory(tmp_path)
    zombie = save_of(9, 1, 5)
    add(storage, 9, save=zombie, manifest=False)
    add(storage, 7, save=save_of(7, 2, 1))
    manifest = f"{zombie}/manifest.json"

    def in_between(did, name):
        if (did, name) == ("put_new", manifest):
            add(storage, 9, save=zombie)  # it commits after it was found unfinished

    assert prune(WatchedStorage(storage, in_between), "j", keep=1, invalid=()) == []
    assert find_saves(storage).committed == [save_of(7, 2, 1), zombie]
    storage.remove(manifest)
    tried = []

    def too_late(did, name):
        if did == "remove_tree":
            tried.append(storage.put_new(manifest, b"its manifest"))

    assert prune(WatchedStorage(storage, too_late), "j", keep=1, invalid=()) == [zombie]
    assert tried == [False]


def test_a_manifest_that_comes_when_all_else_is_gone_counts_for_nothing(tmp_path):
    storage = Directory(tmp_path)
    add(storage, 7, save=save_of(7, 2, 1))
    zombie = save_of(9, 1, 5)
    add(storage, 9, save=zombie)
    for name in ("save.json", "rank-00000.json"):
        storage.remove(f"{zombie}/{name}")
    assert prune(storage, "j", keep=1, invalid=()) == []
    assert save_of(7, 2, 1) in find_saves(storage).committed


def test_an_empty_directory_goes_where_its_session_is_known(tmp_path):
    storage = Directory(tmp_path)
    add(storage, 7, save=save_of(7, 2, 1))
    for save in (save_of(5, 2, 0), save_of(5, 1, 1)):
        (tmp_path / str(save)).mkdir()
    assert prune(storage, "j", keep=1, invalid=()) == [save_of(5, 2, 0)]


@pytest.mark.parametrize("is_unfinished", [True, False])
def test_what_is_left_of_a_removal_that_was_cut_short_goes_next_time(tmp_path, is_unfinished):
    """At whichever removal of a file it dies: what is left says whose it is, or is nobody's."""
    for number in range(8):
        storage = Directory(tmp_path / str(number))
        save = save_of(1, 1, 1)
        add(storage, 1, save=save, manifest=not is_unfinished)
        add(storage, 2, save=save_of(2, 1, 2))
        left = [number]

        def dies(_, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr("outlast.storage.directory.sync_directory", dies)
            prune(storage, "j", keep=1, invalid=())
        prune(storage, "j", keep=1, invalid=())
        assert storage.children() == [str(save_of(2, 1, 2))], number


class Pruning(RuleBasedStateMachine):
    """Saves that commit or do not, rot, restarts that find the rot, and prunes."""

    def __init__(self):
        super().__init__()
        self.place = tempfile.TemporaryDirectory()
        self.storage = Directory(Path(self.place.name))
        self.attempt, self.step, self.serial = 1, 0, 0
        self.rotten, self.known_rotten = set(), set()

    def teardown(self):
        self.place.cleanup()

    def committed(self):
        return find_saves(self.storage).committed

    @rule(gap=st.integers(0, 3), commits=st.booleans())
    def save(self, gap, commits):
        self.step += gap
        self.serial += 1
        save = save_of(self.step, self.attempt, self.serial)
        add(self.storage, self.step, save=save, manifest=commits)

    @precondition(lambda self: self.committed())
    @rule(data=st.data())
    def rot(self, data):
        self.rotten.add(data.draw(st.sampled_from(self.committed())))

    @rule()
    def restart(self):
        """A resume goes from newest to oldest and stops at the first that verifies."""
        self.known_rotten = set()
        self.attempt, self.serial = self.attempt + 1, 0
        for save in reversed(self.committed()):
            if save not in self.rotten:
                self.step = save.step
                return
            self.known_rotten.add(save)

    @rule(keep=st.integers(1, 3))
    def prune(self, keep):
        before = find_saves(self.storage)
        newest = {save.step: save for save in before.committed if save not in self.known_rotten}
        trusted = sorted(newest.values())
        removed = prune(self.storage, "j", keep=keep, invalid=set(self.known_rotten))
        after = find_saves(self.storage)
        assert removed == sorted(removed)
        assert set(removed).isdisjoint(trusted[-keep:])
        assert after.committed == [save for save in before.committed if save not in removed]
        assert [save for save in after.committed if save not in self.known_rotten] == trusted[
            -keep:
        ]
        if trusted:
            last = max(trusted, key=lambda save: save.written)
            later = [save for save in before.unfinished if save.written > last.written]
            assert after.unfinished == sorted(later)
            rotten = [save for save in after.committed if save in self.known_rotten]
            assert not [save for save in rotten if save < trusted[-1]]
        else:
            assert removed == []
        again = prune(self.storage, "j", keep=keep, invalid=set(self.known_rotten))
        assert again == []


Pruning.TestCase.settings = settings(examples(60), stateful_step_count=25)
TestPruning = Pruning.TestCase


# --- after a rollback, and beside other jobs ------------------------------------------------------


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
