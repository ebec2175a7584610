"""What the live view says, for any ledger, on any terminal."""

import io
import json
import re
import time

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from unit_prices import priced

from outlast import config
from outlast.cli import cli
from outlast.cli.top.draw import ViewScreen, screen, status_line
from outlast.cli.top.view import Following, to_json
from outlast.ledger.events import EVENT_NAMES, Event, encode
from outlast.ledger.file import FILE_NAME
from outlast.ledger.job import Job, settings_of
from outlast.peer import claims
from outlast.peer.claims import Claim, Claims, SignOfLife, this_process
from outlast.report.facts import facts
from outlast.report.text import slow_line
from outlast.storage import Directory

JOB = Job(id="0123456789ab", created_t=0.0, settings={}, versions={})
NOW = 1_000_100.0


def event(t, name, attempt=1, rank=0, node="a", **fields):
    head = {"t": 1_000_000.0 + t, "mono": t, "job": JOB.id, "attempt": attempt, "node": node}
    return Event(**head, rank=rank, event=name, fields=fields)


def lived():
    return [
        event(0, "job_started", 0, None, command="outlast run train.py"),
        event(1, "attempt_formed", 1, None, world_size=2, nodes=1, hosts={"a": 2}),
        event(2, "resumed", step=0),
        event(12, "step", step=10, seconds=10.0, until=100),
        event(13, "commit", step=10, tier="local", durable_s=0.5, bytes=8_000),
        event(22, "step", step=20, seconds=10.0, until=100),
        event(24, "worker_lost", 1, 1, beat_t=1_000_022.0, step=20, signal="SIGKILL"),
        event(24, "restart", 1, None, reason="worker lost", kind="killed", action="restart"),
        event(25, "attempt_formed", 2, None, world_size=2, nodes=1, hosts={"a": 2}),
        event(26, "resumed", 2, step=10),
        event(46, "step", 2, step=30, seconds=20.0, until=100),
    ]


def write(directory, events, tail=b""):
    directory.mkdir(exist_ok=True)
    (directory / "job.json").write_bytes(msgspec.json.encode(JOB))
    (directory / FILE_NAME).write_bytes(b"".join(map(encode, events)) + tail)


def viewed(directory, now=NOW, toml="", job=JOB):
    following = Following(
        directory, job, settings_of(None, config.load({"dir": str(directory)}), job)
    )
    while following.look():
        pass
    following.settle()
    return following.view(now)


def held(directory, process):
    claim = Claim(attempt=2, node="t", host="a", address="", term="t", process=process)
    assert Claims(Directory(directory)).take(claim, 0)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_job_that_has_come_back(tmp_path):
    write(tmp_path / "j", lived())
    held(tmp_path / "j", this_process())
    view = viewed(tmp_path / "j", now=1_000_047.0)
    assert (view.state, view.step, view.until_step) == ("running", 30, 100)
    assert (view.attempt, view.num_attempts, view.world_size) == (2, 2, 2)
    assert (view.saved_step, view.num_steps_replayed) == (10, 10)
    (tier,) = view.tiers
    assert (tier.name, tier.step, tier.age_s) == ("local", 10, 34.0)
    (incident,) = view.incidents
    assert (incident.kind, incident.is_open, incident.lost_steps) == ("worker lost", False, 10)
    assert incident.cost_s == pytest.approx(24.0)  # in which the ten steps were made again
    assert [(one.name, one.failures) for one in view.machines] == [("a", {"worker_lost": 1})]
    # 70 steps of a second each; and of 44 s behind the start-up 30 were new steps.
    assert view.left_low_s == pytest.approx(70.0)
    assert view.left_high_s == pytest.approx(70.0 * 44 / 30)


def test_the_parts_and_what_they_cost(tmp_path):
    (tmp_path / "outlast.toml").write_text("[price]\nspot = 36\n")
    write(tmp_path / "j", lived())
    held(tmp_path / "j", this_process())
    view = viewed(tmp_path / "j", now=1_000_047.0)
    assert sum(view.workers_s.values()) == pytest.approx(2 * 47.0)
    assert view.cost == pytest.approx(0.47)
    assert view.cost_lost == pytest.approx(0.47 - 0.30)


