"""A Trainer that is killed and drained ends with the weights and the logs of one that is not.

The undisturbed one has no Outlast in it, but where a collator draws (then at another place).
"""

import json
import random
import signal

import pytest
from floor import SCRIPTS, Job, until

from outlast.integrations.trainer_checkpoints import broken
from thorough import ALL, seed

SCRIPT = SCRIPTS / "hf_trainer.py"
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
DEATHS = 10 if ALL else 3
# Name → workers, arguments, steps in all, whether the calm one is without Outlast.
KINDS = {
    "accumulating": (1, (), 39, True),
    "ddp": (2, (), 21, True),
    "masked": (1, ("--masked",), 39, False),
    "best": (
        1,
        (
            *("load_best_model_at_end=true", 'eval_strategy="steps"', "eval_steps=4"),
            *('save_strategy="steps"', "save_steps=4"),
        ),
        39,
        True,
    ),
    "processes": (1, ("dataloader_num_workers=2", "max_steps=17"), 17, True),
}
USUAL = ("accumulating", "ddp", "masked")


def result(records):
    """What it ended with: the weights and the step, and what was logged, each once."""
    logs = {line for line in (records / "logs.jsonl").read_text().splitlines() if line}
    final = json.loads((records / "final.json").read_text())
    return final, sorted(json.loads(line)[0] for line in logs), logs


def calm(floor, tmp_path, workers, arguments, *, is_plain):
    records = tmp_path / "calm"
    records.mkdir()
    given = [records, *(["--plain"] if is_plain else []), *arguments]
    env = {**QUIET, "OUTLAST_DIR": tmp_path / "calm-job"}
    for one in (
        floor.ranks(workers, SCRIPT, *given, env=env)
        if workers > 1
        else [floor.warm(SCRIPT, *given, env=env)]
    ):
        assert one.wait() == 0, one.text
    return result(records)


@pytest.mark.parametrize("kind", KINDS if ALL else USUAL)
def test_killed_and_drained_it_is_the_same_run(floor, tmp_path, kind):
    workers, arguments, steps, is_plain = KINDS[kind]
    wanted = calm(floor, tmp_path, workers, arguments, is_plain=is_plain)
    job = Job(tmp_path / "job")
    deaths = sorted(random.Random(seed()).sample(range(1, steps - 3), DEATHS))
    dies = [part for step in deaths for part in ("--die", step)]
    command = ["run", "--nproc-per-node", workers, "--dir", job.directory, SCRIPT, job.records]
    running = floor.outlast(*command, *dies, *arguments, env=QUIET)
    step = job.records / "step"
    drained_at = steps - 3

    def is_there():
        died = all((job.records / f"died-{one}").exists() for one in deaths)
        return died and int(step.read_text() or 0) >= deaths[-1]

    until(is_there, "all deaths", running=running)
    running.signal(signal.SIGTERM)
    code = running.wait()
    assert code in (0, 75), running.text
    if code == 75:
        again = floor.outlast(*command, *dies, *arguments, env=QUIET)
        assert again.wait() == 0, again.text
    assert result(job.records) == wanted, running.text
    assert len(job.events("resumed")) >= DEATHS
    assert drained_at < steps


def test_of_its_own_checkpoints_the_newest_whole_one_is_gone_on_from(floor, tmp_path):
    wanted = calm(floor, tmp_path, 1, (), is_plain=True)
    job = Job(tmp_path / "job")
    saves = ('save_strategy="steps"', "save_steps=4")
    killed = floor.warm(SCRIPT, job.records, "--plain", "--die", 18, *saves, env=QUIET)
    assert killed.wait() == -signal.SIGKILL, killed.text
    torn = job.records / "trainer" / "checkpoint-16"
    with (torn / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    assert "model.safetensors" in broken(torn)
    going_on = floor.warm(
        SCRIPT, job.records, "--resume", *saves, env={**QUIET, "OUTLAST_DIR": job.directory}
    )
    assert going_on.wait() == 0, going_on.text
    assert "checkpoint-16 is not whole" in going_on.err
    assert result(job.records)[0] == wanted[0], going_on.text
