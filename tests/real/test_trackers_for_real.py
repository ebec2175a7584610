"""What W&B, MLflow and TensorBoard have of a job that was killed or drained.

MLflow and W&B are large and not among what ``make test`` installs: ``make test-all`` has them.
"""

import json
import os
import signal
import struct

import pytest
from floor import Job, until

BLOCK = 1 << 15
LOOP = """
import os, signal, sys, time
from pathlib import Path
import torch, outlast
from torch import distributed
model = torch.nn.Linear(2, 2)
enough = Path(sys.argv[1])
is_one_of_many = os.environ["WORLD_SIZE"] != "1"
if is_one_of_many:
    distributed.init_process_group("gloo")
def all_see(path):
    seen = torch.tensor(float(path.exists()))
    if is_one_of_many:
        distributed.all_reduce(seen)
    return bool(seen)
def train(log):
    with outlast.session(model=model, every="3 steps") as session:
        for _ in session.steps(range(1_000_000)):
            log(session.step)
            time.sleep(0.01)
            if all_see(enough):
                break
"""
TENSORBOARD = (
    LOOP
    + """
from torch.utils.tensorboard import SummaryWriter
place = os.environ["OUTLAST_TENSORBOARD_DIR"]
with SummaryWriter(place) as writer, SummaryWriter(place + "/evaluation") as evaluation:
    train(lambda step: writer.add_scalar("loss", 1.0 / (step + 1), step))
    evaluation.add_scalar("accuracy", 0.5, 0)
"""
)
BOTH = (
    LOOP
    + """
import mlflow, wandb
def log(step):
    mlflow.log_metric("loss", 1.0 / (step + 1), step=step)
    wandb.log({"loss": 1.0 / (step + 1)})  # the run counts its rows itself
with mlflow.start_run() as one, wandb.init(project="p", mode="offline") as other:
    train(log)
    print("RUN", one.info.run_id, other.id)
"""
)
LIGHTNING = """
import os, sys, time
from pathlib import Path
import torch
import lightning.pytorch as pl
from lightning.pytorch.loggers import MLFlowLogger
from outlast.integrations.lightning import LightningCallback
enough = Path(sys.argv[1])
class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
    def training_step(self, batch, index):
        time.sleep(0.01)
        self.trainer.should_stop = enough.exists()
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-4)
data = torch.utils.data.TensorDataset(torch.ones(100_000, 1))
logger = MLFlowLogger(run_id=os.environ.get("MLFLOW_RUN_ID"))
trainer = pl.Trainer(
    max_epochs=1, accelerator="cpu", logger=logger, log_every_n_steps=1,
    enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    callbacks=[LightningCallback(every="3 steps")],
)
trainer.fit(Net(), torch.utils.data.DataLoader(data))
print("RUN", logger.run_id)
"""
STAND_IN = (
    LOOP
    + """
import threading, types
rank = os.environ["RANK"]
class Run:
    def log(self, row, commit):
        print("ROW", rank, sorted(row), commit, flush=True)
        if sys.argv[2] == "hangs":
            threading.Event().wait()
        raise RuntimeError("the tracker is broken")
sys.modules["wandb"] = types.SimpleNamespace(run=Run())
train(lambda step: None)
"""
)
DRAINED = """
import os, signal
import torch, mlflow, wandb, outlast
model = torch.nn.Linear(2, 2)
with mlflow.start_run() as one, wandb.init(project="p", mode="offline") as other:
    with outlast.session(model=model, every="3 steps") as session:
        until = session.step + 5 if session.resumed else 1_000_000
        for _ in session.steps(range(1_000_000), until=until):
            mlflow.log_metric("step", session.step, step=session.step)
            if session.step == 9 and not session.resumed:
                os.kill(os.getpid(), signal.SIGTERM)
    print("RUN", one.info.run_id, other.id)
"""
NUMBERS = {"outlast/goodput", "outlast/lost_worker_s", "outlast/incidents", "outlast/attempt"}


