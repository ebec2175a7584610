"""Where each worker-second went: worked examples, and that nothing is lost or counted twice."""

import math
import random

import pytest
from ledger_stories import (
    STORIES,
    drained,
    ev,
    finished,
    formed,
    killed,
    killed_twice,
    lost,
    resumed,
    sample,
    start,
    undisturbed,
)

from outlast.ledger.events import Event, decode, encode
from outlast.ledger.goodput import PARTS, Goodput, goodput


def lanes(events, now=None, world_size=2):
    """The parts in seconds of the line, those that are not zero."""
    split = goodput(events, now)
    assert math.isclose(split.total, sum(split.parts().values()), abs_tol=1e-9)
    found = {part: round(value / world_size, 6) for part, value in split.parts().items()}
    return {part: value for part, value in found.items() if value}


def test_an_undisturbed_job_is_productive_from_resume_to_its_last_sample():
    split = goodput(undisturbed())
    assert lanes(undisturbed()) == {
        "productive": 2.75,
        "stalled": 0.25,
        "starting": 3.0,
        "other": 0.5,
    }
    assert (split.wall_s, split.total) == (6.5, 13.0)
    assert (split.steps_done, split.steps_replayed) == (30, 0)
    assert (split.attempts, split.commits) == (1, 1)
    assert split.fraction_productive == pytest.approx(2.75 / 6.5)


def test_a_kill_costs_detection_restart_and_replay():
    # 6.0 to 6.4 trained up to the beat; 10 to 11 crosses the mark of 34 after 4 of 10 steps.
    assert lanes(killed()) == {
        "productive": 1 + 0.75 + 1 + 0.4 + 0.6 + 1,
        "replayed": 1.4,
        "stalled": 0.25,
        "detecting": 0.6,
        "restarting": 2.0,
        "starting": 3.0,
        "other": 0.5,
    }
    split = goodput(killed())
    assert (split.steps_done, split.steps_replayed, split.attempts) == (50, 14, 2)


def test_bringing_the_data_back_is_part_of_the_restart():
    before = lanes(killed())
    again = [
        sample(10.0, 30, 2, catch_up_s=0.5) if (e.event, e.t) == ("step", 10.0) else e
        for e in killed()
    ]
    after = lanes(again)
    assert after["restarting"] == pytest.approx(before["restarting"] + 0.5)
    assert after["replayed"] == pytest.approx(before["replayed"] - 0.5)


def test_a_second_kill_replays_from_the_highest_mark():
    # The third attempt goes from 20 to 60 in 2 s; 32 of its 40 steps were done before.
    assert lanes(killed_twice()) == {
        "productive": 5.35,
        "replayed": 1.4 + 1.6,
        "stalled": 0.25,
        "detecting": 0.6 + 0.8,
        "restarting": 2.0 + 1.0,
        "starting": 3.0,
    }
    assert goodput(killed_twice()).steps_replayed == 14 + 32


def test_steps_between_the_last_sample_and_a_commit_are_done_again_as_well():
    lost_t = [
        *start(),
        sample(4.0, 10),
        ev(4.9, "commit", 1, 0, step=18, durable_s=0.1, bytes=8, files=2),
        formed(6.0, 2),
        resumed(7.0, 8, 2),
        sample(8.0, 28, 2),
    ]
    assert goodput(lost_t).steps_replayed == 10
    weights = [e for e in lost_t if e.event != "commit"]
    assert goodput(weights).steps_replayed == 2


def test_a_drain_stalls_for_its_commit_then_waits_and_restarts():
    split = goodput(drained())
    # Two workers until the second attempt forms at 66 s, four from there on.
    assert split.parts() == pytest.approx(
        {
            **dict.fromkeys(PARTS, 0),
            "productive": 1.5 * 2 + 1 * 4,
            "stalled": 0.5 * 2,
            "restarting": 1 * 2 + 1 * 4,
            "waiting": 60 * 2,
            "starting": 3 * 2,
        }
    )
    assert split.wall_s == 68.0
    machines = goodput(drained(), count="machines")
    assert machines.total == pytest.approx(66 * 1 + 2 * 2)
    assert machines.waiting == 60.0


def test_a_kill_before_the_first_commit_replays_from_the_start():
    events = [
        *start(),
        sample(4.0, 10),
        lost(5.0, beat_t=4.5, step=15),
        formed(6.0, 2),
        resumed(7.0, 0, 2),
        sample(8.0, 10, 2),
        sample(9.0, 20, 2),
    ]
    assert lanes(events) == {
        "productive": 2.0,
        "replayed": 1.5,
        "detecting": 0.5,
        "restarting": 2.0,
        "starting": 3.0,
    }


