"""The installed ``outlast checkpoints`` on a real job with two tiers: damage, mending, pruning."""

import itertools
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from floor import SCRIPTS, TRAIN, Floor, Job, until
from safetensors.torch import load_file
from saved import saved, saves_in

from thorough import some

OUTLAST = Path(sys.executable).with_name("outlast")
RANKS, STEPS_BEFORE, STEPS = 2, 9, 15
TIERS = ("fast", "slow")
FILES = [f"rank-{rank:05d}.{kind}" for rank in range(RANKS) for kind in ("safetensors", "json")]


def train(floor, job, steps):
    ranks = floor.ranks(RANKS, TRAIN, job.records, steps, "--pause", "0.02", env=job.env)
    assert [rank.wait() for rank in ranks] == [0] * RANKS, ranks[0].text


@pytest.fixture(scope="module", name="jobs")
def _jobs(tmp_path_factory):
    place = tmp_path_factory.mktemp("checkpoints")
    floor = Floor(place)
    calm, before = (Job(place / name, RANKS) for name in ("calm", "before"))
    train(floor, calm, STEPS)
    train(floor, before, STEPS_BEFORE)
    floor.close()
    return calm, before


class Tiers:
    """A copy of the job, whose checkpoints lie in its directory and once more in ``slow``."""

    def __init__(self, floor, place, made):
        self.floor = floor
        shutil.copytree(made.directory, place / "job")
        self.job = Job(place / "job", RANKS)
        self.fast, self.slow = self.job.checkpoints, place / "slow"
        shutil.copytree(self.fast, self.slow)
        (place / "outlast.toml").write_text(
            f'dir = "{self.job.directory}"\n'
            f'[[tier]]\nname = "fast"\nurl = "{self.fast}"\n'
            f'[[tier]]\nname = "slow"\nurl = "{self.slow}"\nkeep = 1\n'
        )

    def call(self, *arguments, code=0):
        """``outlast checkpoints ARGUMENTS``, which ends as it should and without a traceback."""
        process = self.floor.outlast("checkpoints", *arguments)
        assert process.wait() == code, process.text
        assert "Traceback" not in process.text
        return process

    def answer(self, *arguments, code=0):
        """What it says with --json: one object, and nothing else."""
        return json.loads(self.call(*arguments, "--json", code=code).out)

    def bytes_of(self, tier):
        return {str(p.relative_to(tier)): p.read_bytes() for p in tier.rglob("*") if p.is_file()}

    def bad(self, code=1):
        rows = self.answer("verify", code=code)["checkpoints"]
        return {(row["step"], row["tier"]): row["reason"] for row in rows if not row["valid"]}


@pytest.fixture(name="tiers")
def _tiers(floor, tmp_path, jobs):
    return Tiers(floor, tmp_path, jobs[1])


def flip(path, rng):
    data = bytearray(path.read_bytes())
    offset, bit = rng.randrange(len(data)), rng.randrange(8)
    print(f"bit {bit} of byte {offset} of {path.name}")
    data[offset] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("tier", "name"), some(itertools.product(TIERS, [*FILES, "manifest.json"]), 3)
)
def test_a_bit_flips_and_is_put_back(tiers, rng, name, tier):
    assert tiers.bad(code=0) == {}
    whole = tiers.bytes_of(tiers.fast)
    flip(saved(getattr(tiers, tier), STEPS_BEFORE) / name, rng)
    damaged = tiers.bad()
    assert set(damaged) == {(STEPS_BEFORE, tier)}
    assert name in damaged[STEPS_BEFORE, tier]
    verify = tiers.call("verify", "--step", STEPS_BEFORE, code=1)
    assert f"Next: outlast checkpoints repair --step {STEPS_BEFORE}" in verify.out
    repair = tiers.call("repair", "--step", STEPS_BEFORE)
    assert f"{name}, from" in repair.out
    assert tiers.bad(code=0) == {}
    assert tiers.bytes_of(tiers.fast) == tiers.bytes_of(tiers.slow) == whole
    (event,) = tiers.job.events("repaired")
    assert (event["step"], event["tier"], event["file"]) == (STEPS_BEFORE, tier, name)


@pytest.mark.parametrize("tier", ["fast", "slow"])
def test_a_manifest_that_is_missing_in_one_tier(tiers, tier):
    step = tiers.job.steps().committed[0]
    place = saved(getattr(tiers, tier), step)
    whole = tiers.bytes_of(getattr(tiers, tier))
    (place / "manifest.json").unlink()
    assert tiers.bad() == {(step, tier): "manifest.json is missing"}
    listed = {row["step"]: row for row in tiers.answer("list")["checkpoints"]}
    assert listed[step]["state"] == "committed"
    assert listed[step]["tiers"][tier]["state"] == "unfinished"
    done = tiers.answer("repair")["repaired"]
    assert [one["file"] for one in done] == ["manifest.json"]
    assert tiers.bytes_of(getattr(tiers, tier)) == whole
    assert tiers.bad(code=0) == {}


def test_what_was_mended_is_what_training_goes_on_from(tiers, rng, jobs):
    """All of the newest is damaged in both tiers, each in other files."""
    calm = jobs[0]
    for tier, names in ((tiers.fast, FILES[:2]), (tiers.slow, FILES[2:])):
        for name in names:
            flip(saved(tier, STEPS_BEFORE) / name, rng)
    assert set(tiers.bad()) == {(STEPS_BEFORE, "fast"), (STEPS_BEFORE, "slow")}
    assert len(tiers.answer("repair")["repaired"]) == len(FILES)
    train(tiers.floor, tiers.job, STEPS)
    assert tiers.job.events("resumed")[-1]["step"] == STEPS_BEFORE
    found = [final["hash"] for final in tiers.job.finals()]
    assert found == [final["hash"] for final in calm.finals()]


