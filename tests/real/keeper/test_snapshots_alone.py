"""Snapshots between two commits: what is in memory alone, what it survives, and how it ends up."""

import os
import signal

import psutil
import pytest
from floor import SCRIPTS, Job, until
from lean import Place

from outlast.errors import Exit
from outlast.ledger.file import read_events

SCRIPT = SCRIPTS / "snapshots.py"
STEPS = 250
STORED = ("commit", "tier_copied")
TWO = (("local", 2), ("shared", 2))


# --- the keeper -----------------------------------------------------------------------------------


@pytest.fixture(name="place")
def _place(floor, tmp_path):
    place = Place(floor, tmp_path / "place", tiers=TWO, linger_s=1.0)
    place.process = place.keeper(writers=2)
    yield place
    place.process.kill()
    place.process.wait()


def test_what_is_in_memory_alone_goes_to_the_first_tier_where_nobody_goes_on(place):
    worker = place.worker(buffers=2)
    assert worker.save(1) == ""
    assert worker.save(2, tiers=(), arena=1) == ""
    assert place.committed() == [1]
    worker.client._wire.close()  # without a word
    assert place.process.wait(timeout=60) == 0
    assert place.committed() == [1, 2]
    copied = [(one["tier"], one["step"]) for one in events(place.directory, "tier_copied")]
    assert copied == [("shared", 1)]
    late = [one for one in events(place.directory, "commit") if one.get("late")]
    assert [(one["tier"], one["step"], one["kind"]) for one in late] == [("local", 2, "full")]


def test_what_is_in_storage_is_not_brought_again(place):
    worker = place.worker(buffers=2)
    assert worker.save(1, tiers=(), arena=1) == ""
    assert worker.save(2, tiers=("local",)) == ""
    worker.client._wire.close()
    assert place.process.wait(timeout=60) == 0
    assert place.committed() == [2]
    assert not events(place.directory, "tier_copied")


def test_a_workers_death_is_no_end(place):
    worker = place.worker(buffers=2)
    assert worker.save(1, tiers=()) == ""
    worker.client._wire.close()
    other = place.worker(buffers=2)
    assert other.client.recall().children()
    assert other.save(2, tiers=("local",), arena=0) == ""
    assert place.committed() == [2]


def test_the_newest_snapshot_is_overwritten_last(place):
    worker = place.worker(buffers=2)
    assert worker.save(1, tiers=(), arena=1) == ""
    assert worker.save(2, tiers=(), arena=0) == ""
    worker.client._wire.close()
    other = place.worker(buffers=2)
    assert other.reserved.arenas == worker.reserved.arenas[::-1]


def test_one_that_was_overwritten_is_left_out(place):
    """The next attempt takes the memory while it is brought: that costs the copy, and no more."""
    worker = place.worker(size=1 << 20)
    assert worker.save(1, tiers=()) == ""
    place.storage.root.write_text("")  # storage that fails, so that it takes a while
    worker.client._wire.close()
    until(lambda: events(place.directory, "storage_error"), "a try")
    other = place.worker(size=1 << 20)
    other.begin(2, tiers=(), whole=False)
    place.storage.root.unlink()
    until(lambda: events(place.directory, "save_skipped"), "the end of it")
    assert "not in memory any more" in events(place.directory, "save_skipped")[0]["reason"]
    assert place.committed() == []


# --- whole jobs -----------------------------------------------------------------------------------


def events(directory, name):
    return [event for event in read_events(directory) if event.event == name]


def alone(job):
    """Steps of snapshots that no tier got."""
    return [one["step"] for one in job.events("snapshot") if one.get("tiers") == []]


def start(floor, job, *, every="auto", pause=0.02, **env):
    return floor.outlast(
        *("run", "--dir", job.directory, SCRIPT, job.records, STEPS),
        *("--every", every, "--pause", pause),
        # A snapshot takes milliseconds, of which a loaded machine makes tens.
        env={**job.env, "OUTLAST_CHECKPOINT_OVERHEAD": "0.5", **env},
    )


@pytest.fixture(name="calm", scope="module")
def _calm():
    return {}


def undisturbed(floor, tmp_path, calm):
    if not calm:
        job = Job(tmp_path / "calm", 1)
        assert start(floor, job, pause=0.0).wait() == 0
        calm["hash"] = job.final()["hash"]
    return calm["hash"]


