"""What a plan would have said, against what a ledger tells."""

import pytest
from unit_prices import priced

from outlast.ledger.events import Event
from outlast.report.facts import facts, to_json
from outlast.report.text import _few, forecast_lines

STEP_S = 10.0


def story(saves_every, losses=(), until=1000):
    """Steps of 10 s, a save of 1 s every so often, losses after which 20 s pass."""
    t, attempt, events = 1e6, 0, []

    def tell(name, rank=0, **fields):
        events.append(
            Event(
                t=t, mono=t, job="j", attempt=attempt, node="n", rank=rank, event=name,
                fields=fields,
            )
        )  # fmt: skip

    tell("job_started", rank=None)
    attempt = 1
    tell("attempt_formed", rank=None, world_size=2, nodes=1)
    tell("resumed", step=0)
    step = saved = 0
    lost = list(losses)
    while step < until:
        step, t = step + 1, t + STEP_S
        if lost and step >= lost[0]:
            lost.pop(0)
            tell("worker_lost", exit_code=-9, step=step - 1, beat_t=t - STEP_S)
            t, attempt, step = t + 20, attempt + 1, saved
            tell("attempt_formed", rank=None, world_size=2, nodes=1)
            tell("resumed", step=saved)
            continue
        stalled = 0.0
        if step % saves_every == 0:
            t, saved, stalled = t + 1, step, 1.0
            tell("snapshot", step=step, blocked_s=1.0, kind="full")
            tell("commit", step=step, durable_s=2.0, tier="local", kind="full")
        tell("step", step=step, seconds=STEP_S + stalled, stalled_s=stalled)
    tell("job_finished", rank=None, exit_code=0)
    return events


def test_a_quiet_job_did_a_little_better_than_predicted():
    job = facts(story(10), prices=priced(2.0))
    found = job.forecast
    assert found.interruptions == 0
    assert found.interruptions_predicted == pytest.approx(0.1 * 10100 / 3600, rel=0.01)
    assert found.interval_s == pytest.approx(100.0, rel=0.02)
    assert found.productive > found.productive_predicted > 0.95
    assert found.regret is None
    assert found.cost_predicted(job.money.cost) == pytest.approx(
        job.money.cost * found.productive / found.productive_predicted
    )


def test_one_that_saved_too_seldom_is_told_so():
    often = facts(story(5, [60, 160, 260, 360])).forecast
    seldom = facts(story(50, [90, 140, 190, 240, 290, 340, 390, 440])).forecast
    assert seldom.interruptions == 8
    assert seldom.productive < seldom.productive_predicted
    assert seldom.best_interval_s < 0.7 * seldom.interval_s
    assert seldom.regret > 0.05
    assert often.regret < 0.02


def test_it_is_in_words_and_in_numbers():
    events = story(50, [90, 190])
    lines = [line.plain for line in forecast_lines(facts(events, prices=priced(2.0)))]
    assert [line.split()[0] for line in lines] == [
        *("goodput", "failures", "plan", "cost", "interval")
    ]
    assert "predicted at one in 10 h, 2 measured" in lines[1]
    numbers = to_json(events, prices=priced(2.0))["forecast"]
    assert numbers["num_interruptions"] == 2
    assert numbers["cost_measured"] > 0
    assert 0 <= numbers["regret_fraction"] < 1


def test_without_training_or_saves_there_is_none():
    assert facts([]).forecast is None
    assert to_json(story(2000, until=20))["forecast"] is None


def planned(events, **more):
    """The story, as of a job whose plan was kept."""
    plan = {
        "planned_t": 1e6,
        "failures_per_h": 2.0,
        "failures_low_per_h": 1.0,
        "failures_high_per_h": 4.0,
        "rate_source": "given as 2/h",
        "productive_fraction": 0.5,
        "interval_s": 700.0,
        "checkpoint_s": 1.0,
    }
    head = {"t": 1e6, "mono": 1e6, "job": "j", "attempt": 0, "node": "n", "rank": None}
    first, *others = events
    return [first, Event(**head, event="planned", fields=plan | more), *others]


def test_what_a_kept_plan_said_stands_beside_what_came():
    job = facts(planned(story(50, [90, 190])), prices=priced(2.0))
    found = job.forecast
    hours = found.ran_h
    assert found.interruptions_predicted == pytest.approx(2 * hours)
    assert found.productive_predicted == 0.5
    assert found.cost_predicted(job.money.cost, job.money.price) == pytest.approx(
        2 * job.money.cost * found.productive
    )
    lines = [line.plain for line in forecast_lines(job)]
    assert f"{2 * hours:.1f} predicted ({hours:.1f} to {4 * hours:.1f}), 2 measured" in lines[1]
    assert "of 1970-01-12, with a save every 11 min 40 s" in lines[2]
    numbers = to_json(planned(story(50, [90, 190])), prices=priced(2.0))["forecast"]
    assert numbers["plan"]["rate_source"] == "given as 2/h"


def test_a_plans_own_price_counts():
    events = planned(story(50, [90, 190]), price_per_machine_hour=6.0)
    job = facts(events, prices=priced(2.0))
    assert job.forecast.cost_predicted(job.money.cost, job.money.price) == pytest.approx(
        3 * 2 * job.money.cost * job.forecast.productive
    )


def test_without_a_plan_it_is_said_how_to_keep_one():
    lines = [line.plain for line in forecast_lines(facts(story(50, [90])))]
    assert any("outlast plan --save keeps one" in line for line in lines)
    assert to_json(story(50, [90]))["forecast"]["plan"] is None


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0.0"), (12.34, "12.3"), (0.0675, "0.1"), (0.0123, "0.01"), (1e-9, "0.0")],
)
def test_few_failures_are_not_rounded_to_none(count, words):
    assert _few(count) == words
