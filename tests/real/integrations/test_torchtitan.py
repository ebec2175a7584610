"""torchtitan's trainer, killed and drained, ends with the weights and losses of one that is not.

The undisturbed one has torchtitan's own checkpoints, and no Outlast in it. ``make test-titan`` has
an environment with torchtitan, which wants today's torch; elsewhere all of this is skipped. On
CPUs, by a script that answers for the device.
"""

import pytest
from floor import SCRIPTS, Job
from frameworks import ENV, TEST_S, Kind, calm, check_the_same_run, result

from outlast.errors import ConfigError
from thorough import ALL

pytest.importorskip("torchtitan", reason="make test-titan has an environment with it")

SCRIPT = SCRIPTS / "titan.py"
pytestmark = pytest.mark.timeout(TEST_S)
KINDS = {
    "single, accumulated": Kind(20, ("training.global_batch_size=4",)),
    "fsdp": Kind(20, workers=2),
    "replicas": Kind(
        20,
        (
            "parallelism.data_parallel_shard_degree=1",
            "parallelism.data_parallel_replicate_degree=2",
        ),
        workers=2,
    ),
    "tensor parallel": Kind(20, ("parallelism.tensor_parallel_degree=2",), workers=2),
    "until the data ends": Kind(18, ("training.steps=500", "dataloader.infinite=false")),
}


USUAL = ("fsdp", "tensor parallel", "until the data ends")


@pytest.mark.parametrize("kind", KINDS if ALL else USUAL)
def test_killed_and_drained_it_is_the_same_run(floor, tmp_path, kind):
    check_the_same_run(floor, tmp_path, SCRIPT, KINDS[kind])


@pytest.fixture(name="half")
def _half(floor, tmp_path):
    """A job whose first ten of twenty steps were made with torchtitan's own manager."""
    job = Job(tmp_path / "job")
    steps = ("training.steps=10", "lr_scheduler.total_steps=20")
    plain = floor.warm(SCRIPT, job.records, "--plain", *steps, WHOLE, env=ENV)
    assert plain.wait() == 0, plain.text
    return job


WHOLE = "checkpoint.last_save_model_only=false"


def test_from_torchtitans_own_checkpoint_it_goes_on(floor, tmp_path, half):
    """And a job that has ended stays so; at the end torchtitan writes what it wrote before."""
    wanted = calm(floor, tmp_path, SCRIPT, WHOLE)
    for _ in range(2):
        ours = floor.outlast("run", "--dir", half.directory, SCRIPT, half.records, WHOLE, env=ENV)
        assert ours.wait() == 0, ours.text
        assert result(half.records) == wanted
    steps = {one["step"] for one in half.events("commit")}
    assert steps <= set(range(10, 21))
    assert max(steps) == 20
    written = {one.name for one in (half.records / "out/checkpoint").iterdir()}
    assert written == {"step-5", "step-10", "step-20"}


def test_what_is_to_be_loaded_only_is_torchtitans(floor, tmp_path, half):
    given = ("run", "--dir", half.directory, SCRIPT, half.records, "checkpoint.load_only=true")
    ours = floor.outlast(*given, env=ENV)
    assert ours.wait() == 0, ours.text
    assert result(half.records) == calm(floor, tmp_path, SCRIPT)
    assert not half.events("commit")


def test_parts_on_different_workers_are_refused_in_a_line(floor, tmp_path):
    job = Job(tmp_path / "job")
    given = (job.records, "parallelism.pipeline_parallel_degree=2")
    command = ("run", "--nproc-per-node", 2, "--dir", job.directory, SCRIPT)
    ours = floor.outlast(*command, *given, env=ENV)
    assert ours.wait() == 2, ours.text
    assert "set --parallelism.pipeline_parallel_degree 1" in ours.err
    assert "Traceback" not in ours.err


def test_another_manager_is_refused_in_a_line():
    from torchtitan.components.checkpointer import BaseCheckpointManager

    from outlast.integrations.torchtitan import OutlastCheckpoints, checkpoints

    assert OutlastCheckpoints.Config(options={"keep": 3}).enable
    with pytest.raises(ConfigError, match="takes the place of torchtitan's CheckpointManager"):
        checkpoints(BaseCheckpointManager.Config())
