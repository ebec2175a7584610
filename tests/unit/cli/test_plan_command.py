"""``outlast plan`` as a person calls it: every question, with the worked numbers."""

import math
import re

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from plan_words import by_model

from outlast.cli import cli
from thorough import examples


@pytest.fixture(autouse=True)
def _nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("gpus", "mtbf_h", "failures"),
    [
        (1, 4788.0, 0.3),
        (8, 598.5, 2.4),
        (64, 74.8, 19.2),
        (512, 9.4, 154.0),
        (4096, 1.2, 1231.9),
        (16384, 0.3, 4927.5),
    ],
)
def test_failures(ask, gpus, mtbf_h, failures):
    found = ask(f"failures --gpus {gpus} --rate 0.5%/gpu-day --days 60")
    assert round(found["mtbf_h"], 1) == mtbf_h
    assert round(found["num_failures"], 1) == failures
    assert found["num_gpus_mtbf_below_1h"] == 4788


def test_a_plain_number_is_a_rate(ask):
    found = ask("failures --gpus 8 --rate 0.005/gpu-day --days 60")
    assert found["num_gpus_mtbf_below_1h"] == 4801


@pytest.mark.parametrize(
    ("flags", "mtbf_h"),
    [
        ("--gpus 512 --rate 0.5%/gpu/day", 9.352),
        ("--gpus 16384 --rate llama-3", 3.093),
        ("--gpus 16384 --rate llama-3-all", 2.781),
        ("--gpus 16384 --rate '6.5/1000 node-days'", 1.803),
        ("--gpus 131072 --rate rsc-1", 0.225),
        ("--gpus 16384", 3.093),
        ("--rate 1/90min", 1.5),
        ("--rate 16/day", 1.5),
    ],
)
def test_rates_as_people_write_them(ask, flags, mtbf_h):
    found = ask(f"failures {flags}")
    assert round(found["mtbf_h"], 3) == mtbf_h
    assert found["rate_source"]


@pytest.mark.parametrize(
    ("minutes", "young", "exact", "wall"),
    [(1, 11.84, 11.187, 1.1898), (3, 20.51, 18.565, 1.3600), (5, 26.48, 23.260, 1.4962)],
)
def test_intervals(ask, minutes, young, exact, wall):
    found = ask(f"interval --gpus 4096 --rate 0.5%/gpu-day --checkpoint {minutes}min")
    models = by_model(found)
    assert list(models) == ["linear at Young", "linear at its optimum", "Daly", "exact"]
    assert round(60 * models["linear at Young"]["interval_h"], 2) == young
    assert round(60 * models["exact"]["interval_h"], 3) == exact
    assert round(models["exact"]["wall_h_per_useful_h"], 4) == wall
    assert [row["chosen"] for row in found["models"]] == [False, False, False, True]
    assert found["interval_low_h"] < found["interval_h"] < found["interval_high_h"]
    assert round(found["waste_ratio_rate_off_2x"], 3) == 1.061
    assert round(found["waste_ratio_rate_off_10x"], 2) == 1.74
    assert math.fsum(found["parts_per_useful_h"].values()) == pytest.approx(
        models["exact"]["wall_h_per_useful_h"]
    )


@pytest.mark.parametrize(("mtbf", "minutes"), [(1440, 116.69), (360, 56.71), (15, 9.14)])
def test_daly(ask, mtbf, minutes):
    found = by_model(ask(f"interval --rate 1/{mtbf}min --checkpoint 5min"))
    assert round(60 * found["Daly"]["interval_h"], 2) == minutes


@pytest.mark.parametrize(("lag", "wall"), [("6min", 1.117), ("18min", 1.228)])
def test_asynchronous(ask, lag, wall):
    found = by_model(ask(f"interval --rate 1/3.09h --checkpoint 10s --restore 6min --lag {lag}"))
    assert round(found["asynchronous"]["wall_h_per_useful_h"], 3) == wall


def test_without_a_lag_asynchronous_is_young(ask):
    found = by_model(ask("interval --rate 1/3.09h --checkpoint 10s --restore 6min --lag 0"))
    assert round(found["linear at Young"]["wall_h_per_useful_h"], 3) == 1.079


