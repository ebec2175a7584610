"""From tier to tier: the newest wins, failures pause, nothing in use is pruned, some give up."""

import threading
import time
from types import SimpleNamespace

import pytest
from keeper_fakes import JOB, FakeKeeper
from unit_fakes import WatchedStorage
from unit_names import committed, save_name, save_of

from outlast.checkpoint.catalog import remove_save
from outlast.checkpoint.manifest import MANIFEST, shard_file, signed_by, state_file
from outlast.keeper import copies as room
from outlast.keeper.copies import DurableTier, TierCopies
from outlast.keeper.memory import Due
from outlast.storage import Directory
from whole_reads import verify

LIMIT_S = 20


class Tiers:
    """Two tiers behind fake saves; ``shared`` fails or waits as it is told."""

    def __init__(self, monkeypatch, path, keep=(1, 2)):
        monkeypatch.setattr(room, "PAUSE_S", 0.01)
        monkeypatch.setattr(room, "PAUSE_MAX_S", 0.05)
        self.error = None
        self.ahead_of = lambda operation, name: None
        self.gate, self.is_at_gate = threading.Event(), threading.Event()
        self.gate.set()
        self.local = Directory(path / "local")
        self.shared = Directory(path / "shared")
        watched = WatchedStorage(self.shared, self._fail)
        self.keeper = FakeKeeper(monkeypatch, {"local": self.local})
        tiers = [DurableTier("local", self.local, keep[0]), DurableTier("shared", watched, keep[1])]
        self.copies = TierCopies(JOB, tiers, self._record, self.keeper.saves.names)
        self.keeper.saves._conclusions._on_committed = self.copies.committed
        self.worker = self.keeper.worker()
        self.events = []
        self.changed = threading.Condition()

    def _record(self, event, **fields):
        with self.changed:
            self.events.append((event, fields.get("step")))
            self.changed.notify_all()

    def _fail(self, operation, name):
        if not self.gate.is_set():
            self.is_at_gate.set()
        assert self.gate.wait(LIMIT_S)
        self.ahead_of(operation, name)
        return self.error if operation == "create" else None

    def save(self, step, tiers=None):
        self.worker.save(step, step, tiers=tiers)
        self.keeper.run()

    def until(self, event, step):
        with self.changed:
            assert self.changed.wait_for(lambda: (event, step) in self.events, LIMIT_S), self.events

    def settle(self):
        deadline = threading.Event()
        for _ in range(LIMIT_S * 200):
            if self.copies.idle:
                return
            deadline.wait(0.005)
        raise AssertionError("not idle")


@pytest.fixture(name="tiers")
def _tiers(monkeypatch, tmp_path):
    tiers = Tiers(monkeypatch, tmp_path)
    yield tiers
    tiers.gate.set()
    tiers.copies.stop()


def test_a_checkpoint_goes_where_it_is_due(tiers):
    tiers.save(1)
    tiers.save(2, ("local",))
    tiers.settle()
    assert committed(tiers.shared) == [1]
    assert committed(tiers.local) == [2]
    verify(tiers.shared, 1)


def test_of_those_that_wait_the_newest_is_brought(tiers):
    tiers.gate.clear()
    tiers.save(1)
    assert tiers.is_at_gate.wait(LIMIT_S)
    for step in (2, 3, 4):
        tiers.save(step)
    tiers.gate.set()
    tiers.settle()
    assert tiers.events.count(("save_skipped", 2)) + tiers.events.count(("save_skipped", 3)) == 2
    assert committed(tiers.shared)[-1] == 4


def test_a_failure_is_repeated_until_a_newer_one_takes_its_place(tiers):
    tiers.error = OSError(5, "Input/output error")
    tiers.save(1)
    tiers.until("storage_error", 1)
    tiers.save(2)
    tiers.until("storage_error", 2)
    tiers.error = None
    tiers.settle()
    assert committed(tiers.shared) == [2]
    assert ("save_skipped", 1) in tiers.events
    assert tiers.copies._copiers["shared"].failures >= 2


