"""WorkerRecords are read as they grow, and what a killed process left half written is not."""

import msgspec
from drill_records import found, step

from outlast.drill.record import WorkerBegun, WorkerHeld, WorkerRecords
from outlast.drill.target import RECORDS


def begun(pid=7, t=1.0):
    return WorkerBegun(pid=pid, rank=0, world_size=1, attempt=1, machine="one", t=t, versions={})


def line(one):
    return msgspec.json.encode(one) + b"\n"


def test_a_file_is_read_as_it_grows(tmp_path):
    place = tmp_path / RECORDS
    place.mkdir()
    path, records = place / "rank-0.attempt-1.7.jsonl", WorkerRecords(tmp_path)
    path.write_bytes(line(begun()) + line(found()))
    (record,) = records.look()
    assert (record.begun.pid, record.steps, record.is_held) == (7, [], False)
    with path.open("ab") as file:
        file.write(line(step(1)) + line(step(2))[:-9])
    assert [one.step for one in records.look()[0].steps] == [1]
    with path.open("ab") as file:
        file.write(line(step(2))[-9:] + line(WorkerHeld(step=2)))
    (record,) = records.look()
    assert [one.step for one in record.steps] == [1, 2]
    assert record.is_held


def test_steps_ahead_of_a_sessions_are_not_the_jobs(tmp_path):
    place = tmp_path / RECORDS
    place.mkdir()
    lines = [begun(), step(1), step(2), found(5), step(6)]
    (place / "rank-0.attempt-1.7.jsonl").write_bytes(b"".join(map(line, lines)))
    (record,) = WorkerRecords(tmp_path).look()
    assert [one.step for one in record.steps] == [6]


def test_processes_come_in_the_order_in_which_they_began(tmp_path):
    place = tmp_path / RECORDS
    place.mkdir()
    for pid, t in ((8, 3.0), (9, 2.0)):
        (place / f"rank-0.attempt-1.{pid}.jsonl").write_bytes(line(begun(pid, t)))
    assert [one.begun.pid for one in WorkerRecords(tmp_path).look()] == [9, 8]
