"""What went wrong, in one sentence, and when the job was back: worked examples."""

import msgspec
import pytest
from ledger_stories import ev, formed, lost, resumed, sample

from outlast.ledger.events import decode, encode
from outlast.ledger.incidents import Incident, incidents


def notice(t, deadline_t=None, **fields):
    told = {"source": "aws", "action": "terminate", "deadline_t": deadline_t, **fields}
    return ev(t, "notice", **told)


def start():
    return [ev(0.0, "job_started", 0), formed(1.0), resumed(3.0), sample(4.0, 50)]


def killed(**how):
    return [
        *start(),
        lost(7.0, **{"beat_t": 6.4, "step": 57, "signal": "SIGKILL", **how}),
        ev(7.1, "restart", reason="worker lost", restarts=1),
        formed(8.0, 2),
        resumed(9.0, 50, 2),
    ]


def drained():
    return [
        *start(),
        notice(4.5, 124.5),
        ev(5.0, "drain_agreed", 1, 0, step=91),
        ev(6.0, "drained", step=91, committed=True),
        ev(6.1, "job_finished", exit_code=75),
        ev(66.0, "job_started", 1),
        formed(67.0, 2),
        resumed(68.0, 91, 2),
        sample(69.0, 95, 2),
    ]


def test_no_trouble_no_incidents():
    assert incidents([]) == []
    events = [*start(), ev(5.0, "job_finished", exit_code=0)]
    assert incidents(events) == []
    assert incidents([*events, ev(9.0, "job_started")]) == []


def test_a_kill_lasts_from_the_last_beat_to_the_first_new_step():
    (incident,) = incidents([*killed(), sample(10.0, 60, 2), sample(11.0, 70, 2)])
    assert incident == Incident(
        kind="worker lost",
        attempt=1,
        began_t=6.4,
        detected_t=7.0,
        what="rank 1 was killed by SIGKILL after step 57",
        ranks=(1,),
        nodes=("n",),
        from_step=57,
        resumed_step=50,
        resumed_t=9.0,
        back_t=10.0,
        back_step=60,
        closed=True,
    )
    assert incident.lost_steps == 7


def test_steps_that_are_done_again_before_the_first_sample_are_counted_once():
    (seldom,) = incidents([*killed(), sample(10.0, 53, 2)])
    cost = seldom.cost(0.3)
    assert cost == pytest.approx((0.6, 0.0, 3.0, 4 * 0.3))
    assert cost.total_s == seldom.cost_s(0.3) == pytest.approx(3.6 + 1.2)
    (all_done,) = incidents([*killed(), sample(10.0, 60, 2)])
    assert all_done.cost(0.3) == pytest.approx((0.6, 0.0, 3.0, 0.0))


def test_the_time_in_which_nobody_had_started_it_costs_no_machines():
    (incident,) = incidents(drained())
    cost = incident.cost(0.3)
    assert cost.total_s == pytest.approx(69.0 - 4.5)
    assert cost.held_s == pytest.approx(cost.total_s - incident.away_s)
    assert incident.away_s > 50.0


def test_an_incident_is_open_until_a_new_step():
    for more in ([], [sample(10.0, 50, 2)], [sample(10.0, 60, 1)], [sample(10.0, 60, 2, rank=1)]):
        (incident,) = incidents([*killed(), *more])
        assert (incident.closed, incident.back_t) == (False, None)
    (incident,) = incidents(killed()[:6])
    assert (incident.resumed_step, incident.lost_steps) == (None, None)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"signal": 9}, "rank 1 was killed by SIGKILL after step 57"),
        ({"signal": None, "exit_code": -11}, "rank 1 was killed by SIGSEGV after step 57"),
        ({"signal": 63 + 64}, "rank 1 was killed by signal 127 after step 57"),
        ({"signal": None, "exit_code": 3}, "rank 1 left with exit code 3 after step 57"),
        (
            {"signal": None, "exit_code": 1, "error": "Traceback:\n  x\nValueError: bad\n"},
            "rank 1 failed (ValueError: bad) after step 57",
        ),
        ({"signal": None}, "rank 1 was lost after step 57"),
        ({"step": None}, "rank 1 was killed by SIGKILL after step 50"),
    ],
)
def test_the_sentence_says_how(how, words):
    (incident,) = incidents(killed(**how))
    assert incident.what == words


