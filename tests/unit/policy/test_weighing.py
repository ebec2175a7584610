"""A machine is left out where its failures cost the others more than it adds."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from outlast.policy.attribution import (
    ESTIMATE_S,
    AgentView,
    Sighting,
    Stakes,
    Tolls,
    cause_of,
    weigh,
)
from outlast.policy.failures import Failure, Kind, Remedy
from outlast.policy.restart import RestartLimits, RestartPolicy
from thorough import examples

NOW_T = 100_000.0
HOUR_S = 3600.0


def stakes(machines, cost_s=60.0, **more):
    return Stakes(workers=1, all_workers=machines, machines=machines, cost_s=cost_s, **more)


def weighed(kind, every_s, times, machines, **more):
    failures = [(NOW_T - every_s * ago, kind.value) for ago in range(times)]
    return weigh(failures, stakes(machines, **more), now_t=NOW_T, window_s=HOUR_S, least=3)


CASES = {
    "a GPU's errors, each minute, on 3 machines": (Kind.CUDA, 60, 3, 3, {}, True),
    "a hang each minute": (Kind.HANG, 60, 3, 3, {}, True),
    "three in an hour, on 3": (Kind.CUDA, 1200, 3, 3, {}, False),
    "three in an hour, on 100": (Kind.CUDA, 1200, 3, 100, {}, True),
    "fewer than three": (Kind.CUDA, 60, 2, 100, {}, False),
    "three kills within 15 s, on 3": (Kind.KILLED, 5, 3, 3, {"cost_s": 4.0}, False),
    "five of them": (Kind.KILLED, 5, 5, 3, {"cost_s": 3.9}, False),
    "six of them: no chance any more": (Kind.KILLED, 5, 6, 3, {"cost_s": 3.9}, True),
    "three of them, on 8": (Kind.KILLED, 5, 3, 8, {"cost_s": 4.0}, True),
    "kills that cost little, on 8": (Kind.KILLED, 60, 3, 8, {"cost_s": 4.0}, False),
    "a spare waits": (Kind.CUDA, 1200, 3, 3, {"has_spare": True}, True),
    "a spare waits, coming back costs more": (
        *(Kind.CUDA, 1200, 3, 3),
        *({"has_spare": True, "pause_s": 30.0}, False),
    ),
    "coming back costs what it saves": (Kind.CUDA, 150, 3, 3, {"pause_s": 40.0}, False),
    "the same, left out for an hour": (
        *(Kind.CUDA, 150, 3, 3),
        *({"pause_s": 40.0, "out_s": HOUR_S}, True),
    ),
    "most of the work": (Kind.CUDA, 100, 3, 1, {}, False),
}


@pytest.mark.parametrize("name", CASES)
def test_who_goes(name):
    kind, every_s, times, machines, more, goes = CASES[name]
    found = weighed(kind, every_s, times, machines, **more)
    assert found.goes == goes, found


def test_good_hours_before_do_not_hide_a_machine_that_has_just_broken():
    failures = [(NOW_T - ago, Kind.CUDA.value) for ago in (0.0, 60.0, 120.0, 3500.0)]
    found = weigh(failures, stakes(3), now_t=NOW_T, window_s=HOUR_S, least=3)
    assert found.goes
    steady = [(NOW_T - ago, Kind.CUDA.value) for ago in (0.0, 1200.0, 2400.0, 3500.0)]
    assert not weigh(steady, stakes(3), now_t=NOW_T, window_s=HOUR_S, least=3).goes


def test_the_time_that_it_was_left_out_says_nothing_for_it():
    failures = [(NOW_T - ago, Kind.CUDA.value) for ago in (0.0, 30.0, 330.0, 360.0)]
    for away, goes in {(0.0, 0.0): False, (NOW_T - 30.0, 300.0): True}.items():
        has = stakes(3, cost_s=30.0, since_t=NOW_T - 390.0, away=away)
        assert weigh(failures, has, now_t=NOW_T, window_s=HOUR_S, least=3).goes == goes


def test_both_figures_are_told():
    words = weighed(Kind.CUDA, 75, 4, 6).words
    assert words == (
        "its failures cost the job 4.8 machine-hours an hour, and it adds 1 (1/6 of the work)"
    )
    words = weighed(Kind.CUDA, 75, 4, 6, has_spare=True).words
    assert words.endswith("an hour, and a machine that waits can take its place")


@examples(1000)
@given(
    st.lists(st.tuples(st.floats(0, HOUR_S), st.sampled_from(list(Kind))), max_size=30),
    st.integers(1, 1000),
    st.floats(0.1, 1000),
    st.floats(0, HOUR_S),
)
def test_no_machine_costs_more_than_all_and_one_more_failure_never_helps_it(
    failures, machines, cost_s, began_s
):
    known = [(NOW_T - ago_s, kind.value) for ago_s, kind in failures]
    has = stakes(machines, cost_s=cost_s, since_t=NOW_T - began_s)
    found = weigh(known, has, now_t=NOW_T, window_s=HOUR_S, least=3)
    assert 0.0 <= found.costs <= 1.0
    more = [*known, (NOW_T, Kind.CUDA.value)]
    assert weigh(more, has, now_t=NOW_T, window_s=HOUR_S, least=3).costs >= found.costs - 1e-9
    if machines == 1:
        assert not found.goes


# --- what a failure costs ------------------------------------------------------------------------


def tolls(*events):
    made = Tolls()
    for event in events:
        made.see(*event)
    return made


def test_what_a_failure_costs_is_restart_and_what_is_done_again():
    began = [("attempt_formed", 90.0), ("resumed", 100.0, 0)]
    assert tolls(*began).cost_s == ESTIMATE_S
    # 50 steps in 100 s; ten of them are done again.
    known = tolls(*began, ("restart", 200.0, 50), ("attempt_formed", 204.0), ("resumed", 206.0, 40))
    assert (known.since_t, known.cost_s, known.pause_s) == (90.0, 26.0, 6.0)
    # The next one has not come to a new step: all its time is lost.
    known.see("restart", 216.0, 40)
    known.see("attempt_formed", 217.0)
    known.see("resumed", 220.0, 40)
    assert (known.cost_s, known.pause_s) == (20.0, 5.0)


def test_an_unchanged_script_costs_its_restarts_and_two_words_of_one_failure_count_once():
    known = tolls(
        *[("attempt_formed", 100.0), ("restart", 200.0), ("restart", 201.0)],
        *[("attempt_formed", 210.0), ("restart", 300.0), ("attempt_formed", 320.0)],
        ("restart", 400.0),
    )
    assert (known.cost_s, known.pause_s) == (15.0, 15.0)


def test_a_second_word_may_know_the_step_and_a_night_between_two_runs_costs_nothing():
    began = [("attempt_formed", 90.0), ("resumed", 100.0, 0)]
    known = tolls(*began, ("restart", 200.0), ("restart", 200.5, 50), ("resumed", 206.0, 40))
    assert known.cost_s == 26.0
    known = tolls(*began, ("restart", 200.0, 50), ("job_started", 9e4), ("resumed", 9e4 + 9, 40))
    assert known.cost_s == ESTIMATE_S


# --- what is done about it -----------------------------------------------------------------------


def crashes(host, times, every_s, seen=(), **more):
    """The last verdict on a machine whose worker crashes, while the job gets on."""
    policy = RestartPolicy(99, limits=RestartLimits(weighs=True))
    for number in range(times):
        verdict = policy.judge(
            [Failure(rank=0, exit_code=-11, step=number)],
            lasted_s=every_s,
            now_s=NOW_T + number * every_s,
            here=AgentView(host=host, attempt=number, seen=tuple(seen)),
            stakes={one: stakes(3, since_t=NOW_T - 60.0, **more) for one in "abc"},
        )
    return verdict


def test_a_machine_that_crashes_each_minute_goes_and_one_that_does_each_quarter_stays():
    gone = crashes("a", 3, 60.0)
    assert gone.action is Remedy.LEAVE_OUT
    assert "machine-hours an hour" in gone.weighed
    stays = crashes("a", 3, 900.0)
    assert stays.action is Remedy.RESTART
    assert "it adds 1 (1/3 of the work)" in stays.weighed
    assert not crashes("a", 2, 60.0).weighed


def test_what_other_machines_have_had_too_is_weighed_against_none():
    elsewhere = Sighting(
        attempt=0, hosts=("b",), kind="crash", cause=cause_of("crash", "x"), t=NOW_T
    )
    assert crashes("a", 5, 60.0, seen=[elsewhere]).action is Remedy.RESTART


def test_hangs_of_one_machine_are_weighed_by_whoever_judges():
    policy = RestartPolicy(99, limits=RestartLimits(weighs=True))
    for every_s, goes in ((600.0, False), (60.0, True)):
        policy = RestartPolicy(99, limits=RestartLimits(weighs=True))
        for number in range(3):
            verdict = policy.judge(
                [Failure(rank=1, exit_code=-9, message="hang: x", step=number, hosts=("b",))],
                lasted_s=every_s,
                now_s=NOW_T + number * every_s,
                here=AgentView(host="a", attempt=number),
                stakes={one: stakes(3, since_t=NOW_T - every_s) for one in "abc"},
            )
        assert (verdict.host == "b") == goes, verdict
