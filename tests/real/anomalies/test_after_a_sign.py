"""What else may come with a rollback: a crash behind it, another one, the end, a survivor."""

import json
import shutil

import pytest
from anomalies_floor import KEPT, ROLLBACK, SCRIPT, STEPS, of_attempt, reference, run

from thorough import some

POISON = ("--poison", "32:nan")


def back_to(job):
    (event,) = job.events("rollback")
    return event["step"]


def test_a_crash_right_behind_it_goes_on_from_before_the_sign_too(floor, tmp_path):
    job, running = run(floor, tmp_path, 2, *POISON, "--die-in", "2:30", env=KEPT)
    step = back_to(job)
    resumed = [event["step"] for event in job.events("resumed")]
    assert resumed[:2] == [0, step]
    assert step <= resumed[2] <= 30, running.text
    clean = reference(floor, job, step, *POISON, "--without", "32-32")
    for rank in range(2):
        expected = {line["step"]: line for line in of_attempt(clean, rank, 0)}
        for attempt in (2, 3):
            for line in of_attempt(job, rank, attempt):
                assert line == expected[line["step"]]
        assert job.final(rank)["hash"] == clean.final(rank)["hash"]


def test_one_bad_batch_behind_another_and_then_it_gives_up(floor, tmp_path):
    poison = [arg for number in (32, 33, 35, 36) for arg in ("--poison", f"{number}:nan")]
    env = {**KEPT, "OUTLAST_HEALTH_ROLLBACKS": "2"}
    job, running = run(floor, tmp_path, 1, *poison, env=env, code=76)
    first, second, third = job.events("rollback")
    assert first["batches"] == {"loop": 1, "first": 32, "last": 32}
    assert second["batches"] == {"loop": 1, "first": 33, "last": 34}
    assert third["batches"] is None
    assert third["reason"].endswith("2 rollbacks within 1000 steps did not help")
    assert "(exit 76)" in running.err
    # Somebody has mended the data: it goes on from before the sign.
    again = floor.outlast(
        *("run", "--nproc-per-node", 1, "--dir", job.directory, SCRIPT, job.records, STEPS),
        env=env,
    )
    assert again.wait() == 0, again.text
    assert job.events("resumed")[-1]["step"] == third["step"] < 32
    assert job.newest() == STEPS


def test_stop_leaves_what_is_from_before(floor, tmp_path):
    env = {**KEPT, "OUTLAST_HEALTH_ANOMALY": "stop"}
    job, running = run(floor, tmp_path, 2, *POISON, env=env, code=76)
    assert "the loss of step 32 is no number" in running.err
    step = back_to(job)
    stands = f"step {step}" if step else "the start"  # where no save was quick enough
    assert f"stopping; {stands} stands" in running.err
    assert not job.events("worker_lost")
    listed = floor.outlast("checkpoints", "list", "--json", job.directory)
    assert listed.wait() == 0, listed.text
    health = {row["step"]: row["health"] for row in json.loads(listed.out)["checkpoints"]}
    assert not step or health[step] == "healthy"
    assert {what for saved, what in health.items() if saved > step} <= {"unhealthy"}


def test_report_changes_nothing_and_keeps_one_from_before(floor, tmp_path):
    env = {"OUTLAST_HEALTH_SETTLE": "3", "OUTLAST_CHECKPOINT_KEEP": "1"}
    job, running = run(floor, tmp_path, 1, "--poison", "32:nan", env=env)
    (sign,) = job.events("anomaly")
    assert (sign["step"], sign["action"]) == (32, "report")
    assert not job.events("rollback")
    assert "reported only" in running.err
    assert [line["step"] for line in of_attempt(job, 0, 1)] == list(range(1, STEPS + 1))
    kept = job.steps().committed
    assert STEPS in kept
    assert max(event["step"] for event in job.events("healthy")) in kept, "however old it is"
    assert min(kept) < 32


@pytest.mark.parametrize("world", [1, 2])
def test_a_sign_in_the_very_last_step_is_not_saved_as_the_end(floor, tmp_path, world):
    job, running = run(floor, tmp_path, world, "--poison", f"{STEPS}:nan", env=KEPT)
    (sign,) = job.events("anomaly")
    assert sign["step"] == STEPS
    clean = reference(
        *(floor, job, back_to(job), "--poison", f"{STEPS}:nan", "--without", f"{STEPS}-{STEPS}")
    )
    assert [final["hash"] for final in job.finals()] == [final["hash"] for final in clean.finals()]
    assert job.final()["step"] == STEPS, running.text


def test_without_our_agent_the_same_command_again_goes_on(floor, tmp_path):
    from floor import Job

    job = Job(tmp_path / "job", 2)
    arguments = (2, SCRIPT, job.records, STEPS, *POISON)
    first = floor.ranks(*arguments, env={**job.env, **KEPT})
    assert [rank.wait() for rank in first] == [75, 75], first[0].text
    assert "rolling back to step" in first[0].err
    step = back_to(job)
    shutil.copytree(job.checkpoints, tmp_path / "kept")
    ended = {rank: len(job.lines(rank)) for rank in range(2)}
    second = floor.ranks(*arguments, env={**job.env, **KEPT})
    assert [rank.wait() for rank in second] == [0, 0], second[0].text
    clean = reference(floor, job, step, *POISON, "--without", "32-32", copied=True)
    for rank in range(2):
        lines = job.lines(rank)[ended[rank] :]
        assert lines[0]["step"] == step + 1
        assert lines == clean.lines(rank)
        assert job.final(rank)["hash"] == clean.final(rank)["hash"]


@pytest.mark.parametrize("loader", some(["list", "stock", "stateful", "stream"], 2))
def test_other_loaders(floor, tmp_path, loader):
    options = (*POISON, "--loader", loader)
    job, _ = run(floor, tmp_path, 1, *options, env=KEPT)
    clean = reference(floor, job, back_to(job), *options, "--without", "32-32")
    assert of_attempt(job, 0, 2) == of_attempt(clean, 0, 0)
    assert job.final()["hash"] == clean.final()["hash"]


def test_survivors_do_not_bring_back_what_was_undone(floor, tmp_path):
    env = {**KEPT, "OUTLAST_WORKERS_IN_PROCESS": "true"}
    job, running = run(floor, tmp_path, 2, *POISON, env=env)
    step = back_to(job)
    assert [event["step"] for event in job.events("resumed")] == [0, step], running.text
    clean = reference(floor, job, step, *POISON, "--without", "32-32")
    assert [final["hash"] for final in job.finals()] == [final["hash"] for final in clean.finals()]


def test_it_is_proved_what_was_left_out(floor, tmp_path):
    job, _ = run(floor, tmp_path, 2, *POISON, env=ROLLBACK)
    shown = floor.outlast("checkpoints", "show", "--samples", "--json", job.directory)
    assert shown.wait() == 0, shown.text
    found = json.loads(shown.out)
    assert found["proved"]
    (left_out,) = found["left_out"]
    assert (left_out["step"], left_out["samples"]) == (32, 12)
    report = floor.outlast("report", job.directory)
    assert report.wait() == 0, report.text
    assert "the loss of step 32 is no number" in report.out