def test_several_workers_of_one_attempt_are_one_incident():
    events = killed()
    events[5:5] = [
        lost(7.0, 3, beat_t=6.4, step=57, signal="SIGKILL"),
        lost(7.05, 0, beat_t=6.5, step=58, signal="SIGTERM"),
        lost(7.06, 2, beat_t=6.5, step=58, signal="SIGTERM"),
    ]
    (incident,) = incidents(events)
    assert incident.what == (
        "ranks 1 and 3 were killed by SIGKILL after step 58; "
        "then ranks 0 and 2 were killed by SIGTERM"
    )
    assert incident.ranks == (0, 1, 2, 3)
    assert (incident.detected_t, incident.from_step, incident.lost_steps) == (7.0, 58, 8)


def test_the_cause_is_told_before_what_followed_from_it():
    gloo = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"
    events = killed()
    events[4:4] = [
        lost(6.9, 2, beat_t=6.4, step=57, signal="SIGTERM"),
        lost(6.9, 0, beat_t=6.4, step=57, exit_code=1, error=gloo),
    ]
    (incident,) = incidents(events)
    assert incident.what == (
        f"rank 1 was killed by SIGKILL after step 57; then rank 0 failed ({gloo}); "
        "then rank 2 was killed by SIGTERM"
    )


def test_two_kills_are_two_incidents():
    events = [*killed(), sample(10.0, 60, 2), lost(11.0, 0, 2, beat_t=10.5, step=62, signal=9)]
    first, second = incidents(events)
    assert (first.closed, first.back_t) == (True, 10.0)
    assert (second.closed, second.attempt, second.from_step) == (False, 2, 62)


def test_new_steps_between_two_samples_end_an_incident_as_well():
    first, second = incidents([*killed(), lost(9.9, 0, 2, beat_t=9.8, step=53, signal=9)])
    assert (first.closed, first.back_t) == (True, 9.8)
    assert (second.began_t, second.from_step, second.closed) == (9.8, 53, False)


def test_an_attempt_that_fails_before_a_new_step_belongs_to_the_incident():
    events = [*killed(), lost(9.9, 0, 2, beat_t=9.0, step=50, exit_code=1), formed(10.0, 3)]
    (incident,) = incidents(events)
    assert (incident.resumed_step, incident.closed) == (None, False)
    assert incident.what == (
        "rank 1 was killed by SIGKILL after step 57; "
        "attempt 2 failed before its first step: rank 0 left with exit code 1"
    )
    (incident,) = incidents([*events, resumed(11.0, 40, 3), sample(12.0, 45, 3)])
    assert (incident.attempt, incident.lost_steps, incident.back_t) == (1, 17, 12.0)


def test_a_notice_that_ends_in_a_drain_closes_with_the_next_attempts_first_step():
    (incident,) = incidents(drained())
    assert incident == Incident(
        kind="preemption notice",
        attempt=1,
        began_t=4.5,
        detected_t=4.5,
        what="aws says terminate in 120 s; all ranks stopped after step 91",
        from_step=91,
        resumed_step=91,
        resumed_t=68.0,
        back_t=69.0,
        back_step=95,
        away_s=pytest.approx(59.9),
        closed=True,
    )
    assert incident.lost_steps == 0
    assert not incidents(drained()[:-1])[0].closed


def test_a_drain_without_a_commit_has_lost_what_the_newest_commit_lacks():
    given_up = [
        *start(),
        ev(3.0, "commit", 1, step=80, tier="local"),
        ev(3.5, "commit", 1, step=85, tier="local", kind="weights"),
        notice(4.5, 124.5),
        ev(6.0, "drained", step=91, committed=False),
    ]
    (incident,) = incidents(given_up)
    assert (incident.standing_step, incident.lost_steps) == (80, 11)
    (incident,) = incidents([*given_up, ev(6.05, "commit", 1, step=90, tier="local")])
    assert (incident.standing_step, incident.lost_steps) == (90, 1)
    again = [ev(66.0, "job_started", 1), formed(67.0, 2), resumed(68.0, 70, 2)]
    (incident,) = incidents([*given_up, *again])
    assert (incident.standing_step, incident.resumed_step, incident.lost_steps) == (80, 70, 21)
    (incident,) = incidents([one for one in given_up if one.event != "commit"])
    assert (incident.standing_step, incident.lost_steps) == (0, 91)


