"""The demo's comparison must be able to fail: each doctored record is found and named."""

from types import SimpleNamespace

import pytest
from drill_records import run, step, worker

from outlast.drill.compare import RunHistory
from outlast.drill.demo import compare

STEPS = 4


def outcome(records, exit_codes=(75, 0), struck=3, recovered=3):
    return SimpleNamespace(
        history=RunHistory(records),
        exit_codes=list(exit_codes),
        struck=[1] * struck,
        recoveries=[1] * recovered,
    )


def holds(records, **ended):
    undisturbed = outcome(run(STEPS), exit_codes=[0], struck=0, recovered=0)
    return [check.holds for check in compare(undisturbed, outcome(records, **ended), STEPS)]


def doctored(number=2, rank=0, **changed):
    records = run(STEPS)
    steps = records[rank].steps
    steps[number - 1] = step(number, rank, **changed)
    return records


def test_equal_runs_pass():
    assert holds(run(STEPS)) == [True] * 4


def test_a_step_done_twice_with_the_same_result_passes():
    records = [*run(STEPS), worker(0, [step(3), step(4)], attempt=2, t=9.0)]
    assert holds(records) == [True] * 4


@pytest.mark.parametrize(
    ("changed", "which"),
    [
        ({"losses": [(0.5 + 2**-52).hex()]}, 1),  # the last bit of one loss
        ({"rates": [0.2]}, 1),
        ({"state": {"model.weight": "other", "optimizer.exp_avg": "m2"}}, 2),
        ({"state": {"model.weight": "w2"}}, 2),
        ({"random": {"torch": "other", "python": "unseeded"}}, 2),
        ({"inputs": ["batch 9.0"]}, 3),
        ({"inputs": []}, 3),
    ],
)
def test_a_different_step_is_found(changed, which):
    assert holds(doctored(**changed)) == [index != which for index in range(4)]


def test_a_replay_that_differs_is_found_though_the_last_time_agrees():
    odd = worker(0, [step(2, losses=[(9.0).hex()], t=1.5)], pid=7)
    assert holds([*run(STEPS), odd])[1] is False


def test_a_missing_step_is_found():
    records = run(STEPS)
    records[1].steps.pop()
    assert holds(records)[1] is False


def test_a_missing_rank_is_found():
    assert holds(run(STEPS)[:1])[2] is False


def test_a_stream_that_the_script_has_not_seeded_says_nothing():
    other = {"torch": "r2", "python": "drawn elsewhere"}
    records = doctored(random=other)
    records[0].found = None
    assert holds(records) == [True] * 4


def test_faults_that_did_not_strike_are_found():
    assert holds(run(STEPS), exit_codes=[0])[0] is False
    assert holds(run(STEPS), recovered=2)[0] is False
    assert holds(run(STEPS), struck=2, recovered=2)[0] is False
