"""The ledger: torn lines are passed over, nothing that fails reaches the training."""

import errno
import json
import logging
import math
import os
import threading

import hypothesis.strategies as st
import pytest
from hypothesis import given
from unit_fakes import num_descriptors

from outlast.ledger import events as events_room
from outlast.ledger.events import EVENT_NAMES, HEAD, Event, decode, encode
from outlast.ledger.file import FILE_NAME, Follower, Ledger, read_events
from thorough import examples


@pytest.fixture
def ledger(tmp_path):
    one = Ledger(tmp_path, job="0123456789ab", attempt=2, rank=1)
    yield one
    one.close()


def names(directory):
    return [event.event for event in read_events(directory)]


# --- one line ------------------------------------------------------------------------------------


def test_the_head_of_each_line_and_its_fields(ledger, tmp_path):
    told = ledger.append("commit", step=7, durable_s=0.5, bytes=10, files=2)
    (line,) = (tmp_path / FILE_NAME).read_bytes().splitlines()
    raw = json.loads(line)
    assert list(raw)[: len(HEAD)] == list(HEAD)
    assert (raw["job"], raw["attempt"], raw["rank"], raw["event"]) == (
        "0123456789ab",
        2,
        1,
        "commit",
    )
    assert (raw["step"], raw["bytes"]) == (7, 10)
    assert list(read_events(tmp_path)) == [told]
    assert (told["step"], told.get("step"), told.get("none", 3)) == (7, 7, 3)


def test_rank_and_attempt_of_an_event(ledger, tmp_path):
    ledger.attempt = 3
    ledger.append("worker_lost", rank=5, exit_code=-9)
    ledger.rank = None
    ledger.append("restart", durable=False)
    found = list(read_events(tmp_path))
    assert [(event.attempt, event.rank) for event in found] == [(3, 5), (3, None)]


def test_numbers_that_json_has_no_word_for_become_null(ledger, tmp_path):
    ledger.append("step", scalars={"loss": math.nan, "lr": math.inf, "fine": 1.5})
    (event,) = read_events(tmp_path)
    assert event["scalars"] == {"loss": None, "lr": None, "fine": 1.5}


@pytest.mark.parametrize(
    "value", ["/data/\udcff", {"\udcff": ["\udcff"]}, print, {1, 2}, 2**70, b"bytes"], ids=ascii
)
def test_whatever_a_field_holds_the_event_is_kept_and_nothing_is_raised(ledger, tmp_path, value):
    ledger.append("storage_error", operation="save", path=value, error="no space", step=7)
    ledger.append("commit", step=8)
    found = list(read_events(tmp_path))
    assert [event.event for event in found] == ["storage_error", "commit"]
    assert (found[0]["error"], found[0]["step"]) == ("no space", 7)


def test_the_contract_names_every_event():
    table = events_room.__doc__
    assert all(name in table for name in EVENT_NAMES)
    assert len(EVENT_NAMES) == 44


fields = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: name not in HEAD),
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.lists(st.integers(0, 9)),
)


@given(fields, st.none() | st.integers(0, 9), st.text(max_size=9))
@examples(200)
def test_a_line_reads_as_it_was_written(more, rank, name):
    event = Event(
        t=1.25, mono=2.5, job="j", attempt=1, node="n", rank=rank, event=name, fields=more
    )
    line = encode(event)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert decode(line) == event


def test_every_tear_and_flip_of_a_line_is_an_event_or_nothing():
    event = Event(t=1.0, mono=2.0, job="j", attempt=1, node="n", rank=None, event="commit")
    line = encode(event)
    for length in range(len(line) - 2):
        assert decode(line[:length]) is None
    for place in range(len(line)):
        for value in (0x00, 0x0A, 0x22, 0x80, 0xC3, 0xFF):
            found = decode(line[:place] + bytes([value]) + line[place + 1 :])
            assert found is None or isinstance(found, Event)


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"3", b"[]", b"null", b'"t"', b"{}", b'{"t": 1}', b"[" * 100_000]
)
def test_what_is_not_an_event(line):
    assert decode(line) is None


# --- torn lines ----------------------------------------------------------------------------------