def test_what_the_job_was_begun_with_counts_where_nothing_is_set_here(tmp_path):
    write(tmp_path / "j", lived())
    job = msgspec.structs.replace(JOB, settings={"price.spot": "7", "checkpoint.every": "10 s"})
    view = viewed(tmp_path / "j", job=job)
    assert view.price_per_machine_hour == 7.0
    assert view.tiers[0].interval_s == 10.0
    (tmp_path / "outlast.toml").write_text("[price]\nspot = 36\n")
    assert viewed(tmp_path / "j", job=job).price_per_machine_hour == 36.0
    damaged = msgspec.structs.replace(JOB, settings={"price.spot": "cheap"})
    (tmp_path / "outlast.toml").unlink()
    assert viewed(tmp_path / "j", job=damaged).price_per_machine_hour is None


# --- does anybody run it? -------------------------------------------------------------------------


def test_one_whose_process_has_ended_is_dead(tmp_path):
    write(tmp_path / "j", lived())
    ended = this_process().rpartition("/")[0].rpartition("/")[0] + "/1/1"  # began at another time
    held(tmp_path / "j", ended)
    Claims(Directory(tmp_path / "j")).say_alive(SignOfLife(attempt=2, node="t", count=7))
    view = viewed(tmp_path / "j")
    assert view.state == "gone"
    assert view.is_over
    assert view.left_low_s is None
    assert view.wall_s == 46.0  # what nobody ran does not count
    text = "\n".join(line.plain for line in screen(view, 80))
    assert "DEAD since 13:47:26 UTC, 54.0 s ago" in text
    assert "Next: outlast run train.py (goes on from step 10)" in text
    write(tmp_path / "j", [one for one in lived() if one.event != "commit"])
    text = "\n".join(line.plain for line in screen(viewed(tmp_path / "j"), 80))
    assert "Next: outlast run train.py (from step 0: nothing is saved)" in text


@pytest.mark.parametrize(("age_s", "state"), [(5.0, "running"), (600.0, "gone")])
def test_machines_that_gather_have_claimed_nothing_yet(tmp_path, age_s, state):
    write(tmp_path / "j", [*lived(), event(50, "job_started", 0, None, node="b")])
    held(tmp_path / "j", "")
    over = SignOfLife(attempt=2, node="t", count=7, over=True)  # the start before has ended well
    Claims(Directory(tmp_path / "j")).say_alive(over)
    assert viewed(tmp_path / "j", now=1_000_050.0 + age_s).state == state


@pytest.mark.parametrize(("age_s", "state"), [(5.0, "running"), (600.0, "silent")])
def test_where_nobody_here_can_tell_the_ledger_does(tmp_path, age_s, state):
    write(tmp_path / "j", lived())
    assert viewed(tmp_path / "j", now=1_000_046.0 + age_s).state == state


def test_silence_is_dated_and_is_no_time_of_the_job(tmp_path):
    (tmp_path / "outlast.toml").write_text("[price]\nspot = 36\n")
    lost = event(46, "worker_lost", 2, 1, beat_t=1_000_046.0, step=30)
    write(tmp_path / "j", [*lived(), lost])
    view = viewed(tmp_path / "j", now=1_000_046.0 + 66 * 86_400)
    assert (view.state, view.wall_s, view.left_low_s) == ("silent", 46.0, None)
    assert view.cost == pytest.approx(0.46)
    assert view.incidents[0].is_open
    assert view.incidents[0].cost_s < 46.0
    text = " ".join(line.plain.strip() for line in screen(view, 80))
    assert "silent since 1970-01-12 13:47:26 UTC, 66 d 00 h ago: nobody here can tell" in text
    assert "last attempt 2 · 2 workers · ran for 46.0 s in all" in text
    assert "1970-01-12 13:47:02 UTC worker lost" in text


