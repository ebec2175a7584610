"""``outlast simulate`` as a person calls it: answers, a seed that replays them, plain refusals."""

import json
import re
import shlex

import click
import pytest
from click.testing import CliRunner

from outlast.cli import cli
from outlast.errors import ConfigError

SPOT = "0,add,a\n0,add,b\n3600000,remove,a\n5400000,add,c\n9000000,remove,b\n10800000,add,d\n"
FAILURES = "t_hours,node,downtime_min\n" + "".join(f"{7 * n + n % 5},{n},30\n" for n in range(60))


@pytest.fixture(autouse=True)
def _traces(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spot.csv").write_text(SPOT)
    (tmp_path / "failures.csv").write_text(FAILURES)
    (tmp_path / "lives.csv").write_text("name,lifetime_s\na,3000\nb,9000\n")
    (tmp_path / "sky.json").write_text('{"gap_seconds": 600, "data": [1,1,1,0,1,1,0,0,1,1]}')
    (tmp_path / "back.csv").write_text("5000,add,a\n4000,remove,a\n")


def called(line):
    return (
        CliRunner()
        .invoke(cli, shlex.split(line), catch_exceptions=False, standalone_mode=False)
        .output
    )


def asked(line):
    return json.loads(called(f"simulate {line} --json"))


def test_a_job_in_words():
    said = called(
        "simulate --rate 2/h --checkpoint 3min --restore 3min --days 5 --price 2 --replications 50 "
        "--policy auto --policy '30 min' --policy exact"
    )
    assert "50 replications from seed 0; the job waits for all its machines" in said
    assert "The failures: given as 2/h." in said
    assert "→ exact" in said or "→ auto" in said
    assert "30 min against auto: -" in said
    assert "(standard error " in said
    assert "per useful h" in said
    assert said.rstrip().endswith("--seed 0")


def test_numbers_with_their_units_and_a_seed_that_replays_them():
    line = "--rate 2/h --checkpoint 3min --days 5 --price 2 --replications 20"
    first = asked(line)
    assert first == asked(f"{line} --seed 0")
    assert first != asked(f"{line} --seed 1")
    assert first["failures_per_h"] == pytest.approx(2.0)
    auto, young = first["policies"]
    assert young["interval_h"] == pytest.approx((2 * 0.05 / 2) ** 0.5)
    assert auto["interval_h"] is None
    assert auto["useful_fraction_p5"] <= auto["useful_fraction_p50"] <= auto["useful_fraction_p95"]
    assert sum(auto["parts_fraction"].values()) == pytest.approx(1.0)
    assert auto["cost"] == pytest.approx(2 * 24 * 5)
    assert auto["cost_per_useful_h"] == pytest.approx(2 / auto["useful_fraction"])
    assert auto["useful_fraction_less_first"] == 0.0


def test_also_as_a_question_of_the_plan():
    line = "simulate --rate 2/h --days 1 --replications 5 --json"
    assert called(f"plan {line}") == called(line)


@pytest.mark.parametrize("mode", ["rigid", "restart", "elastic", "peer", "local"])
@pytest.mark.parametrize("trace", ["spot.csv", "sky.json", "failures.csv", "lives.csv"])
def test_every_trace_with_every_way_to_recover(trace, mode):
    costs = "--checkpoint 5s --restore 30s"
    if mode == "peer":
        costs = "--tier peer,cost=1s,survives=holders --tier s3,cost=5s,restore=30s,every=4"
    found = asked(
        f"{trace} --mode {mode} --machines 4 {costs} --replace 5min "
        "--days 1 --policy '10 min' --replications 3 --step 2s --notice 2min"
    )
    (policy,) = found["policies"]
    assert 0 <= policy["useful_fraction"] <= 1
    assert sum(policy["parts_fraction"].values()) == pytest.approx(1.0)


def test_what_is_known_of_a_trace_is_said():
    said = called("simulate failures.csv --policy best --replications 2")
    assert "losses at 60 moments, one each 7 h" in said
    assert "(Weibull, shape" in said
    assert "2 lifetimes, 1 h 40 min at the mean" in called("simulate lives.csv --replications 1")


@pytest.mark.parametrize("law", ["weibull:0.7", "bathtub", "zones:2"])
def test_laws(law):
    found = asked(f"--rate 1/2h --law {law} --machines 4 --days 2 --replications 3 --mode restart")
    assert found["policies"][0]["num_failures"] > 0


@pytest.mark.parametrize("law", ["weibull:0.5", "weibull:3", "bathtub", "zones:2"])
def test_a_law_fails_as_often_as_the_rate_says(law):
    # Fewer days than a machine lasts at the mean: new ones would fail more often, or less.
    line = f"--law {law} --machines 100 --checkpoint 10min --policy '1 h' --replications 40"
    found = asked(f"{line} --rate 1/h --days 2")
    assert found["failures_per_h"] == 1.0
    assert found["policies"][0]["num_failures"] == pytest.approx(48, rel=0.1)


def test_a_bathtub_as_recorded_needs_no_rate():
    found = asked("--law bathtub --machines 4 --days 9 --checkpoint 1min --replications 20")
    assert found["failures_per_h"] == pytest.approx(4 / 8.4, rel=0.01)
    assert found["policies"][0]["num_failures"] == pytest.approx(24 * 9 * 4 / 8.4, rel=0.1)


def test_a_notice_that_is_too_short_changes_nothing_and_is_said_to():
    line = "--rate 2/h --checkpoint 3min --restore 3min --days 3 --policy '30 min' --replications 9"
    short = asked(f"{line} --notice 1s")
    none = asked(f"{line} --notice 10min --flush-probability 0%")
    assert short["policies"] == none["policies"]
    long = asked(f"{line} --notice 10min")["policies"][0]
    assert long["useful_fraction"] > short["policies"][0]["useful_fraction"] + 0.1
    assert long["parts_fraction"]["waiting"] == 0
    # An instant more of a step's length makes no other story of it.
    in_steps = asked(f"{line} --notice 10min --step 1s")["policies"][0]
    assert in_steps["useful_fraction"] == pytest.approx(long["useful_fraction"], abs=0.01)
    assert "A notice of 1.0 s changes nothing: no save fits into it." in called(
        f"simulate {line} --notice 1s"
    )
    assert "changes nothing: none comes" in called(
        f"simulate {line} --notice 10min --flush-probability 0%"
    )


def test_formulas_know_of_notices_and_of_all_tiers():
    line = "--rate 2/h --checkpoint 3min --days 2 --replications 2 --policy young"
    alone = asked(line)["policies"][0]["interval_h"]
    most = asked(f"{line} --notice 5min --flush-probability 75%")["policies"][0]["interval_h"]
    assert most == pytest.approx(2 * alone)
    all_of_them = asked(f"{line} --notice 5min")["policies"][0]["interval_h"]
    assert all_of_them == 48  # nothing to save for before the end
    tiers = "--tier a,cost=60s --tier b,cost=8min,every=4"
    assert asked(f"{line} {tiers}")["policies"][0]["interval_h"] == pytest.approx(alone)


def test_tiers():
    both = asked(
        "--rate 1/h --machines 4 --days 2 --replications 3 --tier memory,cost=1s,survives=process "
        "--tier s3,lag=60s,restore=2min,every=4,keep=2"
    )
    assert both["policies"][0]["parts_fraction"]["stalled"] > 0


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--rate 2/h --replications 1000000000", "1,000,000 is the most"),
        ("--rate 2/h --mode restart --machines 100000000", "100,000 is the most"),
        ("--rate 1e6/h", "that would take about"),
        (
            "--rate 2/h --mode restart --tier a,cost=1s --policy '1 s' --replications 500",
            "that would take about",
        ),
    ],
)
def test_what_nobody_would_wait_for_is_not_begun(line, words):
    with pytest.raises(ConfigError, match=words):
        called(f"simulate {line}")


