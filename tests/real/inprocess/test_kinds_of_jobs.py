"""What other people's loops have in them besides a sum and a step, when a loss interrupts them."""

import functools

import losses
import pytest
from floor import SCRIPTS
from losses import STEPS, WORKERS, ends

from thorough import ALL, some

SCRIPT = SCRIPTS / "many_kinds.py"
run = functools.partial(losses.run, SCRIPT)
calm = functools.partial(losses.undisturbed, SCRIPT)

DEATHS = ("2:3:backward", "1:9:summed", "0:14:forward")
SLOW_S = 0.01  # at each place, so that a save is committed within some steps


@pytest.mark.parametrize("kind", ["all", "stock", "own"])
def test_no_step_is_lost_and_no_bit_differs(floor, tmp_path, kind):
    job, running = run(floor, tmp_path / "job", kind, *DEATHS)
    assert ends(job) == calm(kind), running.text
    sources = [event["source"] for event in job.events("resumed")][1:]
    # From fewer than three where some had not come to the end of a step that others had completed.
    assert len(sources) == len(DEATHS), running.text
    assert all(source.endswith("that survived") for source in sources), running.text
    # Rank 3 has lived through all of it, and made no step twice but those that were interrupted:
    # fewer where it heard of a loss between two steps, as on a loaded machine.
    bodies = job.final(3)["bodies"]
    ended = [event["ended"] for event in job.events("survived")]
    assert STEPS <= bodies <= STEPS + len(DEATHS), (ended, running.text)
    assert "Traceback" not in running.err, running.text


def test_who_takes_a_lost_ones_place_is_lost_too(floor, tmp_path):
    job, running = run(floor, tmp_path / "job", "all", "2:3:backward", "2:0:joining")
    assert ends(job) == calm("all"), running.text
    assert job.events("resumed")[-1]["source"].endswith("that survived"), running.text
    assert len(job.events("worker_lost")) == 2


@pytest.mark.parametrize("kind", ["buffers", "outside"])
def test_what_cannot_be_gone_on_from_comes_back_from_memory(floor, tmp_path, kind):
    """Each rank has statistics of its own; it has a sum of its own outside of the loop."""
    deaths = "2:8:backward", "0:14:forward"
    job, running = run(floor, tmp_path / "job", kind, *deaths, pause=SLOW_S)
    assert ends(job) == calm(kind), running.text
    _, first, second = [event["step"] for event in job.events("resumed")]
    # Or of a step later, where the keeper was still writing the one before.
    assert 5 <= first < 8, running.text
    assert 10 <= second < 14, running.text


@pytest.mark.parametrize(
    ("kind", "deaths"),
    [
        # Whether its result goes into the state nobody knows: no survivor has this step's end.
        ("own_late", ("2:8:stepped", "1:14:word4")),
        # Nor has anybody the state of its beginning.
        ("weights", ("2:8:backward", "1:14:forward")),
    ],
)
def test_a_sum_that_leaves_no_state_costs_steps_and_no_process(floor, tmp_path, kind, deaths):
    job, running = run(floor, tmp_path / "job", kind, *deaths, pause=SLOW_S)
    assert ends(job) == calm(kind), running.text
    _, first, second = [event["step"] for event in job.events("resumed")]
    assert 5 <= first < 8, running.text
    assert 10 <= second < 14, running.text
    kept = [(event["ranks"], event["ended"]) for event in job.events("survived")]
    assert kept == [([0, 1, 3], {}), ([0, 2, 3], {})], running.text
    assert "Traceback" not in running.err, running.text


PLACES = ("forward", "backward", "bucket", "summed", "step", "stepped", "ended")
WORDS = tuple(f"word{number}" for number in range(10))


KINDS = ("all", "hook", "static", "several", "own")
COMPILED = ("compiled", "compiled_inside", "compiled_step")  # which each process does: seconds


@pytest.mark.parametrize("kind", [*some(KINDS, 1), *some(COMPILED, 1)])
def test_kinds_at_drawn_places(floor, tmp_path, rng, kind):
    """Two workers: a model that is laid out anew sums in another order, which two do not see."""
    rng.seed(f"{kind} {rng.random()}")
    places = PLACES + WORDS * (kind == "own")
    at = (8,) if kind in COMPILED and not ALL else (3, 8, 13, 17)
    deaths = [f"{rng.randrange(2)}:{step}:{rng.choice(places)}" for step in at]
    print(kind, *deaths)
    job, running = run(floor, tmp_path / "job", kind, *deaths, workers=2)
    assert ends(job) == calm(kind, workers=2), running.text
    sources = [event["source"] for event in job.events("resumed")][1:]
    assert sources == ["from 1 worker that survived"] * len(deaths), running.text
    assert "Traceback" not in running.err, running.text


def test_what_is_said_between_epochs_is_on_nobodys_way(floor, tmp_path):
    """In the midst of an epoch's loop, in its first step, and in its last one.

    In the first one behind a sum: all are in the loop by then.
    """
    deaths = ("2:4:backward", "1:6:bucket", "0:10:bucket", "3:13:step", "1:16:summed")
    job, running = run(floor, tmp_path / "job", "epochs", *deaths)
    assert ends(job) == calm("epochs"), running.text
    sources = [event["source"] for event in job.events("resumed")][1:]
    assert len(sources) == len(deaths), running.text
    assert all(source.endswith("that survived") for source in sources), running.text
    assert "Traceback" not in running.err, running.text


@pytest.mark.parametrize("place", some(["before", "between", "behind"], 1))
def test_a_loss_between_epochs_is_none_of_a_step(floor, tmp_path, place):
    """The others do not go on without it in the loop that follows."""
    job, running = run(floor, tmp_path / "job", "epochs_plain", f"2:100:{place}", f"0:102:{place}")
    assert ends(job) == calm("epochs_plain"), running.text


def test_who_is_in_a_later_epoch_than_a_checkpoint_starts_anew(floor, tmp_path):
    """What stands between the epochs is to run again."""
    job, running = run(floor, tmp_path / "job", "epochs_late", "2:11:stepped", "1:16:stepped")
    assert ends(job) == calm("epochs_late"), running.text


def test_a_static_graph_is_still_summed(floor, tmp_path):
    job, running = run(floor, tmp_path / "job", "static", *DEATHS)
    found = [end["model"] for end in ends(job)]
    assert found == found[:1] * WORKERS, running.text
