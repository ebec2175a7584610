"""What other people's loops have in them besides a sum and a step, when a loss interrupts them."""

import pytest
from floor import SCRIPTS, Job

SCRIPT = SCRIPTS / "many_kinds.py"
WORKERS, STEPS = 4, 20
DEATHS = ("2:3:backward", "1:9:summed", "0:14:forward")
# Within a window of four batches, of any rank, two at once, in the midst of its last sum, and where
# others have completed what ends it.
BEHIND = ("summed", "optimizer", "stepped")
IN_WINDOWS = (
    ("2:6:forward", "0:11:backward", "1:16:bucket"),
    ("3:7:accumulated", "0:12:optimizer", "1:18:backward", "3:18:accumulated"),
    ("1:8:summed", "0:12:stepped", "2:13:forward"),
)
IN_PROCESS = {"OUTLAST_WORKERS_IN_PROCESS": "true"}


def run(floor, place, kind, *deaths):
    job = Job(place, WORKERS)
    asked = [part for death in deaths for part in ("--die", death)]
    running = floor.outlast(
        *("run", "--nproc-per-node", WORKERS, "--dir", job.directory),
        *(SCRIPT, job.records, STEPS, kind, *asked),
        env=IN_PROCESS,
    )
    assert running.wait() == 0, running.text
    return job, running


def ends(job):
    return [final["hash"] for final in job.finals()]


@pytest.mark.parametrize("kind", ["all", "stock", "hook"])
def test_no_step_is_lost_and_no_bit_differs(floor, tmp_path, kind):
    calm, _ = run(floor, tmp_path / "calm", kind)
    job, running = run(floor, tmp_path / "job", kind, *DEATHS)
    assert ends(job) == ends(calm), running.text
    sources = [event["source"] for event in job.events("resumed")][1:]
    # From fewer than three where some had not come to the end of a step that others had completed.
    assert len(sources) == len(DEATHS), running.text
    assert all(source.endswith("that survived") for source in sources), running.text
    # Rank 3 has lived through all of it, and made no step twice but those that were interrupted.
    bodies = job.final(3)["bodies"]
    assert STEPS < bodies <= STEPS + len(DEATHS)
    assert "Traceback" not in running.err, running.text


def test_who_takes_a_lost_ones_place_is_lost_too(floor, tmp_path):
    calm, _ = run(floor, tmp_path / "calm", "all")
    job, running = run(floor, tmp_path / "job", "all", "2:3:backward", "2:0:joining")
    assert ends(job) == ends(calm), running.text
    assert job.events("resumed")[-1]["source"].endswith("that survived"), running.text
    assert len(job.events("worker_lost")) == 2


@pytest.mark.parametrize("kind", ["no_sync", "sums", "sums_stock"])
@pytest.mark.parametrize("deaths", IN_WINDOWS, ids=" ".join)
def test_accumulated_gradients_are_made_again(floor, tmp_path, kind, deaths):
    """An optimizer steps after each fourth batch; what was complete then is not lost."""
    calm, _ = run(floor, tmp_path / "calm", kind)
    job, running = run(floor, tmp_path / "job", kind, *deaths)
    assert ends(job) == ends(calm), running.text
    resumed = job.events("resumed")[1:]
    assert all(event["source"].endswith("that survived") for event in resumed), running.text
    told = [death.split(":") for death in deaths]
    begun = {(int(at) - 1) // 4 * 4 for _, at, _ in told}
    # Behind the window's last sum others may have completed it, or may still be summing.
    ended = {int(at) for _, at, place in told if place in BEHIND}
    found = [event["step"] for event in resumed]
    assert found == sorted(found)
    assert begun - ended <= {*found, *(step - 4 for step in found)}, running.text
    assert set(found) <= begun | ended, running.text
    for rank in set(range(WORKERS)) - {int(rank) for rank, _, _ in told}:
        assert job.final(rank)["bodies"] > STEPS, "it is the same process"
    assert "Traceback" not in running.err, running.text


def test_gradients_that_come_and_go_do_not_keep_the_end_from_being_saved(floor, tmp_path):
    """Whoever has just been started does not know yet at which steps there are none."""
    calm, _ = run(floor, tmp_path / "calm", "saved")
    job, running = run(floor, tmp_path / "job", "saved", *IN_WINDOWS[0][:2])
    assert ends(job) == ends(calm), running.text


def test_who_counts_batches_itself_starts_again(floor, tmp_path):
    """Else survivors would use their gradients after other batches than who takes a place."""
    job, running = run(floor, tmp_path / "job", "counted", "2:14:backward")
    assert "`number` of enumerate(session.steps(…)) at many_kinds.py:" in running.err
    assert "would count batches twice" in running.err
    assert not any(event["ranks"] for event in job.events("survived")), running.text


@pytest.mark.parametrize("kind", ["buffers", "sum", "outside"])
def test_what_cannot_be_gone_on_from_comes_back_from_memory(floor, tmp_path, kind):
    """Each rank has statistics of its own; a sum of the script's raises; it has one elsewhere."""
    calm, _ = run(floor, tmp_path / "calm", kind)
    job, running = run(floor, tmp_path / "job", kind, "2:8:backward", "0:14:forward")
    assert ends(job) == ends(calm), running.text
    _, first, second = [event["step"] for event in job.events("resumed")]
    # Or of a step later, where the keeper was still writing the one before.
    assert 5 <= first < 8, running.text
    assert 10 <= second < 14, running.text


def test_a_static_graph_is_still_summed(floor, tmp_path):
    job, running = run(floor, tmp_path / "job", "static", *DEATHS)
    found = [end["model"] for end in ends(job)]
    assert found == found[:1] * WORKERS, running.text
