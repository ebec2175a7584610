"""What an attempt knows of those before it: the same as from reading everything, only sooner."""

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given

from outlast.errors import StorageError
from outlast.ledger.events import EVENT_NAMES, encode
from outlast.ledger.file import FILE_NAME, Follower, Ledger, keep, kept, make_room, read_events
from outlast.ledger.past import Glance, Past
from outlast.policy.cadence import COSTS_KEPT, Auto, cost_of
from outlast.policy.hazard import of_a_new_job
from outlast.policy.rollbacks import Batches
from outlast.policy.tier_cadence import Scope
from thorough import examples


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


@examples(60)
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
    whole = Past(directory).look().failures
    assert (past.failures.known, past.failures.since_t) == (whole.known, whole.since_t)
    assert past.failures.hazard.calm_per_h == pytest.approx(whole.hazard.calm_per_h)
    ledger.close()


def test_costs_and_bursts_are_known_to_the_next_attempt(ledger, tmp_path, monkeypatch):
    """What the cadence of an attempt goes by was learnt in those before it."""
    now = [1e9]
    monkeypatch.setattr("outlast.ledger.file.time.time", lambda: now[0])
    expected, past, word = of_a_new_job(), Past(tmp_path), ""
    for number in range(30):
        ledger.attempt = number + 1
        ledger.append("resumed", step=number)
        for _ in range(3):
            now[0] += 2.0
            ledger.append("step", step=number)
            ledger.append("snapshot", step=number, blocked_s=number / 1000, bytes=7)
            ledger.append("commit", step=number, durable_s=0.2, kind="full")
        now[0] += 2.0
        ledger.append("worker_lost", node="a")
        past = Past(tmp_path, word).look()
        word = past.word
        now[0] += 5.0  # down
        expected = expected.after(8.0 / 3600, failed=True)
    assert not past.storms
    ledger.append("cadence", interval_s=1.0, burst=True)
    ledger.append("cadence", interval_s=1.0, tier="slow")
    word = past.look().word
    for found in (past, Past(tmp_path, word), Past(tmp_path).look()):
        assert found.storms
        assert found.tier_intervals_s == {"slow": 1.0}
        assert found.failures.hazard.burst_per_h() == pytest.approx(expected.burst_per_h())
        assert found.failures.hazard.burst_per_h() > 100
        assert found.failures.known.num_seen == pytest.approx(30, rel=1e-3)
        costs = [cost_of(n / 1000, 0.2) for n in range(30) for _ in range(3)][-COSTS_KEPT:]
        assert found.costs_s == pytest.approx(costs)
        auto = Auto(0.0, found.failures.hazard, found.costs_s)
        assert auto.due_s(0, 0.0, 0.1) < 3.0


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


@pytest.mark.parametrize(
    "word",
    ["", "x", "1 2", "1 2 3 4", "-1 2 3 0.0 0.0 0.0", "9 2 3 x 0.0 0.0", "99999 5 6 1.0 1.0 1e9"],
)
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


def test_machines_that_are_left_out_and_their_failures(ledger, tmp_path):
    for kind, own in [("killed", True), ("peer", False), ("crash", True)]:
        ledger.append("restart", reason="", restarts=1, kind=kind, own=own)
    here = ledger.node
    ledger.append("left_out", node="b", reason="it failed", until_t=9.0, for_s=3.0, goes=True)
    past = Past(tmp_path).look()
    assert [kind for _, kind in past.own_failures[here]] == ["killed", "crash"]
    assert past.left_out["b"]["reason"] == "it failed"
    ledger.append("let_in", node="b")
    ledger.append("let_in", node=here)
    past.look()
    assert (past.left_out, past.own_failures) == ({}, {})
    for _ in range(150):
        ledger.append("restart", reason="", restarts=1, kind="killed", own=True)
    assert len(past.look().own_failures[here]) == 100  # bounded


STORIES = {
    # event, t … → failures, hours of running
    "a worker is lost": ("resumed 0, step 1800, worker_lost 3600, restart 3610", 1, 1.0),
    "several are lost at once": ("resumed 0, worker_lost 3600, node_lost 3700, hang 3800", 1, 1.0),
    "down is no running": ("resumed 0, hang 3600, resumed 7200, step 9000, hang 10800", 2, 2.0),
    "a drain is no failure": ("resumed 0, drained 3600, job_finished 3601, resumed 7200", 0, 1.0),
    "an end is none": ("resumed 0, job_finished 3600", 0, 1.0),
    "a new membership is none": (
        "resumed 0, step 1800, attempt_formed 1900, worker_lost 1901",
        0,
        0.53,
    ),
    "without a word": ("resumed 0, step 3600, job_started 9999, resumed 9999", 1, 1.0),
    "it has begun": ("job_started 0, attempt_formed 1, resumed 2, step 3602", 0, 1.0),
    "a clock that steps back": ("resumed 3600, step 1800, worker_lost 5400", 1, 1.0),
    "a loss before it ran": ("worker_lost 5, worker_lost 6", 0, 0.0),
}


