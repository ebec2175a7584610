"""``outlast checkpoints list`` and ``show``: what is in which tier, and what is not, in words."""

import json

import pytest
import torch
from cli_job import BYTES, JOB, SHARD, STATE, name_of
from unit_checkpoints import write

from outlast.checkpoint.manifest import part_file, shard_file
from outlast.storage import Directory

SIZE = BYTES + len('{"state": {}}')


def listed(outlast, *flags):
    code, out, err = outlast("checkpoints", "list", "--json", *flags)
    assert code == 0, err
    found = json.loads(out)
    return {row["step"]: row for row in found["checkpoints"]}, found["tiers"], err


def states(row):
    return {tier: copy["state"] for tier, copy in row["tiers"].items()}


def test_every_state_in_every_tier(job, outlast):
    job.save(100)
    job.save(200, tiers=["fast"], kind="weights")
    job.save(300)
    job.path("slow", 300, "manifest.json").write_text("torn")
    job.save(400, tiers=["slow"])
    job.path("slow", 400, "manifest.json").unlink()
    job.save(500, tiers=["fast"])
    job.path("fast", 500, "manifest.json").write_text("")
    rows, tiers, err = listed(outlast)
    assert err == ""
    assert [(tier["name"], tier["unreadable"]) for tier in tiers] == [
        ("fast", None),
        ("slow", None),
    ]
    assert {step: row["state"] for step, row in rows.items()} == {
        100: "committed",
        200: "weights only",
        300: "committed",
        400: "unfinished",
        500: "invalid",
    }
    assert states(rows[100]) == {"fast": "committed", "slow": "committed"}
    assert states(rows[200]) == {"fast": "committed", "slow": "absent"}
    assert states(rows[300]) == {"fast": "committed", "slow": "invalid"}
    assert states(rows[400]) == {"fast": "absent", "slow": "unfinished"}
    assert rows[100] | {"tiers": None} == {
        "step": 100,
        "save": name_of(100),
        "attempt": 1,
        "state": "committed",
        "bytes": SIZE,
        "created_t": 1.8e9 + 100,
        "world_size": 1,
        "kind": "full",
        "exact": True,
        "health": "unknown",
        "tiers": None,
    }
    assert rows[500]["reason"] == "manifest.json is empty"
    assert "torn" in rows[300]["tiers"]["slow"]["reason"]
    assert "reason" not in rows[300]


def test_as_a_person_reads_it(job, outlast):
    job.save(100)
    job.save(1200, tiers=["fast"], kind="weights")
    job.begin("slow", 1200)
    code, out, err = outlast("checkpoints", "list")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "     step  state             size  committed (UTC)      fast  slow",
        "      100  committed       4.1 kB  2027-01-15 08:01:40  yes   yes",
        "    1,200  weights only    4.1 kB  2027-01-15 08:20:00  yes   part",
        "Next: outlast checkpoints verify",
    ]
    job.path("slow", 100, "manifest.json").write_text("")
    assert outlast("checkpoints", "list")[1].splitlines()[-1] == "Next: outlast checkpoints repair"


def test_one_tier_needs_no_columns(job, outlast):
    (job.place / "outlast.toml").write_text('[[tier]]\nurl = "fast"\n')
    job.save(100, tiers=["fast"])
    _, out, _ = outlast("checkpoints", "list", "outlast-job")
    assert out.splitlines() == [
        "     step  state             size  committed (UTC)",
        "      100  committed       4.1 kB  2027-01-15 08:01:40",
        "Next: outlast checkpoints verify outlast-job",
    ]


def test_a_tier_that_cannot_be_listed_is_named_and_the_others_are_shown(job, outlast):
    job.save(100, tiers=["slow"])
    (job.place / "fast").write_text("a file")
    rows, tiers, err = listed(outlast)
    assert states(rows[100]) == {"fast": "unknown", "slow": "committed"}
    assert "Not a directory" in tiers[0]["unreadable"]
    (line,) = err.splitlines()
    assert line == (
        f"outlast: tier fast: {job.place}/fast cannot be listed: Not a directory; "
        "going on without it"
    )
    assert "?     yes" in outlast("checkpoints", "list")[1]