def test_what_takes_long_is_said_before():
    from outlast.cli.simulate import _weigh
    from outlast.planner.job import JobSetup
    from outlast.planner.study import Scenario

    said = CliRunner().invoke(
        click.command()(lambda: _weigh(Scenario(setup=JobSetup()), 50, 90.0)), []
    )
    assert said.stderr.startswith("This takes about 1 min 30 s")
    assert not said.stdout


def test_a_recording_without_a_loss(tmp_path):
    (tmp_path / "quiet.json").write_text('{"gap_seconds": 600, "data": [1,1,1,1,1,1]}')
    found = asked("quiet.json --checkpoint 10s --replications 1")
    assert [one["num_failures"] for one in found["policies"]] == [0, 0]


REFUSED = {
    "--rate 2/h --law weibull:0.001": "a shape is within 0.1 and 100",
    "--rate 2/h --law zones:100 --machines 2": "2 machines cannot be in 100 zones",
    "--rate 2/h --mode peer": "--mode peer reads other machines' memory",
    "--rate -2/h": "a rate is above 0",
    "--rate 2/fortnight": "is not a unit of time",
    "": "no rate is known",
    "--rate 2/h --mode lokal": "--mode lokal is not a way to recover; did you mean local?",
    "--rate 2/h --law zone:3": "--law zone:3 is none; known are constant",
    "--rate 2/h --law zones:2.5": "2.5 is no number of zones",
    "--rate 2/h --law weibull:x": "--law weibull:x is none",
    "--rate 2/h --law bathtub:3": "--law bathtub:3",
    "--rate 2/h --policy often": "'often' is not a policy; known are auto",
    "--rate 2/h --policy '20 steps'": "say how long one takes with --step",
    "--rate 2/h --policy young20": "young20 needs a trace",
    "--rate 2/h --tier a,cst=3s": "'cst=3s' is not KEY=VALUE; did you mean cost?",
    "--rate 2/h --tier a,cost=3": "'3' has no unit",
    "--rate 2/h --tier a,survives=me": "'me' survives nothing known; process, holders, all",
    "--rate 2/h --checkpoint 3": "has no unit",
    "failures.csv --rate 2/h": "a trace brings its own failures",
    "none.csv": "none.csv cannot be read: No such file",
    "back.csv": "back.csv: row 2 is at 4 s, before 5 s",
}


