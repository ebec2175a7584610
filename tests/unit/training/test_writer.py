"""Writing in the background: whatever goes wrong there, training goes on and is told."""

import threading

import pytest
import torch
from unit_fakes import WatchedStorage

from outlast.attempt.link import LocalLink
from outlast.checkpoint.catalog import find_steps
from outlast.checkpoint.save import Captured, Committed, Saver
from outlast.checkpoint.snapshot import Arena
from outlast.ledger.file import Ledger, read_events
from outlast.storage import Directory
from outlast.training.pending import PendingSave, Saves
from outlast.training.writer import Writer, Written


class SlowSaver:
    """Saves when it is told to, and fails when it is told to."""

    def __init__(self):
        self.go = threading.Event()
        self.error = None
        self.saved = []

    def save(self, captured):
        assert self.go.wait(20)
        self.saved.append(captured.step)
        if self.error:
            raise self.error
        return Committed(step=captured.step, num_bytes=10, num_files=2)


def captured(step):
    return Captured(step=step, data={}, snapshot=Arena().take({"w": torch.ones(3)}))


class Bench:
    def __init__(self, path, saver=None, *, rank=0, keep=2, storage=None):
        self.path = path
        self.storage = storage or Directory(path / "checkpoints")
        self.saver = saver or Saver(self.storage, LocalLink(), job="j", attempt=1, timeout_s=1.0)
        self.ended = []
        self.told = threading.Semaphore(0)
        self.ledger = Ledger(path, job="j", rank=rank)
        self.writer = Writer(
            self.saver, self.storage, self.ledger, rank=rank, keep=keep, on_written=self.on_written
        )

    def on_written(self, written):
        self.ended.append(written)
        self.told.release()

    def write(self, step):
        self.writer.submit(captured(step))
        written = self.writer.wait(20)
        assert self.told.acquire(timeout=20)
        return written

    def events(self, name):
        return [event for event in read_events(self.path) if event.event == name]


@pytest.fixture
def bench(tmp_path, request):
    made = []

    def make(*args, **more):
        made.append(Bench(tmp_path, *args, **more))
        return made[-1]

    yield make
    for one in made:
        one.writer.stop(5)
        one.ledger.close()
        assert not one.writer._thread.is_alive()


def test_a_commit_is_recorded_and_old_ones_go(bench):
    one = bench(keep=2)
    assert one.writer.idle
    for step in (1, 2, 3):
        assert one.write(step) == Written(step=step)
    assert one.writer.committed_step == 3
    assert find_steps(one.storage).committed == [2, 3]
    assert one.ended == [Written(step=step) for step in (1, 2, 3)]
    events = one.events("commit")
    assert [event["step"] for event in events] == [1, 2, 3]
    assert set(events[0].fields) == {"step", "durable_s", "bytes", "files"}
    assert events[0]["files"] == 3


def test_other_ranks_neither_record_nor_prune(bench):
    saver = SlowSaver()
    saver.go.set()
    storage = WatchedStorage(Directory("/nowhere"))
    one = bench(saver, rank=1, storage=storage)
    assert one.write(5) == Written(step=5)
    assert one.writer.committed_step == 5
    assert one.events("commit") == []
    assert storage.log == []


