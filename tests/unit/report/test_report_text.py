"""The report as a person reads it, line by line, and as data."""

import io
import itertools
import json

import pytest
from rich.console import Console
from unit_prices import priced

from outlast import units
from outlast.ledger.events import Event
from outlast.ledger.goodput import PARTS, Goodput, Split
from outlast.ledger.incidents import Incident
from outlast.report.facts import facts, to_json
from outlast.report.money import money
from outlast.report.page import page
from outlast.report.text import (
    ATTEMPTS_TOLD,
    LOST_TERM,
    SAVED_TERM,
    breakdown_lines,
    incident_lines,
    slow_lines,
    summary_lines,
    where_time_went,
)

_MONO = itertools.count()


def summary(events, now=None, **more):
    return summary_lines(facts(events, now=now, **more), now=now)


def ev(t, event, attempt=1, rank=None, **fields):
    return Event(
        t=t,
        mono=float(next(_MONO)),
        job="tiny",
        attempt=attempt,
        node="n",
        rank=rank,
        event=event,
        fields=fields,
    )


def formed(t, attempt=1):
    return ev(t, "attempt_formed", attempt, world_size=4, nodes=2)


def killed():
    """Two machines for 3,600 s: 1,800 s productive, 600 s replayed, 300 s each of the rest."""
    return [
        ev(0.0, "job_started", 0),
        formed(100.0),
        ev(300.0, "resumed", 1, 0, step=0),
        ev(1500.0, "step", 1, 0, step=1200, seconds=1200.0, stalled_s=0.0),
        ev(1500.0, "commit", 1, 0, step=600, durable_s=1.0, bytes=8, files=4),
        ev(1800.0, "worker_lost", 1, 1, beat_t=1500.0, step=1200, signal="SIGKILL"),
        formed(2000.0, 2),
        ev(2100.0, "resumed", 2, 0, step=600),
        ev(3300.0, "step", 2, 0, step=1800, seconds=1200.0, stalled_s=0.0),
        ev(3600.0, "job_finished", 2, exit_code=0, reason=""),
    ]


def plain(lines):
    return [line.plain for line in lines]


def test_where_time_went_shows_each_part_that_took_any():
    lines = plain(where_time_went(facts(killed()).workers, bar_width=8))
    assert lines == [
        " 50.0 %  productive                2 h 00 min  ████",
        " 16.7 %  replayed                 40 min 00 s  █▍",
        "  8.4 %  starting                 20 min 00 s  ▋",
        "  8.3 %  detecting                20 min 00 s  ▋",
        "  8.3 %  restarting               20 min 00 s  ▋",
        "  8.3 %  not known                20 min 00 s  ▋",
        "100.0 %  worker time               4 h 00 min",
    ]


def test_each_part_has_its_line_and_the_percents_add_up():
    split = Goodput(**dict.fromkeys(PARTS, 1.0), total=float(len(PARTS)))
    lines = plain(where_time_went(split))
    assert len(lines) == len(PARTS) + 1
    assert round(sum(float(line.split()[0]) for line in lines[:-1]), 6) == 100.0
    assert lines[-1].startswith("100.0 %")


def test_what_is_not_nothing_can_be_seen_and_bars_can_be_left_out():
    split = Goodput(productive=1e6, stalled=0.001, total=1e6 + 0.001)
    assert [line[-1] for line in plain(where_time_went(split))][:2] == ["█", "▏"]
    assert "█" not in "".join(plain(where_time_went(split, bar_width=0)))
    assert plain(where_time_went(Goodput())) == ["no time has passed yet"]


def test_each_part_has_its_price_and_waiting_costs_nothing():
    parts = {"productive": 3600.0, "waiting": 7200.0}
    machines = Goodput(**parts, total=10_800.0)
    spent = Split(machines=machines, machines_by_name={"a": {**dict.fromkeys(PARTS, 0.0), **parts}})
    paid = money(spent, {}, priced(0.7))
    lines = plain(where_time_went(machines, money=paid, bar_width=0))
    assert [line.split()[-1] for line in lines] == ["0.70", "0.00", "0.70"]


def test_an_incident_in_three_lines():
    incident = Incident(
        kind="worker lost",
        attempt=1,
        began_t=11_564.0,
        detected_t=11_564.6,
        what="rank 1 was killed by SIGKILL after step 57",
        from_step=57,
        resumed_step=50,
        resumed_t=11_566.0,
        back_t=11_572.3,
        closed=True,
    )
    assert plain(incident_lines(incident)) == [
        "1970-01-01 03:12:44 UTC  worker lost: rank 1 was killed by SIGKILL after step 57",
        "  detected after 600 ms; resumed at step 50, 7 steps lost",
        "  back after 8.3 s",
    ]


