"""One simulated job, with the runtime's own decisions: who waits, what is lost, what is kept."""

import math
import random

import pytest

from outlast.planner.job import MODES, JobRun, JobSetup, Level, MachineLoss
from outlast.policy.cadence import EverySeconds, EverySteps

NEVER = EverySeconds(math.inf, 0.0)
SHARED = Level(cost_s=1.0, restore_s=10.0)


def run(losses, cadence=None, **how):
    setup = JobSetup(**{"machines": 4, "levels": (SHARED,), "step_s": 1.0, **how})
    every = cadence or EverySeconds(100.0, 0.0)
    comes = how.pop("comes", ())
    return JobRun(setup, every, losses, random.Random(1), comes=comes).run()


def test_nothing_goes_wrong():
    outcome = run([], work_s=1000.0)
    assert (outcome.finished, outcome.failures, outcome.saves) == (True, 0, 10)
    assert outcome.parts["productive"] == 1000.0
    assert outcome.parts["stalled"] == 10.0
    assert outcome.wall_s == 1010.0
    assert outcome.machine_s == 4040.0


def test_a_rigid_job_waits_for_its_machine_and_goes_back_to_its_checkpoint():
    outcome = run([MachineLoss(150.0, (2,), "reset", back_s=500.0)], work_s=300.0, detect_s=5.0)
    assert outcome.parts["detecting"] == 5.0
    assert outcome.parts["waiting"] == 495.0
    assert outcome.parts["restarting"] == 10.0
    assert outcome.parts["replayed"] == 49.0  # from 100 to 149: one second was the save's
    assert outcome.parts["productive"] == 300.0


def test_a_spare_takes_the_place():
    outcome = run([MachineLoss(150.0, (2,), "reset", back_s=500.0)], work_s=300.0, spares=1)
    assert outcome.parts["waiting"] == 0.0
    assert outcome.machine_s > 4 * outcome.wall_s


def test_others_go_on_more_slowly_and_take_it_in_again():
    loss = MachineLoss(150.0, (2,), "reset", back_s=200.0)
    outcome = run([loss], work_s=600.0, mode="restart", detect_s=5.0)
    assert outcome.parts["waiting"] == 0.0
    # 600 s of work, of which those of (350 - 165) s were done by three of four.
    slow_s = 350 - 150 - 5 - 10
    assert outcome.parts["productive"] + outcome.parts["replayed"] > 649
    assert outcome.wall_s == pytest.approx(
        600 + 49 + slow_s / 4 + 5 + 10 + 10 + outcome.parts["stalled"], abs=3
    )


def test_memory_survives_a_process_and_not_a_machine():
    memory = Level(name="memory", cost_s=0.0, restore_s=1.0, survives="process")
    disk = Level(name="disk", cost_s=0.0, restore_s=20.0, every=3)
    both = {"levels": (memory, disk), "work_s": 1000.0}
    process = run([MachineLoss(450.0, (), "reset")], **both)
    machine = run([MachineLoss(450.0, (1,), "reset", back_s=0.0)], **both)
    assert (process.parts["restarting"], process.parts["replayed"]) == (1.0, 50.0)
    assert (machine.parts["restarting"], machine.parts["replayed"]) == (20.0, 50.0)
    later = run([MachineLoss(650.0, (1,), "reset", back_s=0.0)], **both)
    assert later.parts["replayed"] == 250.0  # of the 3rd; the 4th save of disk is that of 700


def test_copies_in_others_memory_survive_unless_owner_and_holder_go_together():
    peer = Level(name="peer", survives="holders", restore_s=2.0)
    how = {"levels": (peer, SHARED), "mode": "peer", "work_s": 400.0}
    alone = run([MachineLoss(250.0, (0,), "reset", back_s=1000.0)], **how)
    # Of four machines 0 and 2 hold each other's: the copies lie half of the way round.
    pair = run([MachineLoss(250.0, (0, 2), "reset", back_s=1000.0)], **how)
    assert alone.parts["restarting"] == 2.0
    assert pair.parts["restarting"] == 10.0


