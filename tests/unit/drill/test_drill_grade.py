"""Grades: each promise can be broken, and what was measured is what was recorded."""

from pathlib import Path

import pytest
from drill_records import run, step, worker

from outlast.drill import grade as grading
from outlast.drill.faults.fault import MayLose, Promise, Struck
from outlast.drill.grade import Grade, RunEnd, VerifiedBytes, grade
from outlast.ledger.events import Event

STEPS = 10
STRUCK_T = 6.5


@pytest.fixture(autouse=True)
def verified(monkeypatch):
    """What reading the checkpoints finds: they are no part of these tests."""
    found = [VerifiedBytes(checkpoints=2, num_bytes=100)]
    monkeypatch.setattr(grading, "verify", lambda _: found[-1])
    return found


def event(name, t, **fields):
    return Event(t=t, mono=t, job="j", attempt=1, node="one", rank=None, event=name, fields=fields)


def ended(records, events=(), exit_codes=(), directory="/nowhere/run/job"):
    return RunEnd(
        records=records,
        events=events,
        exit_codes=list(exit_codes),
        seconds=1.0,
        directory=Path(directory),
        output=Path(directory),
    )


def killed(first=5, late=7.0):
    """Lost in step 7, and gone on from behind step ``first`` - 1."""
    before = [worker(rank, [step(n, rank) for n in range(1, 7)]) for rank in range(2)]
    again = [
        worker(
            rank,
            [step(n, rank, t=late + n) for n in range(first, STEPS + 1)],
            attempt=2,
            t=late,
        )
        for rank in range(2)
    ]
    return [*before, *again]


EVENTS = [
    event("commit", 4.2, step=4),
    event("worker_lost", STRUCK_T + 0.25),
    event("attempt_formed", STRUCK_T + 0.5),
]


def graded(
    records=None,
    events=None,
    ended_with=(),
    price=None,
    struck=True,
    what="SIGKILL",
    named="worker_lost",
    further=STEPS,
    **promised,
):
    return grade(
        "kill-worker",
        Promise(**{"loses": MayLose.COMMIT, **promised}),
        Struck(what=what, t=STRUCK_T, last_step=6, event=named) if struck else None,
        run=ended(killed() if records is None else records, events or EVENTS, ended_with),
        undisturbed=ended(run(further)),
        steps=STEPS,
        price=price,
    )


def broken(found: Grade):
    return [one.what for one in found.held if not one.holds]


def test_what_is_promised_holds_and_is_measured():
    found = graded(price=3600.0)
    assert found.holds, broken(found)
    assert found.found_after_s == pytest.approx(0.25)
    assert found.lost_steps == 2
    assert found.stood_s == pytest.approx(8.0)  # from step 6 to step 7
    assert found.cost == pytest.approx(8.0)
    assert found.samples.lost == found.samples.repeated == 0
    assert found.differs == ""


def test_a_fault_that_never_struck_broke_its_promise():
    assert broken(graded(struck=False)) == ["the fault never struck: the job ended before"]


def test_a_job_that_stays_behind():
    records = killed()
    records[-1].steps.pop()
    assert broken(graded(records)) == [f"the job comes to step {STEPS} by itself"]


@pytest.mark.parametrize(
    ("promised", "first", "holds"),
    [
        ({"loses": MayLose.COMMIT}, 5, True),
        ({"loses": MayLose.COMMIT}, 2, False),  # further back than the newest commit
        ({"loses": MayLose.OLDER}, 1, True),
        ({"loses": MayLose.STEP}, 6, True),
        ({"loses": MayLose.STEP}, 5, False),
        ({"loses": MayLose.NOTHING}, 7, True),
        ({"loses": MayLose.NOTHING}, 6, False),
    ],
)
def test_how_many_steps_may_be_made_again(promised, first, holds):
    found = graded(killed(first), **promised)
    assert found.holds == holds, broken(found)
    assert found.lost_steps == 7 - first


@pytest.mark.parametrize(("again_t", "holds"), [(STRUCK_T + 2.1, True), (STRUCK_T + 4, False)])
def test_what_hung_may_move_until_its_workers_have_ended(again_t, holds):
    """It is let go once it is found, and may complete steps before it is ended for it."""
    records = killed()
    for one in records[:2]:
        one.steps += [step(number, one.steps[0].rank, t=again_t) for number in (7, 8)]
    hung = [EVENTS[0], event("hang", STRUCK_T + 2), event("attempt_formed", STRUCK_T + 4.5)]
    found = graded(records, hung, named="hang")
    assert found.holds == holds, broken(found)