def test_a_sign_of_life_that_stands_still_or_goes_on(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(claims.time, "monotonic", lambda: clock[0])
    storage = Directory(tmp_path)
    assert claims.Onlooker(storage).lives() is None  # nobody has claimed anything
    Claims(storage).take(Claim(attempt=1, node="t", host="b", address="x:1", term="t"), 0)
    onlooker, count = claims.Onlooker(storage), 0
    for _ in range(30):
        clock[0] += 1.0
        count += 1
        Claims(storage).say_alive(SignOfLife(attempt=1, node="t", count=count))
        found = onlooker.lives()
    assert found is True
    for _ in range(20):
        clock[0] += 1.0
        found = onlooker.lives()
    assert found is False
    Claims(storage).say_alive(SignOfLife(attempt=1, node="t", count=count + 1, over=True))
    assert claims.Onlooker(storage).lives() is False


def test_ranks_of_other_machines_are_as_their_machines_said_last(tmp_path):
    def told(t, attempt, own_s, first=2):
        figures = {"step_s": [0.3] * 2, "own_s": own_s, "wait_s": [0.1] * 2, "data_s": [0.01] * 2}
        counts = {"seconds": 10.0, "kinds": [7], "num": [30] * 2, "longest_s": [0.5] * 2}
        return event(
            t, "rank_steps", attempt, None, "b", ranks=[first, first + 1], **counts, **figures
        )

    def age_of(view):
        return [one.age_s for one in view.ranks]

    events = [*lived(), told(48, 2, [0.1, 0.2]), told(58, 2, [0.1, 0.25])]
    events.append(told(59, 1, [9.0, 9.0]))  # late, of the attempt before
    write(tmp_path / "j", events)
    view = viewed(tmp_path / "j")  # 42 s later: nobody here can tell whether it runs
    assert [(one.rank, one.node, one.own_s) for one in view.ranks] == [
        (3, "b", 0.25),
        (2, "b", 0.1),
    ]
    console = Console(file=io.StringIO(), width=100, height=40, color_system=None)
    console.print(ViewScreen(view))
    assert "250 ms" in console.file.getvalue()
    assert age_of(view) == [42.0, 42.0]
    assert "as of 42.0 s ago" in console.file.getvalue()
    beside = told(59, 2, [0.3, 0.3], first=4)  # another agent of the same machine
    write(tmp_path / "j", [*events, beside])
    assert [one.rank for one in viewed(tmp_path / "j").ranks] == [4, 5, 3, 2]
    again = event(60, "attempt_formed", 3, None, world_size=2, nodes=1, hosts={"a": 2})
    write(tmp_path / "j", [*events, again])
    assert viewed(tmp_path / "j").ranks == []


def slow_rank(t, step, over=False, **more):
    fields = {"ranks": [3], "factor": 1.5, "since_step": 12, "lost_s": 0.4, "cause": "compute"}
    return event(t, "straggler", 2, 3, "b", **{**fields, "step": step, "over": over, **more})


def test_slow_ranks_are_those_of_the_report_and_one_that_is_over_is_not_forgotten(tmp_path):
    (tmp_path / "outlast.toml").write_text('[price]\nspot = 36\ncurrency = "USD"\n')
    prices = msgspec.structs.replace(priced("36"), currency="USD")

    def both(events, now):
        write(tmp_path / "j", events)
        view, job = viewed(tmp_path / "j", now=now), facts(events, now=now, prices=prices)
        assert [one.rank for one in view.slow_ranks] == job.slow_ranks
        assert [one.what for one in view.slow_ranks] == [
            slow_line(one, job).plain for one in job.slow_ranks
        ]
        assert [one.cost for one in view.slow_ranks] == [
            pytest.approx(job.cost_of(one.lost_s)) for one in job.slow_ranks
        ]
        return view

    events = [*lived(), slow_rank(46, 22), event(47, "step", 2, step=31, seconds=1.0)]
    (slow,) = both(events, 1_000_048.0).slow_ranks
    assert (slow.rank.ranks, slow.rank.until_step, slow.rank.over) == ((3,), 31, False)
    over = [*events, slow_rank(48, 31, over=True), event(49, "step", 2, step=60, seconds=1.0)]
    view = both(over, 1_000_050.0)
    (slow,) = view.slow_ranks
    assert (slow.rank.over, slow.rank.until_step) == (True, 31)
    text = " ".join(line.plain.strip() for line in screen(view, 120, 30))
    assert f"slow: {slow.what}" in text
    assert slow.what.endswith("USD")
    assert "1970-01-12 13:46:54 to 13:47:27 UTC (steps 12 to 31)" in slow.what
    many = [slow_rank(46.5 + i / 10, 23 + i, ranks=[i], cause="burst", over=True) for i in range(5)]
    text = " ".join(line.plain.strip() for line in screen(both([*events, *many], NOW), 120, 40))
    assert "slow: rank 3 on b" in text  # that still is, before those that were
    assert "and 4 more times that a rank was slow" in text
    view, seen = viewed(tmp_path / "j"), set()
    for height in range(5, 40):  # each is there as a whole, or not at all
        lines = screen(view, 80, height)
        text = " ".join(line.plain.strip() for line in lines)
        seen.add(num := sum(f"slow: {one.what}" in text for one in view.slow_ranks))
        assert text.count("slow: rank") == num
        assert len(lines) <= height
    assert seen == {0, 1, 2}


def test_messages_that_did_not_go_out_are_seen_until_one_does(tmp_path):
    failed = event(45, "not_told", 2, None, why="HTTP 500", since_t=1_000_044.0, of=1)
    earlier = event(44, "not_told", 2, None, why="HTTP 404", since_t=1_000_043.0, of=1)
    write(tmp_path / "j", [*lived(), earlier, failed])
    view = viewed(tmp_path / "j")
    assert view.untold.num == 2
    text = " ".join(line.plain.strip() for line in screen(view, 80, 24))
    assert "! 2 messages could not be sent since" in text
    assert "HTTP 500" in text
    assert "2 messages could not be sent" in status_line(view)
    events = [*lived(), failed, event(46, "not_told", 2, None, over=True)]
    write(tmp_path / "j", events)
    view = viewed(tmp_path / "j")
    assert view.untold == facts(events).untold
    assert "could not be sent" not in status_line(view)
    assert "1 message could not be sent from" in " ".join(x.plain for x in screen(view, 90))


def test_each_cell_of_a_bar_is_in_the_legend_and_in_any_font(tmp_path):
    write(tmp_path / "j", lived())
    held(tmp_path / "j", this_process())
    lines = [line.plain for line in screen(viewed(tmp_path / "j", now=1_000_047.0), 100)]
    (bar,) = (line for line in lines if line.startswith("goodput"))
    cells = set(bar.partition("%")[2].split()[0])
    legend = " ".join(lines[lines.index(bar) + 1 :])
    assert cells == set("=1234.")  # the smallest part has its cell, too
    assert all(re.search(rf"(^| ){re.escape(cell)} \w", legend) for cell in cells)
    assert all(ord(char) < 256 or char == "…" for char in "".join(lines))


def test_a_loop_that_goes_on_beyond_its_end_has_a_whole_bar(tmp_path):
    write(tmp_path / "j", [*lived(), event(47, "step", 2, step=10**12, seconds=1.0, until=100)])
    held(tmp_path / "j", this_process())
    lines = [line.plain for line in screen(viewed(tmp_path / "j", now=1_000_048.0), 80)]
    (bar,) = (line for line in lines if line.startswith("step "))
    assert set(bar.rpartition("  ")[2]) == {"="}


# --- any ledger, any terminal ---------------------------------------------------------------------

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 200),
    st.floats(allow_nan=False, allow_infinity=False, min_value=-1e13, max_value=1e13),
    st.sampled_from(["a", "b", "local", "", "x" * 300]),
    st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(st.sampled_from(["a", "b"]), st.integers(-1, 3), max_size=2),
)
NAMES = (
    *("step", "until", "seconds", "stalled_s", "beat_t", "exit_code", "world_size", "nodes"),
    *("hosts", "tier", "durable_s", "bytes", "interval_s", "every", "stacks", "ranks", "factor"),
    *("over", "deadline_t", "until_t", "operation", "error", "reason", "command", "node", "age_s"),
    *("kinds", "num", "step_s", "own_s", "wait_s", "data_s", "longest_s"),
)
EVENTS = st.lists(
    st.builds(
        lambda t, name, attempt, rank, node, fields: event(
            t, name, attempt, rank, "n", **{k: v for k, v in fields.items() if k != "node"}
        ),
        st.floats(0, 100, allow_nan=False).map(lambda t: round(t, 3)),
        st.sampled_from(sorted(EVENT_NAMES)),
        st.integers(0, 4),
        st.sampled_from([None, 0, 0, 1]),
        st.sampled_from(["a", "b"]),
        st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=8),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(EVENTS, st.integers(1, 130), st.integers(1, 50), st.binary(max_size=20))
def test_any_ledger_gives_a_view_that_fits(tmp_path_factory, events, width, height, torn):
    directory = tmp_path_factory.mktemp("j")
    write(directory, events, torn)
    view = viewed(directory)
    assert json.loads(msgspec.json.encode(to_json(view)))["job"] == JOB.id
    assert status_line(view, with_incident=True).count("\n") == 0
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, color_system=None)
    console.print(ViewScreen(view, "q: leave"), end="", height=height)
    lines = out.getvalue().split("\n")
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_a_line_that_is_cut_says_so(tmp_path):
    write(tmp_path / "j", lived())
    console = Console(file=io.StringIO(), width=12, height=24, color_system=None)
    console.print(ViewScreen(viewed(tmp_path / "j")))
    assert console.file.getvalue().startswith("job 0123456…\n")