@pytest.mark.parametrize("name", sorted(STORIES))
def test_how_often_it_failed_while_it_ran(tmp_path, name):
    words, failures, hours = STORIES[name]
    lines = []
    for one in words.split(", "):
        event, t = one.split()
        head = {"t": 1e6 + float(t), "mono": 0.0, "job": "j", "attempt": 1, "node": "n"}
        lines.append(json.dumps({**head, "rank": 0, "event": event}, separators=(",", ":")))
    (tmp_path / FILE_NAME).write_text("\n".join(lines) + "\n")
    known = Past(tmp_path).look().failures.known
    assert known.num_seen == pytest.approx(failures, rel=0.01)
    assert known.seen_h == pytest.approx(hours, rel=0.01)


def test_another_machine_that_joins_is_no_failure(ledger, tmp_path):
    ledger.append("resumed", step=0)
    ledger.append("job_started", joins=True)
    assert Past(tmp_path).look().failures.known.num_seen == 0
    ledger.append("job_started")
    assert Past(tmp_path).look().failures.known.num_seen == 1


def test_what_losses_were_like_is_handed_on(ledger, tmp_path):
    ledger.append("healthy", step=10, windows={"loss": [2.0, 3.0], "other": [1.0]})
    past = Past(tmp_path, Past(tmp_path).look().word)
    assert past.windows == {"loss": [2.0, 3.0]}
    ledger.append("healthy", step=20)
    ledger.append("healthy", step=30, windows={"loss": ["x"]})
    assert past.look().windows == {"loss": [2.0, 3.0]}
    ledger.append("rollback", step=10, first=31, batches=None, windows={"loss": [4.0] * 300})
    assert past.look().windows == {"loss": [4.0] * 100}
    ledger.append("healthy", step=20, windows={"loss": [9.0]})
    assert past.look().windows == {"loss": [4.0] * 100}, "of an attempt that was undone"


def test_a_rollback_that_was_kept_beside_the_ledger_counts_as_one_in_it(ledger, tmp_path):
    ledger.attempt = 1
    for step in (10, 20, 30):
        ledger.append("commit", step=step)
    before = Past(tmp_path).look()
    ledger.attempt = 2
    rollback = ledger.entry("rollback", None, {"step": 20, "first": 25, "batches": None})
    make_room(tmp_path)
    assert before.look().promised == 30
    assert keep(tmp_path, encode(rollback))
    word = before.look().word
    for past in (before, Past(tmp_path).look(), Past(tmp_path, word).look()):
        assert found(past) == (2, 20), "nobody takes the attempt's number again"
        assert [one.step for one in past.rollbacks] == [20]
        assert [event.fields for event in past.unwritten] == [rollback.fields]
    ledger.attempt = 3
    ledger.append("commit", step=35)
    ledger.write(rollback, durable=True)  # late
    for past in (before.look(), Past(tmp_path).look(), Past(tmp_path, word).look()):
        assert (found(past), past.commits) == ((3, 35), [10, 20, 35])
        assert [one.step for one in past.rollbacks] == [20]
        assert past.unwritten == []


def test_several_are_kept_in_the_room_that_there_is(ledger, tmp_path):
    make_room(tmp_path)
    path = tmp_path / "rollbacks"
    size = path.stat().st_size
    windows = {what: [1 / 3] * 100 for what in ("loss", "grad_norm")}
    for number in range(10):
        fields = {"step": 10 * number, "first": 900, "batches": None, "windows": windows}
        ledger.attempt = number
        assert keep(tmp_path, encode(ledger.entry("rollback", None, fields)))
    assert [event["step"] for event in kept(tmp_path)] == [10 * number for number in range(10)]
    assert path.stat().st_size == size
    make_room(tmp_path)
    assert len(kept(tmp_path)) == 10
    make_room(tmp_path, forget=True)
    assert kept(tmp_path) == []
    assert keep(tmp_path, b"garbage\n")
    assert Past(tmp_path).look().unwritten == []
    path.unlink()
    path.symlink_to("/dev/full")
    assert not keep(tmp_path, b"x\n")