@pytest.mark.parametrize("command", ["list", "verify", "show", "repair", "prune"])
def test_no_tier_that_can_be_listed(job, outlast, command):
    for tier in ("fast", "slow"):
        (job.place / tier).write_text("a file")
    code, out, err = outlast("checkpoints", command)
    assert (code, out) == (77, "")
    (line,) = err.splitlines()
    assert "fast cannot be listed" in line
    assert "slow cannot be listed" in line
    assert "Look at the disk" in line


def test_an_object_store_that_cannot_be_opened_is_a_tier_like_any_other(job, outlast, monkeypatch):
    def refuse(url):
        raise OSError(5, f"opening {url}: no")

    job.save(100)
    monkeypatch.setattr("outlast.cli.checkpoints.survey.open_storage", refuse)
    code, _, err = outlast("checkpoints", "list")
    assert code == 77
    assert "it cannot be opened: opening" in err


def test_nothing_there_yet(job, outlast):
    code, out, _ = outlast("checkpoints", "list")
    first, then = out.splitlines()
    assert (code, first) == (0, f"no checkpoint in {job.place}/fast or {job.place}/slow yet")
    assert then == "nothing has been started here yet. Next: outlast run YOUR_SCRIPT"
    for command in ("show", "verify", "repair"):
        code, out, err = outlast("checkpoints", command)
        assert (code, out) == (2, "")
        assert "there is no checkpoint in" in err


@pytest.mark.parametrize(
    ("every", "steps", "due"),
    [
        ("200 steps", [], "it is before its first step; without outlast.session a script saves"),
        ("200 steps", [17], "the next one is due at step 200 (checkpoint.every = 200 steps)"),
        ("200 steps", [17, 201], "the next one is due at step 400"),
        ("200 steps", [17, 400], "there would be some: the script sets its own (every= of outlast"),
        ("5 min", [17], "5 min after training began (checkpoint.every = 5 min)"),
        ("auto", [17], "5 s after training began (checkpoint.every = auto)"),
    ],
    ids=str,
)
def test_nothing_saved_while_it_runs_says_when_something_will_be(
    job, outlast, monkeypatch, every, steps, due
):
    monkeypatch.setenv("OUTLAST_CHECKPOINT_EVERY", every)
    job.ledger.append("job_started", rank=None, command="outlast run train.py")
    job.ledger.append("attempt_formed", rank=None, world_size=1, nodes=1)
    for step in steps:
        job.ledger.append("step", rank=0, step=step, seconds=1.0, stalled_s=0.0, until=1000)
    _, how, when, then = outlast("checkpoints", "list", job.directory)[1].splitlines()
    assert how.startswith("the job: running; ")
    assert due in when
    assert then == f"Next: outlast top {job.directory}"


def test_nothing_saved_and_the_job_is_over(job, outlast):
    job.ledger.append("job_started", rank=None, command="outlast run train.py")
    job.ledger.append("storage_error", rank=None, operation="save", error="no space")
    job.ledger.append("job_finished", rank=None, exit_code=77, reason="the disk is full")
    _, how, note, then = outlast("checkpoints", "list")[1].splitlines()
    assert "the job: storage unusable (exit 77)" in how
    assert note == "storage failed, save: no space"
    assert then == "Next: outlast report"


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:7]), f"has 7 of {BYTES:,} bytes"),
        (lambda path: path.unlink(), "is missing"),
    ],
    ids=["cut", "gone"],
)
def test_a_file_that_is_cut_short_or_missing_is_seen_by_its_size(job, outlast, harm, words):
    job.save(100, 200)
    harm(job.path("fast", 200, SHARD))
    rows, _, _ = listed(outlast)
    why = f"1 of 2 files whole: {SHARD} {words}"
    assert rows[200]["tiers"]["fast"] == {
        "state": "invalid",
        "reason": why,
        "odd_files": {SHARD: words},
    }
    assert states(rows[100]) == {"fast": "committed", "slow": "committed"}
    assert rows[200]["state"] == "committed"  # the other tier has it
    _, _, row, more, then = outlast("checkpoints", "list")[1].splitlines()
    assert row.split()[-2:] == ["BAD", "yes"]
    assert more == f"           fast: {why}"
    assert then == "Next: outlast checkpoints repair"
    harm(job.path("slow", 200, STATE))
    assert listed(outlast)[0][200]["state"] == "committed"  # each file is whole somewhere
    job.path("slow", 200, SHARD).write_bytes(b"")
    rows, _, _ = listed(outlast)
    assert (rows[200]["state"], rows[200]["reason"]) == ("invalid", "a file is whole in no tier")
    assert outlast("checkpoints", "list")[1].splitlines()[-1] == "Next: outlast checkpoints verify"