@pytest.mark.parametrize(
    ("closed", "words"),
    [(False, "  not back yet"), (True, "  over, without a new step after it")],
)
def test_an_incident_of_which_little_is_known_takes_two_lines(closed, words):
    incident = Incident(
        kind="drain", attempt=1, began_t=0.0, detected_t=0.0, what="x", closed=closed
    )
    assert plain(incident_lines(incident)) == ["1970-01-01 00:00:00 UTC  drain: x", words]
    ended = words if closed else "  not back: the job's end (gave up)"
    job = facts([*killed()[:-1], ev(4000.0, "job_finished", 2, exit_code=76)])
    assert plain(incident_lines(incident, job))[1] == ended


def test_the_summary():
    assert plain(summary(killed(), prices=priced(0.7, 1.0))) == [
        "job tiny: finished",
        "  steps     1,800 steps, 600 of them replayed",
        "  attempts  2 attempts",
        "  commits   1 commit (newest: step 600)",
        "  goodput   50.0 % of 4 h 00 min of worker time, in 1 h 00 min, went into new steps",
        "  incidents 1 incident, 600 steps lost",
        (
            f"  cost      1.40, of which 0.70 lost: {LOST_TERM}; 0.067 more than {SAVED_TERM} "
            "(0.7 per machine and hour, spot; in the currency of [price])"
        ),
    ]
    # 2 machine-hours at 0.70 were spent; 1.33 h on demand would have done without the loss.
    cheap = plain(summary(killed(), prices=priced(0.5, 1.0)))[-1]
    assert f"1.00, of which 0.50 lost: {LOST_TERM}; 0.33 less than {SAVED_TERM}" in cheap
    assert "on demand" in plain(summary(killed(), prices=priced(on_demand=1.0)))[-1]
    assert len(summary(killed())) == 6
    assert plain(summary([])) == ["no job has been started here: the ledger is empty"]


def test_a_running_job_says_when_it_was_last_heard_of():
    lines = plain(summary(killed()[:-1], now=3312.0))
    assert lines[0] == "job tiny: running, last heard of 12.0 s ago"
    assert (
        plain(summary(killed()[:6]))[5]
        == "  incidents 1 incident, no steps lost so far, 1 not over"
    )


def test_a_drain_that_was_given_up_says_what_it_lost():
    def told(*, committed):
        return Incident(
            kind="drain",
            attempt=1,
            began_t=0.0,
            detected_t=0.0,
            what="all ranks stopped after step 57 without a commit",
            from_step=57,
            standing_step=committed,
        )

    assert plain(incident_lines(told(committed=50)))[1] == (
        "  the commit of step 50 stands, 7 steps lost"
    )
    assert plain(incident_lines(told(committed=0)))[1] == ("  nothing is committed, 57 steps lost")


@pytest.mark.parametrize(
    ("more", "state"),
    [
        ([], "running"),
        ([ev(4000.0, "drained", 2, step=1800, committed=True)], "drained"),
        (
            [
                ev(4000.0, "drained", 2, step=1800, committed=True),
                ev(4000.1, "step", 2, 0, step=1800),
            ],
            "drained",
        ),
        ([ev(4000.0, "job_finished", 2, exit_code=0)], "finished"),
        ([ev(4000.0, "job_finished", 2, exit_code=75)], "drained"),
        ([ev(4000.0, "job_finished", 2, exit_code=76)], "gave up"),
        ([ev(4000.0, "job_finished", 2, exit_code=77)], "storage unusable"),
        ([ev(4000.0, "job_finished", 2, exit_code=78)], "refuses to resume"),
        ([ev(4000.0, "job_finished", 2, exit_code=1)], "failed"),
        ([ev(4000.0, "job_finished", 2)], "failed"),
        (
            [ev(4000.0, "job_finished", 2, exit_code=75), ev(5000.0, "job_started", 2)],
            "running",
        ),
    ],
)
def test_the_state_is_what_the_newest_events_say(more, state):
    assert facts([*killed()[:-1], *more]).state == state


def test_an_end_that_was_followed_by_a_start_is_no_end():
    events = [*killed()[:-1], ev(4000.0, "job_finished", 2, exit_code=75, reason="notice")]
    assert (facts(events).exit_code, facts(events).reason) == (75, "notice")
    events.append(ev(5000.0, "job_started", 2))
    assert (facts(events).exit_code, facts(events).reason) == (None, "")


