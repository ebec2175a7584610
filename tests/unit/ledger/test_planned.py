"""A plan that is kept, and found again."""

import contextlib

import msgspec
import pytest

from outlast.errors import ConfigError
from outlast.ledger.events import Event
from outlast.ledger.file import Ledger, read_events
from outlast.ledger.job import Prediction, enter_plan, keep_plan, newest_plan, read_plan

PLAN = Prediction(
    planned_t=1e9,
    failures_per_h=0.5,
    failures_low_per_h=0.25,
    failures_high_per_h=1.0,
    rate_source="given as 0.5/h",
    productive_fraction=0.9,
    interval_s=600.0,
    checkpoint_s=20.0,
    price_per_machine_hour=2.0,
)


def test_it_is_kept_and_found_again(tmp_path):
    assert read_plan(tmp_path / "job") is None
    assert keep_plan(PLAN, tmp_path / "job") == tmp_path / "job" / "plan.json"
    assert read_plan(tmp_path / "job") == PLAN
    other = msgspec.structs.replace(PLAN, failures_per_h=2.0)
    keep_plan(other, tmp_path / "job")
    assert read_plan(tmp_path / "job") == other
    assert [path.name for path in (tmp_path / "job").iterdir()] == ["plan.json"]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"failures_per_h": "x"}', "\udcff"])
def test_what_is_no_plan_is_said_so(tmp_path, text):
    (tmp_path / "plan.json").write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError, match="is no plan; remove it, or write it anew"):
        read_plan(tmp_path)


def test_it_cannot_be_kept_everywhere(tmp_path):
    (tmp_path / "job").write_text("")
    with pytest.raises(ConfigError, match=r"plan\.json cannot be written: .*OUTLAST_DIR"):
        keep_plan(PLAN, tmp_path / "job")


def test_it_is_entered_and_what_is_no_plan_stops_nothing(tmp_path):
    said = []
    with contextlib.closing(Ledger(tmp_path, job="j")) as ledger:
        enter_plan(ledger, tmp_path, said.append)
        (tmp_path / "plan.json").write_text("{}")
        enter_plan(ledger, tmp_path, said.append)
        assert not list(read_events(tmp_path))
        keep_plan(PLAN, tmp_path)
        enter_plan(ledger, tmp_path, said.append)
    assert len(said) == 1
    assert "is no plan; remove it" in said[0]
    assert newest_plan(read_events(tmp_path)) == PLAN


def test_the_newest_that_can_be_read_counts():
    def told(**fields):
        return Event(
            t=1.0, mono=1.0, job="j", attempt=0, node="n", rank=None, event="planned", fields=fields
        )

    assert newest_plan([]) is None
    other = msgspec.structs.replace(PLAN, interval_s=1.0)
    events = [
        told(**msgspec.structs.asdict(PLAN)),
        told(**msgspec.structs.asdict(other)),
        told(interval_s="x"),
    ]
    assert newest_plan(events) == other