def test_a_drain_that_was_agreed_and_never_reached():
    events = [*drained()[:6], lost(6.0, signal=9)]
    assert incidents(events[:-1])[0].what == (
        "aws says terminate in 120 s; all ranks agreed to stop after step 91"
    )
    (incident,) = incidents(events)
    assert incident.what == (
        "aws says terminate in 120 s; rank 1 was killed by SIGKILL after step 91; "
        "all ranks agreed to stop after step 91"
    )


def test_a_drain_that_could_not_commit_says_so():
    events = [*drained()[:6], ev(6.0, "drained", step=91, committed=False)]
    assert incidents(events)[0].what.endswith("all ranks stopped after step 91 without a commit")


def test_an_incident_says_which_machines_it_was_on():
    def nodes(*events):
        return [one.nodes for one in incidents([*start(), *events])]

    other = msgspec.structs.replace(lost(7.2, rank=0), node="m")
    assert nodes(lost(7.0), other) == [("m", "n")]
    assert nodes(ev(7.0, "node_lost", node="b")) == [("b",)]
    assert nodes(ev(7.0, "hang", nodes=["c", "a"], ranks=[3, 1])) == [("a", "c")]
    assert nodes(ev(7.0, "hang", nodes=[], ranks=[])) == [("n",)]
    assert nodes(ev(7.0, "hang", nodes="x", ranks=7)) == [("n",)]
    assert nodes(notice(7.0, 99.0)) == [()]


def test_a_drain_without_its_notice_is_a_drain():
    events = drained()
    del events[4]
    (incident,) = incidents(events)
    assert (incident.kind, incident.began_t, incident.closed) == ("drain", 5.0, True)
    assert incident.what == "all ranks stopped after step 91"


def test_a_notice_that_a_late_clock_dates_behind_the_drain_is_what_it_is_for():
    events = drained()
    (incident,) = incidents([*events[:4], notice(5.05, 125.05), *events[5:]])
    assert (incident.kind, incident.began_t) == ("preemption notice", 5.0)
    assert incident.what == "aws says terminate in 120 s; all ranks stopped after step 91"


def test_the_next_runs_notice_makes_no_other_drain_of_the_one_before():
    events = drained()
    del events[4]
    found = incidents([*events, notice(67.5, 999.0, attempt=2)])
    assert [one.kind for one in found] == ["drain", "preemption notice"]


def test_a_machine_that_goes_before_the_drain_is_part_of_the_notice():
    (incident,) = incidents([*start(), notice(4.5, 34.5, source="signal"), lost(5.0, signal=9)])
    assert incident.kind == "preemption notice"
    assert incident.what == (
        "a signal says terminate in 30 s; rank 1 was killed by SIGKILL after step 50"
    )


def test_a_notice_while_restarting_opens_its_own_incident_with_the_first_new_step():
    events = [*killed()[:-1], notice(8.5, 98.5), *killed()[-1:], sample(10.0, 60, 2)]
    first, second = incidents(events)
    assert (first.closed, "aws" in first.what) == (True, False)
    assert (second.kind, second.began_t, second.attempt) == ("preemption notice", 8.5, 2)
    assert not second.closed


def test_a_notice_while_restarting_belongs_to_what_fails_before_a_new_step():
    events = [*killed()[:-1], notice(8.5, 98.5), *killed()[-1:], lost(9.5, 0, 2, step=50)]
    events += [formed(10.0, 3), resumed(11.0, 50, 3), sample(12.0, 60, 3)]
    (incident,) = incidents(events)
    assert incident.closed
    assert incident.what.startswith("aws says terminate in 90 s; rank 1 was killed")


def test_a_notice_of_a_machine_that_is_gone_is_forgotten():
    again = [resumed(9.0, 50, 2), sample(10.0, 60, 2)]
    events = [*killed()[:-2], notice(7.5, 97.5), ev(8.0, "job_started"), formed(8.1, 2), *again]
    (incident,) = incidents(events)
    assert incident.closed
    events = [*killed(), notice(9.5, 99.5), ev(9.9, "job_finished", 2, exit_code=0)]
    (incident,) = incidents(events)
    assert incident.closed


def test_the_last_step_of_a_notice_is_the_last_before_the_loss():
    events = [*start(), notice(4.5, 64.5), sample(5.0, 70), lost(6.0, signal=9)]
    assert incidents(events)[0].from_step == 70
    (incident,) = incidents([*events, sample(1000.0, 71)])  # late: the attempt is over
    assert not incident.closed