def test_of_many_ranks_the_file_is_named_and_parts_are_read_for_it_alone(job, outlast, monkeypatch):
    (job.place / "outlast.toml").write_text('[[tier]]\nname = "fast"\nurl = "fast"\n')
    states = [{"m": {"w": torch.full((5,), float(rank))}, "rank": rank} for rank in range(3)]
    manifest = write(Directory(job.place / "fast"), states, 300, job=JOB)
    read, at = [], job.place / "fast" / str(manifest.save)
    original = Directory.open

    def noted(self, name):
        read.append(name)
        return original(self, name)

    monkeypatch.setattr(Directory, "open", noted)
    assert listed(outlast)[0][300]["state"] == "committed"
    assert read == []
    path = at / shard_file(1)
    path.write_bytes(path.read_bytes()[:-1])
    (row,) = listed(outlast)[0].values()
    (name,) = row["tiers"]["fast"]["odd_files"]
    assert name == shard_file(1)
    assert row["tiers"]["fast"]["reason"].startswith("8 of 9 files whole: ")
    assert read
    assert all(part_file(1) in name for name in read)


def made_with(job, **tiers):
    """What a job's record says of its tiers."""
    raw = json.loads((job.directory / "job.json").read_text())
    raw["settings"] = {f"tier.{name}": value for name, value in tiers.items()}
    (job.directory / "job.json").write_text(json.dumps(raw))


def test_with_other_settings_it_says_where_the_job_was_made_to_save(job, outlast):
    made_with(job, nvme="/mnt/nvme/job, every 1, keep 3")
    _, out, _ = outlast("checkpoints", "list")
    assert "The job was made with checkpoints in /mnt/nvme/job: go where its outlast.toml" in out
    assert "/mnt/nvme/job" in outlast("checkpoints", "verify")[2]


def test_from_another_directory_the_tiers_are_those_the_job_was_made_with(
    job, outlast, tmp_path, monkeypatch
):
    job.save(100, 200)
    made_with(job, **{name: f"{job.place}/{name}, every 1, keep 3" for name in ("fast", "slow")})
    before = outlast("checkpoints", "list", job.directory)[1]
    assert "fast" in before
    monkeypatch.chdir(tmp_path.parent)  # no outlast.toml there
    assert outlast("checkpoints", "list", job.directory) == (0, before, "")
    assert outlast("checkpoints", "verify", job.directory)[0] == 0
    for command in ("prune", "repair"):  # what a file says is not enough to remove or write
        code, out, err = outlast("checkpoints", command, job.directory)
        assert (code, out) == (2, "")
        assert "which tiers to write to must be set" in err
        assert f"{job.place}/slow" in err


@pytest.mark.parametrize(
    "made",
    [
        {"x": "nonsense"},
        {"x": "memory:, every 1, keep 1"},
        {"x": "s3://, every 1, keep 1"},
        {"x": "/a, every 0, keep 1"},
        {},
    ],
)
def test_a_record_without_tiers_is_no_reason_to_fail(job, outlast, tmp_path, monkeypatch, made):
    made_with(job, **made)
    monkeypatch.chdir(tmp_path.parent)
    code, out, _ = outlast("checkpoints", "list", job.directory)
    assert code == 0
    assert f"no checkpoint in {job.directory}/checkpoints yet" in out