def test_a_copy_is_gone_with_its_holder_also_one_after_the_other():
    peer = Level(name="peer", survives="holders", restore_s=2.0)
    how = {"levels": (peer, Level(cost_s=1.0, restore_s=10.0, every=2)), "work_s": 700.0}
    # Saved at 100 (both), 200 (memory alone); 0 and 2 hold each other's.
    both = [
        MachineLoss(250.0, (0,), "reset", back_s=5.0),
        MachineLoss(265.0, (2,), "reset", back_s=5.0),
    ]
    other = [
        MachineLoss(250.0, (0,), "reset", back_s=5.0),
        MachineLoss(265.0, (1,), "reset", back_s=5.0),
    ]
    assert run(other, **how).parts["restarting"] == 2.0 + 2.0
    assert run(both, **how).parts["restarting"] == 2.0 + 10.0
    # Saved anew between the two, it is held anew.
    later = [
        MachineLoss(250.0, (0,), "reset", back_s=5.0),
        MachineLoss(460.0, (2,), "reset", back_s=5.0),
    ]
    assert run(later, **how).parts["restarting"] == 2.0 + 2.0


def test_who_is_lost_while_a_loss_is_noticed_is_missed_as_well():
    how = {"mode": "elastic", "work_s": 400.0, "rejoin_s": 0.5, "detect_s": 5.0}
    pair = [
        MachineLoss(250.3, (0,), "reset", back_s=900.0),
        MachineLoss(252.0, (2,), "reset", back_s=900.0),
    ]
    assert run(pair, NEVER, **how).parts["replayed"] > 250
    others = [
        MachineLoss(250.3, (0,), "reset", back_s=900.0),
        MachineLoss(252.0, (1,), "reset", back_s=900.0),
    ]
    assert run(others, NEVER, **how).parts["replayed"] < 2


def test_survivors_that_wait_for_others_go_on_where_they_are():
    how = {"mode": "elastic", "work_s": 400.0, "rejoin_s": 0.5, "least": 4}
    outcome = run([MachineLoss(250.3, (0,), "reset", back_s=50.0)], NEVER, **how)
    assert outcome.parts["waiting"] == pytest.approx(50.0)
    assert outcome.parts["replayed"] < 1.0


def test_who_comes_while_it_saves_is_taken_in_after_it():
    slow = Level(cost_s=50.0, restore_s=10.0)
    loss = MachineLoss(30.0, (2,), "reset", back_s=150.0)
    outcome = run([loss], mode="restart", levels=(slow,), horizon_s=400.0)
    # Restored at 40, saved from 140 to 190: at 180 it came, and nothing is to be saved twice.
    assert outcome.parts["stalled"] == 50.0 + 50.0
    assert outcome.parts["restarting"] == 10.0 + 10.0


def test_survivors_go_on_where_they_are_if_they_have_everything():
    how = {"mode": "elastic", "work_s": 400.0, "rejoin_s": 0.5, "detect_s": 1.0}
    alone = run([MachineLoss(250.3, (0,), "reset", back_s=1000.0)], NEVER, **how)
    assert alone.parts["replayed"] < 1.0
    assert alone.parts["restarting"] == 0.5
    pair = run([MachineLoss(250.3, (0, 2), "reset", back_s=1000.0)], NEVER, **how)
    assert pair.parts["replayed"] == pytest.approx(2 * 250.3)  # all of it, on half of the machines
    twice = [MachineLoss(150.0, (0,), "reset"), MachineLoss(250.0, (1,), "reset")]
    assert run(twice, NEVER, **how).parts["replayed"] < 2.0


def test_replicas_have_everything_whoever_is_lost():
    how = {"mode": "replicas", "work_s": 400.0, "rejoin_s": 0.5, "detect_s": 1.0}
    pair = run([MachineLoss(250.3, (0, 2), "reset", back_s=1000.0)], NEVER, **how)
    assert pair.parts["replayed"] < 1.0
    assert (pair.parts["restarting"], pair.parts["detecting"]) == (0.5, 1.0)
    # With nobody left there is nothing but the checkpoint: here, none.
    everybody = run([MachineLoss(250.3, (0, 1, 2, 3), "reset", back_s=10.0)], NEVER, **how)
    assert everybody.parts["replayed"] == pytest.approx(250.3)


