"""What trackers are told, through the variables that they read."""

import sys
import time
import types

import pytest

from outlast.attempt import trackers
from outlast.ledger.events import Event, encode
from outlast.ledger.file import FILE_NAME

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


# --- what goes into a run -------------------------------------------------------------------------


class _Tables:
    """A script's W&B run: its rows."""

    def __init__(self):
        self.rows, self.failures = [], 0

    def log(self, row, commit):
        assert commit is False
        if self.failures:
            self.failures -= 1
            raise RuntimeError("no connection")
        self.rows.append(row)


@pytest.fixture
def wandb(monkeypatch):
    run = _Tables()
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=run))
    for name in ("mlflow", *trackers._WRITERS):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return run


def lost_twice(directory):
    """A ledger with two incidents, a while ago, and steps behind both."""
    lines, t = [], time.time() - 100.0
    for attempt, (first, last) in enumerate([(0, 49), (40, 60), (60, 90)], 1):
        events = [("attempt_formed", {"world_size": 1, "nodes": 1}), ("resumed", {"step": first})]
        events += [("step", {"step": step, "seconds": 0.1}) for step in (first + 1, last)]
        events += [("worker_lost", {"signal": 9, "exit_code": -9, "step": last})] * (attempt < 3)
        for name, fields in events:
            t += 1.0
            head = {"t": t, "mono": t, "job": "j0b", "attempt": attempt, "node": "n", "rank": 0}
            lines.append(encode(Event(**head, event=name, fields=fields)))
    (directory / FILE_NAME).write_bytes(b"".join(lines))


def fed(directory, attempt=3):
    """What a feed tells that ends well at once."""
    feed = trackers.TrackerFeed(directory, attempt, 60, "")
    feed.start()
    feed.end()
    feed.close()


def test_each_incident_is_told_once_in_a_job(tmp_path, wandb):
    lost_twice(tmp_path)
    fed(tmp_path)
    marked = [row for row in wandb.rows if "outlast/incident" in row]
    (words,) = [row["outlast/incident"] for row in marked]
    assert words.count("was killed by SIGKILL") == 2
    assert "resumed from step 40, 9 steps done again | " in words
    assert words.endswith("resumed from step 60")
    assert marked[0]["outlast/incident_step"] == 60
    assert wandb.rows[-1]["outlast/incidents"] == 2
    assert wandb.rows[-1]["outlast/attempt"] == 3
    before = len(wandb.rows)
    fed(tmp_path, attempt=4)
    assert len(wandb.rows) > before
    assert not any("outlast/incident" in row for row in wandb.rows[before:])


def test_what_was_told_shortly_before_an_attempt_is_lost_is_told_again(tmp_path, wandb):
    lost_twice(tmp_path)
    feed = trackers.TrackerFeed(tmp_path, 3, 60, "")
    feed._turn(is_last=False)
    assert len([row for row in wandb.rows if "outlast/incident" in row]) == 1
    fed(tmp_path, attempt=4)  # the process before it was killed
    assert len([row for row in wandb.rows if "outlast/incident" in row]) == 2


def test_a_tracker_that_fails_gets_what_it_has_missed_and_is_left_alone_in_the_end(
    tmp_path, wandb, caplog
):
    lost_twice(tmp_path)
    wandb.failures = trackers.TRIES - 1
    feed = trackers.TrackerFeed(tmp_path, 3, 60, "")
    for _ in range(trackers.TRIES):
        feed._turn(is_last=True)
    assert "outlast/incident" in wandb.rows[0]
    assert caplog.text.count("W&B does not take") == 1
    wandb.failures = 100
    for _ in range(10):
        feed._turn(is_last=True)
    assert wandb.failures == 100 - trackers.TRIES


def test_nothing_is_read_and_no_thread_begun_where_no_tracker_is_in_use(tmp_path, wandb):
    lost_twice(tmp_path)
    del sys.modules["wandb"]
    feed = trackers.TrackerFeed(tmp_path, 3, 60, "")
    feed.start()
    assert feed._thread is None
    sys.modules["wandb"] = types.SimpleNamespace(run=None)  # imported, and no run is begun
    feed._turn(is_last=True)
    assert feed._follower.offset == 0


def test_of_several_event_files_that_are_open_the_one_nearest_to_the_root_is_written(
    tmp_path, wandb, monkeypatch
):
    class SummaryWriter:
        def __init__(self, place, file_writer):
            self.log_dir, self.file_writer = str(tmp_path / place), file_writer

    class Derived(SummaryWriter):
        pass

    module = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, trackers._WRITERS[0], module)
    writers = [SummaryWriter("a", None), SummaryWriter("b/c", object()), Derived("d", object())]
    found = trackers._EventFile(0)
    assert found.open() is writers[2]
    writers[2].file_writer = None  # closed: writing there would begin another file
    assert found.open() is None  # the next search is due later
    found._search_s = 0.0
    assert found.open() is writers[1]
