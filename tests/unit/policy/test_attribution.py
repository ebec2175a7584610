"""Whose a failure is, and what the machine costs that had it."""

import random

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
    recurrence_of,
    weigh,
)
from outlast.policy.failures import Failure, Kind, Remedy
from outlast.policy.restart import RestartLimits, RestartPolicy
from sick_machines import SICK, words
from thorough import examples, seed

# --- the same on one machine is its own, on several it is the script's ---------------------------


HANG = "hang"


def failure(name, rng, rank, host, step=None, proven=True):
    if name == HANG:
        return Failure(
            rank=rank,
            exit_code=-9,
            message=f"hang: rank {rank} has not entered step 812's gradient sum",
            step=step,
            stack="train in train.py",
            hosts=(host,),
            proven=proven,
        )
    message, code = words(name, rng)
    told = f"Traceback\n  File train.py, in main\n{message}" if message and code == 1 else ""
    return Failure(rank=rank, exit_code=code, message=message, traceback=told, step=step)


def echo(step):
    return Failure(
        rank=9, exit_code=1, message="RuntimeError: Connection closed by peer", step=step
    )


class Job:
    """A job on some machines, each with a policy of its own, and what they tell each other."""

    def __init__(self, names, least=1, rng=None):
        self.policies = {name: RestartPolicy(1000) for name in names}
        self.out, self.seen, self.attempt, self.went_out = set(), [], 0, set()
        self.least, self.rng, self.end, self.blamed = least, rng or random.Random(0), None, set()

    def run(self, has, steps=lambda attempt: None):
        """An attempt, in which ``has(host, rank)`` says what fails there; False when it trained."""
        self.attempt += 1
        members = [name for name in self.policies if name not in self.out]
        failed = {name: how for rank, name in enumerate(members) if (how := has(name, rank))}
        if not failed:
            return False
        # What raises ends an attempt before anybody is taken to hang.
        failed = {name: how for name, how in failed.items() if how != HANG} or failed
        told, step = [], steps(self.attempt)
        for rank, name in enumerate(members):
            # Of a hang all are told the same; of anything else the others have an echo.
            of = next(iter(failed)) if HANG in failed.values() else name
            how = failed.get(of)
            fails = [failure(how, self.rng, rank, of, step)] if how else [echo(step)]
            verdict = self.policies[name].judge(
                fails,
                lasted_s=5.0,
                now_s=float(self.attempt),
                elsewhere={one.kind for one in self.seen if name not in one.hosts},
                here=AgentView(host=name, attempt=self.attempt, seen=tuple(self.seen)),
                num_out=len(self.went_out),
            )
            if not verdict.restart:
                self.end = self.end or verdict
            elif verdict.action is Remedy.LEAVE_OUT:
                self.blamed.add(verdict.host or name)
            told += [verdict.sighting] if verdict.sighting else []
        self.seen += told
        for name in sorted(self.blamed - self.out):
            if len(members) - 1 >= self.least and name in members:
                self.out.add(name)
                self.went_out.add(name)
                members.remove(name)
        return True

    def go(self, has, most=20, **more):
        """Until it trains, ends, or has failed ``most`` times."""
        while self.attempt < most and self.end is None and self.run(has, **more):
            pass
        return self


ALL = [*SICK, HANG]


@pytest.mark.parametrize("how", ALL)
@pytest.mark.parametrize("steps", [None, 5], ids=["at once", "at a step"])
def test_what_one_machine_has_leaves_it_out_within_three_attempts(how, steps):
    rng = random.Random(seed())
    names = ["a", "b", "c"]
    sick = rng.choice(names)
    job = Job(names, rng=rng).go(lambda host, _: how if host == sick else "", steps=lambda _: steps)
    assert job.end is None, job.end
    assert job.out == {sick}
    assert job.attempt <= 3 + (steps is not None)  # the first was progress


@pytest.mark.parametrize("how", ALL)
def test_what_all_machines_have_ends_the_job_for_what_it_is(how):
    job = Job("abc", least=2, rng=random.Random(seed())).go(lambda *_: how)
    assert job.end is not None
    assert job.end.exit_code == 76
    is_script = how == "a library"
    assert ("a bug in the script" in job.end.reason) == (is_script or how == HANG)
    assert job.end.kind is not None
    assert job.attempt <= 6


@pytest.mark.parametrize("how", ["a library", HANG])
def test_a_bug_that_only_rank_0_can_have_follows_it_to_another_machine(how):
    job = Job("abc").go(lambda _, rank: how if rank == 0 else "", steps=lambda _: 7)
    assert job.end is not None
    assert "on 2 machines" in job.end.reason
    assert "a bug in the script" in job.end.reason
    assert job.out == {"a"}
    assert set(job.end.cleared) == {"a", "b"}  # nobody is left out for it the next time


def test_a_machine_that_the_job_cannot_do_without_is_named():
    job = Job("ab", least=2).go(lambda host, _: "taken" if host == "b" else "")
    assert job.attempt == 3
    assert "always on machine b, and the job cannot go on without it" in job.end.reason
    assert "another process holds memory of the GPU" in job.end.reason