def test_what_cannot_be_mended_remains_and_is_named(tiers, rng):
    for tier in (tiers.fast, tiers.slow):
        (saved(tier, STEPS_BEFORE) / FILES[0]).unlink()
    flip(saved(tiers.slow, STEPS_BEFORE) / FILES[1], rng)
    repair = tiers.call("repair", code=1)
    assert f"mended  step         {STEPS_BEFORE}  slow  {FILES[1]}, from fast" in repair.out
    assert f"{FILES[0]} is missing; no tier has {FILES[0]} whole" in repair.out
    assert set(tiers.bad()) == {(STEPS_BEFORE, "fast"), (STEPS_BEFORE, "slow")}


@pytest.mark.parametrize(
    ("tier", "how"), some(itertools.product(TIERS, ["a file", "a loop", "not there"]), 3)
)
def test_a_tier_that_cannot_be_read(tiers, tier, how):
    place = getattr(tiers, tier)
    shutil.rmtree(place)
    if how == "a file":
        place.write_text("")
    elif how == "a loop":
        place.symlink_to(place.name)
    listing = tiers.call("list")
    rows = {row["step"]: row["tiers"][tier]["state"] for row in tiers.answer("list")["checkpoints"]}
    if how == "not there":  # nothing was ever written there: that is not an error
        assert listing.err == ""
        assert set(rows.values()) == {"absent"}
        return
    (line,) = listing.err.splitlines()
    assert f"tier {tier}: {place} cannot be listed: " in line
    assert set(rows.values()) == {"unknown"}
    tiers.call("verify", code=1)
    tiers.call("show")
    other = {"fast": tiers.slow, "slow": tiers.fast}[tier]
    shutil.rmtree(other)
    other.write_text("")
    for command in ("list", "verify", "repair", "show", "prune"):
        process = tiers.call(command, code=77)
        assert process.out == ""
        (line,) = process.err.splitlines()
        assert "cannot be listed" in line


def test_prune_shows_what_it_would_do_and_does_it(tiers):
    steps = tiers.job.steps().committed
    assert len(steps) > 1  # on a busy machine not each of the three was written in time
    before = tiers.bytes_of(tiers.fast), tiers.bytes_of(tiers.slow)
    looked = tiers.answer("prune", "--dry-run")
    going = {plan["tier"]: [one["step"] for one in plan["steps"]] for plan in looked["tiers"]}
    assert going == {"fast": [], "slow": steps[:-1]}
    assert (tiers.bytes_of(tiers.fast), tiers.bytes_of(tiers.slow)) == before
    tiers.call("prune", code=2)  # nobody to ask
    assert (tiers.bytes_of(tiers.fast), tiers.bytes_of(tiers.slow)) == before
    done = tiers.answer("prune", "--yes")
    assert all(one["removed"] for plan in done["tiers"] for one in plan["steps"])
    assert [save.step for save in saves_in(tiers.slow)] == [steps[-1]]
    assert tiers.bytes_of(tiers.fast) == before[0]
    assert tiers.bad(code=0) == {}


def test_prune_keeps_its_hands_off_a_running_job(floor, tmp_path):
    job = Job(tmp_path / "job")
    running = floor.warm(SCRIPTS / "wrong.py", "hold", tmp_path / "end", env=job.env)
    until(lambda: "training" in running.out, "a session", running=running)
    prune = floor.cold("checkpoints", "prune", "--yes", job.directory, program=str(OUTLAST))
    assert prune.wait() == 2, prune.text
    assert "is running and prunes by itself" in prune.err
    (tmp_path / "end").touch()
    assert running.wait() == 0, running.text
    prune = floor.cold("checkpoints", "prune", "--yes", job.directory, program=str(OUTLAST))
    assert prune.wait() == 0, prune.text


def test_export_gives_the_same_weights_in_every_format(tiers, rng, tmp_path):
    flip(saved(tiers.fast, STEPS_BEFORE) / FILES[0], rng)  # the other tier has it whole
    for to in ("torch", "safetensors", "dcp"):
        assert tiers.answer("export", "--to", to, "--out", to)["out"] == str(tmp_path / to)
        again = tiers.call("export", "--to", to, "--out", to, code=2)
        assert "exists and is not empty; give another --out" in again.err
    known = torch.load(tmp_path / "torch" / "state.pt", weights_only=True)["model"]
    found = load_file(tmp_path / "safetensors" / "model.safetensors")
    assert set(found) == {name for name, value in known.items() if isinstance(value, torch.Tensor)}
    assert all(torch.equal(found[name], known[name]) for name in found)
    assert (tmp_path / "dcp").is_dir()
    refused = tiers.call("export", "--to", "trainer", "--out", "trainer", code=2)
    assert "this checkpoint is of no job with OutlastCallback" in refused.err
    assert not (tmp_path / "trainer").exists()


def test_the_samples_of_a_damaged_tier_are_not_believed(tiers):
    whole = tiers.answer("show", "--samples")
    assert whole["step"] == STEPS_BEFORE
    (saved(tiers.fast, STEPS_BEFORE) / FILES[1]).write_text("{}")
    assert tiers.answer("show", "--samples") == whole