def test_a_torn_last_line_is_skipped_and_the_next_writer_starts_afresh(ledger, tmp_path):
    ledger.append("job_started")
    ledger.append("commit", step=1)
    ledger.close()
    path = tmp_path / FILE_NAME
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first + 1, len(whole)):
        path.write_bytes(whole[:length])
        # Only the newline is missing: the line itself can be read.
        assert names(tmp_path) == ["job_started", "commit"][: 2 if length == len(whole) - 1 else 1]
        ledger.append("restart")
        ledger.close()
        assert names(tmp_path)[-1] == "restart"
        assert path.read_bytes().startswith(whole[:length] + b"\n")


def test_garbage_in_the_middle_is_skipped(ledger, tmp_path):
    ledger.append("job_started")
    with (tmp_path / FILE_NAME).open("ab") as file:
        file.write(b"\x00" * 100 + b"\n" + b"\xff\xfe\n" + b'{"half": \n' + b"\n")
    ledger.append("commit", step=1)
    assert names(tmp_path) == ["job_started", "commit"]


def test_an_event_of_a_later_version_is_kept(ledger, tmp_path):
    ledger.append("of_the_future", new_field=[1])
    (event,) = read_events(tmp_path)
    assert (event.event, event["new_field"]) == ("of_the_future", [1])


def test_no_ledger_no_events(tmp_path):
    assert list(read_events(tmp_path)) == []
    assert list(read_events(tmp_path / "none")) == []


def test_reading_from_an_offset(ledger, tmp_path):
    ledger.append("job_started")
    offset = (tmp_path / FILE_NAME).stat().st_size
    ledger.append("commit", step=1)
    assert [event.event for event in read_events(tmp_path, offset=offset)] == ["commit"]


def test_lines_of_several_writers_do_not_mix(tmp_path):
    def write(rank):
        one = Ledger(tmp_path, job="j", rank=rank)
        for number in range(50):
            one.append("step", durable=False, step=number, text="x" * 300)
        one.close()

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    found = list(read_events(tmp_path))
    assert len(found) == 200
    for rank in range(4):
        assert [event["step"] for event in found if event.rank == rank] == list(range(50))


# --- a disk that fails ---------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["open", "write", "fsync"])
def test_a_full_disk_is_counted_and_told_once_and_never_raised(tmp_path, monkeypatch, caplog, call):
    ledger, other = (Ledger(tmp_path, job="j", attempt=1, rank=rank) for rank in (0, 1))
    real = getattr(os, call)

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            assert ledger.append("commit", step=step)["step"] == step
            other.append("commit", step=step)  # it meets the same disk
    assert ledger.lost_events == other.lost_events == 3
    (record,) = caplog.records
    words = f"the ledger {ledger.path} cannot be written: No space left on device; free space there"
    assert record.getMessage() == words
    caplog.clear()
    monkeypatch.setattr(os, call, real)
    with caplog.at_level(logging.WARNING):
        for one in (other, ledger, ledger):
            one.append("job_finished")
    (record,) = caplog.records
    words = f"the ledger {ledger.path} can be written again; 3 events are lost"
    assert record.getMessage() == words
    assert ledger.lost_events == 3
    assert names(tmp_path)[-1] == "job_finished"
    gaps = {event.rank: event for event in read_events(tmp_path) if event.event == "watch_gap"}
    assert sorted(gaps) == [0, 1]  # each process tells what of its own is missing, once
    for gap in gaps.values():
        assert (gap["what"], gap["lost"], gap["reason"]) == ("ledger", 3, "No space left on device")
        assert gap["from_t"] < gap.t
        assert gap["seconds"] >= 0


def test_a_gap_is_told_once_there_is_room_for_it(ledger, tmp_path, monkeypatch):
    """The first line that fits again may be the last one that does."""
    real, room = os.write, [0]

    def write(fd, data):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0] -= 1
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    ledger.append("commit", step=1)
    room[0] = 1
    ledger.append("commit", step=2)  # the word of the gap does not fit any more
    assert names(tmp_path) == ["commit"]
    ledger.append("commit", step=3)
    room[0] = 10
    ledger.append("commit", step=4)
    assert names(tmp_path) == ["commit", "commit", "watch_gap"]
    assert list(read_events(tmp_path))[-1]["lost"] == ledger.lost_events == 2