@pytest.mark.parametrize("line", sorted(REFUSED))
def test_what_cannot_be_is_one_line(line):
    from click import ClickException

    with pytest.raises((ConfigError, ClickException)) as error:
        called(f"simulate {line}")
    words = getattr(error.value, "format_message", lambda: str(error.value))()
    assert REFUSED[line] in words
    assert "\n" not in words


def test_a_job_that_gets_nowhere_is_said_to():
    said = called(
        "simulate --rate 30/h --checkpoint 30min --days 9 --policy '1 h' --replications 2 --price 2"
    )
    assert said.count("no progress") == 3  # p50, p95, and what a useful hour costs
    assert "inf" not in said


def test_who_goes_on_with_the_rest_knows_how_many_there_are():
    line = "failures.csv --checkpoint 5s --replications 1 --policy '10 min'"
    assert asked(f"{line} --mode restart")["num_machines"] == 60
    assert asked(f"{line} --mode restart --machines 8")["num_machines"] == 8
    assert asked(line)["num_machines"] == 1


def test_a_fleet_of_131072_for_60_days_costs_no_more_than_its_failures(outlast):
    """All of it, with 1,000 replications: ``python benchmarks/simulate_scale.py``."""
    line = "simulate --gpus 131072 --days 60 --rate llama-3 --checkpoint 5s --restore 3min --json"
    code, out, err = outlast(*line.split(), "--policy", "auto", "--replications", "5")
    assert code == 0, err
    (found,) = json.loads(out)["policies"]
    assert found["num_failures"] == pytest.approx(131072 * 4.74e-4 * 60, rel=0.05)
    assert 0.7 < found["useful_fraction"] < 1


def test_a_policy_that_counts_steps_says_what_it_counts():
    said = called('simulate --rate 2/h --days 1 --step 1s --replications 2 --policy "200 steps"')
    assert "200 steps   200 steps" in said
    assert "as it learns" not in said


@pytest.mark.parametrize("mode", ["rigid", "restart", "elastic", "local"])
def test_a_mode_is_said_as_what_the_job_does(mode):
    said = called(f"simulate --rate 2/h --days 1 --machines 4 --mode {mode} --replications 2")
    assert re.search(r"the job (waits|goes|trains) ", said)


def test_fewer_machines_are_said_to_do_less():
    line = "simulate --rate 2/h --days 1 --machines 4 --mode elastic --replications 2 --replace 1h"
    assert "useful counts the work, which fewer machines do more slowly" in called(line)
    assert "fewer machines" not in called("simulate --rate 2/h --days 1 --replications 2")
