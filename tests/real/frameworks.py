"""A framework's run that is killed and drained, beside one that nothing happens to.

What both have in common is the script's to say: RECORDS [--plain] [--die STEP …] [KEY=VALUE …];
it writes logs.jsonl and final.json.
"""

import json
import random
import signal
from typing import NamedTuple

from floor import Job, until

from thorough import ALL, seed

ENV = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
# What each worker would import for seconds; by the script.
AHEAD = {"lightning_trainer.py": ("lightning.pytorch",), "hf_trainer.py": ("transformers.trainer",)}
DEATHS = 10 if ALL else 3
DEATHS_S = 40.0 * DEATHS  # each is a start of the framework, on a machine that others use
TEST_S = 300.0 + DEATHS_S


def result(records):
    """What it ended with, and what was logged, each line once."""
    logs = {line for line in (records / "logs.jsonl").read_text().splitlines() if line}
    return json.loads((records / "final.json").read_text()), logs


class Kind(NamedTuple):
    """What a script is started with, and how long its job is.

    ``steps`` are those in all; ``is_plain`` says whether the undisturbed one is without Outlast;
    ``env`` is what its environment has besides.
    """

    steps: int
    arguments: tuple[str, ...] = ()
    workers: int = 1
    is_plain: bool = True
    env: tuple[tuple[str, str], ...] = ()


def check_the_same_run(floor, tmp_path, script, kind):
    """The disturbed one ends as the undisturbed one does."""
    given = (floor, tmp_path, script, *kind.arguments)
    shared = {"workers": kind.workers, "env": dict(kind.env)}
    wanted = calm(*given, is_plain=kind.is_plain, **shared)
    found = disturbed(*given, steps=kind.steps, **shared)
    assert found == wanted


def calm(floor, tmp_path, script, *arguments, workers=1, is_plain=True, env=None):
    """The result of a run that nothing happens to; with Outlast only if it is not plain."""
    records = tmp_path / "calm"
    records.mkdir()
    given = [script, records, *(["--plain"] if is_plain else []), *arguments]
    env = {**ENV, **(env or {}), "OUTLAST_DIR": tmp_path / "calm-job"}
    started = (
        floor.ranks(workers, *given, env=env) if workers > 1 else [floor.warm(*given, env=env)]
    )
    for one in started:
        assert one.wait() == 0, one.text
    return result(records)


def disturbed(floor, tmp_path, script, *arguments, steps, workers=1, env=None):
    """The result of one whose last rank dies at drawn steps, and that is drained behind them."""
    job, env = Job(tmp_path / "job"), {**ENV, **(env or {})}
    deaths = sorted(random.Random(seed()).sample(range(1, steps - 3), DEATHS))
    dies = [part for step in deaths for part in ("--die", step)]
    command = ["run", "--nproc-per-node", workers, "--dir", job.directory, script, job.records]
    ahead = () if ALL else AHEAD.get(script.name, ())
    running = floor.outlast(*command, *dies, *arguments, env=env, ahead=ahead)
    marks = [job.records / f"died-{step}" for step in deaths]
    until(
        lambda: all(mark.exists() for mark in marks),
        "all deaths",
        running=running,
        limit_s=DEATHS_S,
    )
    running.signal(signal.SIGTERM)
    code = running.wait()
    assert code in (0, 75), running.text  # the last death may be near the end
    if code == 75:
        again = floor.outlast(*command, *dies, *arguments, env=env, ahead=ahead)
        assert again.wait() == 0, again.text
    assert len(job.events("worker_lost")) == len(deaths), running.text
    skipped = [one["reason"] for one in job.events("save_skipped")]
    assert not [one for one in skipped if "other tensors" in one]
    return result(job.records)