def test_a_fault_that_the_ledger_does_not_name():
    silent = [one for one in EVENTS if one.event != "worker_lost"]
    assert broken(graded(events=silent)) == ["the ledger names it"]
    assert graded(events=silent, must_notice=False).holds


def test_exit_codes_that_were_not_promised():
    assert broken(graded(ended_with=[76])) == ["exit codes: 76"]
    assert broken(graded(ended_with=[75, 0])) == ["exit codes: 75 0"]
    assert graded(ended_with=[75, 0], exit_codes=(75,)).holds


def test_one_attempt_too_many():
    more = [*EVENTS, event("attempt_formed", 9.0), event("attempt_formed", 9.5)]
    assert broken(graded(events=more)) == ["3 attempts behind it, 1 at most"]


def test_a_state_that_differs():
    records = killed()
    records[-1].steps[-1] = step(STEPS, 1, t=20.0, state={"model.weight": "other"})
    found = graded(records)
    assert len(broken(found)) == 1
    assert "model.weight" in found.differs
    assert graded(records, exact=False).holds


def drained_late(last, **odd):
    """It has left behind the drill's last step, and gone on from there."""
    before = [worker(rank, [step(n, rank) for n in range(1, STEPS + 3)]) for rank in range(2)]
    made = range(STEPS + 3, last + 1)
    again = [
        worker(rank, [step(n, rank, t=30.0 + n, **odd) for n in made], attempt=2, t=30.0)
        for rank in range(2)
    ]
    return [*before, *again]


def test_what_is_behind_a_late_drain_is_compared():
    assert graded(drained_late(STEPS + 5), further=STEPS + 4).holds
    odd = graded(drained_late(STEPS + 5, losses=["0x0p0"]), further=STEPS + 4)
    assert any(f"differs from step {STEPS + 3} on: the loss" in one for one in broken(odd))


def test_a_resume_of_which_nothing_was_compared_has_shown_nothing():
    (said,) = broken(graded(drained_late(STEPS + 5), further=STEPS + 2))
    assert said.startswith(f"it went on with step {STEPS + 3}, and the undisturbed run ended with")
    assert graded(drained_late(STEPS + 5), further=STEPS + 2, exact=False).holds


def test_a_restart_from_nothing_proves_no_resume():
    early = [one for one in EVENTS if one.event != "commit"]
    found = graded(killed(1), early)
    (said,) = broken(found)
    assert said.startswith("nothing was saved yet in step 7: it began again at step 0")
    assert found.is_open
    assert not found.holds
    late = [*early, event("commit", STRUCK_T + 0.1, step=6)]
    assert graded(killed(1), late).is_open
    assert not graded(killed(1)).is_open, "there was a checkpoint, and more was lost than since it"
    assert not graded(killed(5), early).is_open, "it had a snapshot to go on from"
    odd = killed(1)
    odd[-1].steps[-1] = step(STEPS, 1, t=20.0, state={"model.weight": "other"})
    assert not graded(odd, early).is_open, "something else is wrong, too"


def test_data_that_is_lost():
    records = killed()
    records[-1].steps[-1] = step(STEPS, 1, t=20.0, inputs=["batch 1.1"])
    assert any("1 lost, 1 repeated" in one for one in broken(graded(records)))


def test_checkpoints_that_do_not_verify(verified):
    verified.append(VerifiedBytes(checkpoints=1, damaged=["step-4.a1 in local: torn"]))
    assert broken(graded()) == ["step-4.a1 in local: torn"]


def test_the_checkpoint_that_the_fault_itself_damaged_may_still_lie_there(verified):
    verified.append(VerifiedBytes(checkpoints=1, damaged=["step-4.a1 in local: torn"]))
    assert graded(what="one bit is flipped in step-4.a1/rank-00000.json").holds
    assert not graded(what="one bit is flipped in step-5.a1/rank-00000.json").holds


def test_a_refusal_that_was_promised():
    assert graded(ended_with=[78], refuses=True, exit_codes=(78,)).holds
    assert not graded(ended_with=[0], refuses=True, exit_codes=(78,)).holds
    assert not graded(ended_with=[], refuses=True, exit_codes=(78,)).holds


def test_what_cannot_be_tried_breaks_nothing():
    assert Grade(fault="oom-kill", why_not="control groups are made as root").holds
    assert not Grade(fault="kill-worker").holds
