"""What somebody should look at: a machine that stands out, a silence, a checkpoint that may go."""

import json

import msgspec
import pytest
from click.testing import CliRunner
from test_ranks import a_job
from test_report_text import summary
from unit_prices import priced

from outlast.cli.report import command
from outlast.ledger.events import Event
from outlast.ledger.goodput import split
from outlast.report.facts import facts, to_json
from outlast.report.page import page
from outlast.report.text import (
    INCIDENT_TERMS,
    UNNAMED_TOLD,
    breakdown_lines,
    every_words,
    incident_lines,
    slow_lines,
    summary_lines,
    warning_lines,
)
from report_story import large_job, story, write_story

HOUR_S = 3600.0


def ev(t, name, attempt=1, node="a", rank=None, **fields):
    head = {"job": "j", "attempt": attempt, "node": node, "rank": rank, "event": name}
    return Event(t=1e9 + t, mono=t, **head, fields=fields)


def begun(hosts=("a", "b")):
    formed = {"world_size": len(hosts), "nodes": len(hosts), "hosts": dict.fromkeys(hosts, 1)}
    return [
        ev(0.0, "job_started", 0),
        ev(1.0, "attempt_formed", **formed),
        ev(2.0, "resumed", rank=0, step=0),
        ev(102.0, "step", rank=0, step=100, seconds=100.0),
    ]


def plain(lines):
    return [line.plain for line in lines]


def summed(events, **more):
    return "\n".join(plain(summary(events, **more)))


# --- a machine ------------------------------------------------------------------------------------


def losing(*nodes):
    """A machine lost each hundred seconds, these one after the other."""
    events, t, hosts = begun(("a", "b", "c")), 102.0, dict.fromkeys("abc", 1)
    for number, node in enumerate(nodes, 2):
        lost = {"step": 100 * (number - 1), "beat_t": 1e9 + t, "signal": "SIGKILL"}
        events.append(ev(t + 1, "worker_lost", number - 1, node, 1, **lost))
        events.append(ev(t + 2, "attempt_formed", number, world_size=3, nodes=3, hosts=hosts))
        events.append(ev(t + 3, "resumed", number, rank=0, step=100 * (number - 1)))
        t += 103
        events.append(ev(t, "step", number, rank=0, step=100 * number, seconds=100.0))
    return events


def test_a_machine_with_most_of_the_incidents_stands_out():
    verdict = facts(losing("b", "b", "c")).verdict
    assert verdict.machines == ["b"]
    assert verdict.words == ("b stands out: had 2 of the 3 incidents in which machines are named")
    assert f"  machines  {verdict.words}" in summed(losing("b", "b", "c"))
    assert "<strong>Machines:</strong> b stands out: had 2 of the 3" in page(losing("b", "b", "c"))
    assert to_json(losing("b", "b", "c"))["machine_verdict"]["machines"] == ["b"]


@pytest.mark.parametrize("nodes", [("b",), ("a", "b"), ("a", "b", "b", "c"), ()])
def test_no_machine_is_bad_for_one_incident_nor_for_half_of_them(nodes):
    verdict = facts(losing(*nodes)).verdict
    assert verdict.machines == []
    assert verdict.words.startswith("no machine is bad: ")


def test_a_job_of_one_machine_has_none_that_stands_out():
    assert facts(begun(("a",))).verdict is None
    assert "machines" not in summed(begun(("a",)))


def test_the_machine_that_is_slow_all_along_is_named():
    events = a_job(40, lambda rank, minute: 0.9 if rank == 3 else 0.4)
    job = facts([*begun(("a", "b")), *_later(events)])
    assert job.verdict.machines == ["b"]
    assert "100 % of what slow ranks have cost (20 min 00 s) was waiting" in job.verdict.words
    (slow,) = job.slow_ranks
    assert (slow.node, slow.ranks, slow.cause, slow.since_step) == ("b", (3,), "not named", None)
    assert job.waited_s == pytest.approx(slow.lost_s) == pytest.approx(0.5 * 60 * 40)


def _later(events, by_s=200.0):
    return [msgspec.structs.replace(one, t=one.t + by_s) for one in events]


def test_where_slowness_goes_from_machine_to_machine_none_is_bad():
    job = facts(large_job(8))
    assert job.verdict.machines == []
    assert job.verdict.words.startswith("no machine is bad: slowness went from machine to machine")
    assert job.verdict.words in page(large_job(8))
    *told, rest = plain(slow_lines(job))
    assert (len(told), rest.split(" that ")[0]) == (UNNAMED_TOLD, "and 5 more")
    # Of machines that are slow in turn the others wait for one at a time.
    assert job.waited_s < sum(one.lost_s for one in job.slow_ranks)


