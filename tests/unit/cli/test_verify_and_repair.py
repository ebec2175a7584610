"""``outlast checkpoints verify`` and ``repair``: damage is named, and mended from other tiers."""

import json
import shutil

import pytest
from cli_job import SHARD, STATE, name_of

from outlast.storage import Directory


def verified(outlast, *flags, code=1):
    """(step, tier) → reason, or None where every byte matches."""
    got, out, err = outlast("checkpoints", "verify", "--json", *flags)
    assert got == code, (out, err)
    return {(row["step"], row["tier"]): row.get("reason") for row in json.loads(out)["checkpoints"]}


def bad(rows):
    return {copy: reason for copy, reason in rows.items() if reason}


def repaired(outlast, *flags, code=0):
    got, out, err = outlast("checkpoints", "repair", "--json", *flags)
    assert got == code, (out, err)
    found = json.loads(out)
    files = {(row["step"], row["tier"], row["file"], row["source"]) for row in found["repaired"]}
    return files, {(row["step"], row["tier"]): row["reason"] for row in found["remains"]}


# --- verify --------------------------------------------------------------------------------------


def test_everything_is_whole(job, outlast):
    job.save(100, 200)
    rows = verified(outlast, code=0)
    assert rows == {(s, t): None for s in (100, 200) for t in ("fast", "slow")}
    code, out, err = outlast("checkpoints", "verify")
    assert (code, err) == (0, "")
    *lines, total, following = out.splitlines()
    assert lines[0] == "         step  tier  size, or what is wrong"
    assert lines[1] == "ok        100  fast  4.1 kB"
    assert lines[-1] == "ok        200  slow  4.1 kB"
    assert total.startswith("4 copies, every byte matches (16.4 kB in ")
    assert following == "Next: outlast checkpoints show"
    assert job.events("verify_failed") == []


@pytest.mark.parametrize("name", [SHARD, STATE, "manifest.json"])
@pytest.mark.parametrize("tier", ["fast", "slow"])
def test_one_bit_in_one_tier(job, outlast, tier, name):
    job.save(100, 200)
    job.flip(tier, 100, name)
    rows = verified(outlast)
    assert set(bad(rows)) == {(100, tier)}
    assert name in rows[100, tier]
    code, out, _ = outlast("checkpoints", "verify", "--step", "100")
    assert code == 1
    assert "1 of 2 copies damaged" in out
    assert out.splitlines()[-1] == "Next: outlast checkpoints repair --step 100"
    assert verified(outlast, "--step", "200", code=0)
    other = {"fast": "slow", "slow": "fast"}[tier]
    assert set(verified(outlast, "--tier", other, code=0)) == {(100, other), (200, other)}


@pytest.mark.parametrize("name", [SHARD, STATE])
def test_a_file_that_is_missing_short_or_a_directory(job, outlast, name):
    job.save(100, 200, 300)
    job.path("slow", 100, name).unlink()
    job.path("slow", 200, name).write_bytes(job.path("slow", 200, name).read_bytes()[:-1])
    job.path("slow", 300, name).unlink()
    job.path("slow", 300, name).mkdir()
    found = bad(verified(outlast))
    assert set(found) == {(100, "slow"), (200, "slow"), (300, "slow")}
    assert all(name in reason for reason in found.values())


def test_a_manifest_that_should_be_there(job, outlast):
    """Missing in one tier: damage, where it cannot be a checkpoint in the making."""
    job.save(100, 200, 300, told=False)
    job.path("slow", 200, "manifest.json").unlink()
    assert bad(verified(outlast)) == {(200, "slow"): "manifest.json is missing"}
    shutil.copy(job.path("fast", 200, "manifest.json"), job.path("slow", 200))
    job.path("slow", 300, "manifest.json").unlink()  # the newest there: it may be in the making
    rows = verified(outlast, "--tier", "slow", code=0)
    missing = {(300, "slow"): "manifest.json is missing"}
    assert rows == {(100, "slow"): None, (200, "slow"): None, **missing}
    _, out, _ = outlast("checkpoints", "verify")
    assert "--        300  slow  no manifest yet: in the making, or given up" in out
    assert bad(verified(outlast, "--step", "300")) == missing  # who asks for it wants to know
    job.ledger.append("tier_copied", step=300, tier="slow")  # it was there once
    assert bad(verified(outlast)) == missing


