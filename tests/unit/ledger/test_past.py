"""What an attempt knows of those before it: the same as from reading everything, only sooner."""

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from outlast.errors import StorageError
from outlast.ledger.events import EVENT_NAMES
from outlast.ledger.file import FILE_NAME, Follower, Ledger, read_events
from outlast.ledger.past import Past
from outlast.policy.rollbacks import Batches


@pytest.fixture
def ledger(tmp_path):
    one = Ledger(tmp_path, job="0123456789ab")
    yield one
    one.close()


def by_reading_all(directory):
    events = list(read_events(directory))
    promised = [
        event["step"]
        for event in events
        if event.event == "commit"
        and isinstance(event.get("step"), int)
        and event.get("kind", "full") == "full"
    ]
    return max((event.attempt for event in events), default=0), max(promised, default=0)


def found(past):
    return past.attempt, past.promised


events = st.tuples(
    st.sampled_from(sorted(EVENT_NAMES)),
    st.integers(0, 9),
    st.dictionaries(
        st.sampled_from(["step", "kind", "attempt", "event", "error", "scalars"]),
        st.one_of(
            st.integers(0, 99),
            st.sampled_from(["full", "weights", '"event":"commit"', '{"t":1,"mono":1,"job":"x"']),
            st.dictionaries(st.sampled_from(["attempt", "event"]), st.integers(0, 99)),
        ),
    ),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(events, max_size=12), st.integers(0, 12))
def test_it_is_what_reading_everything_gives(tmp_path_factory, written, turn):
    directory = tmp_path_factory.mktemp("job")
    ledger, past = Ledger(directory, job="j"), Past(directory)
    for number, (event, attempt, fields) in enumerate(written):
        if number == turn:
            past = Past(directory, past.look().word)
        ledger.attempt = attempt
        free = {name: v for name, v in fields.items() if name not in ("attempt", "event")}
        ledger.append(event, durable=False, **free)
    assert found(past.look()) == by_reading_all(directory)
    ledger.close()


def test_only_what_is_new_is_read(ledger, tmp_path):
    ledger.attempt = 3
    ledger.append("commit", step=40)
    word = Past(tmp_path).look().word
    size = (tmp_path / FILE_NAME).stat().st_size
    (tmp_path / FILE_NAME).write_bytes(b"#" * (size - 1) + b"\n")  # what is behind is not looked at
    ledger.append("attempt_formed", world_size=1, nodes=1)
    ledger.attempt = 4
    ledger.append("commit", step=50)
    past = Past(tmp_path, word)
    assert found(past) == (3, 40)
    assert found(past.look()) == (4, 50)


def test_weights_alone_are_no_promise(ledger, tmp_path):
    ledger.append("commit", step=40, kind="weights")
    ledger.append("commit", step=30, kind="full")
    ledger.append("commit", step=None)
    assert Past(tmp_path).look().promised == 30


def test_a_rollback_undoes_what_was_committed_behind_it(ledger, tmp_path):
    ledger.attempt = 1
    for step in (10, 20, 30):
        ledger.append("commit", step=step)
    ledger.append("healthy", step=10)
    ledger.append("healthy", step=20)
    batches = {"loop": 1, "first": 16, "last": 17}
    ledger.append("rollback", step=10, first=16, batches=batches)
    ledger.append("commit", step=35)  # late, of the attempt that is undone
    ledger.append("healthy", step=35)
    word = Past(tmp_path).look().word
    ledger.attempt = 2
    ledger.append("commit", step=15)
    ledger.append("healthy", step=15)
    ledger.append("rollback", step="x", first=3)  # is not understood
    for past in (Past(tmp_path), Past(tmp_path, word)):
        past.look()
        assert found(past) == (2, 15)
        assert (past.commits, past.healthy) == ([10, 15], [10, 15])
        (rollback,) = past.rollbacks
        assert (rollback.attempt, rollback.step, rollback.first) == (1, 10, 16)
        assert rollback.batches == Batches(loop=1, first=16, last=17)


def test_a_rollback_to_the_start_leaves_no_promise(ledger, tmp_path):
    ledger.append("commit", step=30)
    ledger.append("rollback", step=0, first=16, batches=None)
    assert Past(tmp_path).look().promised == 0


def test_a_line_that_is_not_whole_yet_is_read_when_it_is(ledger, tmp_path):
    ledger.attempt = 2
    ledger.append("commit", step=40)
    path = tmp_path / FILE_NAME
    line = path.read_bytes()
    path.write_bytes(line[:-20])
    past = Past(tmp_path).look()
    assert found(past) == (0, 0)
    path.write_bytes(line)
    assert found(past.look()) == (2, 40)


def test_a_node_of_any_name_and_fields_that_look_like_heads(ledger, tmp_path):
    ledger.attempt, ledger.node = 7, 'a"b\\,"event":"commit"'
    ledger.append("step", step=99, scalars={"attempt": 50, "event": "commit"})
    ledger.append("commit", step=3)
    assert found(Past(tmp_path).look()) == (7, 3)


@pytest.mark.parametrize("word", ["", "x", "1 2", "1 2 3 4", "-1 2 3", "99999 5 6"])
def test_a_word_that_does_not_fit_is_no_harm(ledger, tmp_path, word):
    ledger.attempt = 2
    ledger.append("commit", step=40)
    assert found(Past(tmp_path, word).look()) == (2, 40)


def test_a_ledger_that_is_not_there_has_no_past(tmp_path):
    assert found(Past(tmp_path / "none").look()) == (0, 0)


def test_one_that_cannot_be_read_is_said_so(tmp_path):
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(StorageError, match=r"the ledger in .* cannot be read: Is a directory"):
        Past(tmp_path).look()


@pytest.mark.parametrize("tail_bytes", [0, 1, 150, 10_000])
def test_a_follower_may_begin_near_the_end(ledger, tmp_path, tail_bytes):
    for number in range(5):
        ledger.append("restart", reason="x" * number, restarts=number)
    lines = (tmp_path / FILE_NAME).read_bytes().splitlines(keepends=True)
    expected, left = [], tail_bytes
    for line in reversed(lines):
        left -= len(line)
        if left < 0:
            break
        expected.insert(0, json.loads(line)["restarts"])
    follower = Follower(tmp_path, tail_bytes=tail_bytes)
    assert [event["restarts"] for event in follower.poll()] == expected
    ledger.append("restart", reason="", restarts=9)
    assert [event["restarts"] for event in follower.poll()] == [9]