def test_each_prefix_of_a_life_with_its_last_line_torn(tmp_path):
    whole = b"".join(map(encode, lived()))
    write(tmp_path / "j", [])
    for size in range(0, len(whole), 37):
        (tmp_path / "j" / FILE_NAME).write_bytes(whole[:size])
        view = viewed(tmp_path / "j")
        assert view.num_attempts <= 2
        assert screen(view, 80, 24)


def test_read_bit_by_bit_it_says_the_same(tmp_path):
    write(tmp_path / "j", lived())
    at_once = viewed(tmp_path / "j")
    following = Following(tmp_path / "b", JOB, config.load({"dir": str(tmp_path / "b")}))
    write(tmp_path / "b", [])
    whole = b"".join(map(encode, lived()))
    for at in range(0, len(whole), 101):
        with (tmp_path / "b" / FILE_NAME).open("ab") as file:
            file.write(whole[at : at + 101])
        following.look()
        following.view(NOW)
    following.settle()
    found = following.view(NOW)
    other = {"directory": at_once.directory}
    assert msgspec.structs.replace(found, **other) == at_once


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (40, 24), (80, 12)])
def test_the_first_questions_are_answered_on_any_screen(tmp_path, width, height):
    write(tmp_path / "j", [*lived(), event(50, "worker_lost", 2, 0, beat_t=1_000_049.0, step=33)])
    held(tmp_path / "j", this_process())
    lines = screen(viewed(tmp_path / "j"), width, height)
    assert len(lines) <= height
    assert max(len(line.plain) for line in lines) <= width
    text = " ".join(line.plain for line in lines)
    assert "running" in text.partition("attempt")[0]
    assert "step 30 of 100" in text
    assert "NOT BACK YET" in text
    assert "2 incidents" in text
    assert "Next: outlast report" in text


