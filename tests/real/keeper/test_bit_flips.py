"""A flipped bit in any file of one of two tiers: seen at resume, read from the other, mended."""

import shutil

import pytest
from floor import Floor
from keeper_floor import SCRIPT, KeeperJob
from saved import saved

from outlast.storage import Directory
from whole_reads import verify

RANKS = 2
STEP, STEPS = 6, 8
FILES = [f"rank-{rank:05d}.{kind}" for rank in range(RANKS) for kind in ("safetensors", "json")]
TIERS = ("local", "shared")


def train(floor, job, steps):
    ranks = floor.ranks(RANKS, SCRIPT, job.records, steps, env=job.env)
    assert [rank.wait() for rank in ranks] == [0] * RANKS, ranks[0].text
    return ranks


@pytest.fixture(scope="module", name="base")
def _base(tmp_path_factory):
    """A job of two tiers that has come to STEP, what it left, and an undisturbed one's hashes."""
    place = tmp_path_factory.mktemp("flips")
    floor = Floor(place)
    tables = [f'name = "{name}"\nurl = "{place}/{name}"\nkeep = 2\n' for name in TIERS]
    job = KeeperJob(place / "job", RANKS, tiers=tables, free=-9)
    train(floor, job, STEP)
    for name in (*TIERS, "job"):
        shutil.copytree(place / name, place / f"pristine-{name}")
    train(floor, job, STEPS)
    floor.close()
    return place, job, [final["hash"] for final in job.finals()]


@pytest.fixture(name="job")
def _job(base):
    place, job, _ = base
    for name in (*TIERS, "job"):
        shutil.rmtree(place / name)
        shutil.copytree(place / f"pristine-{name}", place / name)
    return job


def flip(base, tier, name, rng):
    path = saved(base[0] / tier, STEP) / name
    data = bytearray(path.read_bytes())
    offset, bit = rng.randrange(len(data)), rng.randrange(8)
    print(f"bit {bit} of byte {offset} of {name}")
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def both_verify(base):
    for tier in TIERS:
        verify(Directory(base[0] / tier), STEP)


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_it_is_read_from_the_other_tier_and_mended(floor, rng, base, job, name):
    flip(base, "local", name, rng)
    train(floor, job, STEPS)
    resumed = job.events("resumed")[-1]
    assert (resumed["step"], resumed["skipped"]) == (STEP, [])
    failed = job.events("verify_failed")
    assert {(event["file"], event["tier"]) for event in failed} == {(name, "local")}
    (repaired,) = job.events("repaired")
    assert (repaired["file"], repaired["tier"]) == (name, "local")
    assert "repaired from shared" in resumed["source"] or name.startswith(("rank-00001", "mani"))
    both_verify(base)
    assert [final["hash"] for final in job.finals()] == base[2]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", [FILES[0], FILES[3], "manifest.json"])
def test_the_command_line_finds_and_mends_it(floor, rng, base, job, tier, name):
    flip(base, tier, name, rng)
    commands = {}
    for act in ("verify", "repair", "verify again"):
        command = ("checkpoints", act.partition(" ")[0], job.directory)
        commands[act] = floor.outlast(*command, env=job.env)
        commands[act].wait()
    assert commands["verify"].poll() == 1, commands["verify"].text
    assert name.partition(".")[0] in commands["verify"].out
    assert tier in commands["verify"].out
    assert commands["repair"].poll() == 0, commands["repair"].text
    assert commands["verify again"].poll() == 0, commands["verify again"].text
    both_verify(base)