class _Killed:
    """A job whose worker is killed twice, each time once it has gone on for some steps."""

    def __init__(self, floor, tmp_path, text, env=None):
        self.job = Job(tmp_path / "job")
        self.enough = tmp_path / "enough"
        script = tmp_path / "train.py"
        script.write_text(text)
        self._floor = floor
        self.run = floor.outlast(
            *("run", "--dir", self.job.directory, script, self.enough), env=env, cwd=tmp_path
        )
        self.lost = []

    def kill(self):
        """SIGKILL to the worker of the newest attempt; each was sampled behind its resume."""
        attempt = len(self.lost) + 1
        until(lambda: self._sampled(attempt), f"steps in attempt {attempt}", running=self.run)
        (worker,) = self._floor.workers()
        os.kill(worker, signal.SIGKILL)
        self.lost.append(worker)

    def end(self):
        """Have the job finish, once the last loss is behind it."""
        attempt = len(self.lost) + 1
        until(lambda: self._sampled(attempt), f"steps in attempt {attempt}", running=self.run)
        self.enough.touch()
        assert self.run.wait() == 0, self.run.text

    def resumed(self):
        """The steps that later attempts went on from."""
        return [event["step"] for event in self.job.events("resumed") if event.attempt > 1]

    def _sampled(self, attempt):
        steps = [e["step"] for e in self.job.events("step") if e.attempt == attempt]
        return len(steps) > 1 and self.job.newest()


