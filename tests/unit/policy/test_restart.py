"""Every row of the table, in its order, and what makes two failures the same."""

import itertools

import pytest

from outlast.policy.failures import Failure
from outlast.policy.restart import SHORT_ATTEMPT_S, WITHOUT_PROGRESS_MAX, RestartPolicy


def crash(step=None, *, rank=0, text="Traceback: boom", message="ValueError: boom", code=1):
    return Failure(rank=rank, exit_code=code, traceback=text, message=message, step=step)


def killed(step=None, *, rank=0, signal=9):
    return Failure(rank=rank, exit_code=-signal, step=step)


def echo(step=None, *, rank=1, message="RuntimeError: Connection closed by peer [127.0.0.1]:1"):
    return crash(step, rank=rank, text=f"Traceback: {message}", message=message)


def judge(policy, *failures, lasted_s=1.0, leaving=False, **more):
    verdict = policy.judge(list(failures), lasted_s=lasted_s, leaving=leaving, **more)
    return verdict.exit_code if not verdict.restart else "restart"


ON_PURPOSE = [2, 77, 78]


@pytest.mark.parametrize("code", [2, 77, 78, 75])
@pytest.mark.parametrize("leaving", [True, False])
def test_a_worker_that_left_on_purpose_decides(code, leaving):
    left = Failure(rank=1, exit_code=code, message="the script said why")
    policy = RestartPolicy(10)
    for failures in itertools.permutations([left, killed(5), echo(5)]):
        assert judge(policy, *failures, leaving=leaving) == code
    assert policy.restarts == 0
    verdict = policy.judge([killed(5), left], lasted_s=1.0)
    assert verdict.reason == ("the script said why" if code != 75 else verdict.reason)
    assert verdict.reason


def test_the_order_among_them_is_that_of_the_table():
    order = [2, 77, 78, 75]
    for first, second in itertools.combinations(order, 2):
        failures = [Failure(rank=0, exit_code=second), Failure(rank=1, exit_code=first)]
        assert judge(RestartPolicy(10), *failures) == first


def test_a_machine_that_leaves_is_not_worth_another_attempt():
    policy = RestartPolicy(10)
    assert judge(policy, crash(5), leaving=True) == 75
    assert judge(policy, killed(5), leaving=True) == 75
    verdict = policy.judge([killed(5)], lasted_s=1.0, leaving=True)
    assert "on their way out" in verdict.reason


def test_the_same_traceback_at_the_same_step_twice_is_a_bug():
    policy = RestartPolicy(10)
    assert judge(policy, crash(5)) == "restart"
    assert judge(policy, crash(5)) == 76
    verdict = RestartPolicy(10)
    verdict.judge([crash(5)], lasted_s=1.0)
    assert "same step twice" in verdict.judge([crash(5)], lasted_s=1.0).reason


@pytest.mark.parametrize(
    "second",
    [crash(6), crash(4), crash(5, text="Traceback: other"), killed(5), echo(5)],
    ids=["later", "earlier", "other traceback", "killed", "echo"],
)
def test_another_failure_is_not_the_same_bug(second):
    policy = RestartPolicy(10)
    assert judge(policy, crash(5)) == "restart"
    assert judge(policy, second) == "restart"


