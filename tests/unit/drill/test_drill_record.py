"""A worker's record as it grows: what each line of it says, and what a killed process left."""

import msgspec

from outlast.drill.record import (
    NoticeDue,
    Records,
    StateFound,
    StepRecord,
    WorkerBegun,
    WorkerEnded,
    WorkerHeld,
)
from outlast.drill.target import RECORDS

BEGUN = WorkerBegun(pid=1, rank=0, world_size=1, attempt=1, machine="m", t=1.0, versions={})
FOUND = StateFound(step=3, is_counted=True, state={}, random={})


def step(number):
    parts = {"losses": [], "inputs": [], "state": {}, "random": {}, "rates": []}
    return StepRecord(step=number, t=1.0, rank=0, world_size=1, **parts)


def test_each_line_says_one_thing(tmp_path):
    (tmp_path / RECORDS).mkdir()
    path = tmp_path / RECORDS / "rank-0.attempt-1.1.jsonl"
    records = Records(tmp_path)

    def look(*lines, rest=b""):
        with path.open("ab") as file:
            file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines) + rest)
        (one,) = records.look()
        steps = [made.step for made in one.steps]
        return steps, one.found is not None, one.is_due, one.is_held, one.ended is not None

    assert look(BEGUN) == ([], False, False, False, False)
    assert look(step(1)) == ([1], False, False, False, False)  # ahead of a session
    assert look(FOUND, step(4)) == ([4], True, False, False, False)
    assert look(NoticeDue(step=4)) == ([4], True, True, False, False)
    half = msgspec.json.encode(step(5))
    assert look(WorkerHeld(step=4), rest=half[:20]) == ([4], True, True, True, False)
    assert look(rest=half[20:]) == ([4], True, True, True, False)
    assert look(rest=b"\n") == ([4, 5], True, True, True, False)
    assert look(WorkerEnded(t=2.0)) == ([4, 5], True, True, True, True)
