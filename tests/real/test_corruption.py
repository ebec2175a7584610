"""A damaged checkpoint is seen, named and passed over; with none left the job refuses to start."""

import shutil

import pytest
from floor import TRAIN, Floor, Job
from saved import unlike

from thorough import some

STEPS_BEFORE, STEPS = 9, 15
RANKS = 2
FILES = [f"rank-{rank:05d}.{kind}" for rank in range(RANKS) for kind in ("safetensors", "json")]


def train(floor, job, steps):
    """The job's ranks as torchrun would start them; their exit codes and their processes."""
    ranks = floor.ranks(RANKS, TRAIN, job.records, steps, "--pause", "0.05", env=job.env)
    return [rank.wait() for rank in ranks], ranks


@pytest.fixture(scope="module", name="jobs")
def _jobs(tmp_path_factory):
    """An undisturbed job, and one of some checkpoints that the tests damage copies of."""
    place = tmp_path_factory.mktemp("corruption")
    floor = Floor(place)
    calm, before = (Job(place / name, RANKS) for name in ("calm", "before"))
    assert train(floor, calm, STEPS)[0] == [0, 0]
    for steps in (3, 6, STEPS_BEFORE):  # each end is committed, however slow the machine is
        assert train(floor, before, steps)[0] == [0, 0]
    assert before.steps().committed == [3, 6, STEPS_BEFORE]
    floor.close()
    return calm, before


@pytest.fixture(name="calm")
def _calm(jobs):
    return jobs[0]


@pytest.fixture(name="job")
def _job(jobs, tmp_path):
    shutil.copytree(jobs[1].directory, tmp_path / "job")
    return Job(tmp_path / "job", RANKS)


def flip(path, rng):
    data = bytearray(path.read_bytes())
    offset, bit = rng.randrange(len(data)), rng.randrange(8)
    print(f"bit {bit} of byte {offset} of {path.name}")
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def truncate(path, rng):
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def halve(path, _):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path, _):
    path.write_bytes(b"")


def remove(path, _):
    path.unlink()


def a_directory(path, _):
    path.unlink()
    path.mkdir()


DAMAGES = [
    *((name, how) for name in [*FILES, "manifest.json"] for how in (flip, truncate, remove)),
    *(("manifest.json", how) for how in (halve, empty, a_directory)),
    (FILES[0], a_directory),
]


def passed_over(job):
    """Steps that were not valid; events that name a tier are about one file there."""
    return [event for event in job.events("verify_failed") if "tier" not in event.fields]


def assert_goes_on(floor, job, calm, step, named):
    """The next start passes ``step`` over, says so, and ends as if nothing had happened."""
    older = max(found for found in job.steps().committed if found < step)
    codes, ranks = train(floor, job, STEPS)
    assert codes == [0, 0], ranks[0].text
    (failed,) = passed_over(job)
    assert (failed["step"], named in failed["reason"]) == (step, True), failed
    resumed = job.events("resumed")[-1]
    assert resumed["step"] == older
    (skipped,) = resumed["skipped"]
    assert (skipped["step"], skipped["reason"]) == (step, failed["reason"])
    (line,) = [line for line in ranks[0].err.splitlines() if "not valid" in line]
    assert failed["reason"] in line
    assert f"resumed from step {older} in" in line
    assert [final["hash"] for final in job.finals()] == [final["hash"] for final in calm.finals()]
    assert all(job.consumed(rank).items() <= calm.consumed(rank).items() for rank in range(RANKS))


@pytest.mark.parametrize(("name", "damage"), some(DAMAGES, 5))
def test_the_older_checkpoint_is_used(floor, rng, job, calm, name, damage):
    damage(job.path(STEPS_BEFORE, name), rng)
    verify = floor.outlast("checkpoints", "verify", job.directory, "--step", STEPS_BEFORE)
    assert verify.wait() == 1, verify.text
    assert "\nBAD" in verify.out
    assert name in verify.out
    named = name
    if name == "manifest.json" and damage in (remove, a_directory):
        named = "manifest is missing"
    assert_goes_on(floor, job, calm, STEPS_BEFORE, named)


@pytest.mark.parametrize("damage", [flip, remove])
def test_verify_looks_at_every_step(floor, rng, job, damage):
    name = "manifest.json" if damage is remove else FILES[0]
    damage(job.path(STEPS_BEFORE, name), rng)
    verify = floor.outlast("checkpoints", "verify", job.directory)
    assert verify.wait() == 1, verify.text
    rows = [line for line in verify.out.splitlines() if line.startswith(("ok ", "BAD"))]
    assert len(rows) == len(job.steps().committed) + (damage is remove)
    assert [row for row in rows if row.startswith("BAD")] == [rows[-1]]
    assert name.partition(".")[0] in rows[-1]