def test_what_the_watch_named_is_told_once():
    job = facts(story())
    (slow,) = job.slow_ranks
    assert (slow.node, slow.cause) == ("node-2", "compute")
    assert job.waited_s == pytest.approx(slow.lost_s) == pytest.approx(599 * 1.1)
    assert slow.from_t < slow.until_t
    (rank,) = [one for one in to_json(story())["ranks"] if one["slow_factor"]]
    assert "lost_s" not in rank


def test_machines_of_which_the_same_is_said_are_one_line():
    hosts = [f"n{number}" for number in range(9)]
    lines = [line for line in plain(breakdown_lines(facts(begun(hosts)))) if "machine" in line]
    (line,) = lines
    assert line.startswith("  machine   9 machines alike: n0 to n8, 1 min 42 s: ")
    kinds = [ev(0.5, "machine", 0, node, kind="p5", source="aws") for node in hosts[:2]]
    first, second = [
        line for line in plain(breakdown_lines(facts([*begun(hosts), *kinds]))) if "alike" in line
    ]
    assert "2 machines alike (p5): n0, n1" in first
    assert "7 machines alike: n2 to n8" in second


def test_a_table_that_is_cut_says_so():
    assert "40 of 512; the others are in outlast report --json" in page(large_job(64))


# --- incidents, silences, warnings ----------------------------------------------------------------


def test_text_page_and_json_have_the_incidents_in_one_order_with_one_cost():
    data, text = to_json(story()), page(story())
    job = facts(story())
    began = [one["began_t"] for one in data["incidents"]]
    assert began == sorted(began)
    articles = [text.index(f'aria-label="incident {number}"') for number in range(1, 4)]
    assert articles == sorted(articles)
    for one, told in zip(job.incidents, data["incidents"], strict=True):
        words = plain(incident_lines(one, job))[-1].strip()
        assert words.startswith("cost ")
        assert words in text
        assert told["cost_s"] == pytest.approx(sum(told["cost_parts_s"].values()))
    assert INCIDENT_TERMS[1:] in text


def test_the_steps_made_again_cost_together_what_the_job_says_they_did():
    """Each incident's at the time of such a step; where none was sampled late, they add up."""
    job = facts(losing("b", "c"))
    assert job.workers.steps_replayed == 0
    lost = [*begun(("a",))]
    lost += [ev(103.0, "worker_lost", node="a", rank=0, step=100, beat_t=1e9 + 102)]
    lost += [ev(104.0, "attempt_formed", 2, world_size=1, nodes=1)]
    lost += [ev(105.0, "resumed", 2, rank=0, step=60)]
    lost += [ev(105.0 + n, "step", 2, rank=0, step=60 + n, seconds=1.0) for n in range(1, 51)]
    job = facts(lost)
    (one,) = job.incidents
    cost = job.cost_of_incident(one)
    assert one.lost_steps == job.workers.steps_replayed == 40
    assert cost.again_s == pytest.approx(39 * 1.0)  # the first is in the time until then
    assert cost.total_s == pytest.approx(1.0 + 3.0 + 39.0)


def silent(hours):
    """Something after a silence."""
    t = 102.0 + hours * HOUR_S
    return [*begun(), ev(t, "step", rank=0, step=200, seconds=100.0)]


def test_a_silence_is_told_as_an_incident():
    job = facts(silent(1.5))
    (one,) = job.incidents
    assert (one.kind, one.closed) == ("silence", True)
    assert plain(incident_lines(one, job)) == [
        (
            "2001-09-09 01:48:22 UTC  silence: nothing was written for 1 h 30 min; the next word "
            "came at 2001-09-09 03:18:22 UTC"
        )
    ]
    assert job.cost_of_incident(one) is None
    assert "silence" in page(silent(1.5))
    assert facts(silent(0.9)).incidents == []


def test_time_of_which_an_incident_tells_is_no_silence():
    lost_t = 102.0 + 2 * HOUR_S
    lost = ev(lost_t, "worker_lost", node="b", rank=1, step=100, beat_t=1e9 + 102.0)
    assert [one.kind for one in facts([*begun(), lost]).incidents] == ["worker lost"]
    ended = [*begun(), ev(103.0, "drained", step=100, committed=True)]
    ended += [ev(lost_t, "job_started", 0), ev(lost_t + 1, "attempt_formed", 2, world_size=2)]
    assert "silence" not in [one.kind for one in facts(ended).incidents]


def test_an_incident_that_is_not_over_costs_so_far_and_silence_costs_nothing():
    lost = [*begun(), ev(104.0, "worker_lost", node="b", rank=1, step=100, beat_t=1e9 + 102)]
    job = facts(lost, now=1e9 + 164)
    words = plain(incident_lines(job.incidents[0], job))[-1]
    assert words == (
        "  cost 1 min 02 s of each worker so far: 2.0 s until it was noticed, 1 min 00 s since "
        "then, and training stands still"
    )
    later = facts(lost, now=1e9 + 104 + 9 * HOUR_S)
    assert later.cost_of_incident(later.incidents[0]).total_s == pytest.approx(2.0)
    ended = facts([*lost, ev(105.0, "job_finished", exit_code=76)])
    assert ended.cost_of_incident(ended.incidents[0]) is None


