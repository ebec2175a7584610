"""Two runs beside each other: what differs first, where attempts belong, the data."""

import pytest
from drill_records import found, run, step, worker

from outlast.drill.compare import RunHistory, first_difference, samples
from outlast.drill.record import LoopBegun

STEPS = 6


def beside(records, steps=STEPS):
    undisturbed = RunHistory(run(steps))
    return undisturbed, RunHistory(records, undisturbed)


def test_the_first_of_several_differences_is_named():
    records = run(STEPS)
    records[1].steps[3] = step(4, 1, losses=["0x1p+1"], state={"model.weight": "other"})
    records[1].steps[4] = step(5, 1, losses=["0x1p+1"])
    differs = first_difference(*beside(records), STEPS)
    assert (differs.step, differs.rank, differs.part) == (4, 1, "loss")
    assert differs.words == "from step 4 on: the loss on rank 1, 0.25 and 2"


def test_a_tensor_that_differs_has_its_name():
    records = run(STEPS)
    records[0].steps[2] = step(3, state={"model.weight": "w3", "optimizer.exp_avg": "other"})
    assert first_difference(*beside(records), STEPS).names == ["optimizer.exp_avg"]


def test_what_lies_behind_the_last_step_is_not_compared():
    records = run(STEPS)
    records[0].steps[-1] = step(STEPS, losses=["0x1p+1"])
    assert first_difference(*beside(records), STEPS - 1) is None
    assert first_difference(*beside(records), STEPS) is not None


def test_other_numbers_of_workers_are_compared_by_their_state_alone():
    alone = worker(0, [step(n, world_size=1, inputs=["all of it"]) for n in range(1, 4)])
    assert first_difference(*beside([alone]), STEPS) is None
    odd = worker(0, [step(2, world_size=1, state={"model.weight": "other"})])
    assert first_difference(*beside([odd]), STEPS).part == "state"
    assert not samples(*beside([alone]), STEPS).is_known


@pytest.mark.parametrize("at", [0, 2, 4])
def test_an_attempt_without_a_session_belongs_where_its_state_was(at):
    begun = [step(n - at, state=step(n).state) for n in range(at + 1, STEPS + 1)]
    again = worker(0, begun, attempt=2, t=9.0, at=found(at, is_counted=False))
    _, history = beside([again])
    assert [one.step for one in history.steps(0)] == list(range(at + 1, STEPS + 1))
    assert history.lost == []


def test_an_attempt_from_nowhere_is_told_of():
    odd = found(3, is_counted=False, state={"model.weight": "nobody's"})
    again = worker(0, [step(1)], attempt=2, t=9.0, at=odd)
    assert beside([again])[1].lost == [again]


def test_steps_made_again_are_those_of_several_processes():
    records = [*run(STEPS), worker(0, [step(3), step(4)], attempt=2, t=9.0)]
    assert beside(records)[1].again(STEPS) == 2
    assert beside(run(STEPS))[1].again(STEPS) == 0


def test_a_batch_that_is_lost_and_one_that_comes_twice():
    records = run(STEPS)
    records[0].steps[1] = step(2, inputs=["batch 1.0"])
    seen = samples(*beside(records), STEPS)
    assert (seen.lost, seen.repeated, seen.is_known) == (1, 1, True)


def test_of_a_step_made_twice_the_last_time_counts():
    odd = worker(0, [step(2, inputs=["another"], t=1.5)], pid=9)
    late = worker(0, [step(2, inputs=["another"], t=9.0)], pid=9)
    assert samples(*beside([*run(STEPS), odd]), STEPS).lost == 0
    assert samples(*beside([*run(STEPS), late]), STEPS).lost == 1


@pytest.mark.parametrize(
    ("state", "names"),
    [
        ({"model.weight": "w3", "counts": "epoch 0"}, None),  # as the step left it
        ({"model.weight": "w3", "counts": "epoch 1"}, None),  # as the next loop began
        ({"model.weight": "w3", "counts": "epoch 2"}, ["counts"]),
        ({"model.weight": "w2", "counts": "epoch 1"}, ["model.weight"]),
    ],
)
def test_a_resume_begins_with_what_stood_at_the_loops_end_or_behind_it(state, names):
    undisturbed = run(STEPS)
    left = {"model.weight": "w3", "optimizer.exp_avg": "m3", "counts": "epoch 0"}
    undisturbed[0].steps[2] = step(3, state=left)
    undisturbed[0].take(LoopBegun(step=3, changed={"counts": "epoch 1"}))
    again = worker(0, [step(4)], attempt=2, t=9.0, at=found(3, state=state))
    before = RunHistory(undisturbed)
    differs = first_difference(before, RunHistory([again], before), STEPS)
    assert (differs and differs.names) == names
    assert differs is None or (differs.step, differs.part) == (4, "state before")


def test_how_far_all_ranks_came():
    records = run(STEPS)
    records[1].steps.pop()
    assert beside(records)[1].reached() == STEPS - 1
