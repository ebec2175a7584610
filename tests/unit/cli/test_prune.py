"""``outlast checkpoints prune``: what is shown is what goes, and never what a resume needs."""

import json
import time

import pytest
from cli_job import SHARD, name_of

from outlast.checkpoint.manifest import MANIFEST
from outlast.ledger.job import JobLock
from outlast.storage import Directory


def pruned(outlast, *flags):
    """Tier → (keep, verified, steps that may go, those that went)."""
    code, out, err = outlast("checkpoints", "prune", "--json", *flags)
    assert code == 0, err
    return {
        plan["tier"]: (
            plan["keep"],
            plan["verified"],
            [one["step"] for one in plan["steps"]],
            [one["step"] for one in plan["steps"] if one["removed"]],
        )
        for plan in json.loads(out)["tiers"]
    }


def test_each_tier_keeps_its_own_number(job, outlast):
    job.save(100, 200, 300, 400)
    looked = pruned(outlast, "--dry-run")
    assert looked == {"fast": (3, 400, [100], []), "slow": (2, 400, [100, 200], [])}
    assert job.steps("fast") == job.steps("slow") == ([100, 200, 300, 400], [])
    done = pruned(outlast, "--yes")
    assert done == {"fast": (3, 400, [100], [100]), "slow": (2, 400, [100, 200], [100, 200])}
    assert job.steps("fast") == ([200, 300, 400], [])
    assert job.steps("slow") == ([300, 400], [])
    assert pruned(outlast, "--yes") == {"fast": (3, None, [], []), "slow": (2, None, [], [])}


def test_only_one_tier_and_another_number(job, outlast):
    job.save(100, 200, 300)
    assert pruned(outlast, "--yes", "--keep", "1", "--tier", "slow") == {
        "slow": (1, 300, [100, 200], [100, 200])
    }
    assert job.steps("fast") == ([100, 200, 300], [])


def test_as_a_person_reads_it(job, outlast):
    job.save(100, 200, 300)
    job.begin("slow", 150)
    job.path("slow", 150, SHARD).write_bytes(b"x" * 2000)
    code, out, err = outlast("checkpoints", "prune", "--dry-run", "--tier", "slow")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "tier slow: 2 saves may go (keep 2; step 300 stays and verifies)",
        "  step       100  committed       4.1 kB",
        "  step       150  unfinished      2.1 kB",
        "2 copies would go and free 6.2 kB; nothing was removed",
        "Next: outlast checkpoints prune --tier=slow",
    ]
    _, out, _ = outlast("checkpoints", "prune", "--yes")
    assert out.splitlines()[0] == "tier fast: nothing may go (keep 3)"
    assert out.splitlines()[-2:] == [
        "2 copies removed, 6.2 kB freed",
        "Next: outlast checkpoints list",
    ]


def test_one_that_does_not_verify_is_not_what_stays(job, outlast):
    job.save(100, 200, 300, tiers=["fast"])
    job.flip("fast", 300)
    assert pruned(outlast, "--yes", "--keep", "1") == {
        "fast": (1, 200, [100], [100]),
        "slow": (1, None, [], []),
    }
    assert job.steps("fast") == ([200, 300], [])


@pytest.mark.parametrize("name", [SHARD, MANIFEST])
def test_when_none_verifies_nothing_goes(job, outlast, name):
    job.save(100, 200, 300, tiers=["fast"])
    for step in (100, 200, 300):
        job.flip("fast", step, name)
    assert pruned(outlast, "--yes", "--keep", "1")["fast"] == (1, None, [], [])
    assert job.steps("fast") == ([100, 200, 300], [])


def test_weights_do_not_go_when_there_is_nothing_else(job, outlast):
    job.save(100, tiers=["fast"])
    job.save(200, 300, 400, tiers=["fast"], kind="weights")
    job.flip("fast", 100)
    assert pruned(outlast, "--yes", "--keep", "1")["fast"] == (1, None, [], [])
    assert job.steps("fast") == ([100, 200, 300, 400], [])


def test_weights_do_not_count_as_what_stays(job, outlast):
    job.save(100, 300, tiers=["fast"])
    job.save(200, 400, 500, tiers=["fast"], kind="weights")
    assert pruned(outlast, "--yes", "--keep", "1")["fast"] == (1, 300, [100, 200], [100, 200])
    assert job.steps("fast") == ([300, 400, 500], [])


