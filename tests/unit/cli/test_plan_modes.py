"""``outlast plan modes``: what it says, and what it refuses in one line."""

import json
import shlex

import pytest
from click.testing import CliRunner

from outlast.cli import cli
from outlast.planner.fleet_modes import FLEET_MODES

LINE = "modes --params 1B --step 1s --link 100Gbit/s --replicas 8 --rate 0.02/h --checkpoint 20s"
FLEET = "\n".join(
    [
        "0,add,a",
        "0,add,b",
        "0,add,c",
        "3600000,remove,b",
        "5400000,add,d",
        "9000000,remove,a",
        "10800000,add,e",
    ]
)


@pytest.fixture(autouse=True)
def _nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_one_object_with_all_modes(ask):
    found = ask(f"{LINE} --price 2")
    assert [one["mode"] for one in found["modes"]] == list(FLEET_MODES)
    assert sum(one["chosen"] for one in found["modes"]) == 1
    for one in found["modes"]:
        assert 0 < one["goodput_fraction"] <= 1
        assert one["cost_per_useful_step"] == pytest.approx(16 / one["useful_steps_per_h"])
    pays = found["local_pays"]["over_synchronous"]
    assert not pays["here"]
    ((nothing, below),) = pays["at_bytes_per_s"]
    assert nothing is None
    assert below < found["link_bytes_per_s"] == 12.5e9
    ((above, endless),) = pays["at_failures_per_h"]
    assert above > 0.02
    assert endless is None
    assert 0.97 < pays["even_worth_fraction"] < 1
    needed = found["needed_bytes_per_s_at_95_percent"]
    assert needed["streaming"] < needed["local"] < needed["synchronous"]


def test_text_says_when_local_updates_pay(say):
    said = say(LINE)
    assert "Local updates do not pay over synchronous here: at this rate of failures" in said
    assert "they pay below 5" in said  # 53.6 Gbit/s
    assert "on this link of 100 Gbit/s above 0.0" in said
    assert "→ " in said
    assert said.rstrip().splitlines()[-1].startswith("Next: outlast simulate --rate 0.02/h")
    thin = say(LINE.replace("100Gbit/s", "100Mbit/s"))
    assert "Local updates pay over synchronous here" in thin
    assert "Take local, 4-bit stream" in thin


LONG = (
    LINE.replace("100Gbit/s", "50Gbit/s").replace("0.02/h", "5/h")
    + " --layers 24 --sync-steps 2000"
)


def test_where_local_updates_pay_in_spans(say):
    said = say(f"{LONG} --restore 2min --detect 30s")
    (line,) = (one for one in said.splitlines() if "over templates" in one)
    assert "do not pay" in line
    assert "at any rate" not in line
    assert "on this link of 50.0 Gbit/s below" in line
    assert " and above 4" in line  # some hundred per hour


def test_what_a_local_step_is_taken_to_be_worth_is_said_where_nobody_measured_it(say):
    assert "published for H = 100" in say(LONG)
    assert "it is at H = 2,000: measure it, and give --worth" in say(LONG)
    for line in (LINE, f"{LONG} --worth 0.9"):
        assert "give --worth" not in say(line)
    assert "even where a local step is worth 0." in say(LONG.replace("50Gbit/s", "5Gbit/s"))


def test_needs_are_not_read_off_a_grid(ask):
    found = ask(f"{LONG} --layers 500 --sync-steps 10000")["needed_bytes_per_s_at_95_percent"]
    assert found["streaming"] < found["local"] < 0.1e9 / 8 < found["synchronous"]


def test_a_latency_that_no_bandwidth_makes_up_for_is_said(say):
    said = say(f"{LINE} --latency 10s --sync-steps 1000")
    assert "No link is enough for 95.0 % synchronous, nor with the 4-bit stream" in said


def test_where_nothing_makes_progress_it_takes_nothing(say, ask):
    line = LINE.replace("100Gbit/s", "1Mbit/s").replace("0.02/h", "9000/h --price 2 --restore 1h")
    said = say(line)
    assert said.startswith("No mode makes progress: even local, 4-bit stream does under 0.1 %")
    assert "Take" not in said
    assert "endless" in said
    assert "any per" not in said
    found = ask(line)
    assert not found["makes_progress"]
    assert found["modes"][0]["cost_per_useful_step"] is None


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--detect 30s --restore 2min", "Successors train 2 min 30 s after a loss"),
        ("--replace 0s", "Successors are taken to come at once, and to cost nothing"),
    ],
)
def test_it_says_when_successors_come(say, more, words):
    assert words in say(f"{LINE} {more}")


THIN, RARE = "--link 1Gbit/s", "--rate 1e-6/h"
NEXT = {
    "templates": (f"{LINE} --rate 3/h", "--mode replicas"),
    "synchronous": (f"{LINE} {RARE} --checkpoint 1min --link 1Tbit/s", "--mode restart"),
    "local": (f"{LINE} {THIN} --sync-steps 3000 --worth 1", "--mode local"),
    "streaming": (f"{LINE} {THIN} --detect 20s --restore 3min", "--restore 180s --detect 20s"),
    "backup": (f"{LINE} --tail 1 --worth 0.2", "--machines 7 --spares 1"),
    "redundant": (f"{LINE} --rate 30/h --step 1h --redundant-work 0 --worth 0.01", ""),
    "many": (f"{LINE} --rate 90000/h --replicas 20000", "--replications 2"),
}