def test_the_reason_of_the_end_is_told():
    events = [*killed()[:-1], ev(4000.0, "job_finished", 2, exit_code=76, reason="3 restarts")]
    assert plain(summary(events))[0] == "job tiny: gave up (3 restarts)"


def examined(t, machine, *, fit, **more):
    sick = [{"name": "clock", "status": "failed", "seen": "30 s ahead"}]
    return ev(t, "preflight", 0, machine=machine, fit=fit, findings=[] if fit else sick, **more)


def test_machines_that_the_doctor_found_unfit_are_told_until_they_are_fit():
    events = [*killed()[:-1], examined(50.0, "a", fit=True, unfit={"b": "disk"})]
    events.append(examined(60.0, "c", fit=False))
    assert facts(events).unfit == {"b": "disk", "c": "clock: 30 s ahead"}
    assert "  preflight b was left out: disk" in plain(summary(events))
    events.append(examined(70.0, "c", fit=True, unfit={}))
    assert to_json(events)["unfit"] == {"b": "disk"}


def test_an_examination_after_the_end_is_no_time_of_the_job():
    before = facts(killed())
    after = facts([*killed(), examined(9000.0, "c", fit=False)])
    assert (after.state, after.workers) == (before.state, before.workers)


def test_money_is_for_machines_that_were_held():
    events = [*killed()[:-1], ev(3300.0, "drained", 2, step=1800, committed=True)]
    events += [ev(3300.0, "job_finished", 2, exit_code=75), ev(9300.0, "job_started", 2)]
    job = facts(events, prices=priced(on_demand=3.6))
    assert job.machines.waiting == 12_000.0
    assert job.money.cost == pytest.approx(2 * 3300 * 3.6 / 3600)
    assert job.money.lost == pytest.approx(2 * 1500 * 3.6 / 3600)


def test_to_json_is_plain_data_with_units_in_names():
    data = to_json(killed(), prices=priced(0.7))
    assert json.loads(json.dumps(data)) == data
    assert sum(data["workers_s"].values()) == pytest.approx(data["workers_total_s"])
    assert tuple(data["workers_s"]) == tuple(data["machines_s"]) == PARTS
    assert (data["state"], data["exit_code"], data["wall_s"]) == ("finished", 0, 3600.0)
    assert (data["num_steps_done"], data["num_steps_replayed"]) == (1800, 600)
    assert (data["num_attempts"], data["num_commits"], data["committed_step"]) == (2, 1, 600)
    assert data["fraction_productive"] == pytest.approx(0.5)
    assert (data["cost"], data["cost_lost"]) == (pytest.approx(1.4), pytest.approx(0.7))
    (incident,) = data["incidents"]
    assert incident["what"] == "rank 1 was killed by SIGKILL after step 1200"
    assert (incident["lost_steps"], incident["ranks"]) == (600, [1])
    assert (incident["detected_after_s"], incident["back_after_s"]) == (300.0, 1800.0)
    empty = to_json([])
    assert (empty["state"], empty["cost"], empty["incidents"]) == ("not started", None, [])


@pytest.mark.parametrize("terminal", [True, False])
def test_the_console_decides_on_colour(terminal):
    console = Console(
        width=200,
        file=io.StringIO(),
        force_terminal=terminal,
        color_system="standard" if terminal else "auto",
    )
    for line in [*summary(killed()), *where_time_went(facts(killed()).workers)]:
        console.print(line)
    assert ("\x1b" in console.file.getvalue()) is terminal


def slow(t, step, **fields):
    given = {"node": "b", "ranks": [3], "cause": "compute", "of": "compute", "factor": 1.5}
    given |= {"since_step": 401, "lost_s": 0.5, "over": False, "action": "report"}
    return ev(t, "straggler", 1, 3, step=step, **{**given, **fields})


