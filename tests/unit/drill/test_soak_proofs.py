"""What a soak proves at its end must be able to fail."""

import pytest
from drill_records import found, run, step, worker

from outlast.drill.record import LoopBegun
from outlast.drill.soak import Footprint, consistent, flat

STEPS = 6


def again(first, *, t=20.0, at=None, **changed):
    steps = [step(n, t=t + n, **changed) for n in range(first, STEPS + 1)]
    state = {"model.weight": f"w{first - 1}"}
    return worker(0, steps, attempt=2, t=t, at=at or found(first - 1, state=state))


def holds(records):
    return [one.holds for one in consistent(records)]


def test_a_run_that_is_as_it_should_be():
    assert holds(run(STEPS)) == [True] * 3
    assert holds([*run(STEPS), again(4)]) == [True] * 3


def test_a_step_that_was_made_otherwise_the_second_time():
    assert holds([*run(STEPS), again(4, losses=["0x1p+1"])])[0] is False


def test_a_step_on_other_workers_may_be_another():
    other = again(4, losses=["0x1p+1"], world_size=3)
    assert holds([*run(STEPS), other])[0] is True


def test_a_step_that_nobody_made():
    records = run(STEPS)
    for record in records:
        del record.steps[2]
    assert holds(records)[1] is False


def test_a_worker_that_went_on_from_another_state():
    odd = found(3, state={"model.weight": "nobody's"})
    assert holds([*run(STEPS), again(4, at=odd)])[2] is False


def test_a_worker_that_went_on_from_a_loops_end():
    records = run(STEPS)
    records[0].take(LoopBegun(step=3, changed={"model.weight": "between"}))
    at = found(3, state={"model.weight": "between"})
    assert holds([*records, again(4, at=at)])[2] is True
    assert holds([*records, again(5, at=found(4, state=at.state))])[2] is False


def footprints(memory):
    return [
        Footprint(t=float(n), memory=m, shared=0, threads=4, files=9, processes=2)
        for n, m in enumerate(memory)
    ]


@pytest.mark.parametrize(
    ("memory", "is_flat"),
    [
        ([100] * 9, True),
        ([500, 400, 300, 100, 100, 100, 100, 100, 100], True),  # it settles
        ([100, 100, 100, 100, 101, 99, 100, 900, 100], True),  # one moment says nothing
        ([100, 110, 120, 130, 140, 150, 160, 170, 180], False),
        ([100, 100], False),
    ],
)
def test_what_grows_is_not_flat(memory, is_flat):
    assert flat(footprints(memory), "memory").holds == is_flat


def test_what_was_never_there_is_flat():
    assert flat(footprints([100] * 9), "shared").holds