def test_alone_it_is_called_what_it_is():
    words = {}
    for how in ("no driver", "taken", "memory", "a library"):
        policy, rng = RestartPolicy(1000), random.Random(0)
        for _ in range(9):
            rng.seed(0)  # the same numbers: the same traceback
            verdict = policy.judge([failure(how, rng, 0, "a")], lasted_s=1.0, alone=True)
            if not verdict.restart:
                break
        words[how] = verdict.reason
    assert (
        "find no GPU that they can use: rank 0 failed (RuntimeError: Found no NVIDIA"
        in (words["no driver"])
    )
    assert "another process holds memory of the GPU" in words["taken"]
    assert "need more memory than there is" in words["memory"]
    assert words["a library"] == "the same failure at the same step twice: a bug in the script"


def test_the_owner_may_have_no_machine_left_out():
    policy = RestartPolicy(99, limits=RestartLimits(failures=0))
    found = []
    for attempt in range(1, 4):
        here = AgentView(host="a", attempt=attempt)
        fails = [failure("a library", random.Random(0), 0, "a")]
        found.append(policy.judge(fails, lasted_s=1.0, here=here))
    assert [one.action for one in found[:2]] == [Remedy.RESTART, Remedy.STOP]


@pytest.mark.parametrize("how", ["a library", HANG])
def test_with_progress_in_between_a_machine_may_fail_as_often_as_is_set(how):
    job = Job("abc")
    for attempt in range(1, 4):
        assert not job.out
        job.run(lambda host, _: how if host == "b" else "", steps=lambda _, n=attempt: 9 * n)
    assert (job.end, job.out) == (None, {"b"})


def test_a_hang_that_nobody_can_prove_leaves_its_machine_out_and_ends_nothing():
    policies = {name: RestartPolicy(99) for name in "ab"}
    for attempt in range(1, 9):
        hung = failure(HANG, random.Random(0), 1, "b", step=7, proven=False)
        for name, policy in policies.items():
            here = AgentView(host=name, attempt=attempt)
            verdict = policy.judge([hung], lasted_s=9.0, here=here)
            assert verdict.restart
            assert (verdict.action is Remedy.LEAVE_OUT) == (attempt > 1)
            assert verdict.host == ("b" if attempt > 1 and name == "a" else "")


def test_what_was_longer_ago_than_the_window_does_not_count():
    policy = RestartPolicy(99, limits=RestartLimits(window_s=100.0))
    for attempt in range(1, 9):
        here = AgentView(host="a", attempt=attempt)
        fails = [failure("a library", random.Random(0), 0, "a", step=attempt)]
        verdict = policy.judge(fails, lasted_s=1.0, here=here, now_s=60.0 * attempt)
        assert verdict.action is Remedy.RESTART


def test_what_may_come_of_another_machines_failure_is_not_judged():
    """Machine b raises because a's GPU has gone; that comes first in the table."""

    def has(host, _):
        return {"a": "ECC", "b": "a library"}.get(host, "") if "a" not in job.out else ""

    job = Job("abc")
    job.go(has)
    assert (job.end, job.out) == (None, {"a"})


@examples(200)
@given(
    st.lists(st.sampled_from(["", "", *ALL]), min_size=3, max_size=5),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_whoever_is_sick_the_rest_trains_or_the_job_ends(sick, least, rng):
    names = [f"m{number}" for number in range(len(sick))]
    having = {name: how for name, how in zip(names, sick, strict=True) if how}
    job = Job(names, least=least, rng=rng).go(lambda host, _: having.get(host, ""), most=60)
    assert job.attempt < 60
    assert job.out <= set(having), "a healthy machine was left out"
    if len(names) - len(having) < least:
        assert job.end is not None


def test_rows_are_of_attempts_that_follow_each_other():
    def seen(attempt, host="a", step=1, words="x"):
        return Sighting(
            attempt=attempt, hosts=(host,), kind="k", cause=cause_of("k", words), step=step
        )

    row = recurrence_of(
        seen(9), [seen(8, "b"), seen(6, step=2), seen(3), seen(7, words="y")], since=0
    )
    assert (row.attempts, row.hosts, row.same_step) == (3, frozenset("ab"), 2)
    assert recurrence_of(seen(9), [seen(8)], since=9).attempts == 1
    assert cause_of("k", "rank 3 at 0x7f") == cause_of("k", "rank 14 at 0x80")


def test_every_kind_that_decides_is_drawn():
    kinds = {Kind.NO_GPU, Kind.GPU, Kind.CUDA, Kind.GPU_MEMORY, Kind.MEMORY, Kind.STORAGE}
    kinds |= {Kind.CRASH, Kind.NCCL, Kind.SCRIPT, Kind.UNKNOWN}
    from outlast.policy.failures import kind_of

    rng = random.Random(0)
    assert {kind_of(failure(how, rng, 0, "a")) for how in SICK} == kinds


# --- left out where it costs the others more than it adds ----------------------------------------


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
