"""Jobs of scripts that die where they are told (``scripts/dying.py``), and go on in the process."""

import functools
import tempfile
from pathlib import Path

from floor import Floor, Job

WORKERS, STEPS = 4, 20
IN_PROCESS = {"OUTLAST_WORKERS_IN_PROCESS": "true"}


def start(script, floor, place, *options, workers=WORKERS, steps=STEPS, env=None):
    """A job, and what runs; the first option may be the script's kind."""
    job = Job(place, workers)
    running = floor.outlast(
        *("run", "--nproc-per-node", workers, "--dir", job.directory),
        *(script, job.records, steps, *options),
        env={**IN_PROCESS, **(env or {})},
    )
    return job, running


def run(script, floor, place, kind, *deaths, pause=0.0, **options):
    """The same, to its end; ``pause`` are seconds wherever it could die."""
    asked = ["--pause", pause, *(part for death in deaths for part in ("--die", death))]
    job, running = start(script, floor, place, kind, *asked, **options)
    assert running.wait() == 0, running.text
    return job, running


def ends(job):
    """What each rank has in the end."""
    return [final["hash"] for final in job.finals()]


def by_ranks(script, place, steps, *options, workers=WORKERS, env=None):
    """A job that nothing happens to, without an agent: its records."""
    place.mkdir(exist_ok=True)
    floor, job = Floor(place), Job(place / "job", workers)
    given = {**job.env, **(env or {})}
    ranks = floor.ranks(workers, script, job.records, steps, *options, env=given)
    assert [one.wait() for one in ranks] == [0] * workers, ranks[0].text
    floor.close()
    return job


def compare(job, undisturbed):
    """Every step that was recorded, and the end, are those of the job that nothing happened to."""
    for rank in range(job.num_ranks):
        expected = {line["step"]: line for line in undisturbed.lines(rank)}
        for line in job.lines(rank):
            for what in ("loss", "ids"):
                assert line[what] == expected[line["step"]][what], (rank, line)
        assert job.final(rank)["hash"] == undisturbed.final(rank)["hash"], rank
    audit = job.audit()
    assert audit["proved"], audit["faults"]


@functools.cache
def undisturbed(script, kind, steps=STEPS, **options):
    """The ends of a job that nothing happens to, which is run once for all tests of a process."""
    with tempfile.TemporaryDirectory() as place:
        return ends(by_ranks(script, Path(place), steps, kind, **options))
