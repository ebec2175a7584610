"""Tiers behind the first one: when they are due, what their failures cost, who keeps what."""

import os
import shutil
import signal
import subprocess

import pytest
from floor import until
from keeper_floor import SCRIPT, KeeperJob, keeper, memfds
from lean import Place
from saved import saves_in
from test_crash_matrix import traced

from outlast.keeper.process import Supervisor
from outlast.ledger.file import read_events

TWO = (("local", 1), ("shared", 2))
HERE = ("local",)


def events(place, name):
    return [event for event in read_events(place.directory) if event.event == name]


@pytest.fixture(name="place")
def _place(floor, tmp_path):
    place = Place(floor, tmp_path / "place", tiers=TWO)
    place.process = place.keeper(writers=2)
    yield place
    place.process.kill()
    place.process.wait()


def shared(place):
    return place.committed(place.storages["shared"])


def break_tier(place):
    """A file where the tier's directory should be."""
    root = place.storages["shared"].root
    shutil.rmtree(root, ignore_errors=True)
    root.write_text("")
    return root


def test_each_tier_gets_what_is_due_and_keeps_its_own(place):
    worker = place.worker()
    for step in range(1, 8):
        assert worker.save(step, tiers=HERE if step % 2 else None) == ""
        due = list(range(2, step + 1, 2))[-2:]
        until(lambda due=due: shared(place) == due, "the copy")
        until(lambda step=step: place.committed() == [step], "local is pruned")
    copied = events(place, "tier_copied")
    assert [(event["tier"], event["step"]) for event in copied] == [
        ("shared", step) for step in (2, 4, 6)
    ]


def test_where_the_job_ends_gets_everywhere_due_or_not(place):
    worker = place.worker()
    for step in (1, 2, 3):
        assert worker.save(step, tiers=HERE if step > 1 else None) == ""
    until(lambda: shared(place) == [1], "the copy that was due")
    worker.close()
    until(lambda: shared(place)[-1:] == [3], "where it ended")
    due = [("shared", 1), ("shared", 3)]

    def copied():
        return [(event["tier"], event["step"]) for event in events(place, "tier_copied")]

    until(lambda: copied() == due, "both are said")


def test_a_worker_that_dies_is_no_end(place):
    worker = place.worker()
    for step in (1, 2):
        assert worker.save(step, tiers=HERE if step > 1 else None) == ""
    until(lambda: shared(place) == [1], "the copy that was due")
    worker.client._wire.close()  # without a word
    other = place.worker()
    assert other.save(3, tiers=HERE) == ""
    assert shared(place) == [1]


def test_a_tier_that_fails_costs_nothing_but_its_copies(place):
    worker = place.worker()
    assert worker.save(1) == ""
    until(lambda: shared(place) == [1], "the copy")
    root = break_tier(place)
    for step in (2, 3, 4):
        assert worker.save(step) == ""
        until(lambda step=step: newest_failure(place) == step, "a failure, in words")
    failures = events(place, "storage_error")
    assert {(event["operation"], event["tier"]) for event in failures} == {("copy", "shared")}
    assert all("Not a directory" in event["error"] for event in failures)
    passed = events(place, "save_skipped")
    assert [(event["step"], event["tier"]) for event in passed] == [(2, "shared"), (3, "shared")]
    root.unlink()  # it is mended: without another save the newest one is brought
    until(lambda: shared(place) == [4], "the newest")


def newest_failure(place):
    return max((event.get("step") or 0 for event in events(place, "storage_error")), default=0)