def test_a_copy_that_is_pruned_while_its_writer_is_paused_is_no_copy(tiers):
    """By another machine: its files are gone when the manifest comes."""

    def pause(did, name):
        if (did, name) == ("put_new", f"{save_name(1)}/{MANIFEST}"):
            assert remove_save(tiers.shared, save_of(1), is_unfinished=True)

    tiers.ahead_of = pause
    tiers.save(1)
    tiers.settle()
    assert ("tier_copied", 1) not in tiers.events
    assert ("save_skipped", 1) in tiers.events
    assert committed(tiers.shared) == []


def test_a_further_try_brings_what_is_missing_and_nothing_else(tiers, monkeypatch):
    put_new, tries = tiers.shared.put_new, []

    def fail_once(name, data):
        tries.append(name)
        if len(tries) == 1:
            tiers.shared.remove(f"{save_name(1)}/{state_file(0)}")
            raise OSError(5, "Input/output error")
        return put_new(name, data)

    monkeypatch.setattr(tiers.shared, "put_new", fail_once)
    tiers.save(1)
    tiers.settle()
    log = tiers.copies._copiers["shared"].tier.storage.log
    made = [name.rpartition("/")[2] for did, name in log if did == "create"]
    assert (made.count(shard_file(0)), made.count(state_file(0))) == (1, 2)
    verify(tiers.shared, 1)


def test_once_the_job_is_over_a_tier_that_fails_is_given_up(tiers):
    tiers.error = OSError(28, "No space left on device")
    tiers.copies.end(is_over=True)
    tiers.save(1)
    tiers.settle()  # it would wait for ever
    assert tiers.copies._copiers["shared"].failures == room.LAST_TRIES
    assert ("save_skipped", 1) in tiers.events
    tiers.copies.end(is_over=False)
    tiers.save(2)
    copier, until_s = tiers.copies._copiers["shared"], time.monotonic() + LIMIT_S
    while copier.failures < 2 * room.LAST_TRIES + 1:
        assert time.monotonic() < until_s, "it was given up while somebody trains"
        time.sleep(0.01)
    tiers.error = None
    tiers.settle()
    assert committed(tiers.shared) == [2]


def test_the_source_of_a_copy_stays_until_it_is_made(tiers):
    tiers.gate.clear()
    tiers.save(1)
    for step in (2, 3):
        tiers.save(step, ("local",))
    tiers.copies._copiers["local"].tidy()
    assert 1 in committed(tiers.local)
    copier, still_read = tiers.copies._copiers["shared"], []
    tell = tiers.copies.copied_from
    tiers.copies.copied_from = lambda tier: (still_read.append(copier.reads(tier)), tell(tier))
    tiers.gate.set()
    tiers.settle()
    tiers.settle()
    assert committed(tiers.shared) == [1]
    assert committed(tiers.local) == [3]
    assert still_read == [set()]


def test_a_save_in_flight_is_not_pruned_by_one_that_overtakes_it(monkeypatch, tmp_path):
    tiers = Tiers(monkeypatch, tmp_path / "two", keep=(2, 2))
    late = tiers.keeper.worker(1, 2)
    early = tiers.keeper.worker(0, 2)
    early.save(1, 101, tiers=("local",))
    tiers.keeper.run()  # rank 0's files are there, rank 1's are not
    tiers.save(2, ("local",))
    tiers.settle()
    late.save(1, 101, tiers=("local",))
    tiers.keeper.run()
    assert late.ended[0].error == ""
    tiers.settle()
    assert committed(tiers.local) == [1, 2]
    verify(tiers.local, 1)
    tiers.copies.stop()


def test_what_another_writer_committed_is_left_alone(tiers, monkeypatch):
    other = FakeKeeper(monkeypatch, {"local": tiers.shared})
    worker = other.worker(attempt=7)
    worker.save(1, 1)
    other.run()
    theirs = save_name(1, attempt=7)
    before = {name: tiers.shared.read(f"{theirs}/{name}") for name in tiers.shared.children(theirs)}
    tiers.save(1)
    tiers.settle()
    assert ("tier_copied", 1) in tiers.events
    after = {name: tiers.shared.read(f"{theirs}/{name}") for name in tiers.shared.children(theirs)}
    assert after == before
    assert verify(tiers.shared, 1).attempt == 7
    assert committed(tiers.local) == [1]