def test_several_tiers_by_the_additive_model(ask):
    found = ask("interval --tier 9s,7.78e-6/s --tier 50s,5.19e-7/s,50s --tier 438s,3e-8/s")
    additive = by_model(found)["additive"]
    rates = (7.78e-6, 5.19e-7, 3e-8)
    for interval_h, cost_s, per_s in zip(
        additive["tier_intervals_h"], (9, 50, 438), rates, strict=True
    ):
        assert 3600 * interval_h == pytest.approx(math.sqrt(2 * cost_s / per_s))
    parts = [math.sqrt(2 * c * r) for c, r in zip((9, 50, 438), rates, strict=True)]
    assert additive["waste_fraction"] == pytest.approx(sum(parts) + 50 * 5.19e-7)
    assert additive["wall_h_per_useful_h"] / additive["markov_wall_h_per_useful_h"] == (
        pytest.approx(1 + found["additive_error_fraction"])
    )


def test_several_tiers_by_the_markov_model(ask, say):
    # SCR's machine (Moody et al., SC'10); its regression's best schedules of these are no better.
    line = "interval --tier 9s,7.78e-6/s,9s --tier 50s,5.19e-7/s,50s --tier 438s,3e-8/s,438s"
    found = ask(line)
    markov = by_model(found)["Markov"]
    assert markov["chosen"] is True
    assert markov["every_saves"] == [1, 8, 104]
    assert markov["wall_h_per_useful_h"] == pytest.approx(1 / 0.976769, rel=1e-6)
    assert found["wall_h_per_useful_h"] == markov["wall_h_per_useful_h"]
    assert [row["every_saves"] for row in found["tiers"]] == [1, 8, 104]
    assert found["tiers"][1]["interval_h"] == pytest.approx(8 * found["interval_h"])
    assert found["interval_low_h"] < found["interval_h"] < found["interval_high_h"]
    words = say(line)
    assert words.startswith(
        "Save every 25 min 25 s, every 8th into tier 2, every 104th into tier 3; 2.3 % of the time"
    )
    assert "The additive model's own figure is off by +0.07 % here" in words


def test_a_tier_that_is_of_no_use(ask, say):
    line = "interval --tier 9s,7.78e-6/s --tier 8s,5.19e-7/s"
    assert "nothing into tier 1" in say(line)
    assert ask(line)["tiers"][0]["every_saves"] is None
    assert "The job makes no progress" in say("interval --tier 9s,5/s --tier 80s,1/h")


def test_an_interval_in_steps(ask):
    per_time = ask("interval --rate 0.1/h --checkpoint 30s --step 0.25s")
    per_step = ask(f"interval --rate {0.1 / 3600 * 0.25}/step --checkpoint 30s --step 0.25s")
    mixed_up = ask(f"interval --rate {0.1 / 3600 * 0.25}/s --checkpoint 30s --step 0.25s")
    factor = by_model(mixed_up)["linear at Young"]["interval_steps"]
    steps = by_model(per_time)["linear at Young"]["interval_steps"]
    assert steps == pytest.approx(math.sqrt(2 * 30 / (0.1 / 3600)) / 0.25)
    assert per_step["interval_steps"] == pytest.approx(per_time["interval_steps"])
    assert factor / steps == pytest.approx(1 / math.sqrt(0.25))


def test_what_was_seen(ask):
    found = ask("interval --rate '3 in 5h' --checkpoint 1min")
    assert round(found["failures_per_h"], 3) == 0.267
    assert round(found["failures_low_per_h"], 3) == 0.091
    assert round(found["failures_high_per_h"], 3) == 0.517
    assert round(60 * by_model(found)["linear at Young"]["interval_h"]) == 21
    assert found["range_is"] == "with 90 % probability"


@pytest.mark.parametrize(
    ("per_h", "price", "wasted", "wins", "best_h"),
    [
        (0.1, 0.774, 9.5, True, 0.9512),
        (0.5, 0.876, 20.1, True, 0.4000),
        (2, 1.103, 36.5, False, 0.1791),
        (8, 1.833, 61.8, False, 0.0725),
    ],
)
def test_spot(ask, per_h, price, wasted, wins, best_h):
    found = ask(f"spot --rate {per_h}/h --checkpoint 3min --spot 0.70 --on-demand 1.00")
    models = by_model(found)
    young = models["linear at Young"]
    assert f"{young['price_per_useful_h']:.3f}" == f"{price:.3f}"
    assert round(100 * young["wasted_fraction"], 1) == wasted
    assert young["spot_wins"] is wins
    assert round(young["break_even_failures_per_h"], 4) == 1.2457
    assert round(60 * young["break_even_mtbf_h"], 1) == 48.2
    best = models["linear at its optimum"]
    assert round(best["interval_h"], 4) == best_h
    assert round(best["break_even_failures_per_h"], 4) == 1.2857
    assert round(models["exact"]["break_even_failures_per_h"], 4) == 1.1335