@pytest.mark.parametrize("name", NEXT)
def test_the_next_command_runs(say, name):
    line, words = NEXT[name]
    command = say(line).rstrip().splitlines()[-1].removeprefix("Next: outlast ")
    assert words in command
    result = CliRunner().invoke(
        cli, [*shlex.split(command), "--days", "0.001", "--replications", "2"]
    )
    assert result.exit_code == 0, result.output


FAILURES = "t_hours,node,downtime_min\n" + "\n".join(f"{at}.5,n{at % 3},30" for at in range(40))


@pytest.mark.parametrize(
    ("text", "replicas", "words"),
    [(FLEET, "", "'my trace.csv' --mode"), (FAILURES, "--replicas 6", "--machines 6 --replace 0s")],
)
def test_the_next_command_of_a_recording_runs(say, tmp_path, text, replicas, words):
    (tmp_path / "my trace.csv").write_text(text)
    line = LINE.replace("--replicas 8 --rate 0.02/h", f"--trace 'my trace.csv' {replicas}")
    said = say(line)
    assert "here: by the closed forms, at this rate" in said
    command = said.rstrip().splitlines()[-1].removeprefix("Next: outlast ")
    assert words in command
    result = CliRunner().invoke(cli, [*shlex.split(command), "--replications", "2"])
    assert result.exit_code == 0, result.output


def test_what_would_take_long_is_shortened_and_said(ask, tmp_path, monkeypatch):
    monkeypatch.setattr("outlast.cli.plan.modes.PATIENCE_S", 0.1)
    often = "\n".join(f"{at / 10:.2f},n{at % 400},30" for at in range(3, 4000))
    (tmp_path / "often.csv").write_text(f"t_hours,node,downtime_min\n{often}")
    line = LINE.replace("--replicas 8 --rate 0.02/h", "--trace often.csv --replicas 400")
    found = ask(line)
    assert "(shortened, so that it takes seconds)" in found["model"]


def test_a_recording_is_replayed(ask, tmp_path):
    (tmp_path / "fleet.csv").write_text(FLEET)
    line = LINE.replace("--replicas 8 --rate 0.02/h", "--trace fleet.csv")
    found = ask(line)
    assert found["num_replicas"] == 3
    assert "8 replays of fleet.csv" in found["model"]
    assert found["failures_per_h"] == pytest.approx(2 / 3)
    kept = {one["mode"]: one["kept_fraction"] for one in found["modes"]}
    # Two of three hours have three machines, one has two.
    assert kept["synchronous"] < kept["local"] <= 8 / 9 + 1e-6
    assert ask(line) == found


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--replicas 1", "one replica exchanges nothing"),
        ("--replicas 200000", "100,000 is the most here"),
        ("--backups 8", "of 8 replicas at least one must count"),
        ("--worth 0", "needs no plan"),
        ("--worth 2", "at most 1"),
        ("--sync-steps 0", "a number is above 0"),
        ("--sync-steps 20000", "10,000 is the most"),
        ("--layers 5000", "1,000 is the most"),
        ("--link 10", "has no unit"),
        ("--link 10Gb/s", "bits or bytes"),
        ("--tail 3", "at most 1"),
        ("--latency -1s", "a time is at least 0"),
        ("--rate 1%/gpu-day", "needs the number of GPUs"),
        ("--trace missing.csv", "say the same thing twice"),
    ],
)
def test_what_it_refuses_in_one_line(more, words):
    result = CliRunner().invoke(cli, ["plan", *LINE.split(), *more.split()])
    assert result.exit_code
    said = " ".join((result.output + str(result.exception or "")).split())
    assert words in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("text", "more", "words"),
    [
        (FLEET, "--replicas 8", "has up to 3 machines"),
        (FLEET, "--replace 1h", "and so does fleet.csv: leave it out"),
        ("0,add,a\n0,add,b\n60000,add,c", "", "holds no loss"),
        ("nonsense", "", "begins no trace"),
    ],
)
def test_recordings_that_it_refuses(tmp_path, text, more, words):
    (tmp_path / "fleet.csv").write_text(text)
    line = LINE.replace("--replicas 8 --rate 0.02/h", "--trace fleet.csv")
    result = CliRunner().invoke(cli, ["plan", *line.split(), *more.split()])
    assert result.exit_code
    assert words in " ".join((result.output + str(result.exception or "")).split())


@pytest.mark.parametrize("left_out", ["--params 1B", "--step 1s", "--link 100Gbit/s"])
def test_what_it_needs(left_out):
    result = CliRunner().invoke(cli, ["plan", *LINE.replace(left_out, "").split()])
    assert result.exit_code == 2
    assert "Missing option" in result.output


def test_without_replicas_it_asks_for_them():
    result = CliRunner().invoke(cli, ["plan", *LINE.replace("--replicas 8", "").split()])
    assert "like --replicas 8" in str(result.exception) + result.output


def test_json_is_json_and_nothing_else(tmp_path):
    result = CliRunner().invoke(cli, ["plan", *LINE.split(), "--json"])
    assert json.loads(result.output)["num_replicas"] == 8