def test_an_island_that_goes_loses_its_own_work_alone():
    # H = 500 steps of 1 s, one of 8: 500 / 2 / 8 = 31 fleet-seconds (FACTS, local updates).
    loss = MachineLoss(2000.0, (3,), "reset", back_s=math.inf)
    how = {"mode": "local", "machines": 8, "sync_steps": 500}
    with_it = run([loss], NEVER, horizon_s=2000.0, **how)
    lost = 2000.0 - with_it.useful_s
    assert lost == pytest.approx(31.25)
    assert with_it.parts["restarting"] == 0.0


def test_an_island_that_goes_while_others_save_costs_them_nothing():
    slow = Level(cost_s=50.0, restore_s=10.0)
    how = {"mode": "local", "machines": 8, "sync_steps": 16, "levels": (slow,)}
    outcome = run([MachineLoss(120.0, (3,), "reset")], horizon_s=300.0, **how)
    assert outcome.parts["restarting"] == outcome.parts["detecting"] == 0.0
    assert outcome.parts["replayed"] < 2


def test_an_island_that_is_told_stops_nobody_and_loses_nothing():
    losses = [MachineLoss(150.0, (3,), "notice")]
    how = {"mode": "local", "machines": 8, "horizon_s": 300.0, "detect_s": 5.0}
    outcome = run(losses, NEVER, notice_s=60.0, flush_probability=1.0, **how)
    assert outcome.parts["restarting"] == outcome.parts["replayed"] == 0.0
    assert outcome.failures == 1


def test_a_notice_that_is_honoured_loses_nothing():
    losses = [MachineLoss(1050.0, (1,), "notice", back_s=30.0)]
    how = {"work_s": 2000.0, "notice_s": 60.0, "detect_s": 5.0}
    kept = run(losses, flush_probability=1.0, **how)
    lost = run(losses, flush_probability=0.0, **how)
    assert kept.parts["replayed"] == 0.0
    assert kept.parts["detecting"] == 0.0
    assert lost.parts["replayed"] > 30
    assert kept.failures == lost.failures == 1


def test_who_was_drained_is_replaced_as_soon_as_after_any_loss():
    # Told at 440, gone at 441: its successor is there 30 s later, and not 30 s after 1050.
    losses = [
        MachineLoss(1050.0, (1,), "notice", back_s=30.0),
        MachineLoss(1500.0, (1,), "reset", back_s=0.0),
    ]
    outcome = run(losses, NEVER, horizon_s=1600.0, notice_s=610.0, flush_probability=1.0)
    assert outcome.parts["waiting"] == pytest.approx(30.0)
    # At 1050 nobody goes: the successor was not meant.
    assert outcome.failures == 2
    assert outcome.parts["replayed"] == pytest.approx(1600 - 1500 - 10)


def test_a_notice_that_comes_while_it_saves_or_restores_is_answered_after_that():
    slow = Level(cost_s=40.0, restore_s=60.0)
    how = {"levels": (slow,), "notice_s": 90.0, "flush_probability": 1.0, "horizon_s": 400.0}
    saving = run(
        [MachineLoss(200.0, (1,), "notice", back_s=0.0)], **how
    )  # told at 110, saved at 140
    assert saving.parts["replayed"] == 0.0
    assert saving.parts["stalled"] == 40.0 + 40.0  # of 100 and of 300: it goes with what it saved
    how["notice_s"] = 160.0
    losses = [
        MachineLoss(150.0, (0,), "reset", back_s=0.0),
        MachineLoss(315.0, (1,), "notice", back_s=0.0),
    ]
    restoring = run(losses, **how)  # told at 155, restored at 210
    assert restoring.failures == 2
    assert restoring.parts["replayed"] == 10.0  # of the first


def test_notices_that_come_together_end_in_one_drain():
    losses = [
        MachineLoss(1050.0, (1,), "notice", back_s=5.0),
        MachineLoss(1050.5, (2,), "notice", back_s=5.0),
    ]
    slow = Level(cost_s=5.0, restore_s=10.0)
    outcome = run(
        losses, NEVER, levels=(slow,), horizon_s=2000.0, notice_s=60.0, flush_probability=1.0
    )
    assert outcome.parts["stalled"] == 5.0
    assert outcome.parts["replayed"] == 0.0
    assert outcome.failures == 2