def test_slow_ranks_are_told_with_what_they_have_cost():
    story = [*killed()[:4], slow(700.0, 430), slow(900.0, 600, over=True)]
    burst = {"cause": "burst", "over": True, "ranks": [1], "since_step": 900, "lost_s": 0.1}
    story.append(slow(950.0, 909, **burst))
    job = facts(story)
    assert job.waited_s == pytest.approx(101.0)
    assert [line.split(":")[0] for line in plain(slow_lines(job))] == [
        "rank 3 on b",
        "rank 1 on b",
    ]
    first, second = plain(slow_lines(job))
    assert "slow, its steps 50 % longer than the others', 1970-01-01 00:" in first
    assert first.endswith("(steps 401 to 600), about 1 min 40 s lost waiting")
    assert ": slow for some steps, these 50 % longer than the others'" in second
    paid = facts(story, prices=priced(3.6))
    (share, _) = paid.slow_ranks
    price = paid.money.cost * share.lost_s / paid.held_s
    assert plain(slow_lines(paid))[0].endswith(f"waiting and {paid.money.amount(price)} in money")
    assert to_json(story, prices=priced(3.6))["slow_ranks"][0]["cost"] == pytest.approx(price)
    (line,) = [line for line in plain(summary(story)) if "slow rank" in line]
    assert line == (
        "  slow      1 slow rank and 1 burst; about 1 min 41 s of the job's "
        f"{units.seconds(job.held_s)} were lost waiting for them (an estimate, part of the "
        "productive time; those at the same time counted once)"
    )
    data = json.loads(json.dumps(to_json(story)))
    assert data["waited_for_slow_ranks_s"] == pytest.approx(101.0)
    assert [one["ranks"] for one in data["slow_ranks"]] == [[3], [1]]


def test_what_was_done_about_late_workers_is_told():
    moved = {"counts": [3, 1], "factors": [3.0], "late": [1], "back": [], "from_step": 9}
    samples = {"first_step": 10, "step": 19, "steps": 4}
    story = [
        *killed()[:4],
        ev(700.0, "late_moved", step=7, probes=[], **moved),
        ev(701.0, "late_moved", step=90, probes=[1], **moved),
        ev(702.0, "late_dropped", samples={"1": 8, "10": 2}, **samples),
        ev(703.0, "late_dropped", samples={"1": 1000}, **samples),
    ]
    words = (
        "shards of rank 1 were made by others, shared out anew 1 time; 1,010 samples of 8 steps "
        "are in no sum (rank 1: 1,008, rank 10: 2)"
    )
    assert f"  late      {words}" in plain(summary(story))
    assert plain(slow_lines(facts(story))) == [words]
    assert to_json(story)["late"]["dropped"] == {"1": 1008, "10": 2}
    assert to_json(killed())["late"] is None


def test_nothing_is_said_of_slow_ranks_where_there_are_none():
    assert not [line for line in plain(summary(killed())) if "slow" in line]


def test_a_tiers_own_interval_is_told_until_there_is_another():
    why = "only losses of a machine need it, and a copy was measured"
    events = [
        ev(0, "job_started"),
        formed(1),
        ev(2, "resumed", step=0, rank=0),
        ev(3, "cadence", tier=None, interval_s=30.0, reason="the first checkpoint was measured"),
        ev(4, "cadence", tier="s3", interval_s=600.0, every=20, reason=why),
    ]
    lines = plain(summary(events))
    assert f"  tier      s3 every 10 min 00 s in calm, as decided: {why}" in lines
    assert to_json(events)["tiers"]["s3"]["interval_s"] == 600.0
    later = [*events, formed(5, attempt=2)]
    assert to_json(later)["tiers"] == to_json(events)["tiers"], "attempts say what is new"
    later.append(ev(6, "cadence", tier="s3", interval_s=60.0, reason=why))
    assert to_json(later)["tiers"]["s3"]["interval_s"] == 60.0


def test_messages_that_could_not_be_sent_are_counted_until_one_was():
    events = [
        ev(t, "not_told", addresses=1, of=2, why="no answer", since_t=t - 5.0) for t in (9, 50)
    ]
    events = [ev(0, "job_started"), *events]
    assert to_json(events[:1])["untold"] is None
    (line,) = [line for line in plain(summary(events)) if line.startswith("  messages")]
    since = units.when(4.0)
    assert line.endswith(
        f"2 messages could not be sent since {since} (no answer); try outlast tell --test"
    )
    assert f"2 messages could not be sent since {since} (no answer)" in page(events, None)
    over = [*events, ev(60, "not_told", over=True)]
    (line,) = [line for line in plain(summary(over)) if line.startswith("  messages")]
    assert line.endswith(f"2 messages could not be sent from {since} to {units.when(60.0)}")
    again = [*over, ev(90, "not_told", why=None, since_t="x"), ev(91, "not_told", over=True)]
    assert to_json(again)["untold"]["num"] == 1


