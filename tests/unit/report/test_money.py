"""Each machine at the price of its kind; what has no price is said, not guessed."""

import itertools
import json
import math

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given
from test_report_text import summary
from unit_prices import priced

from outlast.health.exporter import CadenceSetting
from outlast.ledger.events import Event
from outlast.ledger.goodput import split
from outlast.ledger.so_far import SoFar
from outlast.metrics.folded import JobFold
from outlast.metrics.news import NewsFold, NewsMarks
from outlast.report.facts import facts, to_json
from outlast.report.money import held_s, kinds_of, money
from outlast.report.text import LOST_TERM

_MONO = itertools.count()
KINDS = {"a": "p5", "b": "p5", "c": "g6"}


def ev(t, name, attempt=1, node="a", rank=None, **fields):
    head = {"job": "j", "attempt": attempt, "node": node, "rank": rank, "event": name}
    return Event(t=t, mono=t + 1e-6 * next(_MONO), **head, fields=fields)


def a_job(kinds=KINDS):
    """Three machines for an hour, of which half is new steps; then two of them for another."""
    three, two = {"a": 4, "b": 4, "c": 2}, {"a": 4, "b": 4}
    return [
        ev(0.0, "job_started", 0),
        *(ev(0.0, "machine", 0, node, kind=kind, source="aws") for node, kind in kinds.items()),
        ev(0.0, "attempt_formed", world_size=10, nodes=3, hosts=three),
        ev(1800.0, "resumed", rank=0, step=0),
        ev(3600.0, "step", rank=0, step=100, seconds=1800.0),
        ev(3600.0, "worker_lost", node="c", rank=9, step=100, beat_t=3600.0),
        ev(3600.0, "attempt_formed", 2, world_size=8, nodes=2, hosts=two),
        ev(3600.0, "resumed", 2, rank=0, step=100),
        ev(7200.0, "step", 2, rank=0, step=200, seconds=3600.0),
        ev(7200.0, "job_finished", 2, exit_code=0, reason=""),
    ]


def paid(events, prices):
    return money(split(events), kinds_of(events), prices)


def cost_line(prices):
    (line,) = [one.plain for one in summary(a_job(), prices=prices) if "  cost  " in one.plain]
    return line.removeprefix("  cost      ")


def test_each_machine_is_reckoned_at_its_own_price():
    found = paid(a_job(), priced("p5=10, g6=2", "p5=30, g6=3"))
    assert found.by_machine == pytest.approx({"a": 20.0, "b": 20.0, "c": 2.0})
    assert (found.cost, found.useful, found.lost) == pytest.approx((42.0, 31.0, 11.0))
    assert found.parts["starting"] + found.parts["building"] == pytest.approx(11.0)
    assert found.saved == pytest.approx(4 * 30 + 3 - 42)
    assert [(one.kind, one.machines, one.held_s, one.price) for one in found.kinds] == [
        ("g6", 1, 3600.0, 2.0),
        ("p5", 2, 4 * 3600.0, 10.0),
    ]
    assert found.price == pytest.approx(42 / 5)  # of a machine-hour, in the mean


def test_one_price_is_every_machines():
    one = paid(a_job(), priced(7.0))
    assert (one.cost, one.price, one.priced_as) == (pytest.approx(35.0), 7.0, "spot")
    nobody_knows = paid(a_job({}), priced(7.0))
    assert (nobody_knows.cost, nobody_knows.parts) == (pytest.approx(35.0), one.parts)


def test_a_kind_without_a_price_is_in_no_sum_and_is_told():
    found = paid(a_job(), priced("p5=10"))
    assert (found.cost, found.unpriced_s) == (pytest.approx(40.0), pytest.approx(3600.0))
    assert found.by_machine["c"] is None
    assert cost_line(priced("p5=10")) == (
        f"40.00, of which 10.00 lost: {LOST_TERM} (10 per machine and hour, spot; in the "
        "currency of [price]); without 1 h 00 min of "
        "machines of g6: no price is set for them under [price]"
    )
    nothing = paid(a_job(), priced("h100=10"))
    assert (nothing.cost, nothing.price, nothing.lost, nothing.parts) == (None, None, None, {})
    (line,) = [
        one.plain for one in summary(a_job(), prices=priced("h100=1")) if "cost" in one.plain
    ]
    assert line.startswith("  cost      without 5 h 00 min of machines of g6, p5: no price is set")
    assert json.loads(json.dumps(to_json(a_job(), prices=priced("h100=1"))))["cost"] is None