def test_twice_means_twice_in_a_row():
    policy = RestartPolicy(10)
    assert [judge(policy, f) for f in (crash(5), killed(6), crash(5))] == ["restart"] * 3


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("<A object at 0x7f12ab> in pid 123", "<A object at 0x99> in pid 4", True),
        ("value 123", "value 124", False),
        ("pid 1: a", "pid 1: b", False),
    ],
)
def test_addresses_and_process_numbers_do_not_make_a_difference(one, other, same):
    policy = RestartPolicy(10)
    assert judge(policy, crash(5, text=one)) == "restart"
    assert judge(policy, crash(5, text=other)) == (76 if same else "restart")


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: [../gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.0.0.1]:1",
        "torch.distributed.DistNetworkError: Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "DistBackendError: NCCL error: remote process exited or there was a network error",
        "DistBackendError: NCCL communicator was aborted on rank 3.",
    ],
)
def test_the_echo_of_a_peers_death_is_not_the_bug(message):
    """The survivors of a kill -9 all fail in the same line; that proves nothing about them."""
    policy = RestartPolicy(100)
    for _ in range(3):
        assert judge(policy, echo(5, message=message), killed(5)) == "restart"
    policy = RestartPolicy(100)
    assert judge(policy, echo(5, message=message), crash(5, rank=2)) == "restart"
    assert judge(policy, echo(5, message=message), crash(5, rank=3)) == 76


def test_the_reason_names_the_cause_and_not_the_echo():
    def reason(*failures):
        return RestartPolicy(9).judge(list(failures), lasted_s=1.0).reason

    assert reason(echo(5), killed(5, rank=3)) == "rank 3 failed (signal 9)"
    assert reason(crash(5, rank=2)) == "rank 2 failed (ValueError: boom)"
    assert reason(Failure(rank=1, exit_code=3)) == "rank 1 failed (exit code 3)"
    assert reason(echo(5)) == reason() == "a peer was lost"


def test_attempts_without_progress_end():
    policy = RestartPolicy(100)
    outcomes = [judge(policy, killed(None)) for _ in range(WITHOUT_PROGRESS_MAX)]
    assert outcomes == ["restart"] * (WITHOUT_PROGRESS_MAX - 1) + [76]
    verdict = policy.judge([killed(None)], lasted_s=1.0)
    assert "without progress" in verdict.reason


def test_a_new_step_starts_the_count_again():
    policy = RestartPolicy(100, without_progress_max=3)
    steps = [10, 10, 5, 11, 11, 11, 11]
    assert [judge(policy, killed(step)) for step in steps] == ["restart"] * 6 + [76]


def test_the_furthest_of_any_rank_counts():
    policy = RestartPolicy(100, without_progress_max=2)
    for step in range(1, 10):
        assert judge(policy, killed(0), killed(step, rank=1), killed(None, rank=2)) == "restart"


def test_a_script_that_tells_no_steps_makes_progress_by_lasting():
    policy = RestartPolicy(100, without_progress_max=2)
    for number in range(10):
        one = crash(None, text=f"Traceback: {number}")
        assert judge(policy, one, lasted_s=SHORT_ATTEMPT_S, updates=7) == "restart"
        assert judge(policy, killed(None), lasted_s=SHORT_ATTEMPT_S) == "restart"
    assert judge(policy, killed(None), lasted_s=SHORT_ATTEMPT_S - 1) == "restart"
    assert judge(policy, crash(None), lasted_s=SHORT_ATTEMPT_S - 1) == 76


def test_a_bug_behind_minutes_of_loading_is_a_bug():
    """A minute without a step and without an update is loading, not progress."""
    policy = RestartPolicy(1000)
    assert [judge(policy, crash(None), lasted_s=180.0) for _ in range(2)] == ["restart", 76]
    policy = RestartPolicy(1000)
    hung = [Failure(rank=0, exit_code=-9, message="hang: nobody moves")]
    found = [judge(policy, *hung, lasted_s=600.0) for _ in range(WITHOUT_PROGRESS_MAX)]
    assert found == ["restart"] * (WITHOUT_PROGRESS_MAX - 1) + [76]
    away = crash(None, message="ConnectionRefusedError: [Errno 111] Connection refused")
    policy = RestartPolicy(1000)
    waits = [policy.judge([away], lasted_s=180.0, chance=1.0).wait_s for _ in range(4)]
    assert waits == [1.0, 2.0, 4.0, 8.0]