def test_keepers_that_ended_are_counted():
    events = [
        ev(0, "job_started"),
        ev(2, "watch_gap", what="keeper", reason="it has ended", seconds=0.1),
    ]
    assert not any("keeper" in line for line in plain(summary(events[:1])))
    found = [line for line in plain(summary(events)) if line.startswith("  keeper")]
    assert found == [
        "  keeper    ended once, and another was started; what it had in memory alone went with it"
    ]


def a_life(attempts, hosts, tiers=()):
    """Attempts of ten minutes each, of which the last nine train."""
    events = [ev(0.0, "job_started", 0)]
    formed = {"world_size": sum(hosts.values()), "nodes": len(hosts), "hosts": hosts}
    for number in range(1, attempts + 1):
        t, step = 600.0 * (number - 1), 540 * (number - 1)
        events.append(ev(t, "attempt_formed", number, **formed))
        events.append(ev(t + 60, "resumed", number, 0, step=step))
        if number > 1:
            events[-1].fields["source"] = "from local"
        events.append(ev(t + 600, "step", number, 0, step=step + 540, seconds=540.0))
        for tier in tiers:
            event, name = ("commit", "durable_s") if tier == "local" else ("tier_copied", "seconds")
            took = {"bytes": 10**9, name: 2.0 * number, "step": step + 540, "tier": tier}
            events.append(ev(t + 600, event, number, 0, **took))
        if number < attempts:
            events.append(ev(t + 600, "restart", number, reason="", kind="killed"))
    return events


def test_one_attempt_on_one_machine_needs_no_breakdown():
    assert breakdown_lines(facts(a_life(1, {"a": 2}))) == []


def test_the_time_of_attempts_machines_and_tiers():
    events = a_life(2, {"a": 2, "b": 6}, ["local", "s3"])
    events += [
        ev(1100.0, "save_skipped", 2, 0, step=700, tier="s3", reason="slow"),
        ev(1190.0, "snapshot", 2, 0, step=1080, blocked_s=3.0, tiers=None),
    ]
    tiers = "2 checkpoints, 2.0 GB, 3.0 s each, 4.0 s the slowest, training stood still for 1.5 s"
    assert plain(breakdown_lines(facts(events))) == [
        "  attempt 1 1 h 20 min: 90.0 % productive, 10.0 % starting",
        "  attempt 2 1 h 20 min: 90.0 % productive, 10.0 % restarting",
        "  machine   a, 40 min 00 s: 90.0 % productive, 5.0 % starting, 5.0 % restarting",
        "  machine   b, 2 h 00 min: 90.0 % productive, 5.0 % starting, 5.0 % restarting",
        f"  tier      local, {tiers}",
        f"  tier      s3, {tiers}, 1 skipped",
    ]


def test_of_many_attempts_the_newest_are_told():
    lines = plain(breakdown_lines(facts(a_life(12, {"a": 1}))))
    assert lines[0] == "  attempts  7 earlier ones: outlast report --json"
    assert [line.split()[1] for line in lines[1:]] == ["8", "9", "10", "11", "12"]
    assert len(lines) == ATTEMPTS_TOLD + 1


def test_a_job_that_fell_silent_is_counted_until_then():
    """Else each hour of a silence is a cost, and soon all of it."""
    begun = [
        ev(0.0, "job_started", attempt=0),
        ev(1.0, "attempt_formed", world_size=2, nodes=1),
        ev(2.0, "resumed", rank=0, step=0),
        ev(100.0, "step", rank=0, step=50, seconds=98.0),
    ]
    week_s = 7 * 86_400.0
    told = facts(begun, now=100.0 + week_s, prices=priced(10.0))
    assert told.state == "silent"
    assert told.workers.wall_s == pytest.approx(100.0)
    assert told.money.cost == pytest.approx(10.0 * 100 / 3600)
    first = summary(begun, now=100.0 + week_s)[0].plain
    assert "silent, last heard of 7 d 00 h ago; counted until then" in first
    assert facts(begun, now=200.0).state == "running"
    assert facts(begun, now=200.0).workers.wall_s == pytest.approx(200.0)


def test_that_nothing_is_saved_is_said():
    def commits(events):
        return next(line.plain for line in summary(events) if "  commits" in line.plain)

    begun = [ev(0.0, "job_started", attempt=0), formed(1.0), ev(2.0, "resumed", rank=0, step=0)]
    assert "saved" not in commits(begun)
    begun.append(ev(9.0, "step", rank=0, step=5, seconds=7.0))
    assert "nothing is saved, a restart begins at step 0" in commits(begun)
    assert "saved" not in commits([*begun, ev(9.5, "commit", rank=0, step=5, tier="local")])
