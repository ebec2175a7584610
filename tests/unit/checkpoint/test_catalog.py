"""What goes, in which order, and what must never go: any history of saves, rot and pruning."""

import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from unit_fakes import WatchedStorage

from outlast.checkpoint.catalog import expendable, find_steps, prune, remove_step
from outlast.checkpoint.manifest import Manifest, encode, step_name
from outlast.storage import Directory
from thorough import examples


def add(storage, step, *, manifest=True, kind="full"):
    storage.put(f"{step_name(step)}/rank-00000.json", b"{}")
    if manifest:
        written = Manifest(
            format=2,
            job="j",
            step=step,
            attempt=1,
            world_size=1,
            layout={},
            created_t=0.0,
            files={},
            tensors={},
            kind=kind,
        )
        storage.put(f"{step_name(step)}/manifest.json", encode(written))


def test_steps_are_told_apart(tmp_path):
    storage = Directory(tmp_path)
    for step in (300, 20, 1000):
        add(storage, step)
    add(storage, 400, manifest=False)
    storage.put("step-12/manifest.json", b"")
    storage.put("other/manifest.json", b"")
    storage.put("step-000000000005x/manifest.json", b"")
    storage.put("report.html", b"")
    found = find_steps(storage)
    assert found.committed == [20, 300, 1000]
    assert found.unfinished == [400]


def test_nothing_there(tmp_path):
    found = find_steps(Directory(tmp_path / "none"))
    assert (found.committed, found.unfinished) == ([], [])
    assert prune(Directory(tmp_path / "none"), keep=1, invalid=set()) == []


def test_the_manifest_goes_first_and_then_the_rest(tmp_path):
    storage = WatchedStorage(Directory(tmp_path))
    add(storage.inner, 7)
    remove_step(storage, 7)
    assert storage.log == [
        ("remove", f"{step_name(7)}/manifest.json"),
        ("remove_tree", step_name(7)),
    ]
    assert not (tmp_path / step_name(7)).exists()


def test_files_stay_when_the_manifest_cannot_be_removed(tmp_path):
    error = OSError(5, "Input/output error")
    storage = WatchedStorage(Directory(tmp_path), lambda did, _: error if did == "remove" else None)
    add(storage.inner, 7)
    with pytest.raises(OSError, match="Input/output"):
        remove_step(storage, 7)
    assert sorted(path.name for path in (tmp_path / step_name(7)).iterdir()) == [
        "manifest.json",
        "rank-00000.json",
    ]


def test_a_prune_that_fails_half_way_leaves_an_unfinished_step_that_goes_next_time(tmp_path):
    fails = [OSError(5, "Input/output error")]
    storage = WatchedStorage(
        Directory(tmp_path), lambda did, _: fails.pop() if did == "remove_tree" and fails else None
    )
    for step in (1, 2, 3):
        add(storage.inner, step)
    with pytest.raises(OSError, match="Input/output"):
        prune(storage, keep=1, invalid=set())
    assert find_steps(storage).unfinished == [1]
    assert find_steps(storage).committed == [3]  # the others were tried all the same
    assert prune(storage, keep=1, invalid=set()) == [1]
    assert find_steps(storage).committed == [3]


def test_an_invalid_step_is_removed_once_and_not_missed_after(tmp_path):
    """What a resume rejected stays in the writer's books when it is long gone from the disk."""
    storage = Directory(tmp_path)
    for step in (100, 200, 300):
        add(storage, step)
    invalid = {50, 200}  # 50: the ledger had its commit, the disk had nothing
    assert prune(storage, keep=1, invalid=invalid) == [100, 200]
    add(storage, 400)
    assert prune(storage, keep=1, invalid=invalid) == [300]
    assert find_steps(storage).committed == [400]