@pytest.mark.parametrize(
    ("restore", "young", "exact"), [("0.05h", 0.9, 0.8826), ("0.2h", 0.5256, 0.5561)]
)
def test_a_restore_moves_the_break_even(ask, restore, young, exact):
    found = ask(
        f"spot --rate 1/h --checkpoint 3min --discount 30% --on-demand 1 --restore {restore}"
    )
    models = by_model(found)
    assert round(models["linear at Young"]["break_even_failures_per_h"], 4) == young
    assert round(models["exact"]["break_even_failures_per_h"], 4) == exact


@pytest.mark.parametrize(
    ("q", "wall", "price"),
    [("0", 1.773, 1.241), ("0.5", 1.589, 1.113), ("90%", 1.347, 0.943), ("0.99", 1.220, 0.854)],
)
def test_notices(ask, q, wall, price):
    found = ask(
        "spot --rate 2/h --checkpoint 3min --restore 3min --flush-cost 1.2min --spot 0.70 "
        f"--on-demand 1.00 --flush-probability {q}"
    )
    best = by_model(found)["linear at its optimum"]
    assert round(best["wall_h_per_useful_h"], 3) == wall
    assert round(best["price_per_useful_h"], 3) == price


def test_a_budget(ask):
    found = ask(
        "budget --gpus 8000 --rate 0.5%/gpu-day --days 30 --price 2.50 --lost 15min "
        "--local-steps 500 --step 1s --islands 8"
    )
    assert round(found["num_failures"], 2) == 1203.01
    assert round(found["lost_gpu_h"]) == 2_406_020
    assert round(found["cost_lost"]) == 6_015_050
    assert round(100 * found["lost_fraction"], 2) == 41.77
    assert round(found["scratch_lost_fraction"], 1) == 601.5
    assert round(found["no_failure_log10"], 1) == -522.5
    assert found["scratch_wall_h"] is None
    assert round(found["local_lost_per_failure_s"]) == 31


def test_local_updates_against_a_checkpoint_every_20_min(say):
    words = say(
        "budget --gpus 8 --rate 0.5%/gpu-day --days 30 --price 1 --lost 10min --local-steps 500 "
        "--step 1s"
    )
    assert "a preemption loses 31.2 fleet-seconds, not 600: 0.0835 GPU-hours in all" in words
    assert words.startswith(
        "1.20 failures cost 1.60 GPU-hours: 0.028 % of the run, 1.60 of 5,760 in"
    )


def test_from_scratch_against_checkpoints(ask):
    found = ask("budget --gpus 4096 --rate 0.5%/gpu-day --days 60 --lost 30min")
    assert round(found["scratch_lost_gpu_h"]) == 3_632_968_665
    assert round(found["lost_gpu_h"]) == 2_522_895
    assert round(found["scratch_lost_ratio"]) == 1440
    assert found["cost_lost"] is None


def test_a_flush(ask, say):
    found = ask("flush --state 640GB --bandwidth 1.5GB/s --notice 180s")
    assert (round(found["write_s"], 2), found["fits"]) == (426.67, False)
    assert round(found["needed_bare_bytes_per_s"] / 1e9, 2) == 3.56
    assert round(found["needed_bytes_per_s"] / 1e9, 2) == 4.18
    assert round(ask("flush --state 640GB --bandwidth 15GB/s --notice 3min")["write_s"], 2) == 42.67
    first = say("flush --state 640GB --bandwidth 1.5GB/s --notice 180s").splitlines()[0]
    assert first == (
        "640 GB at 1.5 GB/s needs 427 s, the notice is 180 s: it will not fit; "
        "4.2 GB/s per machine would."
    )