# --- the command ----------------------------------------------------------------------------------


def test_once_and_json(tmp_path):
    write(tmp_path / "j", [*lived(), event(50, "job_finished", 2, None, exit_code=0, reason="")])
    shown = CliRunner().invoke(cli, ["top", str(tmp_path / "j"), "--once"])
    assert shown.exit_code == 0
    assert shown.output.startswith("job 0123456789ab  finished")
    found = json.loads(CliRunner().invoke(cli, ["top", str(tmp_path / "j"), "--json"]).output)
    assert (found["state"], found["exit_code"], found["is_over"]) == ("finished", 0, True)
    assert found["incidents"][0]["number"] == 1


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        ({"exit_code": 0}, 0),
        ({"exit_code": 75}, 75),
        ({"exit_code": 76}, 76),
        ({"exit_code": 77}, 77),
        ({"exit_code": 78}, 78),
        ({"exit_code": 2}, 1),
        (None, 3),  # silent
    ],
    ids=str,
)
def test_scripts_hear_how_it_stands(tmp_path, ended, code):
    end = [] if ended is None else [event(50, "job_finished", 2, None, reason="", **ended)]
    write(tmp_path / "j", [*lived(), *end])
    for how in ("--once", "--json"):
        assert CliRunner().invoke(cli, ["top", str(tmp_path / "j"), how]).exit_code == code
    if ended is None:
        held(tmp_path / "j", this_process())  # somebody runs it
        assert CliRunner().invoke(cli, ["top", str(tmp_path / "j"), "--once"]).exit_code == 0


def test_in_lines_it_ends_with_the_job(tmp_path):
    write(tmp_path / "j", [*lived(), event(50, "job_finished", 2, None, exit_code=76, reason="no")])
    shown = CliRunner().invoke(cli, ["top", str(tmp_path / "j")])  # no terminal
    assert shown.exit_code == 76
    (line,) = shown.output.splitlines()
    assert "gave up (exit 76)" in line
    assert "\x1b" not in line


def test_one_that_has_not_started_is_one_line(tmp_path):
    write(tmp_path / "j", [])
    (tmp_path / "j" / FILE_NAME).unlink()
    shown = CliRunner().invoke(cli, ["top", str(tmp_path / "j")])
    assert shown.exit_code == 3
    assert shown.output == "./j: nothing has been started here yet\n"


def test_what_is_no_job_is_one_line_of_the_library(tmp_path):
    shown = CliRunner().invoke(cli, ["top", str(tmp_path)])
    assert shown.exit_code != 0
    assert "is not a job's directory" in str(shown.exception)
    both = CliRunner().invoke(cli, ["top", str(tmp_path), "--plain", "--json"])
    assert "give one of them" in both.output


def test_the_view_is_of_now(tmp_path):
    write(tmp_path / "j", lived())
    shown = CliRunner().invoke(cli, ["top", str(tmp_path / "j"), "--json"])
    assert abs(json.loads(shown.output)["t"] - time.time()) < 3600