# --- show ----------------------------------------------------------------------------------------


def shown(outlast, *flags):
    code, out, err = outlast("checkpoints", "show", "--json", *flags)
    assert code == 0, err
    return json.loads(out)


def test_the_newest_from_the_first_tier_that_has_it(job, outlast):
    job.save(100, 200)
    job.path("fast", 200, "manifest.json").write_text("")
    found = shown(outlast)
    assert (found["step"], found["tier"], found["also_in"]) == (200, "slow", [])
    assert (found["kind"], found["exact"], found["bytes"]) == ("full", True, SIZE)
    assert set(found["files"]) == {SHARD, STATE}
    assert found["tensors"] == {"model.weight": {"dtype": "U8", "shape": [BYTES]}}
    found = shown(outlast, "--step", "100")
    assert (found["step"], found["tier"], found["also_in"]) == (100, "fast", ["slow"])
    found = shown(outlast, "--tier", "slow", "--step", "100")
    assert (found["tier"], found["also_in"]) == ("slow", [])


def test_what_a_checkpoint_cannot_do_is_said(job, outlast):
    job.save(100, kind="weights", exact=False)
    _, out, _ = outlast("checkpoints", "show")
    assert "weights only: it cannot be resumed from" in out
    assert "rounded to bf16: a resume is not bit for bit the same run" in out
    assert "in tier fast; also in slow" in out
    assert out.splitlines()[-1] == "Next: outlast checkpoints verify --step 100"


def test_a_step_that_cannot_be_shown(job, outlast):
    job.save(100, 200)
    for tier in ("fast", "slow"):
        job.path(tier, 200, "manifest.json").write_text("")
    code, _, err = outlast("checkpoints", "show", "--step", "200")
    assert code == 1
    assert "step 200 is not valid: manifest.json is empty. See: outlast checkpoints verify" in err
    code, _, err = outlast("checkpoints", "show", "--step", "300")
    assert code == 2
    assert "committed steps: 100" in err
    assert shown(outlast)["step"] == 100


# --- what all of them refuse ---------------------------------------------------------------------

BAD = [
    (["lst"], "checkpoints lst is not a command; did you mean list?"),
    (["zzz"], "known: list, show, verify, repair, prune, export"),
    (["list", "nowhere"], "nowhere is not a job's directory"),
    (["list", "--jsn"], "No such option"),
    (["show", "--step", "x"], "'x' is not a valid integer"),
    (["show", "--step", "-1"], "step -1 is not in"),
    (["show", "--tier", "fst"], "'fst' is not a tier of this job; did you mean fast?"),
    (["show", "--tier", ""], "'' is not a tier of this job; known: fast, slow"),
    (["verify", "--step", "7"], "step 7 is in no tier; there are: 100"),
    (["repair", "--step", "7"], "step 7 is in no tier; there are: 100"),
    (["verify", "--tier", "s3"], "'s3' is not a tier of this job"),
    (["prune", "--keep", "0"], "--keep: '0' checkpoints cannot be kept; write a whole number"),
    (["prune", "--keep", "x"], "--keep: 'x' checkpoints cannot be kept"),
    (["prune", "--tier", "s3"], "'s3' is not a tier of this job"),
    (["export", "--out", "x"], "say which format (--to safetensors, --to dcp, --to torch"),
    (["export", "--to", "tensors", "--out", "x"], "did you mean safetensors?"),
    (["export", "--to", "dcp"], "say where the files go with --out PATH"),
    (["export", "--to", "dcp", "--out", "x", "--step", "7"], "step 7 is not in"),
]


def test_without_a_command_there_is_the_help(job, outlast):
    code, out, err = outlast("checkpoints")
    assert (code, out) == (2, "")
    assert err.startswith("Usage: outlast checkpoints")
    assert err.rstrip().endswith("torch.save")


