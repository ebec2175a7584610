"""A Trainer that is killed and drained ends with the weights and the logs of one that is not.

The undisturbed one has no Outlast in it, but where a collator draws (then at another place).
"""

import signal

import pytest
import torch
from floor import SCRIPTS, Job
from frameworks import ENV, TEST_S, Kind, calm, check_the_same_run, result

from outlast.integrations.trainer_checkpoints import broken
from thorough import ALL

SCRIPT = SCRIPTS / "hf_trainer.py"
pytestmark = pytest.mark.timeout(TEST_S)
SAVES = ('save_strategy="steps"', "save_steps=4")
BEST = ("load_best_model_at_end=true", 'eval_strategy="steps"', "eval_steps=4")
KINDS = {
    "accumulating": Kind(39),
    "ddp": Kind(21, workers=2),
    "masked": Kind(39, ("--masked",), is_plain=False),
    "best": Kind(39, (*BEST, *SAVES)),
    "processes": Kind(17, ("dataloader_num_workers=2", "max_steps=17")),
}
USUAL = ("ddp", "masked")
FSDP = ("fsdp=true", 'fsdp_config={"transformer_layer_cls_to_wrap": ["GPT2Block"]}')
ON_A_GPU = {
    "one": Kind(39, env=(("TEST_DEVICE", "cuda:0"),)),
    "ddp": Kind(21, workers=2, env=(("TEST_DEVICE", "cuda:0"),)),
    "fsdp2": Kind(21, FSDP, workers=2, env=(("TEST_DEVICE", "cuda:0"),)),
    "bf16": Kind(39, ("bf16=true",), env=(("TEST_DEVICE", "cuda:0"),)),
}
EXPORTED = {
    "single": ((*BEST, *SAVES), 1),
    "ddp": ((), 2),
}


@pytest.mark.parametrize("kind", KINDS if ALL else USUAL)
def test_killed_and_drained_it_is_the_same_run(floor, tmp_path, kind):
    check_the_same_run(floor, tmp_path, SCRIPT, KINDS[kind])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("kind", ON_A_GPU)
def test_killed_and_drained_on_a_gpu_it_is_the_same_run(floor, tmp_path, kind):
    check_the_same_run(floor, tmp_path, SCRIPT, ON_A_GPU[kind])


def test_of_its_own_checkpoints_the_newest_whole_one_is_gone_on_from(floor, tmp_path):
    wanted = calm(floor, tmp_path, SCRIPT)
    job = Job(tmp_path / "job")
    env = {**ENV, "OUTLAST_DIR": job.directory}
    for died in (["--die", 7], ["--plain", "--die", 30]):  # the job's own are older then
        killed = floor.warm(SCRIPT, job.records, *died, *SAVES, env=env)
        assert killed.wait() == -signal.SIGKILL, killed.text
    assert 0 < job.newest() < 24
    torn = job.records / "trainer" / "checkpoint-28"
    with (torn / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    assert "model.safetensors" in broken(torn)
    going_on = floor.warm(SCRIPT, job.records, "--resume", *SAVES, env=env)
    assert going_on.wait() == 0, going_on.text
    assert "are older than step 24" in going_on.err
    assert "checkpoint-28 is not whole" in going_on.err
    assert "checkpoint-24, at step 24" in going_on.err
    assert result(job.records)[0] == wanted[0], going_on.text


def test_who_asks_to_resume_goes_on_although_it_is_another_command(floor, tmp_path):
    short = ("max_steps=8",)
    wanted = calm(floor, tmp_path, SCRIPT, *short)
    job = Job(tmp_path / "job")
    env = {**ENV, "OUTLAST_DIR": job.directory}
    killed = floor.warm(SCRIPT, job.records, "--die", 7, *short, env=env)
    assert killed.wait() == -signal.SIGKILL, killed.text
    going_on = floor.warm(SCRIPT, job.records, "--resume", *short, env=env)
    assert going_on.wait() == 0, going_on.text
    assert "resumed from step" in going_on.err
    assert result(job.records)[0] == wanted[0], going_on.text


@pytest.mark.skipif(not ALL, reason="the long tail: make test-all")
@pytest.mark.parametrize("kind", EXPORTED)
def test_the_trainer_alone_goes_on_from_what_is_exported(floor, tmp_path, kind):
    """It ends with the weights of a run that nothing happened to, where there is no outlast."""
    arguments, workers = EXPORTED[kind]
    wanted = calm(floor, tmp_path, SCRIPT, *arguments, workers=workers)
    job, steps = Job(tmp_path / "job"), wanted[0]["step"]
    start = ("--nproc-per-node", workers, SCRIPT)
    given = (*start, job.records, "--die", steps // 2, *arguments)
    killed = floor.torchrun(*given, env={**ENV, **job.env})
    assert killed.wait() != 0, killed.text
    out = tmp_path / f"checkpoint-{job.newest()}"
    given = ("checkpoints", "export", job.directory, "--to", "trainer", "--out", out)
    exported = floor.outlast(*given)
    assert exported.wait() == 0, exported.text
    assert not broken(out)
    records = tmp_path / "alone"
    records.mkdir()
    alone = floor.torchrun(*start, records, "--alone", "--from", out, *arguments, env=ENV)
    assert alone.wait() == 0, alone.text
    assert result(records)[0] == wanted[0], alone.text


def test_a_loss_that_is_no_number_is_told_of_in_its_step(floor, tmp_path):
    """The Trainer itself says nothing of it for as long as it logs nothing, and then logs 0."""
    job = Job(tmp_path / "job")
    env = {**ENV, "OUTLAST_DIR": job.directory}
    arguments = ["--poison", 6, "max_steps=12", "logging_steps=1000"]
    poisoned = floor.warm(SCRIPT, job.records, *arguments, env=env)
    assert poisoned.wait() == 0, poisoned.text
    assert [event["step"] for event in job.events("anomaly")][:1] == [7]
    assert "loss" in poisoned.err


def test_two_callbacks_are_refused(tmp_path):
    from transformers import Trainer, TrainingArguments

    from outlast.errors import ConfigError
    from outlast.integrations.transformers import OutlastCallback

    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    data, twice = [{"x": 1.0}], [OutlastCallback(), OutlastCallback()]
    trainer = Trainer(torch.nn.Linear(1, 1), args, train_dataset=data, callbacks=twice)
    with pytest.raises(ConfigError, match="more than one OutlastCallback; give it one"):
        trainer.train()