def test_a_newer_one_in_the_making_stays(job, outlast):
    job.save(100, 200, tiers=["fast"])
    job.begin("fast", 300)
    job.begin("fast", 150)
    assert pruned(outlast, "--yes", "--keep", "1")["fast"] == (1, 200, [100, 150], [100, 150])
    assert job.steps("fast") == ([200], [300])


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_without_a_terminal_it_wants_a_yes(job, outlast, flags):
    job.save(100, 200, 300, 400)
    code, _, err = outlast("checkpoints", "prune", *flags)
    assert code == 2
    assert "3 copies (12.3 kB) would go; add --yes to remove, or --dry-run to look" in err
    assert job.steps("fast") == ([100, 200, 300, 400], [])


@pytest.mark.parametrize(("answer", "gone"), [("y", True), ("n", False), ("", False)])
def test_on_a_terminal_it_asks(job, outlast, monkeypatch, answer, gone):
    job.save(100, 200, 300, 400)
    asked = []

    def answers(prompt):
        asked.append(prompt)
        return answer

    monkeypatch.setattr("outlast.cli.checkpoints.verify._is_terminal", lambda: True)
    monkeypatch.setattr("click.termui.visible_prompt_func", answers)
    code, _, err = outlast("checkpoints", "prune")
    assert code == (0 if gone else 2)
    assert "Remove 3 copies (12.3 kB)?" in asked[0]
    assert ("nothing was removed" in err) == (not gone)
    assert (job.steps("fast")[0] == [200, 300, 400]) == gone


def test_while_the_job_runs_it_refuses_and_shows(job, outlast):
    job.save(100, 200, 300, 400)
    lock = JobLock(job.directory)
    code, out, err = outlast("checkpoints", "prune", "--yes")
    assert (code, out) == (2, "")
    assert "is running and prunes by itself after each commit; wait for it, or look with" in err
    assert pruned(outlast, "--dry-run")["fast"][2] == [100]
    lock.release()
    assert pruned(outlast, "--yes")["fast"][3] == [100]


def test_no_job_starts_while_it_prunes(job, outlast, monkeypatch):
    def remove(storage, save, *, is_unfinished):
        with pytest.raises(Exception, match="is running already"):
            JobLock(job.directory)
        seen.append(save.step)

    seen = []
    job.save(100, 200, 300, 400)
    monkeypatch.setattr("outlast.cli.checkpoints.verify.remove_save", remove)
    outlast("checkpoints", "prune", "--yes")
    assert seen == [100, 100, 200]
    JobLock(job.directory).release()


@pytest.mark.parametrize("ended", [None, "job_finished", "drained"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_on_several_machines_is_asked_by_its_ledger(job, outlast, ended, nodes):
    job.ledger.append("attempt_formed", world_size=2, nodes=nodes)
    job.save(100, 200, 300, 400)
    if ended:
        job.ledger.append(ended)
        job.ledger.append("repaired", step=1)  # a command's, not the job's
    code, _, err = outlast("checkpoints", "prune", "--yes")
    refused = ended is None and nodes == 2
    assert code == (2 if refused else 0)
    assert ("runs on several machines, last heard of" in err) == refused


def test_a_job_that_is_silent_is_not_running(job, outlast, monkeypatch):
    job.ledger.append("attempt_formed", world_size=2, nodes=2)
    job.save(100, 200, 300, 400)
    now = time.time()
    monkeypatch.setattr("outlast.cli.checkpoints.verify.time.time", lambda: now + 121)
    assert outlast("checkpoints", "prune", "--yes")[0] == 0


def test_a_step_that_cannot_be_removed(job, outlast, monkeypatch):
    def refuse(self, name):
        if name == f"{name_of(100)}/manifest.json":
            raise PermissionError(13, "Permission denied")
        removed(self, name)

    removed = Directory.remove
    job.save(100, 200, 300, 400)
    monkeypatch.setattr(Directory, "remove", refuse)
    code, out, err = outlast("checkpoints", "prune", "--yes")
    assert code == 77
    assert "1 copy removed, 4.1 kB freed" in out
    assert "2 copies could not be removed: " in err
    assert "Permission denied" in err
    assert job.steps("slow") == ([100, 300, 400], [])