def test_only_rank_0_of_a_later_attempt_resumes():
    strangers = [ev(9.1, "resumed", 2, 1, step=3), ev(9.2, "resumed", 1, 0, step=4)]
    (incident,) = incidents([*killed(), *strangers])
    assert (incident.resumed_step, incident.resumed_t) == (50, 9.0)
    (incident,) = incidents([*killed()[:6], ev(7.5, "resumed", 1, 0, step=4)])
    assert incident.resumed_step is None


def test_attempts_that_are_numbered_anew_close_an_incident_too():
    events = [*drained()[:9], formed(67.0, 1), resumed(68.0, 91, 1), sample(69.0, 95, 1)]
    (incident,) = incidents(events)
    assert (incident.resumed_step, incident.back_t) == (91, 69.0)


def test_steps_are_never_won_by_an_incident():
    (incident,) = incidents([*start(), lost(5.0), formed(6.0, 2), resumed(7.0, 55, 2)])
    assert (incident.from_step, incident.resumed_step, incident.lost_steps) == (50, 55, 0)


def test_the_last_step_before_an_incident_is_one_of_its_first_attempt():
    (incident,) = incidents([*killed()[:-1], lost(9.5, 0, 2, step=99)])
    assert incident.from_step == 57


@pytest.mark.parametrize(("deadline_t", "lapses_t"), [(34.5, 94.5), (None, 664.5)])
def test_a_notice_that_nothing_came_of_is_closed(deadline_t, lapses_t):
    events = [*start(), notice(4.5, deadline_t)]
    (incident,) = incidents([*events, sample(lapses_t - 0.1, 90)])
    assert not incident.closed
    (incident,) = incidents([*events, sample(lapses_t + 0.1, 90)])
    assert (incident.closed, incident.back_t) == (True, None)
    assert incident.what.endswith("; nothing came of it")


def test_other_losses_have_their_own_words():
    for event, kind, words in [
        (ev(7.0, "node_lost", node="b"), "machine lost", "machine b was lost after step 50"),
        (ev(7.0, "hang", 1, 1), "hang", "rank 1 made no more progress after step 50"),
        (ev(7.0, "restart", reason="membership"), "restart", "restarted: membership"),
    ]:
        for same in (event, decode(encode(event))):
            (incident,) = incidents([*start(), same])
            assert (incident.kind, incident.what) == (kind, words)


def test_a_loss_before_the_first_step():
    (incident,) = incidents([*start()[:3], lost(5.0, beat_t=3.0, step=0, signal=9)])
    assert incident.what == "rank 1 was killed by SIGKILL before the first step"
    (incident,) = incidents([*start()[:2], lost(2.0, exit_code=1)])
    assert (incident.what, incident.from_step) == ("rank 1 left with exit code 1", None)


def test_an_attempt_that_ends_without_a_word_is_an_incident():
    again = [ev(90.0, "job_started", 1), formed(91.0, 2), resumed(92.0, 40, 2), sample(93.0, 45, 2)]
    (incident,) = incidents([*start(), *again])
    assert incident.kind == "ended without a word"
    assert incident.what == "attempt 1 ended without a word after step 50"
    assert (incident.began_t, incident.detected_t, incident.back_t) == (4.0, 90.0, 93.0)
    assert (incident.attempt, incident.lost_steps) == (1, 10)
    (incident,) = incidents([*start(), *again[1:]])
    assert (incident.kind, incident.detected_t) == ("ended without a word", 91.0)


def test_a_job_with_no_step_left_after_a_loss_closes_when_it_finishes():
    (incident,) = incidents([*killed(), ev(10.0, "job_finished", 2, exit_code=0)])
    assert (incident.closed, incident.back_t) == (True, None)
    (incident,) = incidents([*killed(), ev(10.0, "job_finished", 2, exit_code=76)])
    assert not incident.closed


def test_a_beat_from_nowhere_does_not_stretch_an_incident():
    (incident,) = incidents(killed(beat_t=-1e6))
    assert incident.began_t == 1.0
    (incident,) = incidents([ev(-2.0, "hang", 0, beat_t=0.0)])
    assert incident.began_t == -2.0
    (incident,) = incidents(killed(beat_t=1e6))
    assert incident.began_t == incident.detected_t == 7.0


