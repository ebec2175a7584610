"""Models that are divided within replica groups (HSDP), when a loss interrupts them.

Four workers: ranks 0 and 1 are one group, 2 and 3 the other; 0 and 2 have the same part, 1 and 3.
"""

import functools
import os
import signal
import time

import losses
import pytest
from floor import SCRIPTS, until
from losses import WORKERS, ends

from thorough import ALL, some

SCRIPT = SCRIPTS / "replicas.py"
run = functools.partial(losses.run, SCRIPT)
calm = functools.partial(losses.undisturbed, SCRIPT)
start = functools.partial(losses.start, SCRIPT)

SLOW_S = 0.01  # at each place, so that a save is committed within some steps
KILLS, LONG = 12, 300
# Of each rank, at each place, and a whole replica group at once.
DEATHS = (
    ("2:3:forward", "0:6:bucket", "1:9:summed", "3:12:step", "2:16:ended"),
    ("1:3:stepped", "0:6:backward", "1:6:backward", "3:10:forward", "2:10:bucket"),
    ("0:3:backward", "0:0:joining", "3:7:summed", "2:11:step", "1:15:bucket"),
)
# Within a window of four batches, in the midst of its last sum, and where others have completed it.
IN_WINDOWS = (
    ("2:6:forward", "0:11:backward", "1:16:bucket"),
    ("3:7:accumulated", "0:12:step", "1:18:backward"),
    ("1:8:summed", "0:12:stepped", "3:15:forward"),
)
CASES = [
    *(("clip", deaths) for deaths in DEATHS),
    *(("plain", deaths) for deaths in DEATHS),
    *((kind, deaths) for deaths in IN_WINDOWS for kind in ("no_sync", "sums")),
]


def no_completed_step_was_made_again(job, running):
    """Where each part has a survivor: on a loaded machine gloo may lose what one waits for."""
    survived = {event.attempt: set(event["ranks"]) for event in job.events("survived")}
    resumed = job.events("resumed")[1:]
    assert resumed, running.text
    num = 0
    for event in resumed:
        of = survived.get(event.attempt - 1, set())
        if {rank % 2 for rank in of} == {0, 1}:
            num += 1
            assert event["source"].endswith("that survived"), running.text
    assert num >= len(resumed) - 1, running.text


@pytest.mark.parametrize(("kind", "deaths"), some(CASES, 1))
def test_a_lost_ones_part_comes_from_its_twin(floor, tmp_path, kind, deaths):
    job, running = run(floor, tmp_path / "job", kind, *deaths)
    assert ends(job) == calm(kind), running.text
    no_completed_step_was_made_again(job, running)
    assert "Traceback" not in running.err, running.text
    audit = job.audit()
    assert audit["proved"], audit["faults"]


def test_a_step_that_one_part_has_completed_and_another_has_not_is_undone(floor, tmp_path):
    """Rank 2 dies when its sums are complete; ranks 1 and 3, who have the other part, still sum."""
    job, running = run(floor, tmp_path / "job", "late", "2:9:summed")
    assert ends(job) == calm("plain"), running.text  # the same, at other times
    (resumed,) = job.events("resumed")[1:]
    assert resumed["step"] == 8
    assert resumed["source"].endswith("that survived"), running.text
    assert job.events("survived")[0]["ranks"] == [0, 1, 3]
    audit = job.audit()
    assert audit["proved"], audit["faults"]


def test_a_part_that_is_lost_comes_back_from_memory(floor, tmp_path):
    job, running = run(
        floor, tmp_path / "job", "plain", "0:9:backward", "2:9:backward", pause=SLOW_S
    )
    assert ends(job) == calm("plain"), running.text
    assert "nobody has the part of ranks 0 and 2 any more" in running.err
    resumed = job.events("resumed")[-1]
    assert resumed["step"] >= 5, running.text
    assert not resumed["source"].endswith("that survived")


def test_a_part_that_one_worker_has_alone_is_said_at_the_start(floor, tmp_path):
    job, running = run(floor, tmp_path / "job", "flat", "2:8:backward", pause=SLOW_S)
    assert ends(job) == calm("flat"), running.text
    assert "all start again, from a checkpoint: its state is divided" in running.err
    assert not any(event["ranks"] for event in job.events("survived")), running.text


def test_where_one_could_not_go_on_none_does(floor, tmp_path):
    """Rank 0 alone holds a process group in a variable: it cannot be replaced, nor be joined."""
    job, running = run(floor, tmp_path / "job", "held", "3:8:backward", pause=SLOW_S)
    assert ends(job) == calm("plain"), running.text
    assert "all start again, from a checkpoint: its script holds a process group" in running.err
    assert not any(event["ranks"] for event in job.events("survived")), running.text
    assert job.events("resumed")[-1]["step"] >= 5, running.text


@pytest.mark.skipif(not ALL, reason="a minute, and another job that nothing happens to")
@pytest.mark.parametrize("kind", ["plain", "clip", "no_sync"])
def test_kills_at_any_moment(floor, tmp_path, rng, kind):
    """Of any rank, one or a whole replica group at once."""
    job, running = start(floor, tmp_path / "job", kind, "--pause", 0.002, steps=LONG)
    at = [job.records / f"at-{rank}" for rank in range(WORKERS)]
    for number in range(KILLS):
        least = 1 + number * LONG // KILLS * 3 // 4

        def trains(least=least):
            return all(one.exists() and int(one.read_text() or 0) > least for one in at)

        until(trains, "it trains", running=running)
        time.sleep(rng.random() * 0.1)
        workers = floor.workers()
        for victim in rng.choice(([0], [1], [2], [3], [0, 1], [2, 3])):
            os.kill(workers[victim], signal.SIGKILL)
    assert running.wait() == 0, running.text
    assert ends(job) == calm(kind, steps=LONG), running.text
    resumed = job.events("resumed")[1:]
    survived = [event for event in resumed if event["source"].endswith("that survived")]
    print(f"{len(survived)} of {len(resumed)} from survivors")
    assert survived, running.text
    audit = job.audit()
    assert audit["proved"], audit["faults"]
    assert "Traceback" not in running.err, running.text