def test_a_flush_of_many_machines_and_of_no_use(ask, say):
    assert ask("flush --state 640GB --bandwidth 1.5GB/s --notice 180s --nodes 8")["fits"]
    words = say("flush --state 1GB --bandwidth 1GB/s --notice 15s")
    assert "it will not fit: waiting and agreeing alone take longer" in words


def test_memory(ask):
    assert ask("memory --params 7B")["staged_bytes"] == 98e9
    found = ask("memory --params 70B --nodes 16 --memory 60GB")
    assert round(found["staged_bytes"] / 1e9) == 61
    assert (found["fits"], found["needed_nodes"]) == (False, 17)


@pytest.mark.parametrize(("zones", "variance"), [(1, 194.56), (2, 97.28), (4, 48.64)])
def test_zones(ask, zones, variance):
    (found,) = ask(f"zones --machines 64 --reclaim 5%/h --zones {zones}")["zones"]
    assert round(found["mean_lost_machines_per_h"], 1) == 3.2
    assert round(found["variance_lost_machines_squared"], 2) == variance


def test_the_verdict_on_zones_names_the_mode(ask, say):
    found = ask("zones --machines 64 --reclaim 5%/h")
    assert found["best_num_zones_rigid"] == found["best_num_zones_restart"] == 1
    alone = found["zones"][0]
    rigid = alone["rigid_throughput_fraction"]
    assert alone["restart_throughput_fraction"] == pytest.approx(rigid)
    assert found["best_num_zones_peer"] > 1
    assert "in other zones' memory" in say("zones --machines 64 --reclaim 5%/h")


def test_spares_and_restarts(ask):
    found = ask("spares --rate 7.76/day --repair 24h")
    assert [found[f"num_spares_{share}_percent"] for share in ("90", "99", "99_9")] == [11, 15, 18]
    found = ask("restarts --rate 20.5/day --max-restarts 50 --days 30")
    assert round(found["spent_after_days"], 1) == 2.5
    assert found["gives_up_probability"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("nodes", "lost", "chance"),
    [(16, 2, 0.933), (16, 3, 0.80), (16, 4, 0.615), (128, 2, 0.992), (128, 8, 0.793)],
)
def test_replicas(ask, nodes, lost, chance):
    found = ask(f"replicas --nodes {nodes} --lost {lost}")
    assert round(found["recovers_probability"], 3) == chance


@pytest.mark.parametrize(
    ("flags", "verdict"),
    [
        (
            "--lost 2",
            "Yes: when 2 machines go at once copies lose 52.9 s on average, against 13 min",
        ),
        ("--lost 8", "Hardly: when 8 machines go at once copies lose 12 min 45 s"),
        ("--lost 9", "No: when 9 machines go at once some pair is lost whole"),
        ("--lost 1 --pause 1h", "No: when a machine goes copies save no time, 1 h 00 min against"),
    ],
)
def test_replicas_have_a_verdict(say, flags, verdict):
    assert say(f"replicas --nodes 16 {flags}").startswith(verdict)


def test_what_copying_may_cost(ask, say):
    line = "replicas --nodes 128 --lost 1 --rate 1/12h --every 20min --restore 3min --pause 0"
    found = ask(line)
    assert found["pays"] is True
    assert found["saved_per_loss_h"] == pytest.approx(13 / 60)
    assert found["worth_slowdown_fraction"] == pytest.approx(13 / 60 / 12)
    assert "it pays while copying slows training by less than 1.81 %" in say(line)
    assert ask("replicas --nodes 128")["worth_slowdown_fraction"] is None


def test_a_flush_that_costs_more_than_it_saves(ask, say):
    line = "spot --rate 2/h --checkpoint 3min --restore 3min --spot 0.7 --on-demand 1"
    dear = f"{line} --flush-probability 0.5 --flush-cost 12min"
    found = ask(dear)
    assert found["price_without_flush_per_useful_h"] == ask(line)["price_per_useful_h"]
    assert found["price_per_useful_h"] > found["price_without_flush_per_useful_h"]
    assert "A flush of 12 min 00 s costs more than it saves here: without" in say(dear)
    assert "price_without_flush_per_useful_h" not in ask(line)
    assert "Without the flush a useful hour costs 1.254." in say(dear.replace("12min", "1min"))
    rare = say(dear.replace("2/h", "0.01/h").replace("12min", "20min"))
    assert "At this rate the flush saves" in rare
    assert "at higher ones it costs more than it saves: without, the choice flips at 0.883" in rare


