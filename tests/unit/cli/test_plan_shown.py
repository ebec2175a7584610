"""How ``outlast plan`` shows what it found: all at once, of a job, as pictures and as JSON."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from plan_words import by_model

from outlast.cli.plan import answer
from outlast.errors import ConfigError
from outlast.ledger.events import Event, encode


@pytest.fixture(autouse=True)
def _nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_many_machines_are_readable_and_small_sums_are_not_rounded_away(say):
    spares = say("spares --rate 1000/h --repair 24h")
    assert "Hold 24,361 machines" in spares
    assert "Range: 12,256 to 48,510" in spares
    cheap = say("spot --rate 2/h --checkpoint 3min --spot 0.0007 --on-demand 0.001 --useful 30min")
    assert "0.0011 per useful hour on spot, 0.0010 on demand" in cheap
    assert "0.500 useful hours: 0.00057 on spot, 0.00050 on demand." in cheap


def test_simulate_is_a_question_too(say):
    assert "outlast simulate" in say("--help")
    assert "TRACE" in say("simulate --help")


def test_the_worked_example(say, ask):
    words = say("")
    assert words.startswith("No job here has measured anything, and nothing was given")
    assert "How often should I save?" in words
    every = {"failures", "interval", "spot", "budget", "flush", "memory"}
    assert set(ask("")) == every | {"spares", "restarts", "replicas"}


def test_flags_answer_what_they_are_enough_for(ask, say):
    assert set(ask("--rate 2/h")) == {"failures"}
    assert set(ask("--gpus 64 --checkpoint 1min")) == {"failures", "interval", "budget"}
    assert "no rate was given; 419 unexpected stops" in say("--gpus 64 --checkpoint 1min")
    assert set(ask("--state 640GB --bandwidth 1.5GB/s --notice 120s")) == {"flush", "memory"}


def test_the_jobs_own_measurements(ask, say):
    job = Path("outlast-job")
    job.mkdir()

    def event(t, name, rank=0, attempt=1, **fields):
        head = {"t": t, "mono": t, "job": "j", "attempt": attempt, "node": "n", "rank": rank}
        return encode(Event(**head, event=name, fields=fields))

    lines = [
        event(0, "attempt_formed", rank=None, world_size=2, nodes=["n"]),
        event(1, "resumed", step=0),
        event(100, "snapshot", step=10, blocked_s=2.0),
        event(101, "commit", step=10, durable_s=5.0, bytes=10**9, tier="local"),
        event(7000, "step", step=10, seconds=1.0),
        event(7010, "worker_lost", beat_t=7006.0, exit_code=1),
        event(7020, "attempt_formed", rank=None, attempt=2, world_size=2, nodes=["n"]),
        event(7030, "resumed", attempt=2, step=10),
        event(7040, "step", attempt=2, step=11, seconds=1.0),
        event(18000, "step", attempt=2, step=12, seconds=1.0),
    ]
    (job / "ledger.jsonl").write_bytes(b"".join(lines))
    found = ask("interval")
    assert found["rate_source"].startswith("this job's ledger: 1 failure in 4.99 h")
    assert found["failures_per_h"] == pytest.approx(2 / 15, rel=0.01)
    assert found["checkpoint_h"] == pytest.approx(2 / 3600)
    assert found["lag_h"] == pytest.approx(5 / 3600)
    assert found["restore_h"] == pytest.approx(30 / 3600)
    assert ask("spot --spot 0.7 --on-demand 1")["detect_h"] == found["detect_h"] > 0
    assert ask("interval --checkpoint 1min")["restore_h"] == found["restore_h"]
    assert ask("interval --checkpoint 1min --restore 9s")["restore_h"] == pytest.approx(9 / 3600)
    assert say("").startswith("From what the job in ")
    assert ask("")["memory"]["state_bytes"] == 10**9


@pytest.mark.parametrize(
    "line",
    [
        "interval --rate 2/h --checkpoint 3min --every 1h",
        "spot --rate 2/h --checkpoint 3min --spot 0.7 --on-demand 1",
        "flush --state 640GB --bandwidth 1.5GB/s --notice 180s",
        "",
    ],
)
def test_pictures(say, line):
    say(f"{line} --plot a.svg")
    picture = Path("a.svg").read_text()
    assert picture.startswith("<svg")
    assert "nan" not in picture
    assert "inf" not in re.sub("inf[a-z]", "", picture)
    say(f"{line} --plot a.html")
    page = Path("a.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "<svg" in page
    assert "<script" not in page


def test_the_break_even_is_marked(say):
    say("spot --rate 0.5/h --checkpoint 3min --spot 0.7 --on-demand 1 --plot a.svg")
    assert "break-even: 1.13/h" in Path("a.svg").read_text()


def test_a_png(say):
    pytest.importorskip("resvg_py")
    try:
        say("flush --state 640GB --bandwidth 1.5GB/s --notice 180s --plot a.png")
    except ConfigError as error:  # a machine without any font
        pytest.skip(str(error))
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")


def test_json_is_one_object_and_every_number_has_its_unit(ask):
    units = ("_h", "_s", "_days", "_day", "_steps", "_bytes", "_log10", "_fraction", "_ratio")
    units += ("_probability", "_2x", "_10x")
    counts = ("num_", "cost_", "days", "linear_failures_per_segment")
    for line in (
        "failures --rate 2/h --gpus 8",
        "interval --rate 2/h --checkpoint 1min",
        "spot --rate 2/h --checkpoint 3min --spot 0.7 --on-demand 1",
        "budget --gpus 8 --rate 1/day --days 3 --lost 1h",
        "flush --state 640GB --bandwidth 1.5GB/s --notice 180s",
    ):
        for name, value in ask(line).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                assert name.endswith(units) or name.startswith(counts), name


def test_a_plan_can_be_kept(say, refused, tmp_path):
    said = say("--rate 2/h --checkpoint 3min --restore 3min --spot 0.7 --on-demand 1 --save")
    assert "kept in" in said
    kept = json.loads((tmp_path / "outlast-job" / "plan.json").read_text())
    assert kept["failures_per_h"] == 2.0
    assert kept["checkpoint_s"] == pytest.approx(180)
    assert kept["price_per_machine_hour"] == 0.7
    assert kept["productive_fraction"] == pytest.approx(
        1
        / by_model(json.loads(say("interval --rate 2/h --checkpoint 3min --restore 3min --json")))[
            "exact"
        ]["wall_h_per_useful_h"]
    )
    for nothing in ("--save", "--gpus 16 --save", "--price 2 --gpus 3 --save"):
        assert "there is nothing to keep: --save needs a rate and" in refused(nothing)


def told(t, name, rank=0, attempt=1, **fields):
    head = {"t": t, "mono": t, "job": "j", "attempt": attempt, "node": "n", "rank": rank}
    return encode(Event(**head, event=name, fields=fields))


@pytest.fixture(name="measured")
def _measured():
    """A job that has run for an hour and saved once."""
    job = Path("outlast-job")
    job.mkdir()
    lines = [
        told(0, "attempt_formed", rank=None, world_size=2, nodes=["n"]),
        told(1, "resumed", step=0),
        told(100, "snapshot", step=10, blocked_s=2.0),
        told(101, "commit", step=10, durable_s=5.0, bytes=10**9, tier="local"),
        told(3600, "step", step=10, seconds=1.0),
    ]
    (job / "ledger.jsonl").write_bytes(b"".join(lines))


def commands(words):
    """What the overview says to call for more, without ``outlast plan``."""
    return re.findall(r"all of it: outlast plan (.*)", words)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--rate '3 in 5h' --checkpoint 1min --spot 0.7 --on-demand 1 --nodes 4",
        "--gpus 64 --gpus-per-node 4 --rate '6.5/1000 node-days' --price 2 --checkpoint 90s",
        "--state 640GB --bandwidth 1.5GB/s --notice 120s --nodes 4",
    ],
)
def test_each_question_says_the_command_that_answers_the_same(ask, say, line):
    found = ask(line)
    lines = commands(say(line))
    assert [one.split()[0] for one in lines] == list(found)
    for name, command in zip(found, lines, strict=True):
        alone = ask(command)
        for key, value in found[name].items():
            if isinstance(value, float):
                assert alone[key] == pytest.approx(value, rel=1e-4), key


def test_the_commands_of_a_job_that_was_measured(measured, ask, say):
    found, lines = ask("--gpus 64 --price 2"), commands(say("--gpus 64 --price 2"))
    for name, command in zip(found, lines, strict=True):
        assert "--checkpoint" not in command
        assert ask(command).keys() == found[name].keys()
    assert ask("flush --bandwidth 1GB/s --notice 2min")["state_bytes"] == 10**9


def test_prices_of_the_settings_are_known_without_a_job(ask, refused):
    line = "spot --rate 2/h --checkpoint 3min"
    assert "--on-demand is missing, and outlast.toml has none under [price]" in refused(line)
    Path("outlast.toml").write_text("[price]\nspot = 0.7\non_demand = 1.0\n")
    assert ask(line)["spot_price_per_h"] == 0.7
    assert ask("--rate 2/h --checkpoint 3min")["spot"]["on_demand_price_per_h"] == 1.0


@pytest.mark.usefixtures("measured")
def test_a_simulation_starts_from_what_the_job_has_measured(ask):
    found = ask("simulate --replications 2 --days 1")
    assert found["rate_source"].startswith("this job's ledger: 0 failures in 1 h")
    young = next(one for one in found["policies"] if one["policy"] == "young")
    assert young["interval_h"] == pytest.approx(ask("interval")["models"][0]["interval_h"])
    assert ask("simulate --replications 2 --days 1 --rate 2/h")["failures_per_h"] == 2


@pytest.fixture(name="narrow")
def _narrow(monkeypatch):
    """A terminal of 60 columns."""
    monkeypatch.setenv("COLUMNS", "60")
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(answer, "sys", SimpleNamespace(stdout=terminal))


@pytest.mark.usefixtures("narrow")
def test_on_a_terminal_lines_break_between_words_but_not_before_a_unit(capsys):
    for length in range(30, 60):
        answer.say("x" * length + " takes 13 min 00 s of 1.5 GB and 41.8 % of 2 d 12 h")
        for line in capsys.readouterr().out.splitlines():
            assert len(line) <= 60
            assert line.split()[0] not in ("min", "s", "GB", "%", "d", "h", "00", "12")
    answer.say("The same, indented, " + "word " * 20, indent="    ")
    assert all(line.startswith("    ") for line in capsys.readouterr().out.splitlines())


@pytest.mark.usefixtures("narrow")
def test_a_table_and_its_chosen_row_are_not_broken(capsys):
    rows = answer.table(("model", "wall"), [("a" * 70, "1"), ("b", "2")], [False, True])
    for row in rows:
        answer.say(row)
    assert click.unstyle(capsys.readouterr().out).splitlines() == rows


def test_help_names_what_a_flag_takes_and_lists_no_picture_where_there_is_none(say):
    words = say("flush --help")
    assert "--notice TIME" in words
    assert "--bandwidth BANDWIDTH" in words
    assert "--plot FILE" in words
    assert "--plot" not in say("zones --help")


@pytest.mark.parametrize(
    ("probability", "words"),
    [(1.0, "100.0 %"), (1 - 1e-6, "over 99.9 %"), (0.5, "50.0 %"), (1e-6, "under 0.1 %")],
)
def test_what_is_not_certain_is_not_said_to_be(probability, words):
    assert answer.chance(probability) == words