def test_a_tier_in_which_another_manifest_has_the_name_is_not_complete(tiers):
    """It lies where ours would: to try again changes nothing."""
    path = f"{save_name(1)}/{MANIFEST}"
    tiers.shared.put_new(path, b"what a torn disk has left")
    tiers.save(1)
    tiers.settle()
    assert tiers.events.count(("storage_error", 1)) == 1
    assert ("save_skipped", 1) in tiers.events
    assert not tiers.copies.is_complete
    assert tiers.shared.read(path) == b"what a torn disk has left"
    tiers.save(2)
    tiers.settle()
    assert tiers.copies.is_complete
    verify(tiers.shared, 2)


def test_what_is_committed_in_a_tier_is_not_written_there_again(tiers):
    tiers.save(1)
    tiers.settle()
    watched = tiers.copies._copiers["shared"].tier.storage
    watched.log.clear()
    tiers.copies.go_on({"shared": Due(save=save_name(1), source="local", ranks=(0,))})
    tiers.settle()
    assert not {did for did, _ in watched.log} & {"create", "put", "put_new", "finish"}


def test_a_copy_says_first_whose_it_is(tiers):
    tiers.save(1)
    tiers.settle()
    log = tiers.copies._copiers["shared"].tier.storage.log
    wrote = [one for one in log if one[0] in ("put", "create", "put_new")]
    assert wrote[0] == ("put", f"{save_name(1)}/save.json")
    assert wrote[-1] == ("put_new", f"{save_name(1)}/manifest.json")
    assert signed_by(tiers.shared, save_of(1)) == JOB


# --- while the end waits for slower tiers: who is given up, and by what pace ----------------------


@pytest.fixture(name="copies")
def _copies(tmp_path):
    recorded = []
    tiers = [DurableTier(name, Directory(tmp_path / name), 3) for name in ("local", "near", "far")]
    copies = TierCopies("job", tiers, lambda event, **fields: recorded.append((event, fields)))
    copies.recorded = recorded
    yield copies
    copies.stop()


def manifest_of(step):
    return SimpleNamespace(step=step, attempt=1, save=save_of(step))


def busy(copies, name, *, since_s, done, total=100, step=7):
    """As if the tier's thread were in the middle of a copy."""
    copier = copies._copiers[name]
    copier._current = SimpleNamespace(manifest=manifest_of(step), tier="local", ranks=(0,))
    copier._since_s = time.monotonic() - since_s
    copier.done_bytes, copier.total_bytes = done, total
    return copier


def test_the_pace_is_that_of_the_try_in_progress(copies):
    assert busy(copies, "near", since_s=10, done=20).rest_s() == pytest.approx(40, rel=0.05)
    assert busy(copies, "near", since_s=10, done=0).rest_s() == pytest.approx(10, rel=0.05)
    assert busy(copies, "near", since_s=1, done=1).rest_s() is None  # too early to say
    assert copies._copiers["far"].rest_s() is None  # nothing is due, or it only prunes


@pytest.mark.parametrize(
    ("left_s", "near", "far", "given_up"),
    [
        (10, (4, 50), (4, 1), ["far"]),  # 4 s and 400 s
        (500, (4, 50), (4, 1), []),
        (10, (4, 50), (1, 0), []),  # it has only begun
        (100, (4, 50), (4, 0), []),  # a slow first block
        (1, (4, 50), (9, 0), ["far"]),
        (10, (4, 0), (1, 0), []),  # alone
    ],
)
def test_who_cannot_make_it_makes_way(copies, left_s, near, far, given_up):
    busy(copies, "near", since_s=near[0], done=near[1])
    busy(copies, "far", since_s=far[0], done=far[1])
    copies.replan(left_s)
    assert [name for name, one in copies._copiers.items() if one.is_given_up] == given_up
    assert [fields["tier"] for _, fields in copies.recorded] == given_up
    copies.replan(left_s)  # said once
    assert len(copies.recorded) == len(given_up)


def test_a_tier_that_was_given_up_takes_nothing_more_and_is_not_done(copies):
    busy(copies, "near", since_s=4, done=50)
    far = busy(copies, "far", since_s=4, done=1)
    copies.replan(10)
    far._current = None
    far.submit(SimpleNamespace(manifest=manifest_of(8), tier="local", ranks=()))
    assert far.idle
    assert not copies.is_complete
    assert room.PACE_AFTER_S == 2.0