def test_without_a_beat_all_since_the_last_sample_is_detecting():
    events = [*start(), sample(4.0, 10), lost(5.0, step=12)]
    assert lanes(events) == {"productive": 1.0, "detecting": 1.0, "starting": 3.0}
    assert goodput(events).steps_done == 12


@pytest.mark.parametrize("name", ["worker_lost", "node_lost", "hang", "restart"])
def test_every_kind_of_loss_stops_the_clock(name):
    events = [*start(), sample(4.0, 10), ev(5.0, name), ev(7.0, "notice")]
    expected = {"productive": 1.0, "detecting": 1.0, "restarting": 2.0, "starting": 3.0}
    assert lanes(events) == expected


def test_late_samples_of_a_lost_attempt_only_raise_the_mark():
    late = [sample(5.5, 11), sample(5.6, 12), sample(6.5, 13), sample(6.6, 14)]
    events = [*start(), sample(4.0, 10), lost(5.0), *late, formed(6.0, 2)]
    events += [resumed(7.0, 0, 2), sample(8.0, 14, 2)]
    expected = {"productive": 1.0, "detecting": 1.0, "restarting": 2.0, "starting": 3.0}
    assert lanes(events) == {**expected, "replayed": 1.0}


def test_a_beat_before_the_last_sample_is_no_piece():
    events = [*start(), sample(4.0, 10), lost(5.0, beat_t=3.5, step=9)]
    assert lanes(events) == {"productive": 1.0, "detecting": 1.0, "starting": 3.0}
    events = [*start(), sample(4.0, 10), lost(5.0, beat_t=9.0)]
    assert lanes(events) == {"productive": 2.0, "starting": 3.0}


def test_a_restart_may_bear_the_number_of_the_attempt_to_come():
    events = killed()
    events[10] = ev(7.1, "restart", 2, reason="worker lost", restarts=1)
    assert goodput(events) == goodput(killed())


def test_a_commit_counts_once_whoever_writes_it():
    again = ev(5.3, "commit", 1, 1, step=20, durable_s=0.2, bytes=8, files=2)
    assert goodput([*undisturbed(), again]).commits == 1


def test_a_resume_without_a_step_replays_nothing():
    events = [*start(), sample(4.0, 10), lost(4.0), formed(5.0, 2), ev(6.0, "resumed", 2, 0)]
    expected = {"productive": 2.0, "restarting": 2.0, "starting": 3.0}
    assert lanes([*events, sample(7.0, 20, 2)]) == expected


@pytest.mark.parametrize("t", [math.nan, math.inf, -math.inf, 1e300])
def test_what_has_no_usable_time_is_left_out(t):
    assert goodput([*undisturbed(), sample(t, 40)]) == goodput(undisturbed())
    no_mono = Event(t=6.9, mono=t, job="j", attempt=1, node="n", rank=0, event="commit")
    assert goodput([*undisturbed(), no_mono]) == goodput(undisturbed())


def test_what_is_not_a_step_is_no_sample():
    for garbage in (None, True, -1, 3.5, "3", 10**400):
        events = undisturbed()
        events[5:5] = [sample(5.5, garbage)]
        assert goodput(events) == goodput(undisturbed())


def test_machines_may_be_named_rather_than_counted():
    events = [ev(0.0, "job_started", 0), formed(1.0, nodes=["a", "b", "c"]), resumed(2.0)]
    assert goodput(events, count="machines").total == 6.0


def test_an_attempt_lost_before_it_resumed_goes_on_restarting():
    events = [*start()[:2], lost(2.0), formed(3.0, 2), lost(4.0, attempt=2), formed(5.0, 3)]
    assert lanes([*events, resumed(6.0, 0, 3)]) == {
        "starting": 1.0,
        "restarting": 3.0,
        "other": 2.0,
    }


def test_a_drain_without_the_agreed_sample_stalls_from_the_agreement():
    events = [*start(), sample(4.0, 10), ev(4.3, "drain_agreed", 1, 0, step=14)]
    events.append(ev(5.0, "drained", step=14, committed=True))
    assert lanes(events) == {"productive": 1.3, "stalled": 0.7, "starting": 3.0}
    assert goodput(events).steps_done == 14
    assert lanes([*events, ev(4.6, "drain_agreed", 1, 1, step=14)]) == lanes(events)


