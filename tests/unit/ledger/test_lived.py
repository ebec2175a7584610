"""How often a job failed while it ran, and how long it was down, whoever started it again."""

import pytest

from outlast.ledger.events import Event
from outlast.ledger.incidents import incidents, lived

DAY_S = 86_400.0


def life(text):
    """``name t, name t …``, with a step 600 s after each resume and each 600 s."""
    events, attempt = [], 1
    for one in text.split(", "):
        name, t = one.split()
        attempt += name == "attempt_formed"
        fields = {
            "step": {"step": int(float(t)), "seconds": 1.0},
            "resumed": {"step": 0},
            "attempt_formed": {"world_size": 1, "nodes": ["n"]},
            "worker_lost": {"beat_t": 1e6 + float(t) - 5, "exit_code": -9},
            "node_lost": {"node": "n"},
            "job_finished": {"exit_code": 76},
            "notice": {"source": "aws", "action": "terminate", "deadline_t": 1e6 + float(t) + 120},
            "drained": {"step": int(float(t)), "committed": True},
        }.get(name, {})
        at_t = 1e6 + float(t)
        events.append(
            Event(
                t=at_t, mono=at_t, job="j", attempt=attempt, node="n", rank=0, event=name,
                fields=fields,
            )
        )  # fmt: skip
    return lived(events, incidents(events))


def test_a_drain_is_no_failure_whatever_announced_it():
    found = life(
        "attempt_formed 1, resumed 2, step 602, notice 610, drain_agreed 620, drained 630, "
        "job_finished 631, job_started 90000, attempt_formed 90001, resumed 90002, step 90602"
    )
    assert found.num_failures == 0
    assert not found.failures
    assert found.ran_s == pytest.approx(628 + 600)
    assert not found.downs_s()


def test_a_machine_that_goes_before_it_was_saved_is_one():
    found = life(
        "attempt_formed 1, resumed 2, step 602, notice 610, node_lost 620, attempt_formed 640, "
        "resumed 650, step 660"
    )
    assert found.num_failures == len(found.failures) == 1
    assert found.failures[0].kind == "preemption notice"


@pytest.mark.parametrize("away_s", [0.0, DAY_S, 7 * DAY_S])
def test_the_time_in_which_nobody_started_it_is_not_its_own(away_s):
    start = 700 + away_s
    found = life(
        "attempt_formed 1, resumed 2, step 602, worker_lost 640, job_finished 700, "
        f"job_started {start}, attempt_formed {start + 1}, resumed {start + 20}, "
        f"step {start + 620}"
    )
    assert found.num_failures == 1
    assert found.ran_s == pytest.approx(638 + 600)
    assert found.downs_s() == [pytest.approx(60 + 620)]
    assert found.detections_s() == [pytest.approx(5)]