def test_a_full_tier_costs_nothing_but_its_copies(floor, tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no small file system can be mounted")
    try:
        place = Place(floor, tmp_path / "place", tiers=TWO)
        place.storages["shared"].root.symlink_to(mount)
        process = place.keeper(writers=2)
        worker = place.worker(size=200_000)
        for step in (1, 2, 3):
            assert worker.save(step) == ""
            until(lambda step=step: newest_failure(place) == step, "a failure, in words")
        assert "No space left" in events(place, "storage_error")[0]["error"]
        assert "keep fewer checkpoints" in events(place, "storage_error")[0]["error"]
        assert shared(place) == []
        assert place.committed()[-1] == 3
        worker.close()
        process.kill()
        process.wait()
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_tier_that_vanishes_is_filled_again(place):
    worker = place.worker()
    assert worker.save(1) == ""
    until(lambda: shared(place) == [1], "the copy")
    shutil.rmtree(place.storages["shared"].root)
    assert worker.save(2) == ""
    until(lambda: shared(place) == [2], "the copy")


def test_what_is_being_copied_is_not_pruned(place):
    worker = place.worker()
    root = break_tier(place)
    assert worker.save(1) == ""
    until(lambda: newest_failure(place) == 1, "a failure, in words")
    for step in (2, 3, 4):
        assert worker.save(step, tiers=HERE) == ""
    until(lambda: place.committed() == [1, 4], "all but the source is pruned")
    root.unlink()
    until(lambda: shared(place) == [1], "the copy")
    until(lambda: place.committed() == [4], "the source is pruned")


def test_a_keepers_successor_brings_what_it_had_yet_to_bring(floor, tmp_path, monkeypatch):
    for name, value in floor.environ.items():
        monkeypatch.setenv(name, value)
    place = Place(floor, tmp_path / "place", tiers=TWO)
    supervisor = Supervisor(place.setup)
    supervisor.start()
    root = break_tier(place)
    worker = place.worker()
    assert worker.save(1) == ""
    until(lambda: newest_failure(place) == 1, "a failure, in words")
    old = supervisor.pid
    os.kill(old, signal.SIGKILL)
    until(lambda: supervisor.pid != old, "another keeper")
    root.unlink()
    until(lambda: shared(place) == [1], "the copy")
    assert supervisor.close(30.0)


def test_the_end_waits_for_copies_but_not_beyond_its_deadline(floor, tmp_path):
    place = Place(floor, tmp_path / "place", tiers=TWO)
    for is_broken in (False, True):
        supervisor = Supervisor(place.setup)
        supervisor.start()
        worker = place.worker()
        if is_broken:
            break_tier(place)
        assert worker.save(place.attempt) == ""
        worker.close()
        assert supervisor.close(1.0 if is_broken else None) != is_broken
        assert not list((place.directory / "run").iterdir()) or is_broken
    assert events(place, "tier_copied")[-1]["step"] == 1


def test_an_end_that_waits_for_copies_hears_that_the_machine_goes(floor, tmp_path):
    place = Place(floor, tmp_path / "place", tiers=TWO)
    supervisor = Supervisor(place.setup)
    supervisor.start()
    worker = place.worker()
    break_tier(place)
    assert worker.save(1) == ""
    worker.close()
    asked = iter([None, None, 0.5])
    assert not supervisor.close(None, hurry=lambda: next(asked))


# --- whole jobs ---------------------------------------------------------------------------------


def job_with_two_tiers(tmp_path, every):
    tables = [
        f'name = "local"\nurl = "{tmp_path}/local"\nkeep = 2\n',
        f'name = "shared"\nurl = "{tmp_path}/shared"\nkeep = 1\nevery = {every}\n',
    ]
    job = KeeperJob(tmp_path / "job", tiers=tables, free=-9)
    job.local, job.shared = tmp_path / "local", tmp_path / "shared"
    return job


def steps_in(directory):
    return [save.step for save in saves_in(directory)]


def test_a_job_whose_local_tier_is_gone_resumes_from_the_shared_one(floor, tmp_path):
    job = job_with_two_tiers(tmp_path, every=2)
    first = floor.warm(SCRIPT, job.records, 14, env=job.env)
    assert first.wait() == 0, first.text
    assert [event["step"] for event in job.events("commit")] == [3, 6, 9, 12, 14]
    copied = [event["step"] for event in job.events("tier_copied")]
    assert set(copied) <= {3, 9, 14}  # every other one, and the last
    assert copied[-1] == 14
    # The loss was not seen to be healthy yet: the oldest one and the next behind it stay besides.
    assert (steps_in(job.local), steps_in(job.shared)) == ([3, 9, 12, 14], [3, 9, 14])
    shutil.rmtree(job.local)
    again = floor.warm(SCRIPT, job.records, 20, env=job.env)
    assert again.wait() == 0, again.text
    resumed = job.events("resumed")[-1]
    assert (resumed["step"], resumed["source"]) == (14, "from shared")
    assert not job.events("verify_failed")


def test_with_a_slow_disk_saves_are_skipped_and_memory_does_not_grow(floor, tmp_path):
    job = KeeperJob(tmp_path / "job", pause=3)
    arguments = ("--every=1 steps", "--pause=0.01")
    life = floor.warm(SCRIPT, job.records, 60, *arguments, env={**job.env, "UNSETTLED": "1"})
    until(job.paused, "some steps", running=life)
    held = memfds(floor)
    process = keeper(floor)
    process.poll = lambda: None if process.is_running() else 0
    slow = "inject=fsync:delay_enter=100000"
    place = type("Where", (), {"directory": tmp_path})
    with traced(place, process, "-e", "trace=fsync", "-e", slow):
        job.go()
        until(lambda: job.begun() >= 40, "many steps", running=life)
        assert memfds(floor) == held == 2  # one buffer and the books
    assert life.wait() == 0, life.text
    skipped = [event["reason"] for event in job.events("save_skipped")]
    assert "the save before it is still being written" in skipped
    committed = [event["step"] for event in job.events("commit")]
    assert committed[-1] == 60
    assert 4 < len(committed) < 60
    assert not job.events("storage_error")


@pytest.mark.parametrize("is_machine_lost", [False, True])
def test_a_snapshot_in_memory_alone_outlives_its_worker_and_not_its_machine(
    floor, tmp_path, is_machine_lost
):
    tables = [f'name = "local"\nurl = "{tmp_path}/local"\nkeep = 2\nevery = 4\n']
    job = KeeperJob(tmp_path / "job", memory=True, tiers=tables, free=-9, pause=7)
    life = floor.warm(SCRIPT, job.records, 8, env=job.env)
    until(job.paused, "the second save", running=life)
    process = keeper(floor)
    os.kill(life.pid, signal.SIGSTOP)  # so that it starts no other keeper
    if is_machine_lost:
        process.kill()
    life.kill()
    job.go()
    assert steps_in(tmp_path / "local") == [3]
    assert [event["step"] for event in job.events("commit")] == [3]
    again = floor.warm(SCRIPT, job.records, 8, env=job.env)
    assert again.wait() == 0, again.text
    resumed = job.events("resumed")[-1]
    expected = (3, "from local") if is_machine_lost else (6, "from memory")
    assert (resumed["step"], resumed["source"]) == expected
    assert not job.events("verify_failed")
    assert steps_in(tmp_path / "local")[-1] == 8  # the end goes everywhere