def test_only_one_save_is_in_flight_and_waiting_has_an_end(bench):
    saver = SlowSaver()
    one = bench(saver)
    one.writer.submit(captured(5))
    assert not one.writer.idle
    assert one.writer.wait(0.01) is None
    with pytest.raises(RuntimeError, match="a save is in flight already"):
        one.writer.submit(captured(6))
    saver.go.set()
    assert one.writer.wait(20) == Written(step=5)
    assert one.writer.idle
    assert saver.saved == [5]
    assert one.writer.wait(0) == Written(step=5)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (
            OSError(28, "No space left on device"),
            "; free space, or keep fewer (checkpoint.keep is ",
        ),
        (ValueError("x"), ""),
    ],
)
def test_a_save_that_fails_is_told_and_the_next_one_works(bench, error, advice):
    saver = SlowSaver()
    saver.go.set()
    one = bench(saver)
    assert one.write(5) == Written(step=5)
    saver.error = error
    written = one.write(10)
    assert written.step == 10
    assert written.error.startswith(f"{type(error).__name__}: {error}{advice}")
    assert one.ended[-1] == written
    assert (one.writer.committed_step, one.writer.failures) == (5, 1)
    (event,) = one.events("storage_error")
    assert (event["operation"], event["error"], event["step"]) == ("save", written.error, 10)
    assert event["path"] == one.storage.describe()
    saver.error = None
    assert one.write(15) == Written(step=15)
    assert one.writer.committed_step == 15


def test_pruning_that_fails_does_not_fail_the_save(bench, tmp_path):
    error = OSError(5, "Input/output error")
    storage = WatchedStorage(
        Directory(tmp_path / "checkpoints"),
        lambda did, _: error if did == "remove_tree" else None,
    )
    one = bench(storage=storage, keep=1)
    assert one.write(1) == Written(step=1)
    assert one.write(2) == Written(step=2)
    assert one.writer.committed_step == 2
    (event,) = one.events("storage_error")
    assert event["operation"] == "prune"


def test_what_a_resume_rejected_does_not_count_as_kept_until_it_is_saved_again(bench):
    one = bench(keep=1)
    for step in (10, 20, 30):
        assert one.write(step)
    one.writer.invalid = {30}
    one.write(25)
    assert find_steps(one.storage).committed == [25, 30]
    one.write(30)
    assert one.writer.invalid == set()
    assert find_steps(one.storage).committed == [30]


def test_stopping_lets_the_save_in_flight_end(bench):
    saver = SlowSaver()
    one = bench(saver)
    one.writer.submit(captured(5))
    saver.go.set()
    one.writer.stop(20)
    assert one.writer.committed_step == 5
    assert not one.writer._thread.is_alive()


def test_stopping_has_an_end_even_if_the_save_has_none(bench):
    saver = SlowSaver()
    one = bench(saver)
    one.writer.submit(captured(5))
    thread = one.writer._thread
    one.writer._thread = type("Joined", (), {"join": lambda self, timeout: None})()
    one.writer.stop(0.01)
    assert thread.is_alive()
    assert thread.daemon
    one.writer._thread = thread
    saver.go.set()


# --- what a script holds -------------------------------------------------------------------------


def test_a_pending_save_is_decided_once_and_ends_once():
    pending = PendingSave(5)
    assert (pending.step, pending.committed, pending.error) == (None, False, "")
    assert pending.wait(0) is False
    pending.decide(7)
    pending.decide(8)
    assert pending.step == 7
    pending.end("")
    assert pending.wait() is pending.committed is True


def test_a_pending_save_that_failed():
    pending = PendingSave(5)
    pending.end("OSError: no space")
    assert pending.wait() is pending.committed is False
    assert pending.error == "OSError: no space"


def test_waiting_is_woken_by_the_end():
    pending = PendingSave(5)
    found = []
    waiting = threading.Thread(target=lambda: found.append(pending.wait(20)), daemon=True)
    waiting.start()
    pending.end("")
    waiting.join(10)
    assert found == [True]


def test_a_save_serves_those_who_asked_for_it_or_before():
    saves = Saves()
    early, exact, late = saves.add(3), saves.add(5), saves.add(6)
    saves.decided(5)
    assert [pending.step for pending in (early, exact, late)] == [5, 5, None]
    assert saves.open() == [early, exact, late]
    saves.written(5, "")
    assert [pending.committed for pending in (early, exact, late)] == [True, True, False]
    assert saves.open() == [late]
    saves.written(8, "failed")
    assert (late.step, late.error, saves.open()) == (8, "failed", [])