def test_weights_go_with_what_was_kept_before_them(tmp_path):
    storage = Directory(tmp_path)
    for step, kind in [(10, "full"), (20, "weights"), (30, "full"), (40, "weights")]:
        add(storage, step, kind=kind)
    assert prune(storage, keep=2, invalid=set()) == []
    assert prune(storage, keep=1, invalid=set()) == [10, 20]
    assert find_steps(storage).committed == [30, 40]


def test_a_torn_manifest_is_not_counted_among_those_that_are_kept(tmp_path):
    storage = Directory(tmp_path)
    for step in (10, 20, 30):
        add(storage, step)
    torn = storage.read(f"{step_name(30)}/manifest.json")[:-9]
    storage.put(f"{step_name(30)}/manifest.json", torn)
    assert prune(storage, keep=1, invalid=set()) == [10]
    assert find_steps(storage).committed == [20, 30]


def test_a_manifest_that_cannot_be_read_is_left_alone_and_not_counted(tmp_path):
    for step in (10, 20, 30):
        add(Directory(tmp_path), step)
    error = OSError(5, "Input/output error")
    storage = WatchedStorage(
        Directory(tmp_path),
        lambda did, name: error if did == "read" and step_name(30) in name else None,
    )
    assert expendable(storage, keep=1).steps == (10,)
    with pytest.raises(OSError, match="Input/output"):
        prune(storage, keep=1, invalid=set())
    assert find_steps(storage).committed == [20, 30]


def test_a_step_in_use_stays(tmp_path):
    storage = Directory(tmp_path)
    for step in (10, 20, 30):
        add(storage, step)
    assert expendable(storage, keep=1, in_use={30}).steps == (10, 20)  # and is counted
    assert prune(storage, keep=1, invalid=set(), in_use={10}) == [20]
    assert prune(storage, keep=1, invalid=set()) == [10]


class Pruning(RuleBasedStateMachine):
    """Saves that commit or do not, rot, restarts that find the rot, and prunes."""

    def __init__(self):
        super().__init__()
        self.place = tempfile.TemporaryDirectory()
        self.storage = Directory(Path(self.place.name))
        self.step = 0
        self.rotten, self.known_rotten = set(), set()

    def teardown(self):
        self.place.cleanup()

    def committed(self):
        return find_steps(self.storage).committed

    @rule(gap=st.integers(1, 3), commits=st.booleans())
    def save(self, gap, commits):
        self.step += gap
        add(self.storage, self.step, manifest=commits)
        if commits:
            self.known_rotten.discard(self.step)
            self.rotten.discard(self.step)

    @precondition(lambda self: self.committed())
    @rule(data=st.data())
    def rot(self, data):
        self.rotten.add(data.draw(st.sampled_from(self.committed())))

    @rule()
    def restart(self):
        """A resume goes from newest to oldest and stops at the first that verifies."""
        self.known_rotten = set()
        for step in reversed(self.committed()):
            if step not in self.rotten:
                self.step = step
                return
            self.known_rotten.add(step)

    @rule(keep=st.integers(1, 3))
    def prune(self, keep):
        before = find_steps(self.storage)
        trusted = [step for step in before.committed if step not in self.known_rotten]
        removed = prune(self.storage, keep=keep, invalid=set(self.known_rotten))
        after = find_steps(self.storage)
        assert removed == sorted(removed)
        assert set(removed).isdisjoint(trusted[-keep:])
        assert after.committed == [step for step in before.committed if step not in removed]
        assert [step for step in trusted if step in after.committed] == trusted[-keep:]
        if trusted:
            newest = trusted[-1]
            assert all(step in after.unfinished for step in before.unfinished if step > newest)
            assert not [step for step in after.unfinished if step < newest]
            assert not [s for s in after.committed if s in self.known_rotten and s < newest]
        else:
            assert removed == []
        again = prune(self.storage, keep=keep, invalid=set(self.known_rotten))
        assert again == []


Pruning.TestCase.settings = settings(examples(60), stateful_step_count=25)
TestPruning = Pruning.TestCase