@pytest.mark.parametrize("tier", ["fast", "slow"])
def test_the_newest_that_the_ledger_knows_is_missed(job, outlast, tier):
    job.save(100, 200)
    shutil.rmtree(job.path(tier, 200))
    assert bad(verified(outlast)) == {(200, tier): "manifest.json is missing"}
    shutil.rmtree(job.path(tier, 100))
    assert bad(verified(outlast)) == {(200, tier): "manifest.json is missing"}


def test_what_retention_removed_is_not_missed(job, outlast):
    job.save(100, 200, 300)
    shutil.rmtree(job.path("fast", 100))
    shutil.rmtree(job.path("slow", 100))
    assert bad(verified(outlast, code=0)) == {}


def test_a_tier_that_cannot_be_listed_has_not_passed(job, outlast):
    job.save(100, tiers=["slow"])
    (job.place / "fast").write_text("a file")
    code, out, err = outlast("checkpoints", "verify")
    assert code == 1
    assert "tier fast: " in err
    assert "ok        100  slow" in out


def test_with_no_other_copy_there_is_nothing_to_mend_from(job, outlast):
    job.save(100, 200, tiers=["fast"])
    job.flip("fast", 200)
    _, out, _ = outlast("checkpoints", "verify")
    assert out.splitlines()[-3:] == [
        "a resume would go on from step 100",
        "no other tier has a copy to mend from",
        "Next: outlast checkpoints list",
    ]
    _, out, _ = outlast("checkpoints", "verify", "--tier", "fast")
    assert out.splitlines()[-1] == "Next: outlast checkpoints verify"


def test_weights_are_not_what_a_resume_goes_on_from(job, outlast):
    job.save(100, 300)
    job.save(200, kind="weights")
    job.flip("fast", 300)
    job.flip("slow", 300)
    assert "a resume would go on from step 100" in outlast("checkpoints", "verify")[1]


def test_files_that_cannot_be_read(job, outlast, monkeypatch):
    def fail(_, name):
        if name_of(200) in name:
            raise OSError(5, "Input/output error")
        return opened(_, name)

    opened = Directory.open
    job.save(100, 200, tiers=["fast"])
    monkeypatch.setattr(Directory, "open", fail)
    assert bad(verified(outlast)) == {(200, "fast"): "it cannot be read: Input/output error"}


# --- repair --------------------------------------------------------------------------------------


def test_nothing_to_mend(job, outlast):
    job.save(100)
    code, out, _ = outlast("checkpoints", "repair")
    assert (code, out) == (
        0,
        "nothing to mend: 2 copies verified\nNext: outlast checkpoints verify\n",
    )
    assert job.events("verify_failed", "repaired") == []


@pytest.mark.parametrize("name", [SHARD, STATE, "manifest.json"])
@pytest.mark.parametrize("tier", ["fast", "slow"])
@pytest.mark.parametrize("how", ["flip", "remove", "truncate"])
def test_a_file_is_mended_from_the_other_tier(job, outlast, tier, name, how):
    job.save(100, 200)
    path = job.path(tier, 100, name)
    if how == "flip":
        job.flip(tier, 100, name)
    elif how == "remove":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    verified(outlast)
    assert not job.same()
    other = {"fast": "slow", "slow": "fast"}[tier]
    assert repaired(outlast) == ({(100, tier, name, other)}, {})
    assert job.same()
    assert bad(verified(outlast, code=0)) == {}
    (failed,) = job.events("verify_failed")
    assert (failed["step"], failed["tier"], name in failed["reason"]) == (100, tier, True)
    (event,) = job.events("repaired")
    assert event.fields == {"step": 100, "file": name, "tier": tier, "source": other}
    assert failed["file"] == name