def test_a_session_that_left_without_an_agreed_step_waited_for_no_checkpoint():
    """It was in an evaluation, or in a step that did not end in time."""
    events = [*start(), sample(4.0, 10)]
    events.append(ev(5.0, "drained", step=14, committed=False))
    assert lanes(events) == {"productive": 2.0, "starting": 3.0}
    assert goodput(events).steps_done == 14


def test_samples_in_a_drain_are_stalled():
    more = [sample(4.8, 14), sample(4.9, 14, stalled_s=0.1)]
    assert goodput([*drained(), *more]) == goodput(drained())


def test_a_drain_may_be_known_from_its_exit_code_alone():
    events = [*start(), sample(4.0, 10), finished(5.0, 75)]
    assert lanes(events) == {"productive": 1.0, "stalled": 1.0, "starting": 3.0}


def test_a_drain_that_is_not_over_is_a_stall():
    expected = {"productive": 1.5, "stalled": 0.4, "starting": 3.0}
    assert lanes(drained()[:8]) == expected
    assert lanes([*drained()[:7], finished(4.9, 0)]) == expected


def test_a_drained_line_of_an_earlier_attempt_is_late():
    events = killed()
    assert lanes([*events, ev(9.5, "drained", 1, step=57)]) == lanes(events)


def test_a_loss_in_the_middle_of_a_drain_is_a_stall_until_it_is_noticed():
    events = [*start(), sample(4.0, 10), ev(4.1, "drain_agreed", 1, 0, step=10)]
    events += [lost(5.0, beat_t=4.5, step=10), ev(6.0, "restart")]
    assert lanes(events) == {
        "productive": 1.0,
        "stalled": 1.0,
        "restarting": 1.0,
        "starting": 3.0,
    }


def test_a_machine_that_vanished_was_waited_for():
    events = [*start(), sample(4.0, 10), ev(100.0, "job_started", 1), formed(101.0, 2)]
    assert lanes(events) == {
        "productive": 1.0,
        "waiting": 96.0,
        "restarting": 1.0,
        "starting": 3.0,
    }


def test_a_lost_line_of_a_loss_is_a_restart():
    events = [*start(), sample(4.0, 10), formed(6.0, 2), resumed(7.0, 10, 2), sample(8.0, 20, 2)]
    assert lanes(events) == {"productive": 2.0, "restarting": 3.0, "starting": 3.0}


def test_a_job_started_on_several_machines_is_started_once():
    twice = [ev(0.5, "job_started", 0), *undisturbed()]
    assert lanes(twice) == lanes(undisturbed())
    again = [*drained(), ev(65.5, "job_started", 1)]
    assert goodput(again).parts() == pytest.approx(goodput(drained()).parts())


def test_a_job_that_finished_and_is_started_again_did_not_wait_for_machines():
    again = [ev(60.0, "job_started", 1), formed(61.0, 2)]
    assert lanes([*undisturbed(), *again]) == {
        "productive": 2.75,
        "stalled": 0.25,
        "restarting": 1.0,
        "starting": 3.0,
        "other": 0.5,
        "paused": 53.5,
    }


def test_a_start_that_was_refused_is_start_up():
    events = [ev(0.0, "job_started", 0), finished(1.0, 78, 0), ev(5.0, "job_started", 0)]
    assert lanes([*events, formed(6.0), resumed(8.0)]) == {"starting": 4.0, "paused": 4.0}


def test_now_extends_what_runs_and_nothing_that_has_finished():
    running = undisturbed()[:-1]
    assert lanes(running, now=8.0)["other"] == 2.0  # not known yet, so not called productive
    assert lanes([*running, lost(7.0)], now=9.0)["restarting"] == 2.0
    assert goodput(undisturbed(), now=1e6).wall_s == 6.5
    assert goodput(drained()[:-6], now=105.0).waiting == 200.0  # drained at 5 s, not finished
    assert goodput(drained()[:-5], now=1e6).waiting == pytest.approx(0.2)  # finished at 5.1 s
    assert goodput(running, now=1.0).wall_s == 6.0


def test_a_repair_after_the_end_is_no_time_of_the_job():
    story = undisturbed()
    later = [ev(1e5, "verify_failed", attempt=0, step=30), ev(1e5 + 1, "repaired", attempt=0)]
    assert goodput([*story, *later]) == goodput(story)
    assert goodput([*story, *later], now=2e5) == goodput(story)


