"""A run that was continued is one run in MLflow and W&B; where these are installed.

They are large and not among what the tests install: pip install mlflow-skinny wandb, to run this.
"""

import pytest
from floor import Job

pytest.importorskip("mlflow")
pytest.importorskip("wandb")

SCRIPT = """
import os, signal, sys
import torch, mlflow, wandb, outlast
model = torch.nn.Linear(2, 2)
with mlflow.start_run() as one, wandb.init(project="p", mode="offline") as other:
    with outlast.session(model=model, every="3 steps") as session:
        for _ in session.steps(range(100), until=20):
            mlflow.log_metric("step", session.step, step=session.step)
            if session.step == 9 and not session.resumed:
                os.kill(os.getpid(), signal.SIGTERM)
    print("RUN", one.info.run_id, other.id)
"""


def test_a_drained_job_goes_on_as_the_same_runs(floor, tmp_path):
    job = Job(tmp_path / "job")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = {"MLFLOW_TRACKING_URI": (tmp_path / "ml").as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    codes = []
    for _ in range(2):
        process = floor.outlast("run", "--dir", job.directory, script, env=env)
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