@pytest.mark.parametrize(("arguments", "says"), BAD)
def test_one_line_and_exit_code_2(job, outlast, arguments, says):
    job.save(100)
    code, out, err = outlast("checkpoints", *arguments)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("outlast: ")
    assert says in line


def test_memory_is_not_reached_from_here(job, outlast):
    toml = (job.place / "outlast.toml").read_text()
    (job.place / "outlast.toml").write_text('[[tier]]\nurl = "memory:"\n' + toml)
    job.save(100)
    _, tiers, _ = listed(outlast)
    assert [tier["name"] for tier in tiers] == ["fast", "slow"]
    code, _, err = outlast("checkpoints", "show", "--tier", "memory")
    assert code == 2
    assert "tier memory is memory, which only the running job reaches; choose fast or slow" in err


def test_which_were_seen_to_be_healthy_and_which_were_undone(job, outlast):
    job.save(100, 200, 300, 400)
    job.ledger.append("healthy", step=100)
    job.ledger.append("healthy", step=200)
    job.ledger.append("rollback", step=200, first=250, batches=None)
    code, out, _ = outlast("checkpoints", "list", "--json")
    rows = {row["step"]: row["health"] for row in json.loads(out)["checkpoints"]}
    assert rows == {100: "healthy", 200: "healthy", 300: "unhealthy", 400: "unhealthy"}
    code, out, _ = outlast("checkpoints", "list")
    lines = out.splitlines()
    assert code == 0
    assert lines[1].endswith("yes   yes   healthy")
    assert lines[3].endswith("yes   yes   unhealthy")
    code, out, _ = outlast("checkpoints", "show")
    assert out.startswith("step 200 of job"), "the newest that stands"
    assert "seen to be healthy" in out
    code, out, _ = outlast("checkpoints", "show", "--step", "300", "--json")
    assert json.loads(out)["health"] == "unhealthy"
    code, out, _ = outlast("checkpoints", "verify")
    assert code == 0, "verifying is about bytes"


def test_older_saves_of_a_step_and_other_jobs_are_listed_apart(job, outlast):
    (job.place / "outlast.toml").write_text('[[tier]]\nname = "fast"\nurl = "fast"\n')
    job.save(100, 200, tiers=["fast"])
    tier = Directory(job.place / "fast")
    write(tier, [{"m": 1}], 200, job=JOB, attempt=2)
    write(tier, [{"m": 1}], 300, job="a" * 12)
    write(tier, [{"m": 1}], 400, job="a" * 12)
    code, out, err = outlast("checkpoints", "list")
    assert (code, err) == (0, "")
    _, *lines = out.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["100", "committed"], ["200", "committed"]]
    assert lines[2] == "saved again since, and removed by the next commit:"
    assert lines[3].split()[:2] == ["200", "committed"]
    assert lines[4] == (
        "not of this job: 2 steps of job aaaaaaaaaaaa, the newest 400, in fast; left alone"
    )
    found = json.loads(outlast("checkpoints", "list", "--json")[1])
    assert [row["attempt"] for row in found["checkpoints"]] == [1, 2]
    assert [row["save"] for row in found["superseded"]] == [name_of(200)]
    assert [(row["step"], row["job"]) for row in found["others"]] == [
        (300, "a" * 12),
        (400, "a" * 12),
    ]
    shown = json.loads(outlast("checkpoints", "show", "--step", "200", "--json")[1])
    assert shown["attempt"] == 2
    code, out, _ = outlast("checkpoints", "verify", "--json")
    assert (code, len(json.loads(out)["checkpoints"])) == (0, 3)
    assert outlast("checkpoints", "show", "--step", "300")[0] == 2
    gone = json.loads(outlast("checkpoints", "prune", "--yes", "--json")[1])["tiers"][0]["steps"]
    assert [(one["step"], one["save"]) for one in gone] == [(200, name_of(200))]