def test_a_notice_is_heard_in_time_also_soon_after_another_loss():
    losses = [
        MachineLoss(1000.0, (0,), "reset", back_s=0.0),
        MachineLoss(1040.0, (1,), "notice", back_s=0.0),
    ]
    slow = Level(cost_s=60.0, restore_s=1.0)
    outcome = run(
        losses, NEVER, levels=(slow,), horizon_s=1500.0, notice_s=300.0, flush_probability=1.0
    )
    # Told at 740, saved at 801: the loss at 1000 costs what came after that, the other nothing.
    assert outcome.parts["replayed"] == pytest.approx(1000 - 802, abs=1.5)


def test_the_same_notices_come_whatever_the_policy():
    losses = [MachineLoss(1000.0 * one, (one % 4,), "notice", back_s=0.0) for one in range(1, 40)]
    how = {"horizon_s": 40_500.0, "notice_s": 30.0, "flush_probability": 0.5, "step_s": 0.0}
    often = run(losses, EverySeconds(50.0, 0.0), damaged_probability=0.5, **how)
    seldom = run(losses, EverySeconds(5000.0, 0.0), **how)
    # A drain is followed by no detection.
    of_both = [
        run(losses, EverySeconds(every, 0.0), damaged_probability=odds, detect_s=1.0, **how)
        for every, odds in ((50.0, 0.5), (5000.0, 0.0))
    ]
    assert often.failures == seldom.failures == 39
    assert of_both[0].parts["detecting"] == of_both[1].parts["detecting"] > 0


def test_a_notice_that_is_too_short_is_not_answered():
    slow = Level(cost_s=1.0, lag_s=100.0, restore_s=10.0)
    outcome = run(
        [MachineLoss(1050.0, (1,), "notice", back_s=30.0)],
        work_s=2000.0,
        notice_s=30.0,
        flush_probability=1.0,
        levels=(slow,),
    )
    assert outcome.parts["replayed"] > 30


def test_restarts_are_counted_by_the_runtimes_policy():
    losses = [MachineLoss(150.0 * number, (), "reset") for number in range(1, 9)]
    outcome = run(losses, work_s=5000.0, max_restarts=3)
    assert not outcome.finished
    assert outcome.ended == "gave up after 4 failures"


def test_a_damaged_checkpoint_sends_it_further_back():
    losses = [MachineLoss(1000.0 * number + 50, (), "reset") for number in range(1, 40)]
    sound = run(losses, horizon_s=40_000.0)
    damaged = run(losses, horizon_s=40_000.0, damaged_probability=0.5)
    assert damaged.parts["replayed"] > 1.5 * sound.parts["replayed"]


def test_steps_are_whole_when_they_are_saved():
    outcome = run([], EverySteps(7), work_s=70.0, step_s=2.0)
    assert outcome.saves == 5  # of 35 steps


def test_without_a_machine_that_comes_it_ends():
    outcome = run([MachineLoss(50.0, (1,), "reset")], work_s=300.0)
    assert (outcome.finished, outcome.ended) == (False, "no machine comes any more")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(5))
def test_parts_add_up_whatever_happens(mode, seed):
    chance = random.Random(seed)
    losses, at_s = [], 0.0
    while at_s < 5000:
        at_s += chance.expovariate(1 / 60)
        machines = tuple(chance.sample(range(4), chance.randrange(4)))
        losses.append(MachineLoss(at_s, machines, chance.choice(["reset", "notice"]), 100.0))
    outcome = run(
        losses,
        EverySeconds(20.0, 0.0),
        horizon_s=5000.0,
        mode=mode,
        notice_s=20.0,
        flush_probability=0.5,
        detect_s=2.0,
        rejoin_s=1.0,
        spares=seed % 2,
        damaged_probability=0.1,
    )
    assert outcome.wall_s == pytest.approx(5000.0)
    assert all(part >= -1e-9 for part in outcome.parts.values())
    assert 0 <= outcome.useful_s <= outcome.parts["productive"] + 1e-6
    assert outcome.machine_s <= 5000.0 * (4 + seed % 2) + 1e-6