def test_a_directory_that_went(tmp_path):
    one = Ledger(tmp_path / "gone", job="j")
    one.append("commit", step=1)
    assert one.lost_events == 1
    (tmp_path / "gone").mkdir()
    one.append("commit", step=2)
    assert [event.get("step") for event in read_events(tmp_path / "gone")] == [2, None]
    one.close()


def test_a_write_that_takes_half_a_line_spoils_only_that_line(ledger, tmp_path, monkeypatch):
    """A disk that fills up takes what fits, without an error; there is room again later."""
    ledger.append("job_started")
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: len(data) // 2]))
    ledger.append("commit", step=1)
    monkeypatch.setattr(os, "write", real)
    ledger.append("commit", step=2)
    assert [event.get("step") for event in read_events(tmp_path)] == [None, 2, None]
    assert ledger.lost_events == 1


def test_a_disk_that_stays_full_behind_a_torn_line_costs_no_descriptors(tmp_path, monkeypatch):
    (tmp_path / FILE_NAME).write_bytes(b'{"torn')
    one = Ledger(tmp_path, job="j")
    monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space")))
    one.append("commit", step=1)
    before = num_descriptors()
    for step in range(20):
        one.append("commit", step=step)
    assert num_descriptors() <= before
    assert one.lost_events == 21
    one.close()


def test_what_matters_is_on_disk_when_it_is_told(ledger, monkeypatch):
    synced = []
    ledger.append("step", durable=False)
    monkeypatch.setattr(os, "fsync", synced.append)
    ledger.append("step", durable=False)
    assert synced == []
    ledger.append("commit", step=1)
    assert len(synced) == 1


def test_a_line_is_there_to_be_read_though_nothing_can_be_made_durable(
    ledger, tmp_path, monkeypatch
):
    def fails(_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    assert not ledger.record("storage_error", operation="save")
    assert [event.event for event in read_events(tmp_path)] == ["storage_error"]


def test_its_name_is_on_disk_too_whoever_made_it(ledger, tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("outlast.ledger.file.sync_directory", synced.append)
    ledger.append("commit", step=1)
    ledger.append("commit", step=2)
    assert synced == [tmp_path]
    ledger.close()  # the next process finds the file there
    ledger.append("commit", step=3)
    assert synced == [tmp_path, tmp_path]


# --- following -----------------------------------------------------------------------------------


def test_a_follower_gets_each_event_once(ledger, tmp_path):
    follower = Follower(tmp_path)
    assert follower.poll() == []
    ledger.append("job_started")
    assert [event.event for event in follower.poll()] == ["job_started"]
    assert follower.poll() == []
    ledger.append("commit", step=1)
    ledger.append("commit", step=2)
    assert [event["step"] for event in follower.poll()] == [1, 2]


def test_a_follower_waits_for_the_end_of_a_line(ledger, tmp_path):
    ledger.append("commit", step=1)
    line = (tmp_path / FILE_NAME).read_bytes()
    (tmp_path / FILE_NAME).write_bytes(b"")
    follower = Follower(tmp_path)
    with (tmp_path / FILE_NAME).open("ab", buffering=0) as file:
        for byte in range(len(line) - 1):
            file.write(line[byte : byte + 1])
            assert follower.poll() == []
        file.write(b"\n" + line + b'{"torn')
        assert [event["step"] for event in follower.poll()] == [1, 1]
        file.write(b"\n" + line)
        assert [event["step"] for event in follower.poll()] == [1]


def num_unread(directory):
    unread = []
    list(read_events(directory, on_unread=lambda: unread.append(True)))
    return len(unread)


def test_lines_that_cannot_be_read_are_counted(ledger, tmp_path):
    assert num_unread(tmp_path) == 0
    ledger.append("step", step=3)
    assert num_unread(tmp_path) == 0
    with (tmp_path / FILE_NAME).open("ab") as file:
        file.write(b'{"t": 1.5, "ev\n\xff\xfe\n\n')
    ledger.append("step", step=4)
    assert num_unread(tmp_path) == 2
    assert [event["step"] for event in read_events(tmp_path)] == [3, 4]