def test_a_script_without_a_session_is_not_silent_while_it_says_nothing():
    unheard = [*begun()[:2], ev(2 * HOUR_S, "job_finished", exit_code=0)]
    assert facts(unheard).incidents == []


def test_a_job_that_fell_silent_has_a_warning_with_the_next_command():
    job = facts(begun(), now=1e9 + 102 + 5 * HOUR_S)
    (warning,) = job.warnings
    assert warning.what.startswith("nothing was written for 5 h 00 min: it hangs, or ")
    (line,) = plain(warning_lines(job, "/jobs/one"))
    assert line.endswith("\n  Next: outlast top --once /jobs/one")
    (bare,) = facts(begun()[:2], now=1e9 + 2 * HOUR_S).warnings
    assert "a script without a session writes nothing" in bare.what
    assert facts(begun(), now=1e9 + 200).warnings == []


def saved(*, on_s3, end=0):
    local = {"tier": "local", "durable_s": 1.0, "bytes": 8, "kind": "full"}
    copied = {"tier": "s3", "seconds": 1.0, "bytes": 8}
    return [
        *begun(),
        ev(103.0, "commit", rank=0, step=80, **local),
        ev(104.0, "tier_copied", step=80, **copied),
        ev(105.0, "commit", rank=0, step=100, **local),
        *([ev(106.0, "tier_copied", step=100, **copied)] if on_s3 else []),
        *([ev(107.0, "job_finished", exit_code=end)] if end is not None else []),
    ]


@pytest.mark.parametrize("end", [0, 75, 76])
def test_a_last_checkpoint_on_the_first_tier_alone_is_a_warning(end, tmp_path):
    (warning,) = facts(saved(on_s3=False, end=end)).warnings
    assert "(step 100) is on the first tier, local, alone; s3 has step 80" in warning.what
    assert warning.command == "outlast checkpoints export --step 100 --out ELSEWHERE"
    assert facts(saved(on_s3=True, end=end)).warnings == []
    assert facts(saved(on_s3=False, end=None)).warnings == []  # the copy may be on its way
    job = tmp_path / "job"
    write_story(job, saved(on_s3=False, end=end))
    text = CliRunner().invoke(command, [str(job)])
    assert f"warning: {warning.what}\n  Next: {warning.command} {job}\n" in text.output
    told = json.loads(CliRunner().invoke(command, [str(job), "--json"]).output)
    assert told["warnings"] == [{"what": warning.what, "command": warning.command}]
    drawn = page(saved(on_s3=False, end=end), job)
    assert f"{warning.what}. Next: <code>{warning.command}</code>" in drawn


def test_how_often_is_told_as_it_was_set_chosen_and_was():
    events = [
        *begun(),
        ev(50.0, "cadence", tier=None, interval_s=30.0, reason="measured"),
        *(
            ev(60.0 + t, "commit", rank=0, step=60 + t, tier="local", durable_s=1.0, bytes=8)
            for t in (0, 30, 70)
        ),
    ]
    job = facts(events, every="auto")
    assert every_words("local", job.tiers["local"]) == (
        "local every 30.0 s in calm, as decided: measured; every 35.0 s as it was, in the middle, "
        "and 40.0 s at the longest"
    )
    assert "  every     checkpoint.every is auto" in plain(summary_lines(job))
    data = to_json(events, every="auto")
    assert (data["checkpoint_every"], data["tiers"]["local"]["was_s"]) == ("auto", 35.0)


# --- money ----------------------------------------------------------------------------------------


def test_each_amount_has_its_currency():
    prices = msgspec.structs.replace(priced(3600.0, 7200.0), currency="EUR")
    events = losing("b")
    job = facts(events, prices=prices)
    assert f"{job.money.cost:,.2f} EUR, of which {job.money.lost:,.2f} EUR lost" in summed(
        events, prices=prices
    )
    assert " EUR: " in plain(incident_lines(job.incidents[0], job))[-1]
    text = page(events, prices=prices)
    assert f"<dd>{job.money.cost:,.2f} EUR</dd>" in text
    assert to_json(events, prices=prices)["currency"] == "EUR"
    assert "in the currency of [price]" in page(events, prices=priced(3600.0))


def test_a_slow_ranks_price_is_its_part_of_the_jobs():
    job = facts(story(), prices=priced(36.0))
    assert job.cost_of(job.held_s) == pytest.approx(job.money.cost)
    (line,) = plain(slow_lines(job))
    price = job.money.amount(job.cost_of(job.slow_ranks[0].lost_s))
    assert line.endswith(f" lost waiting and {price} in money")
    assert split(story()).machines.held / 4 == pytest.approx(job.held_s, rel=0.01)