def test_the_name_of_what_is_kept_is_on_disk_too(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("outlast.ledger.file.sync_directory", synced.append)
    make_room(tmp_path)
    assert synced == [tmp_path]
    assert keep(tmp_path, b'{"event": "rollback"}\n')
    assert synced == [tmp_path] * 2


def test_a_ledger_that_takes_nothing_has_its_rollbacks_kept(ledger, tmp_path):
    ledger.path.symlink_to("/dev/full")
    make_room(tmp_path)
    ledger.append("step", step=3)
    assert ledger.lost_events == 1
    assert ledger.record("rollback", step=2, first=3, batches=None)
    (event,) = kept(tmp_path)
    assert event["step"] == 2
    assert not ledger.write(event, durable=True), "the next attempt tries, and keeps it once"
    assert len(kept(tmp_path)) == 1
    (tmp_path / "rollbacks").unlink()
    (tmp_path / "rollbacks").symlink_to("/dev/full")
    assert not ledger.record("rollback", step=2, first=3, batches=None)


TAKEN = {
    # event, machine, t … → failures that took a machine, that took several
    "processes": ("resumed a 0, worker_lost a 10, hang b 11, resumed a 20, hang a 30", 0, 0),
    "a machine": ("resumed a 0, worker_lost a 10, node_lost b 11, resumed a 20", 1, 0),
    "it is told twice": ("resumed a 0, node_lost b 11, node_lost b 12, resumed a 20", 1, 0),
    "two at once": ("resumed a 0, node_lost b 11, node_lost c 12, resumed a 20", 1, 1),
    "two by and by": ("resumed a 0, node_lost b 9, resumed a 20, node_lost c 29", 2, 0),
    "all": ("resumed a 0, step a 10, job_started a 90, resumed a 99", 1, 1),
    "after a drain": ("resumed a 0, drained a 10, node_lost b 11, node_lost c 12", 0, 0),
}


@pytest.mark.parametrize("name", sorted(TAKEN))
@pytest.mark.parametrize("handed_on", [False, True], ids=["at-once", "handed-on"])
def test_what_a_failure_took(tmp_path, name, handed_on):
    words, machines, several = TAKEN[name]
    lines = []
    for one in words.split(", "):
        event, node, t = one.split()
        head = {"t": 1e6 + float(t), "mono": 0.0, "job": "j", "attempt": 1, "node": node}
        lines.append(json.dumps({**head, "rank": 0, "event": event}, separators=(",", ":")))
    past = Past(tmp_path)
    for line in lines:
        with (tmp_path / FILE_NAME).open("a") as file:
            file.write(line + "\n")
        if handed_on:
            past = Past(tmp_path, past.look().word)
    found = past.look().failures.beyond
    assert found.num_machine == pytest.approx(machines, rel=0.01)
    assert found.num_all == pytest.approx(several, rel=0.01)
    assert found.num == pytest.approx(past.failures.known.num_seen)


def test_where_it_came_back_from_after_a_failure(ledger, tmp_path):
    ledger.append("resumed", step=5, source="from bucket")  # its first start here: no failure
    ledger.append("worker_lost")
    ledger.append("resumed", step=5, source="from memory and bucket, 1 file repaired from x")
    ledger.append("drained", step=9)
    ledger.append("resumed", step=9, source="from bucket")
    ledger.append("hang")
    past = Past(tmp_path, Past(tmp_path).look().word)
    ledger.append("resumed", step=9, source="from memory")
    read = past.look().failures.beyond.read
    assert {name: round(number) for name, number in read.items()} == {"memory": 2, "bucket": 1}


def test_very_many_lost_machines_make_no_long_word(tmp_path):
    """It is one variable of a worker's environment, of which the kernel takes 128 KiB."""
    ledger = Ledger(tmp_path, job="j")
    ledger.append("resumed", step=0)
    for number in range(2400):
        ledger.append("node_lost", durable=False, node=f"{number:056d}")
    past = Past(tmp_path).look()
    assert len(past.word) < 2000
    assert past.failures.scope == Scope.ALL


def test_what_failures_have_cost(tmp_path):
    """Ten of 50 steps are done again, and the restart took 6 s; a machine that joins is none."""
    lines = [
        (90.0, 1, "attempt_formed", {}),
        (100.0, 1, "resumed", {"step": 0}),
        (200.0, 1, "restart", {"own": True, "kind": "killed", "step": 50}),
        (204.0, 2, "attempt_formed", {}),
        (206.0, 2, "resumed", {"step": 40}),
        (207.0, 2, "resumed", {"step": 40, "joins": True}),
    ]
    with (tmp_path / FILE_NAME).open("wb") as file:
        for t, attempt, event, fields in lines:
            head = {"t": t, "mono": t, "job": "j", "attempt": attempt, "node": "a", "rank": None}
            file.write(json.dumps({**head, "event": event, **fields}).encode() + b"\n")
    known = Past(tmp_path).look().tolls
    assert (known.since_t, known.cost_s, known.pause_s) == (90.0, 26.0, 6.0)
    told = Glance(Past(tmp_path)).look()
    assert (told.since_t, told.cost_s, told.pause_s) == (90.0, 26.0, 6.0)
