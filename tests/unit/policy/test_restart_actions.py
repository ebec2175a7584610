"""What is done about a failure: waits, machines left out, and that nothing goes on for ever."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from outlast.policy.failures import ROWS, Failure, Kind, Remedy, Signs
from outlast.policy.restart import BACK_OFF_S, RestartLimits, RestartPolicy
from thorough import examples

EXITS = {Kind.KILLED: -9, Kind.CRASH: -11, Kind.ABORT: -6, Kind.UNKNOWN: 3}
MESSAGES = {
    Kind.GPU: "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    Kind.MEMORY: "MemoryError",
    Kind.CUDA: "RuntimeError: CUDA error: an illegal memory access was encountered",
    Kind.STORAGE: "OSError: [Errno 5] Input/output error",
    Kind.GPU_MEMORY: "torch.OutOfMemoryError: CUDA out of memory.",
    Kind.SCRIPT: "ValueError: boom",
    Kind.NCCL: "torch.distributed.DistBackendError: NCCL error: unhandled system error",
    Kind.NETWORK: "ConnectionRefusedError: [Errno 111] Connection refused",
    Kind.PEER: "RuntimeError: Connection closed by peer [10.0.0.1]:1",
}
CRASHES = [*EXITS, *MESSAGES]


def failed(kind, step=None, rank=0, text=""):
    if kind in EXITS:
        return Failure(rank=rank, exit_code=EXITS[kind], step=step)
    message = MESSAGES[kind]
    return Failure(
        rank=rank,
        exit_code=1,
        message=message,
        traceback=f"Traceback: {text}\n{message}",
        step=step,
    )


def judge(policy, *failures, lasted_s=1.0, **more):
    return policy.judge(list(failures), lasted_s=lasted_s, **more)


@pytest.mark.parametrize("kind", CRASHES, ids=[kind.value for kind in CRASHES])
def test_each_kind_has_its_action(kind):
    verdict = judge(RestartPolicy(9), failed(kind, step=3))
    assert (verdict.restart, verdict.kind) == (True, kind)
    row = ROWS[kind]
    assert verdict.action is row.action
    assert verdict.own == (row.own_after != 0)
    assert bool(verdict.wait_s) == (row.action in (Remedy.BACK_OFF, Remedy.LEAVE_OUT))


@pytest.mark.parametrize("kind", CRASHES, ids=[kind.value for kind in CRASHES])
def test_the_same_traceback_twice_is_a_bug_only_where_it_can_be_one(kind):
    policy = RestartPolicy(99)
    judge(policy, failed(kind, step=3))
    verdict = judge(policy, failed(kind, step=3))
    assert verdict.restart != (ROWS[kind].bug_after == 2)
    assert verdict.kind is kind


def test_a_bug_is_known_again_whoever_else_fails_and_in_any_order():
    policy = RestartPolicy(99)
    judge(policy, failed(Kind.SCRIPT, 3, text="a"), failed(Kind.SCRIPT, 3, rank=1, text="b"))
    one, other = failed(Kind.SCRIPT, 3, rank=1, text="b"), failed(Kind.SCRIPT, 3, text="c")
    assert judge(policy, other, one).exit_code == 76


def test_what_is_killed_from_outside_at_the_same_time_is_no_bug():
    policy = RestartPolicy(99)
    for _ in range(3):
        assert judge(policy, failed(Kind.SCRIPT, 3), failed(Kind.KILLED, 3, rank=1)).restart


def test_waits_double_and_have_an_end():
    policy = RestartPolicy(99, limits=RestartLimits(without_progress=20, back_off_max_s=30.0))
    waits = [judge(policy, failed(Kind.NETWORK), chance=1.0).wait_s for _ in range(8)]
    assert waits == [BACK_OFF_S * one for one in (1, 2, 4, 8, 16, 30, 30, 30)]
    assert judge(policy, failed(Kind.NETWORK), chance=0.0).wait_s == 15.0
    assert judge(policy, failed(Kind.NETWORK, step=1), chance=1.0).wait_s == BACK_OFF_S


def test_what_is_simply_restarted_waits_from_the_second_attempt_without_progress_on():
    policy = RestartPolicy(99, limits=RestartLimits(failures=0, without_progress=9))
    waits = [judge(policy, failed(Kind.KILLED), chance=1.0).wait_s for _ in range(4)]
    assert waits == [0.0, 1.0, 2.0, 4.0]
    policy = RestartPolicy(99)
    assert [judge(policy, failed(Kind.PEER)).wait_s for _ in range(4)] == [0.0] * 4


def test_a_machine_is_left_out_after_so_many_failures_of_its_own():
    policy = RestartPolicy(99, limits=RestartLimits(failures=3, window_s=100.0))
    verdicts = [
        judge(policy, failed(Kind.KILLED, step), now_s=now_s)
        for step, now_s in [(1, 0.0), (2, 10.0), (3, 20.0), (4, 105.0), (5, 300.0)]
    ]
    out = Remedy.LEAVE_OUT
    assert [one.action is out for one in verdicts] == [False, False, True, True, False]
    assert [one.wait_s > 0 for one in verdicts] == [False, False, True, True, False]


def test_nobody_waits_after_a_worker_that_was_killed_at_its_work():
    policy = RestartPolicy(99, limits=RestartLimits(failures=2, without_progress=9))
    verdicts = [judge(policy, failed(Kind.KILLED), updates=7, alone=True) for _ in range(4)]
    assert [one.wait_s for one in verdicts] == [0.0] * 4
    assert [one.without_progress for one in verdicts] == [1, 2, 3, 4]
    assert verdicts[-1].action is Remedy.LEAVE_OUT
    assert judge(policy, failed(Kind.KILLED), updates=0).wait_s > 0
    assert judge(policy, failed(Kind.CRASH), updates=7).wait_s > 0


def test_one_machine_is_not_weighed_against_nothing():
    policy = RestartPolicy(99, limits=RestartLimits(failures=2, weighs=True, without_progress=9))
    verdicts = [judge(policy, failed(Kind.KILLED), updates=7, alone=True) for _ in range(4)]
    assert {one.action for one in verdicts} == {Remedy.RESTART}


def test_failures_of_different_kinds_count_together_and_the_scripts_do_not():
    policy = RestartPolicy(99)
    for step, kind in enumerate([Kind.KILLED, Kind.SCRIPT, Kind.GPU_MEMORY, Kind.STORAGE]):
        assert judge(policy, failed(kind, step)).action is not Remedy.LEAVE_OUT
    assert judge(policy, failed(Kind.CRASH, 9)).action is Remedy.LEAVE_OUT


def test_a_broken_gpu_leaves_it_out_at_once_and_whatever_is_set():
    assert judge(RestartPolicy(9), failed(Kind.GPU, 3)).action is Remedy.LEAVE_OUT
    policy = RestartPolicy(9, limits=RestartLimits(failures=0))
    assert judge(policy, failed(Kind.GPU, 3)).action is Remedy.LEAVE_OUT


def test_what_fails_on_other_machines_too_is_not_this_ones_fault():
    policy = RestartPolicy(99, limits=RestartLimits(failures=1))
    verdict = judge(policy, failed(Kind.KILLED, 1), elsewhere={"killed"})
    assert (verdict.own, verdict.action) == (False, Remedy.RESTART)
    assert judge(policy, failed(Kind.CRASH, 2), elsewhere={"killed"}).action is Remedy.LEAVE_OUT
    for kind in (Kind.NCCL, Kind.CUDA):  # a switch that flickers hits all machines at once
        policy = RestartPolicy(99, limits=RestartLimits(failures=1))
        assert not judge(policy, failed(kind, 1), elsewhere={kind.value}).own


@pytest.mark.parametrize("kind", CRASHES, ids=[kind.value for kind in CRASHES])
def test_what_can_come_of_a_loss_elsewhere_is_not_this_ones_fault_where_there_is_one(kind):
    policy = RestartPolicy(99, limits=RestartLimits(failures=1))
    verdict = judge(policy, failed(kind, 1), follows=True)
    is_excused = kind in (Kind.NCCL, Kind.ABORT, Kind.NETWORK)
    assert verdict.own == (ROWS[kind].own_after != 0 and not is_excused)
    assert verdict.action is not Remedy.LEAVE_OUT or verdict.own


def test_failures_from_before_this_agent_count():
    policy = RestartPolicy(
        99, limits=RestartLimits(failures=3, window_s=100.0), own=[5.0, 60.0, 70.0]
    )
    assert judge(policy, failed(Kind.KILLED, 1), now_s=110.0).action is Remedy.LEAVE_OUT


def test_a_hang_without_proof_is_not_counted():
    policy = RestartPolicy(4)
    hung = Failure(rank=1, exit_code=-9, message="hang: rank 1", step=7, proven=False)
    verdicts = [policy.judge([hung], lasted_s=9.0) for _ in range(20)]
    assert all(verdict.restart for verdict in verdicts)
    assert policy.restarts == 0
    sure = Failure(rank=1, exit_code=-9, message="hang: rank 1", step=7)
    ends = [policy.judge([sure], lasted_s=9.0).restart for _ in range(5)]
    assert ends == [True] * 4 + [False]


def hang(step=7, *, proven=True, stack="wait in /home/a/train.py"):
    return Failure(
        rank=1, exit_code=-9, message="hang: rank 1", step=step, proven=proven, stack=stack
    )


def test_hangs_in_months_of_progress_spend_no_restarts_and_other_failures_do():
    policy = RestartPolicy(3)
    for month in range(1, 60):
        assert policy.judge([hang(1000 * month)], lasted_s=4000.0).restart
    assert policy.restarts == 0
    ends = [policy.judge([hang(60_000 + k)], lasted_s=60.0).restart for k in range(5)]
    assert ends == [True] * 3 + [False, False]  # one after the other they do
    assert not RestartPolicy(0).judge([hang(7, proven=False)], lasted_s=4000.0).restart


def test_the_same_hang_at_the_same_step_three_times_is_a_bug():
    policy = RestartPolicy(1000)
    verdicts = [policy.judge([hang()], lasted_s=9.0) for _ in range(3)]
    assert [one.restart for one in verdicts] == [True, True, False]
    assert (verdicts[2].exit_code, verdicts[2].kind) == (76, Kind.HANG)
    assert "the same hang at the same step three times" in verdicts[2].reason


@pytest.mark.parametrize(
    "other",
    [hang(8), hang(stack="load in /home/a/data.py"), hang(stack=""), hang(None)],
    ids=["step", "stack", "machine", "unknown-step"],
)
def test_another_hang_in_between_makes_it_none(other):
    policy = RestartPolicy(1000, limits=RestartLimits(without_progress=99))
    for one in [hang(), hang(), other, hang(), hang()]:
        assert policy.judge([one], lasted_s=9.0).restart
    assert not policy.judge([hang()], lasted_s=9.0).restart


def test_a_suspicion_is_no_bug_until_it_has_had_all_the_time_there_is():
    policy = RestartPolicy(1000)
    for _ in range(4):
        assert policy.judge([hang(proven=False)], lasted_s=9.0).restart
    assert not policy.judge([hang()], lasted_s=900.0).restart


def test_a_script_that_tells_no_steps_hangs_in_the_same_place_now_and_then():
    policy = RestartPolicy(1000)
    for k in range(9):
        assert policy.judge([hang(None)], lasted_s=7200.0, updates=500 + k).restart
    ends = [policy.judge([hang(None)], lasted_s=7200.0, updates=500).restart for _ in range(3)]
    assert ends == [True, True, False]


def test_a_hang_is_nobodys_failure_and_is_not_waited_for():
    policy = RestartPolicy(99, limits=RestartLimits(failures=1, without_progress=9))
    hung = Failure(rank=1, exit_code=-9, message="hang: rank 1 has not entered step 8's sum")
    for _ in range(3):
        verdict = judge(policy, hung)
        assert (verdict.kind, verdict.action) == (Kind.HANG, Remedy.RESTART)
        assert (verdict.own, verdict.wait_s) == (False, 0.0)


def test_connections_that_broke_alone_are_the_networks():
    verdict = judge(RestartPolicy(9), failed(Kind.PEER, 3), echoes=False)
    assert (verdict.kind, verdict.action) == (Kind.NETWORK, Remedy.BACK_OFF)


def test_the_machines_signs_decide():
    verdict = judge(RestartPolicy(9), failed(Kind.KILLED, 3), signs=Signs(oom_kills=1))
    assert (verdict.kind, verdict.action) == (Kind.MEMORY, Remedy.ELSEWHERE)


def test_an_end_has_its_kind_and_tells_the_last_failure():
    policy = RestartPolicy(99, 2)
    judge(policy, failed(Kind.NETWORK))
    verdict = judge(policy, failed(Kind.NETWORK))
    assert (verdict.exit_code, verdict.kind) == (76, Kind.NETWORK)
    assert verdict.reason.startswith("2 attempts in a row without progress; the last one: rank 0")


crashes = st.builds(
    failed,
    st.sampled_from(CRASHES),
    step=st.none() | st.integers(0, 4),
    rank=st.integers(0, 3),
    text=st.sampled_from("ab"),
)
attempts = st.lists(
    st.tuples(
        st.lists(crashes, max_size=4),
        st.sampled_from([1.0, 1000.0]),
        st.floats(0, 1),
        st.sets(st.sampled_from([kind.value for kind in CRASHES]), max_size=2),
        st.floats(0, 2000),
        st.sampled_from([0, 7]),
    ),
    max_size=40,
)


def run(policy, attempts, order=lambda failures: failures):
    found, now_s = [], 0.0
    for failures, lasted_s, chance, elsewhere, later_s, updates in attempts:
        now_s += later_s
        found.append(
            policy.judge(
                order(failures),
                lasted_s=lasted_s,
                chance=chance,
                elsewhere=elsewhere,
                now_s=now_s,
                updates=updates,
            )
        )
    return found


@given(attempts, st.integers(0, 30), st.integers(1, 5), st.randoms(use_true_random=False))
def test_it_is_a_function_of_its_inputs_whatever_their_order(attempts, most, without, random):
    def shuffled(failures):
        return random.sample(failures, len(failures))

    first = run(RestartPolicy(most, without), attempts)
    assert run(RestartPolicy(most, without), attempts) == first
    assert run(RestartPolicy(most, without), attempts, shuffled) == first


@given(attempts, st.integers(0, 30), st.integers(1, 5))
def test_it_never_restarts_without_end(attempts, most, without):
    policy = RestartPolicy(most, without)
    verdicts = run(policy, attempts)
    assert sum(verdict.restart for verdict in verdicts) <= most
    furthest, row = -1, 0
    for (failures, lasted_s, *_), verdict in zip(attempts, verdicts, strict=True):
        step = max((f.step for f in failures if f.step is not None), default=None)
        # Which long attempts without a step are progress is said in test_restart.py.
        is_long = lasted_s > 60 and not verdict.without_progress
        new = is_long if step is None else step > furthest
        # An end for another reason leaves the count alone: nothing follows it.
        row = 0 if new else row + 1
        furthest = max(furthest, step or 0)
        if not verdict.restart:
            break
        assert row < without
        assert verdict.without_progress == row
        assert 0.0 <= verdict.wait_s <= policy.limits.back_off_max_s


@examples(30)
@given(st.sampled_from(CRASHES), st.booleans())
def test_a_failure_that_comes_always_ends(kind, steps):
    policy = RestartPolicy(1000)
    for number in range(1001):
        step = number if steps else None
        if not judge(policy, failed(kind, step)).restart:
            break
    else:
        raise AssertionError("it goes on")