def test_where_every_failure_is_flushed(say):
    words = say(
        "spot --rate 2/h --checkpoint 3min --restore 3min --spot 0.7 --on-demand 1 "
        "--flush-probability 1 --flush-cost 1min"
    )
    assert "Every failure comes with a notice that ends in a flush" in words
    assert "any, above" not in words


def test_a_deadline(ask):
    line = "deadline --work 48h --deadline 70h --rate 0.5/h --away 2h --spot 0.3 --on-demand 1"
    found = {row["policy"]: row for row in ask(line)["policies"]}
    mixed, alone = found["uniform progress"], found["spot alone"]
    assert mixed["met_fraction"] == 1
    assert mixed["chosen"]
    assert alone["met_fraction"] < 0.5
    assert mixed["cost_p5"] <= mixed["cost_mean"] <= mixed["cost_p95"]
    assert mixed["cost_mean"] < found["on demand alone"]["cost_mean"]
    assert ask(line) == ask(line)


def test_a_deadline_after_months_with_a_preemption_an_hour(ask):
    answer = ask(
        "deadline --work 600h --deadline 40d --rate 1/h --away 10min --spot 0.7 --on-demand 1"
    )
    (progress,) = [row for row in answer["policies"] if row["policy"] == "uniform progress"]
    assert progress["met_fraction"] == 1.0
    assert answer["num_runs"] >= 10


def test_a_deadline_that_nobody_meets(say):
    words = say("deadline --work 48h --deadline 40h --rate 1/h --away 1h --spot 1 --on-demand 2")
    assert words.startswith("No: 2 d 00 h of work and a changeover of 6 min 00 s do not fit into")


def test_a_job_that_makes_no_progress_is_told_so(ask, say):
    line = "spot --rate 400/h --checkpoint 3min --spot 0.70 --on-demand 1.00 --restore 10min"
    models = by_model(ask(line))
    assert models["linear at Young"]["makes_progress"] is False
    assert models["linear at Young"]["wall_h_per_useful_h"] is None
    assert "no progress" in say(line)
    assert "The linear model sees no progress" in say(line)


def test_the_linear_models_error_is_said_where_it_leaves_its_range(say):
    words = say("interval --rate 8/h --checkpoint 3min")
    assert "out of its range (λ(T+C) = 1.29, above 0.3) and off by" in words
    assert "is in its range" in say("interval --rate 0.01/h --checkpoint 1min")


@examples(50)
@given(state_gb=st.floats(0.001, 1e5), notice_s=st.floats(28, 4000))
def test_the_bandwidth_that_would_do_does(state_gb, notice_s):
    def said(bandwidth):
        line = f"flush --state {state_gb:.6f}GB --notice {notice_s:.6f}s --bandwidth {bandwidth}"
        return CliRunner().invoke(cli, ["plan", *line.split()], standalone_mode=False).output

    would = re.search(r"it will not fit; ([\d.,]+) (\w+)/s per machine would", said("1kB/s"))
    if would:
        assert "it fits" in said(f"{would[1]}{would[2]}/s")


def test_the_chosen_interval_is_never_shorter_than_the_lag(ask, say):
    line = "interval --rate 0.3236/h --checkpoint 10s --restore 6min --lag 18min"
    found = ask(line)
    assert found["interval_h"] == found["interval_low_h"] == pytest.approx(0.3)
    assert found["within_1_percent_low_h"] == pytest.approx(0.3)
    assert round(by_model(found)["exact"]["wall_h_per_useful_h"], 3) == 1.207
    assert "Save every 18 min 00 s; 17.1 %" in say(line)
    assert "no shorter than the lag; without that it would be 7 min 45 s" in say(line)


@pytest.mark.parametrize(
    "line",
    [
        "interval --rate 2/h --checkpoint 3min --restore 5h",
        "spot --rate 2000/h --checkpoint 3min --spot 0.7 --on-demand 1",
    ],
)
def test_a_useful_hour_of_more_than_a_thousand_is_no_progress(ask, say, line):
    assert "makes no progress" in say(line).splitlines()[0]
    assert not by_model(ask(line))["exact"]["makes_progress"]
    assert max(len(row) for row in say(line).splitlines()) < 140
