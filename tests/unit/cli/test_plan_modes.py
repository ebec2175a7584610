"""``outlast plan modes``: what it says, and what it refuses in one line."""

import json

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
    assert pays["below_bytes_per_s"] < found["link_bytes_per_s"] == 12.5e9
    assert pays["above_failures_per_h"] > 0.02
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


def test_the_next_command_runs(say):
    command = say(LINE).rstrip().splitlines()[-1].removeprefix("Next: outlast ")
    result = CliRunner().invoke(cli, [*command.split(), "--days", "2", "--replications", "2"])
    assert result.exit_code == 0, result.output


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
