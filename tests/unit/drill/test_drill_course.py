"""A drill's course: what it refuses to grade, and when the job under a fault may be over."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from drill_records import run

from outlast.drill.course import STEPS, DrillListener, _refuse_failed, _Striker
from outlast.drill.faults.aim import PlannedFault, When
from outlast.drill.faults.fault import Plain, struck
from outlast.drill.grade import RunEnd
from outlast.errors import ConfigError


def refused(tmp_path, records, *exit_codes, said="a step", steps=STEPS):
    """What is said of an undisturbed run; "" where it is taken."""
    output = tmp_path / "output.txt"
    output.write_text(said)
    end = RunEnd(
        records=records,
        events=[],
        exit_codes=list(exit_codes),
        seconds=1.0,
        directory=Path("/nowhere"),
        output=output,
    )
    try:
        _refuse_failed(end, steps)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_job_that_fails_by_itself_is_not_graded(tmp_path):
    said = refused(tmp_path, run(7), 76, said="ValueError: bad batch")
    assert "fails by itself behind step 7 (exit 76), undisturbed" in said
    assert "ValueError: bad batch" in said


def test_a_job_that_stands_still_by_itself_is_not_graded(tmp_path):
    assert "stands still by itself behind step 7" in refused(tmp_path, run(7))
    assert refused(tmp_path, run(STEPS)) == "", "it has come far enough"


def test_a_job_that_ends_early_is_graded_that_far(tmp_path):
    assert refused(tmp_path, run(7), 0) == ""
    assert refused(tmp_path, run(7), 75, 0) == ""


@pytest.mark.parametrize("records", [[], run(0)])
def test_a_job_without_a_step_is_not_graded(tmp_path, records):
    assert "the end of its first step by itself" in refused(tmp_path, records, 0)


def test_where_a_file_is_missing_the_copy_is_spoken_of(tmp_path):
    missing = "FileNotFoundError: [Errno 2] No such file or directory: '../data/d.txt'"
    assert "in a copy of this directory" in refused(tmp_path, [], 76, said=missing)
    assert "copy" not in refused(tmp_path, [], 76, said="ValueError")


class Momentary(Plain):
    """Strikes at once; lasts until ``goes_on``."""

    name, what = "momentary", "strikes"

    def __init__(self):
        self.goes_on = threading.Event()
        self.num_healed = 0

    def inject(self, target):
        return struck(target, "it has struck in step {step}")

    def heal(self, target):
        self.goes_on.wait(60)
        self.num_healed += 1


def test_a_job_is_held_open_until_the_fault_is_healed_and_no_longer():
    fault = Momentary()
    job = SimpleNamespace(
        completed=lambda: 7, step_s=lambda: 0.0, is_over=lambda: False, machines=[], stop=list
    )
    planned = PlannedFault(When(1), fault)
    with _Striker(planned, job, DrillListener(), waits_for_commit=False) as striker:
        while striker.struck is None:
            assert not striker.is_over
        assert striker.holds()
        fault.goes_on.set()
        while not striker.is_over:
            pass
        assert not striker.holds(), "a script that ends short of the last step has ended"
    assert fault.num_healed


@pytest.mark.parametrize("events", [["snapshot", "commit"], ["snapshot"]])
def test_a_fault_waits_for_a_checkpoint_that_comes_late(events):
    fault, seen = Momentary(), []
    fault.goes_on.set()

    def looked():
        seen.append(SimpleNamespace(event=events[min(len(seen), len(events) - 1)]))
        return seen

    job = SimpleNamespace(
        completed=lambda: 7,
        step_s=lambda: 0.0,
        is_over=lambda: len(seen) > 3,
        machines=[],
        stop=list,
        events=looked,
    )
    planned = PlannedFault(When(1), fault)
    with _Striker(planned, job, DrillListener(), waits_for_commit=True) as striker:
        while not striker.is_over:
            pass
    assert (striker.struck is not None) == ("commit" in events)
    assert len(seen) > 1, "it looked until there was one, or the job was over"