def test_what_an_earlier_attempt_still_writes_changes_nothing():
    events = [*killed(), sample(10.0, 60, 2)]
    late = [lost(10.5, 0, 1, signal=9), ev(10.6, "drained", 1, step=57), sample(10.7, 99, 1)]
    late += [ev(10.8, "drain_agreed", 1, 0, step=57), resumed(10.9, 4, 1)]
    assert incidents([*events, *late]) == incidents(events)
    then = lost(11.0, 0, 2)
    assert incidents([*events, *late, then])[1].from_step == 60


def test_a_machine_that_joins_is_no_incident():
    joins = ev(4.5, "job_started", 0, joins=True)
    assert incidents([*start(), joins, sample(5.0, 60)]) == []
    (vanished,) = incidents([*start(), joins, formed(8.0, 2), resumed(9.0, 50, 2)])
    assert vanished.kind == "ended without a word"


def wrong(action, **fields):
    told = {"step": 52, "first": 52, "what": "loss", "kind": "nan", "value": None, "ranks": [1]}
    return ev(5.0, "anomaly", 1, 0, **{**told, "usual": 2.125, "action": action, **fields})


def test_a_loss_that_goes_wrong_and_is_undone():
    batches = {"loop": 1, "first": 52, "last": 53}
    back = ev(5.1, "rollback", 1, 0, step=40, first=52, batches=batches, seen=60, reason="x")
    restart = ev(5.5, "restart", reason="rolled back", restarts=0)
    events = [*start(), wrong("rollback"), back, restart, formed(6.0, 2), resumed(7.0, 40, 2)]
    (incident,) = incidents([*events, sample(8.0, 45, 2)])
    assert incident.kind == "anomaly"
    assert incident.what == (
        "the loss of step 52 is no number, usually 2.125 on rank 1; "
        "rolling back to step 40, leaving out 2 batches"
    )
    assert (incident.from_step, incident.resumed_step, incident.lost_steps) == (60, 40, 20)
    assert (incident.detected_t, incident.back_t, incident.closed) == (5.0, 8.0, True)


def test_a_loss_that_is_only_reported_is_over_at_once():
    spike = wrong("report", kind="spike", value=31.0)
    (incident,) = incidents([*start(), spike, sample(6.0, 70)])
    assert incident.what == (
        "the loss of step 52 jumped to 31, usually 2.125 on rank 1; reported only"
    )
    assert incident.closed
    assert incident.lost_steps is None
    held = [*start(), notice(4.5, 124.5), spike]
    assert [one.kind for one in incidents(held)] == ["preemption notice"]


def test_a_loss_that_stops_the_job():
    stop = ev(5.1, "rollback", 1, 0, step=40, first=52, batches=None, seen=60, reason="x")
    ends = [wrong("stop"), stop, ev(6.0, "job_finished", exit_code=76)]
    (incident,) = incidents([*start(), *ends])
    assert incident.what.endswith("stopping; step 40 stands, what came after it is undone")
    assert not incident.closed


def moved(t, attempt=1):
    return ev(t, "survived", attempt, None, ranks=[0, 1], ended={}, seconds=0.01, moves=True)


def test_an_attempt_that_is_left_with_nobody_lost_is_no_incident():
    events = [*start(), moved(6.0), formed(6.1, 2), resumed(6.2, 71, 2), sample(7.0, 80, 2)]
    assert incidents(events) == []
    survived = ev(6.0, "survived", 1, None, ranks=[0], ended={}, seconds=0.01, moves=False)
    (incident,) = incidents([*start(), survived, formed(6.1, 2)])
    assert incident.kind == "ended without a word"


def test_a_loss_lasts_until_there_are_new_steps_whatever_attempts_are_left_meanwhile():
    """Survivors have gone on without the lost one, which is back before any step was sampled."""
    events = [*killed(), moved(9.1, 2), formed(9.2, 3), resumed(9.3, 52, 3), sample(10.0, 60, 3)]
    (incident,) = incidents(events)
    assert (incident.resumed_step, incident.resumed_t, incident.back_t) == (50, 9.0, 10.0)
    assert incident.closed


def test_what_was_committed_was_completed_though_no_sample_says_so():
    events = [
        *start(),
        ev(4.5, "commit", step=70, durable_s=0.1, tier="local", kind="full"),
        ev(66.0, "job_started", 1),
        formed(67.0, 2),
        resumed(68.0, 70, 2),
    ]
    (incident,) = incidents(events)
    assert (incident.from_step, incident.lost_steps) == (70, 0)
    assert "after step 70" in incident.what
