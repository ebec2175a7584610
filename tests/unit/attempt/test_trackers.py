"""What trackers are told, through the variables that they read."""

import sys
import types

import pytest

from outlast.attempt import trackers

RUN = "0123456789abcdef0123456789abcdef"


def exported(directory, rank=0, **environ):
    trackers.export("j0b", directory, rank, environ)
    environ.pop("OUTLAST_MLFLOW_RUN_ID", None)
    return environ


@pytest.fixture
def mlflow(monkeypatch):
    """What a script that uses MLflow has imported; its run can be set."""
    module = types.ModuleType("mlflow")
    module.run_id = RUN
    module.active_run = lambda: (
        types.SimpleNamespace(info=types.SimpleNamespace(run_id=module.run_id))
        if module.run_id
        else None
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return module


def test_a_first_run(tmp_path):
    assert exported(tmp_path) == {
        "OUTLAST_RUN_ID": "outlast-j0b",
        "OUTLAST_TENSORBOARD_DIR": str(tmp_path / "tensorboard"),
        "WANDB_RUN_ID": "outlast-j0b",
        "WANDB_RESUME": "allow",
    }


def test_other_ranks_have_runs_of_their_own(tmp_path, mlflow):
    trackers.note(tmp_path)
    environ = exported(tmp_path, rank=3)
    assert environ["WANDB_RUN_ID"] == "outlast-j0b-3"
    assert "MLFLOW_RUN_ID" not in environ


def test_what_somebody_has_set_stays(tmp_path, mlflow):
    trackers.note(tmp_path)
    given = {"WANDB_RUN_ID": "mine", "MLFLOW_RUN_ID": "mine", "OUTLAST_RUN_ID": "mine"}
    environ = exported(tmp_path, **given)
    assert given.items() <= environ.items()
    assert "WANDB_RESUME" not in environ  # theirs may be a run that must not be there yet
    assert exported(tmp_path, WANDB_RESUME="must")["WANDB_RESUME"] == "must"


def test_mlflow_s_run_is_remembered_and_handed_on(tmp_path, mlflow):
    trackers.note(tmp_path)
    assert exported(tmp_path)["MLFLOW_RUN_ID"] == RUN
    mlflow.run_id = RUN[::-1]
    trackers.note(tmp_path)
    assert exported(tmp_path)["MLFLOW_RUN_ID"] == RUN[::-1]
    assert [path.name for path in tmp_path.iterdir()] == ["runs.json"]


@pytest.mark.parametrize("run_id", ["", "../../etc", "x" * 32])
def test_what_is_no_run_is_not(tmp_path, mlflow, run_id):
    mlflow.run_id = run_id
    trackers.note(tmp_path)
    assert "MLFLOW_RUN_ID" not in exported(tmp_path)


def test_its_failure_is_its_own(tmp_path, mlflow, caplog):
    del mlflow.active_run
    trackers.note(tmp_path)
    assert "not remembered" in caplog.text


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"mlflow": 3}', '{"mlflow": "rm -rf"}'])
def test_a_file_that_is_not_ours_is_not_believed(tmp_path, text):
    (tmp_path / "runs.json").write_text(text)
    assert "MLFLOW_RUN_ID" not in exported(tmp_path)


def test_another_job_that_is_started_from_within_has_runs_of_its_own(tmp_path, mlflow):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    trackers.note(first)
    environ = {}
    trackers.export("a" * 12, first, 0, environ)
    assert environ["MLFLOW_RUN_ID"] == RUN
    trackers.export("b" * 12, second, 0, environ)
    assert environ["WANDB_RUN_ID"] == environ["OUTLAST_RUN_ID"] == f"outlast-{'b' * 12}"
    assert environ["OUTLAST_TENSORBOARD_DIR"] == str(second / "tensorboard")
    assert "MLFLOW_RUN_ID" not in environ
    environ |= {"WANDB_RUN_ID": "mine", "MLFLOW_RUN_ID": "mine"}
    trackers.export("a" * 12, first, 0, environ)
    assert environ["WANDB_RUN_ID"] == environ["MLFLOW_RUN_ID"] == "mine"


def test_without_mlflow_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    trackers.note(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_process_that_becomes_another_rank_forgets_what_was_set_for_its_rank(tmp_path):
    environ = {}
    trackers.export("0123456789ab", tmp_path, 3, environ)
    assert environ["WANDB_RUN_ID"] == "outlast-0123456789ab-3"
    trackers.forget_rank(environ)
    trackers.export("0123456789ab", tmp_path, 0, environ)
    assert environ["WANDB_RUN_ID"] == "outlast-0123456789ab"


def test_what_somebody_has_set_is_not_forgotten_with_the_rank():
    environ = {"WANDB_RUN_ID": "mine", "MLFLOW_RUN_ID": "mine", "OUTLAST_RUN_ID": "mine"}
    before = dict(environ)
    trackers.forget_rank(environ)
    assert environ == before


def test_what_is_new_in_the_environment_is_told(tmp_path):
    environ = {"WANDB_RUN_ID": "mine"}
    assert trackers.export("j0b", tmp_path, 0, environ) == environ.keys() - {"WANDB_RUN_ID"}
    assert trackers.export("j0b", tmp_path, 0, environ) == set()  # as in a worker of our agent
