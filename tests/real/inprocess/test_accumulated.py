"""Gradients that are accumulated, and batch norms under DDP, when a loss interrupts them."""

import functools
import itertools
import os
import signal
import time

import losses
import pytest
from floor import SCRIPTS, until
from losses import STEPS, WORKERS, ends

from thorough import some

SCRIPT = SCRIPTS / "accumulating.py"
run = functools.partial(losses.run, SCRIPT)
calm = functools.partial(losses.undisturbed, SCRIPT)
start = functools.partial(losses.start, SCRIPT)

KILLS, LONG = 4, 80
# Of rank 0, who has them, and of others; two at once.
OF_ANY = (
    ("0:3:forward", "1:6:forward", "0:9:backward", "0:12:bucket"),
    ("0:4:summed", "2:7:backward", "0:10:optimizer", "3:13:stepped"),
    ("0:5:stepped", "0:0:joining", "0:8:forward", "2:8:backward"),
)
# Within a window of four batches, of any rank, two at once, in the midst of its last sum, and where
# others have completed what ends it.
BEHIND = ("summed", "optimizer", "stepped")
IN_WINDOWS = (
    ("2:6:forward", "0:11:backward", "1:16:bucket"),
    ("3:7:accumulated", "0:12:optimizer", "1:18:backward", "3:18:accumulated"),
    ("1:8:summed", "0:12:stepped", "2:13:forward"),
)


def each_sample_came_once(job):
    audit = job.audit()
    assert audit["proved"], audit["faults"]


@pytest.mark.parametrize("deaths", some(OF_ANY, 1), ids=" ".join)
def test_batch_norms_statistics_are_those_of_rank_0(floor, tmp_path, deaths):
    """DDP gives them to all at each forward pass; what others have made of them is nothing."""
    job, running = run(floor, tmp_path / "job", "norm", *deaths)
    assert ends(job) == calm("norm"), running.text
    resumed = job.events("resumed")[1:]
    assert len(resumed) > 1, running.text
    assert all(event["source"].endswith("that survived") for event in resumed), running.text
    assert "Traceback" not in running.err, running.text


@pytest.mark.parametrize(
    ("kind", "deaths"),
    some(itertools.product(["no_sync", "sums", "sums_stock", "norm_no_sync"], IN_WINDOWS), 1),
)
def test_accumulated_gradients_are_made_again(floor, tmp_path, kind, deaths):
    """An optimizer steps after each fourth batch; what was complete then is not lost."""
    job, running = run(floor, tmp_path / "job", kind, *deaths)
    assert ends(job) == calm(kind), running.text
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
    if kind != "sums_stock":
        each_sample_came_once(job)
    for rank in set(range(WORKERS)) - {int(rank) for rank, _, _ in told}:
        assert job.final(rank)["bodies"] > STEPS, "it is the same process"
    assert "Traceback" not in running.err, running.text


@pytest.mark.parametrize("kind", some(["saved", "norm_no_sync", "norm"], 1))
def test_kills_at_any_moment(floor, tmp_path, kind, rng):
    """Of any rank, one or two at once."""
    job, running = start(floor, tmp_path / "job", kind, "--pause", 0.004, steps=LONG)
    for number in range(KILLS):
        until(lambda n=number: len(job.events("resumed")) > n, "it trains", running=running)
        time.sleep(rng.random() * 0.5)
        workers = floor.workers()
        for victim in rng.sample(workers, min(len(workers), rng.choice((1, 1, 2)))):
            os.kill(victim, signal.SIGKILL)
    assert running.wait() == 0, running.text
    assert ends(job) == calm(kind, steps=LONG), running.text
    each_sample_came_once(job)
    assert "Traceback" not in running.err, running.text


def test_gradients_that_come_and_go_do_not_keep_the_end_from_being_saved(floor, tmp_path):
    """Whoever has just been started does not know yet at which steps there are none."""
    job, running = run(floor, tmp_path / "job", "saved", *IN_WINDOWS[0][:2])
    assert ends(job) == calm("saved"), running.text


def test_who_counts_batches_itself_starts_again(floor, tmp_path):
    """Else survivors would use their gradients after other batches than who takes a place."""
    job, running = run(floor, tmp_path / "job", "counted", "2:14:backward")
    assert "`number` of enumerate(session.steps(…)) at accumulating.py:" in running.err
    assert "would count batches twice" in running.err
    assert not any(event["ranks"] for event in job.events("survived")), running.text