def test_tensorboard_has_each_incident_at_the_step_gone_on_from(floor, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    killed = _Killed(floor, tmp_path, TENSORBOARD)
    killed.kill()
    killed.kill()
    killed.end()
    place = killed.job.directory / "tensorboard"
    found = EventAccumulator(str(place))
    found.Reload()
    costs = found.Scalars("outlast/incident_cost_s")
    assert {one.step for one in costs} == set(killed.resumed())
    assert all(one.value > 0 for one in costs)
    texts = found.Tensors("outlast/incident/text_summary")
    words = {one.step: one.tensor_proto.string_val[0].decode() for one in texts}
    for step in killed.resumed():
        assert "was killed by SIGKILL" in words[step]
        assert f"resumed from step {step}" in words[step]
    assert set(found.Tags()["scalars"]) >= NUMBERS | {"loss"}
    assert found.Scalars("outlast/incidents")[-1].value == 2
    assert found.Scalars("outlast/attempt")[-1].value == 3
    assert 0 < found.Scalars("outlast/goodput")[-1].value < 1
    other = EventAccumulator(str(place / "evaluation"))
    other.Reload()
    assert other.Tags()["scalars"] == ["accuracy"]  # of two writers, one is told


def test_mlflow_and_wandb_go_on_as_one_run_and_have_the_incidents(floor, tmp_path):
    pytest.importorskip("mlflow")
    pytest.importorskip("wandb")
    store = tmp_path / "ml"
    env = {"MLFLOW_TRACKING_URI": store.as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    killed = _Killed(floor, tmp_path, BOTH, env)
    killed.kill()
    until(lambda: list(store.glob("0/*/tags/outlast.incident.0001")), "told while it runs")
    killed.kill()
    killed.end()
    (line,) = [one for one in killed.run.out.splitlines() if one.startswith("RUN")]
    _, mine, theirs = line.split()
    place = store / "0" / mine
    assert [one.name for one in (store / "0").iterdir() if one.is_dir()] == [mine]
    told = sorted((place / "tags").glob("outlast.incident.*"))
    assert [one.name for one in told] == ["outlast.incident.0001", "outlast.incident.0002"]
    assert all("was killed by SIGKILL" in one.read_text() for one in told)
    costs = (place / "metrics/outlast/incident_cost_s").read_text().splitlines()
    assert {int(one.split()[2]) for one in costs} == set(killed.resumed())
    for name in NUMBERS:
        assert (place / "metrics" / name).exists(), name

    offline = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert {one.name.split("-", 3)[3] for one in offline} == {theirs}
    rows = [row for one in offline for row in _history(next(one.glob("*.wandb")))]
    assert all(
        "loss" in row for row in rows[:-1]
    )  # no row of our own, but behind the script's last
    steps = [row["_step"] for row in _history(next(offline[-1].glob("*.wandb")))]
    assert steps == sorted(set(steps))
    marked = [row for row in rows if "outlast/incident" in row]
    assert {row["outlast/incident_step"] for row in marked} == set(killed.resumed())
    assert all("was killed by SIGKILL" in row["outlast/incident"] for row in marked)
    assert rows[-1].keys() >= NUMBERS
    assert rows[-1]["outlast/incidents"] == 2


def test_the_run_that_lightnings_logger_keeps_to_itself(floor, tmp_path):
    pytest.importorskip("mlflow")
    pytest.importorskip("lightning")
    store = tmp_path / "ml"
    env = {"MLFLOW_TRACKING_URI": store.as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    killed = _Killed(floor, tmp_path, LIGHTNING, env)
    killed.kill()
    killed.kill()
    killed.end()
    (line,) = [one for one in killed.run.out.splitlines() if one.startswith("RUN")]
    (place,) = [one.parent for one in store.glob("*/*/params")]
    assert place.name == line.split()[1]
    told = sorted((place / "tags").glob("outlast.incident.*"))
    assert [one.name for one in told] == ["outlast.incident.0001", "outlast.incident.0002"]
    assert all("was killed by SIGKILL" in one.read_text() for one in told)
    for name in NUMBERS | {"outlast/incident_cost_s", "loss"}:
        assert (place / "metrics" / name).exists(), name


def test_a_drained_job_goes_on_as_the_same_runs(floor, tmp_path):
    pytest.importorskip("mlflow")
    pytest.importorskip("wandb")
    script = tmp_path / "train.py"
    script.write_text(DRAINED)
    env = {"MLFLOW_TRACKING_URI": (tmp_path / "ml").as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    codes = []
    for _ in range(2):
        process = floor.outlast("run", "--dir", tmp_path / "job", script, env=env)
        codes.append(process.wait())
    assert codes == [75, 0], process.text
    _, mine, theirs = next(
        line for line in process.out.splitlines() if line.startswith("RUN")
    ).split()
    runs = [place.name for place in (tmp_path / "ml" / "0").iterdir() if place.is_dir()]
    assert runs == [mine]
    offline = [place.name for place in (tmp_path / "wandb").glob("offline-run-*")]
    assert len(offline) == 2
    assert {name.split("-", 3)[3] for name in offline} == {theirs}


@pytest.mark.parametrize("how", ["hangs", "raises"])
def test_a_tracker_that_hangs_or_raises_is_told_by_rank_0_and_training_goes_on(
    floor, tmp_path, how
):
    script, enough = tmp_path / "train.py", tmp_path / "enough"
    script.write_text(STAND_IN)
    run = floor.outlast(
        *("run", "--nproc-per-node", 2, "--dir", tmp_path / "job", script, enough, how)
    )
    job = Job(tmp_path / "job")
    until(lambda: "ROW" in run.out, "a row", running=run)
    since = job.newest()
    until(lambda: job.newest() > since + 3, "steps behind it", running=run)
    enough.touch()
    assert run.wait() == 0, run.text
    rows = [line for line in run.out.splitlines() if line.startswith("ROW")]
    assert set(rows) == {f"ROW 0 {sorted(NUMBERS)} False"}
    assert run.err.count("W&B does not take") == (how == "raises")


def test_a_tracker_is_told_nothing_where_that_is_not_wanted(floor, tmp_path):
    script, enough = tmp_path / "train.py", tmp_path / "enough"
    script.write_text(STAND_IN)
    run = floor.outlast(
        *("run", "--dir", tmp_path / "job", script, enough, "raises"),
        env={"OUTLAST_METRICS_TRACKERS": "false"},
    )
    until(lambda: Job(tmp_path / "job").newest() > 3, "steps", running=run)
    enough.touch()
    assert run.wait() == 0, run.text
    assert "ROW" not in run.out


def _history(path):
    """The rows of a W&B run that was kept in a file: LevelDB's log behind seven bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, part, rows = path.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        left = BLOCK - place % BLOCK
        size, kind = struct.unpack_from("<HB", data, place + 4)
        if left < 7 or not kind:  # the rest of a block is empty
            place += left
            continue
        part += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or its last part
            record, part = wandb_internal_pb2.Record.FromString(part), b""
            items = record.history.item
            if record.WhichOneof("record_type") == "history":
                rows.append({"/".join(i.nested_key) or i.key: _value(i) for i in items})
    return rows


def _value(item):
    return json.loads(item.value_json)