def test_an_evaluation_that_raises_after_hours_is_a_bug_in_a_script_without_steps():
    policy = RestartPolicy(1000)
    assert [judge(policy, crash(None), lasted_s=7200.0, updates=500) for _ in range(2)] == [
        "restart",
        76,
    ]
    # Elsewhere each time, it proves less, but it is not progress for ever.
    policy = RestartPolicy(1000)
    found = [judge(policy, crash(None), lasted_s=7200.0, updates=500 + k) for k in range(6)]
    assert found == ["restart"] * 5 + [76]


def test_a_script_without_steps_that_hangs_after_hours_of_updates_goes_on():
    policy = RestartPolicy(1000)
    hung = Failure(rank=0, exit_code=-9, message="hang: nobody moves")
    for k in range(9):
        assert judge(policy, hung, lasted_s=7200.0, updates=500 + k) == "restart"


def test_a_long_attempt_that_tells_its_steps_still_has_to_make_some():
    policy = RestartPolicy(100, without_progress_max=2)
    assert judge(policy, killed(5), lasted_s=1e6) == "restart"
    assert judge(policy, killed(5), lasted_s=1e6) == "restart"
    assert judge(policy, killed(5), lasted_s=1e6) == 76


def test_the_budget_of_restarts():
    policy = RestartPolicy(3)
    outcomes = [judge(policy, killed(step)) for step in range(1, 6)]
    assert outcomes == ["restart"] * 3 + [76, 76]
    assert policy.restarts == 3
    assert policy.judge([killed(9)], lasted_s=1.0).reason == "all 3 restarts are spent"
    assert judge(RestartPolicy(0), killed(1)) == 76


def test_a_rollback_is_a_restart_that_is_not_counted():
    policy = RestartPolicy(1)
    back = [Failure(rank=rank, exit_code=79, step=40) for rank in range(2)]
    for _ in range(10):
        assert judge(policy, *back) == "restart"
    assert policy.restarts == 0
    assert judge(policy, killed(41), *back) == "restart"
    assert judge(policy, *back, leaving=True) == 75


def test_after_a_rollback_what_was_reached_before_counts_no_more():
    policy = RestartPolicy(100)
    back = Failure(rank=0, exit_code=79, step=50_010)
    assert judge(policy, crash(50_000)) == "restart"
    assert judge(policy, back) == "restart"
    for step in range(40_000, 48_000, 1000):
        verdict = policy.judge([killed(step)], lasted_s=3600.0)
        assert (verdict.restart, verdict.without_progress) == (True, 0)
    policy = RestartPolicy(100)
    assert [judge(policy, one) for one in (crash(9), back, crash(9), crash(9))] == [
        *["restart"] * 3,  # another batch came at that step
        76,
    ]


def test_a_rollback_that_the_ledger_does_not_know_is_not_believed():
    policy = RestartPolicy(3)
    left = Failure(rank=0, exit_code=79)
    found = [judge(policy, left, rolled_back=False) for _ in range(4)]
    assert found == ["restart"] * 3 + [76]
    assert policy.restarts == 3


def test_what_is_still_to_be_done_behind_a_loop_is_no_bug_and_names_what_came_first():
    policy = RestartPolicy(5)
    left = crash(16, message="no step was left", code=76)
    first = RestartPolicy(5).judge([left], lasted_s=1.0)
    assert (first.restart, first.exit_code, first.reason) == (False, 76, "no step was left")
    assert judge(policy, crash(16, message="ValueError: the report")) == "restart"
    last = policy.judge([left, echo(16)], lasted_s=1.0)
    assert (last.restart, last.exit_code) == (False, 76)
    assert last.reason == "rank 0 failed (ValueError: the report). Started again, no step was left"


def test_workers_that_stop_for_their_loss_stop_the_job():
    policy = RestartPolicy(10)
    assert judge(policy, Failure(rank=0, exit_code=76), Failure(rank=1, exit_code=76)) == 76
    assert (
        "the loss went wrong" in policy.judge([Failure(rank=0, exit_code=76)], lasted_s=1.0).reason
    )