def test_two_damaged_checkpoints_are_both_named(floor, rng, job, calm):
    steps = job.steps().committed
    flip(job.path(steps[-1], FILES[2]), rng)
    truncate(job.path(steps[-2], FILES[1]), rng)
    codes, ranks = train(floor, job, STEPS)
    assert codes == [0, 0], ranks[0].text
    assert job.events("resumed")[-1]["step"] == steps[-3]
    reasons = {event["step"]: event["reason"] for event in passed_over(job)}
    assert FILES[2] in reasons[steps[-1]]
    assert FILES[1] in reasons[steps[-2]]
    assert [final["hash"] for final in job.finals()] == [final["hash"] for final in calm.finals()]


def test_a_directory_that_was_never_committed_is_not_taken(floor, job, calm):
    newest = job.path(STEPS_BEFORE)
    never = newest.with_name(unlike(job.checkpoints, 99))
    shutil.copytree(newest, never)
    (never / "manifest.json").unlink()
    assert train(floor, job, STEPS)[0] == [0, 0]
    assert job.events("resumed")[-1]["step"] == STEPS_BEFORE
    assert not job.events("verify_failed")  # nobody so much as looked at it
    assert [final["hash"] for final in job.finals()] == [final["hash"] for final in calm.finals()]


def test_a_directory_under_another_steps_name_is_not_believed(floor, job, calm):
    newest = job.path(STEPS_BEFORE)
    shutil.copytree(newest, newest.with_name(unlike(job.checkpoints, STEPS_BEFORE + 1)))
    assert train(floor, job, STEPS)[0] == [0, 0]
    (failed,) = passed_over(job)
    assert failed["reason"] == f"manifest.json is that of step {STEPS_BEFORE}"
    assert job.events("resumed")[-1]["step"] == STEPS_BEFORE
    assert [final["hash"] for final in job.finals()] == [final["hash"] for final in calm.finals()]


def break_all(job, rng):
    for step in job.steps().committed:
        name = rng.choice([*FILES, "manifest.json"])
        rng.choice([flip, truncate, remove])(job.path(step, name), rng)


def break_manifests(job, _):
    for step in job.steps().committed:
        job.path(step, "manifest.json").unlink()


def remove_directory(job, _):
    shutil.rmtree(job.checkpoints)


@pytest.mark.parametrize("damage", [break_all, break_manifests, remove_directory])
def test_with_none_left_it_refuses_to_start(floor, rng, job, damage):
    damage(job, rng)
    codes, ranks = train(floor, job, STEPS)
    assert codes == [78, 78], ranks[0].text
    for rank in ranks:
        said = [line for line in rank.err.splitlines() if line.startswith("outlast: ")]
        (line,) = [line for line in said if " is damaged: " not in line]
        assert "checkpoints were committed" in line
        assert f"step {STEPS_BEFORE}: " in line
        assert "Traceback" not in rank.err
    assert job.begun() == 0
    assert not job.events("commit")[-1]["step"] < STEPS_BEFORE


@pytest.mark.parametrize("cold", some([True, False], 1))
def test_outlast_run_refuses_too(floor, rng, job, cold):
    break_all(job, rng)
    run = floor.outlast(
        *("run", "--nproc-per-node", RANKS, "--dir", job.directory),
        *(TRAIN, job.records, STEPS),
        cold=cold,
    )
    assert run.wait() == 78, run.text
    (line,) = [line for line in run.err.splitlines() if "(exit 78)" in line]
    assert "checkpoints were committed" in line
    assert job.begun() == 0
    assert not job.events("restart")


def test_outlast_run_names_the_damaged_file(floor, rng, job):
    flip(job.path(STEPS_BEFORE, FILES[0]), rng)
    run = floor.outlast(
        *("run", "--nproc-per-node", RANKS, "--dir", job.directory),
        *(TRAIN, job.records, STEPS, "--pause=0.02"),
    )
    assert run.wait() == 0, run.text
    (line,) = [line for line in run.err.splitlines() if "not valid" in line]
    assert f"step {STEPS_BEFORE} is not valid: {FILES[0]} does not match its checksum" in line
    assert "resumed from step" in line


def test_a_place_that_cannot_be_listed_is_not_an_empty_one(floor, job):
    shutil.rmtree(job.checkpoints)
    job.checkpoints.write_text("a file")
    codes, ranks = train(floor, job, STEPS)
    assert codes == [77, 77], ranks[0].text
    for rank in ranks:
        (line,) = [line for line in rank.err.splitlines() if line.startswith("outlast: ")]
        assert f"{job.checkpoints} cannot be listed" in line
    assert job.begun() == 0