def test_two_damaged_copies_mend_each_other(job, outlast):
    job.save(100)
    job.flip("fast", 100, SHARD)
    job.flip("slow", 100, STATE)
    files, left = repaired(outlast)
    assert files == {(100, "fast", SHARD, "slow"), (100, "slow", STATE, "fast")}
    assert left == {}
    assert job.same()


def test_a_copy_without_its_manifest_mends_another_once_it_has_it_again(job, outlast):
    job.save(100)
    job.path("fast", 100, "manifest.json").unlink()
    job.path("slow", 100, SHARD).write_bytes(b"short")
    files, left = repaired(outlast)
    assert files == {(100, "fast", "manifest.json", "slow"), (100, "slow", SHARD, "fast")}
    assert left == {}
    assert job.same()
    assert len(job.events("verify_failed")) == 2


def test_a_whole_copy_that_is_gone_comes_back(job, outlast):
    job.save(100, 200)
    shutil.rmtree(job.path("slow", 200))
    files, left = repaired(outlast)
    assert {(file, source) for _, _, file, source in files} == {
        (name, "fast") for name in (SHARD, STATE, "manifest.json")
    }
    assert left == {}
    assert job.same()


def test_what_is_damaged_everywhere_remains_and_the_rest_is_mended(job, outlast):
    job.save(100, 200)
    for tier in ("fast", "slow"):
        job.flip(tier, 200, SHARD)
    job.flip("fast", 200, STATE)
    job.flip("slow", 100)
    files, left = repaired(outlast, code=1)
    assert files == {(200, "fast", STATE, "slow"), (100, "slow", SHARD, "fast")}
    assert set(left) == {(200, "fast"), (200, "slow")}
    assert all(reason.endswith(f"; no tier has {SHARD} whole") for reason in left.values())
    assert len(job.events("repaired")) == 2
    code, out, err = outlast("checkpoints", "repair")
    assert (code, err) == (1, "")
    assert "2 copies could not be mended; a resume passes over what is damaged" in out


def test_with_no_other_copy_it_says_so(job, outlast):
    job.save(100, tiers=["fast"])
    job.flip("fast", 100)
    files, left = repaired(outlast, code=1)
    assert files == set()
    assert left[100, "fast"].endswith("; no other tier has a copy")


def test_only_the_step_that_is_asked_for(job, outlast):
    job.save(100, 200)
    job.flip("fast", 100)
    job.flip("fast", 200)
    assert repaired(outlast, "--step", "200")[0] == {(200, "fast", SHARD, "slow")}
    assert set(bad(verified(outlast))) == {(100, "fast")}


def test_a_copy_in_the_making_is_left_alone(job, outlast):
    job.save(100, 200, told=False)
    job.path("slow", 200, "manifest.json").unlink()
    before = job.path("slow", 200, SHARD).stat()
    assert repaired(outlast) == (set(), {})
    assert not job.path("slow", 200, "manifest.json").exists()
    assert job.path("slow", 200, SHARD).stat().st_ino == before.st_ino
    assert "nothing to mend: 3 copies verified" in outlast("checkpoints", "repair")[1]


def test_a_tier_that_cannot_be_written(job, outlast, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    job.save(100)
    job.flip("slow", 100)
    monkeypatch.setattr(Directory, "create", refuse)
    _, left = repaired(outlast, code=1)
    assert left[100, "slow"].endswith(f"; {SHARD} cannot be written: No space left on device")


def test_a_manifest_is_put_back_last(job, outlast, monkeypatch):
    """With a file that cannot be mended, what has no manifest stays without one."""
    job.save(100, 200)
    job.path("slow", 100, "manifest.json").unlink()
    for tier in ("fast", "slow"):
        job.flip(tier, 100, SHARD)
    _, left = repaired(outlast, code=1)
    assert set(left) == {(100, "fast"), (100, "slow")}
    assert not job.path("slow", 100, "manifest.json").exists()


def test_a_copy_of_a_later_format_is_left_alone(job, outlast):
    job.save(100)
    path = job.path("slow", 100, "manifest.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    before = path.read_bytes()
    done, left = repaired(outlast, code=1)
    assert done == set()
    assert "upgrade outlast" in left[100, "slow"]
    assert path.read_bytes() == before