def test_the_stall_is_never_longer_than_its_interval():
    assert lanes([*start(), sample(4.0, 10, stalled_s=9.0)]) == {"stalled": 1.0, "starting": 3.0}
    for garbage in (-5.0, None, "long", True, math.nan, math.inf, 10**400):
        events = [*start(), sample(4.0, 10, stalled_s=garbage)]
        assert lanes(events) == {"productive": 1.0, "starting": 3.0}
        again = [lost(4.0), formed(4.0, 2), resumed(4.0, 0, 2)]
        again.append(sample(5.0, 10, 2, stalled_s=garbage))
        expected = {"productive": 1.0, "replayed": 1.0, "starting": 3.0}
        assert lanes([*events, *again]) == expected


def test_a_rollback_within_an_attempt_is_replayed():
    events = [*start(), sample(4.0, 10), sample(5.0, 8), sample(6.0, 12)]
    assert lanes(events) == {"productive": 1.5, "replayed": 1.5, "starting": 3.0}


def test_only_rank_0_speaks_for_the_workers():
    events = undisturbed()
    events[4:4] = [sample(4.5, 15, rank=1, stalled_s=0.5)]
    events[2:2] = [ev(2.0, "resumed", 1, 1, step=0)]
    assert lanes(events) == lanes(undisturbed())


def test_an_attempt_resumes_once():
    events = undisturbed()
    events[5:5] = [resumed(5.5, 0)]
    assert lanes(events) == lanes(undisturbed())


def test_nothing_has_happened_in_an_empty_ledger():
    assert goodput([]) == Goodput()
    assert goodput([], now=5.0).fraction_productive == 0.0
    assert tuple(Goodput().parts()) == PARTS == (
        "productive",
        "replayed",
        "data",
        "stalled",
        "script",
        "starting",
        "building",
        "detecting",
        "restarting",
        "waiting",
        "paused",
        "other",
    )  # fmt: skip


@pytest.mark.parametrize("story", STORIES)
def test_a_ledger_cut_at_any_line_adds_up(story):
    events = story()
    for end in range(len(events) + 1):
        for begin in range(end):
            piece = events[begin:end]
            split = goodput(piece)
            assert sum(split.parts().values()) == pytest.approx(split.total, abs=1e-9)
            assert split.wall_s == pytest.approx(piece[-1].t - piece[0].t)
            if story is not drained:  # two workers all along, but for cuts that lose the number
                width = 2 if any(e.event == "attempt_formed" for e in piece) else 1
                assert split.total == pytest.approx(split.wall_s * width)


@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_lines_and_repeated_lines_change_nothing(story, seed):
    events = story()
    shuffled = events * 2
    random.Random(seed).shuffle(shuffled)
    assert goodput(shuffled) == goodput(events)


@pytest.mark.parametrize("story", STORIES)
def test_a_ledger_read_back_from_disk_is_the_same(story):
    events = story()
    assert goodput([decode(encode(event)) for event in events]) == goodput(events)


def test_a_machine_that_joins_those_that_train_changes_nothing():
    joined = [*undisturbed()[:4], ev(4.5, "job_started", 0, joins=True), *undisturbed()[4:]]
    assert goodput(joined) == goodput(undisturbed())


def test_machines_that_all_vanished_were_waited_for():
    started = [ev(100.0, "job_started", 1, joins=True), ev(100.5, "job_started", 1, joins=True)]
    assert lanes([*start(), sample(4.0, 10), *started, formed(101.0, 2)]) == {
        "productive": 1.0,
        "waiting": 96.0,
        "restarting": 1.0,
        "starting": 3.0,
    }


def rolled_back():
    """In step 32 the loss is no number; it is seen at 7.5 s, after step 45; 20 is gone back to."""
    return [
        *undisturbed()[:-1],
        ev(7.4, "anomaly", 1, 0, step=32, what="loss", kind="nan", action="rollback", ranks=[1]),
        ev(7.5, "rollback", 1, 0, step=20, first=32, batches=None, seen=45, reason="loss"),
        sample(7.6, 46),
        ev(7.7, "restart", 1, reason="rolled back", restarts=0),
        formed(8.0, 2),
        resumed(9.0, 20, 2),
        sample(10.0, 40, 2),
        sample(11.0, 60, 2),
    ]


def test_what_a_rollback_undoes_is_done_again():
    # What was trained up to the sign counts as it did; 26 steps of 40 come a second time.
    assert lanes(rolled_back()) == {
        "productive": 2.75 + 1.5 + 1 - 0.3,
        "replayed": 1 + 0.3,
        "stalled": 0.25,
        "restarting": 1.5,
        "starting": 3.0,
    }
    assert goodput(rolled_back()).steps_replayed == 26