def test_some_on_spot_and_others_on_demand():
    found = paid(a_job(), priced("p5=10", "other=4"))
    assert (found.cost, found.priced_as) == (pytest.approx(44.0), "on demand and spot")
    assert found.saved == pytest.approx(4 * 4 - 40)  # of those that have both prices
    told = cost_line(priced("p5=10", "other=4"))
    assert told.endswith(
        "(per machine and hour: g6 4 on demand, p5 10 spot; in the currency of [price])"
    )
    euros = msgspec.structs.replace(priced("p5=10", "p5=30, g6=4"), currency="EUR")
    assert "EUR, of which" in cost_line(euros)
    assert cost_line(euros).endswith("(per machine and hour: g6 4 EUR on demand, p5 10 EUR spot)")


def test_a_machine_that_nobody_names_is_of_the_jobs_one_kind():
    nameless = [one for one in a_job({"a": "p5"}) if one.event != "attempt_formed"]
    nameless += [ev(0.0, "attempt_formed", world_size=10, nodes=3)]
    assert paid(nameless, priced("p5=10")).cost == pytest.approx(60.0)  # the size stays the same
    two_kinds = [*nameless, ev(1.0, "machine", node="z", kind="g6")]
    assert paid(two_kinds, priced("p5=10")).cost is None
    assert paid(two_kinds, priced("p5=10, other=1")).cost == pytest.approx(6.0)


def test_without_prices_there_is_no_money():
    assert paid(a_job(), priced()) is None
    assert facts(a_job()).money is None
    assert to_json(a_job())["cost"] is None
    assert paid([], priced(1.0)).price == 1.0


EVENTS = st.lists(
    st.builds(
        lambda t, name, attempt, node, fields: ev(t, name, attempt, node, 0, **fields),
        st.floats(0, 1e5),
        st.sampled_from(
            [
                "job_started",
                "machine",
                "attempt_formed",
                "resumed",
                "step",
                "worker_lost",
                "drained",
            ]
        ),
        st.integers(0, 4),
        st.sampled_from("abc"),
        st.fixed_dictionaries(
            {},
            optional={
                "kind": st.sampled_from(["p5", "g6", "", None]),
                "nodes": st.integers(0, 4),
                "world_size": st.integers(0, 8),
                "hosts": st.dictionaries(st.sampled_from("abc"), st.integers(1, 4)),
                "step": st.integers(0, 50),
            },
        ),
    ),
    max_size=30,
)


@given(EVENTS, st.sampled_from(["", "2", "p5=3", "p5=3, other=1", "g6=0"]))
def test_whatever_the_ledger_says_the_sums_agree(events, spot):
    spent = split(events)
    for part, seconds in spent.machines.parts().items():
        by_name = math.fsum(one[part] for one in spent.machines_by_name.values())
        assert by_name == pytest.approx(seconds)
    found = money(spent, kinds_of(events), priced(spot, "5"))
    assert found.cost == pytest.approx(math.fsum(found.by_machine.values()))
    assert found.cost == pytest.approx(math.fsum(found.parts.values()))
    assert found.cost == pytest.approx(found.useful + found.lost)
    assert min([found.cost, found.useful, found.lost, *found.parts.values()]) >= 0
    held = math.fsum(map(held_s, spent.machines_by_name.values()))
    assert math.fsum(one.held_s for one in found.kinds) == pytest.approx(held)


def test_a_job_that_is_followed_has_the_same_machines():
    so_far = SoFar()
    so_far.take(a_job())
    assert so_far.split().machines_by_name == split(a_job()).machines_by_name


def test_people_are_told_of_an_incident_at_the_mean_price_of_those_that_were_held():
    def told(prices):
        fold = JobFold(CadenceSetting())
        tidings = NewsFold(fold, prices)
        tidings.take(fold.take(a_job(), 1e9))
        (news,) = [one for one in tidings.beyond(NewsMarks(), 7200.0) if one.kind == "over"]
        return news.more[-1]

    back = "cost: 1 h 00 min of 2 machines"
    assert told(priced("p5=10, g6=1")) == f"{back}, 20.00 at 10 per machine and hour"
    assert told(priced("g6=1")) == back