def test_a_killed_worker_goes_on_from_a_snapshot_that_no_storage_has(floor, tmp_path, calm):
    job = Job(tmp_path / "job", 1)
    run = start(floor, job)
    until(lambda: len(alone(job)) >= 3, "snapshots", running=run)
    os.kill(job.lines()[-1]["pid"], signal.SIGKILL)
    until(lambda: len(job.events("resumed")) == 2, "another attempt", running=run)
    resumed = job.events("resumed")[1]
    assert resumed["source"] == "from memory"
    committed = [one["step"] for one in job.events("commit") if one.attempt == 1]
    assert resumed["step"] >= alone(job)[2] > max(committed)
    assert run.wait() == 0, run.text
    # What no storage had is committed at once.
    first = next(one for one in job.events("snapshot") if one.attempt == 2)
    assert first["tiers"] is None
    assert first["step"] <= resumed["step"] + 5
    assert job.final()["hash"] == undisturbed(floor, tmp_path, calm)


def test_where_the_script_has_failed_for_good_nothing_is_lost(floor, tmp_path, calm):
    job = Job(tmp_path / "job", 1)
    assert start(floor, job, BUG_AT=120).wait() == Exit.GAVE_UP
    stored = max(one["step"] for name in STORED for one in job.events(name))
    # The last one may have been in the making.
    assert stored >= max(sorted(set(alone(job)))[:-1], default=1)
    again = start(floor, job)
    assert again.wait() == 0, again.text
    assert job.events("resumed")[-1]["step"] == stored
    assert job.events("resumed")[-1]["source"] == "from local"
    assert job.final()["hash"] == undisturbed(floor, tmp_path, calm)


def test_what_storage_does_not_take_at_the_end_is_said(floor, tmp_path):
    job = Job(tmp_path / "job", 1)
    bug = tmp_path / "bug"
    run = start(floor, job, BUG_AT=bug)
    until(lambda: len(alone(job)) >= 3, "snapshots", running=run)
    checkpoints = job.directory / "checkpoints"
    checkpoints.rename(job.directory / "away")
    checkpoints.write_text("")  # storage that fails
    written = bug.with_suffix(".new")
    written.write_text(str(alone(job)[-1] + 30))
    written.rename(bug)
    assert run.wait() == Exit.GAVE_UP, run.text
    lost = max(one["step"] for one in job.events("save_skipped") if one.get("tier"))
    assert lost >= alone(job)[2]
    assert f"step {lost} was in memory alone, and is lost: tier local did not get it" in run.text
    stands = max(one["step"] for one in job.events("commit"))
    assert f"; step {stands} stands" in run.text


def test_a_killed_agent_leaves_what_the_keeper_has(floor, tmp_path, calm):
    job = Job(tmp_path / "job", 1)
    run = start(floor, job)
    until(lambda: len(alone(job)) >= 3, "snapshots", running=run)
    (keeper,) = (one for one in floor.offspring() if "outlast.keeper" in " ".join(one.cmdline()))
    os.kill(job.lines()[-1]["pid"], signal.SIGKILL)
    run.kill()
    psutil.wait_procs([keeper], timeout=60)
    assert not keeper.is_running()
    late = [one for one in job.events("commit") if one.get("late")]
    assert len(late) == 1, [*job.events("commit"), alone(job), run.text]
    (late,) = late
    brought = late["step"]
    assert brought >= alone(job)[2]
    again = start(floor, job)
    assert again.wait() == 0, again.text
    assert job.events("resumed")[-1]["step"] == brought
    assert job.final()["hash"] == undisturbed(floor, tmp_path, calm)


@pytest.mark.parametrize(
    ("every", "env"),
    [("3 steps", {}), ("auto", {"OUTLAST_CHECKPOINT_OPTIMIZER_EVERY": "2"})],
    ids=["steps", "weights-alone"],
)
def test_who_says_how_often_means_storage(floor, tmp_path, every, env):
    job = Job(tmp_path / "job", 1)
    run = start(floor, job, every=every, **env)
    until(lambda: len(job.events("commit")) >= 5, "commits", running=run)
    assert not alone(job)
    run.kill()
