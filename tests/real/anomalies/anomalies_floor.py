"""What the tests of losses that go wrong have in common."""

import shutil

from floor import SCRIPTS, Job
from saved import saved

SCRIPT = SCRIPTS / "anomalous.py"
STEPS = 60
ROLLBACK = {"OUTLAST_HEALTH_ANOMALY": "rollback", "OUTLAST_HEALTH_SETTLE": "3"}
KEPT = {**ROLLBACK, "OUTLAST_CHECKPOINT_KEEP": "100"}


def run(floor, tmp_path, world, *options, env=KEPT, code=0):
    """A job of ``outlast run``, to its end."""
    job = Job(tmp_path / "job", world)
    running = floor.outlast(
        *("run", "--nproc-per-node", world, "--dir", job.directory),
        *(SCRIPT, job.records, STEPS, *options),
        env=env,
    )
    assert running.wait() == code, running.text
    return job, running


def reference(floor, job, step, *options, copied=False):
    """The same from the checkpoint of ``step`` on, in a job of its own that nobody watches."""
    clean = Job(job.directory.with_name("clean"), job.num_ranks)
    source = job.directory.with_name("kept") if copied else job.checkpoints
    clean.directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(job.directory / "job.json", clean.directory)  # another job's is left alone
    if step:
        kept = saved(source, step)
        shutil.copytree(kept, clean.checkpoints / kept.name)
    ranks = floor.ranks(job.num_ranks, SCRIPT, clean.records, STEPS, *options, env=clean.env)
    assert [rank.wait() for rank in ranks] == [0] * job.num_ranks, ranks[0].text
    return clean


def of_attempt(job, rank, attempt):
    """What a rank has recorded in an attempt; 0 for a job without an agent."""
    return [
        {name: line[name] for name in ("step", "loss", "ids", "drawn")}
        for line in job.lines(rank)
        if line["attempt"] == attempt
    ]
