"""job.json is lost, and the job goes on: it never begins anew beside its own checkpoints."""

import pytest
from floor import TRAIN, Job

from outlast.ledger.job import read_job


@pytest.fixture(name="job")
def _job(floor, tmp_path):
    """A job with checkpoints up to step 6."""
    job = Job(tmp_path / "job")
    first = floor.warm(TRAIN, job.records, 6, "--light", env=job.env)
    assert first.wait() == 0, first.text
    assert job.newest() == 6
    return job


LOST = {"missing": None, "empty": b"", "torn": b'{"id": "01'}


def lose(job, how):
    path = job.directory / "job.json"
    path.unlink() if LOST[how] is None else path.write_bytes(LOST[how])


def run(floor, job, way, steps=9):
    arguments = (TRAIN, job.records, steps, "--light")
    if way == "run":
        return floor.outlast("run", "--dir", job.directory, *arguments)
    return floor.warm(*arguments, env=job.env)


@pytest.mark.parametrize("way", ["run", "python"])
@pytest.mark.parametrize("how", LOST)
def test_it_goes_on_and_says_so_once(floor, job, how, way):
    before = read_job(job.directory).id
    lose(job, how)
    process = run(floor, job, way)
    assert process.wait() == 0, process.text
    assert [event["step"] for event in job.events("resumed")] == [0, 6]
    assert job.newest() == 9
    assert read_job(job.directory).id == before
    (line,) = [line for line in process.err.splitlines() if before in line and "job.json" in line]
    assert "is written anew" in line


def test_by_the_checkpoints_alone_and_on_several_ranks(floor, tmp_path):
    job = Job(tmp_path / "job", 2)
    for steps in (6, 9):
        ranks = floor.ranks(2, TRAIN, job.records, steps, "--light", env=job.env)
        assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].text
        if steps == 6:
            before = read_job(job.directory).id
            lose(job, "empty")
            (job.directory / "ledger.jsonl").unlink()
    assert [event["step"] for event in job.events("resumed")] == [6]
    assert read_job(job.directory).id == before
    said = [line for rank in ranks for line in rank.err.splitlines() if "written anew" in line]
    assert len(said) == 1, said
    assert "as each checkpoint in " in said[0]


@pytest.mark.parametrize("way", ["run", "python"])
def test_what_is_not_proven_ends_with_78_and_one_line(floor, job, way):
    ledger = job.directory / "ledger.jsonl"
    mine = read_job(job.directory).id
    lines = ledger.read_bytes()
    ledger.write_bytes(lines + lines.replace(mine.encode(), b"0" * 12))
    for save in job.checkpoints.iterdir():
        if save.name.startswith("step-000000000006"):
            note = save / "save.json"
            note.write_bytes(note.read_bytes().replace(mine.encode(), b"0" * 12))
    lose(job, "missing")
    process = run(floor, job, way)
    assert process.wait() == 78, process.text
    (line,) = process.err.splitlines()
    assert line.startswith(f"outlast: {job.directory}/job.json: it is missing, and there are")
    assert f'"id": "{mine}"' in line
    (job.directory / "job.json").write_text(f'{{"id": "{mine}"}}')  # as it says
    again = run(floor, job, way)
    assert again.wait() == 0, again.text
    assert job.events("resumed")[-1]["step"] == 6
    assert job.newest() == 9


def test_what_only_reads_finds_it_too(floor, job):
    lose(job, "torn")
    process = floor.outlast("checkpoints", "list", job.directory)
    assert process.wait() == 0, process.text
    assert process.err == ""
