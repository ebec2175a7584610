"""One to four workers, undisturbed: the same losses, samples, weights and optimizer state."""

import pytest
import torch
from floor import SCRIPTS, Job, free_port, until

from outlast.data import Loader, Shards
from thorough import ALL

SCRIPT = SCRIPTS / "same_bits.py"
STEPS = 12


def run(floor, directory, world, *arguments, steps=STEPS):
    """A job of ``world`` workers on its own, to the end."""
    job = Job(directory, world)
    ranks = floor.ranks(world, SCRIPT, job.records, steps, *arguments, env=job.env)
    assert [rank.wait() for rank in ranks] == [0] * world, ranks[0].text
    return job


def history(job, world):
    """Step → (losses that its ranks saw, ids in the order of the shards)."""
    found = {}
    for rank in range(world):
        for line in job.lines(rank):
            losses, ids = found.setdefault(line["step"], (set(), []))
            losses.add(line["loss"])
            ids += line["ids"]
    return found


@pytest.mark.parametrize("kind", ["convolutions", "transformer"])
def test_one_to_four_workers_come_to_the_same_bits(floor, tmp_path, kind):
    alone = run(floor, tmp_path / "alone", 1, "--kind", kind)
    expected = history(alone, 1)
    assert len({losses.copy().pop() for losses, _ in expected.values()}) == STEPS
    for world in (2, 3, 4):
        job = run(floor, tmp_path / f"of-{world}", world, "--kind", kind)
        assert history(job, world) == expected, world
        assert {final["hash"] for final in job.finals()} == {alone.final()["hash"]}, world


@pytest.mark.parametrize("world", [2, 3, *([4] if ALL else [])])
def test_every_kind_of_sum_is_that_of_one_worker(floor, world):
    """Uneven shards, none at all, unused and frozen parameters, half precision; both exchanges."""
    ranks = floor.ranks(world, SCRIPTS / "many_sums.py")
    assert [rank.wait() for rank in ranks] == [0] * world, "".join(rank.text for rank in ranks)
    assert all("wrong: []" in rank.out and "compared 0" not in rank.out for rank in ranks)


def test_shards_that_other_processes_load_are_the_same():
    points = torch.utils.data.TensorDataset(torch.randn(17, 3))
    here, there = (
        iter(Loader(points, global_batch=6, shards=3, num_workers=count)) for count in (0, 2)
    )
    for _ in range(4):
        ours, theirs = next(here), next(there)
        assert isinstance(theirs, Shards)
        assert (ours.position, ours.first, ours.of) == (theirs.position, theirs.first, theirs.of)
        for one, other in zip(ours.parts, theirs.parts, strict=True):
            assert torch.equal(one[0], other[0])


def test_workers_that_are_not_alike_are_told(floor, tmp_path):
    job = Job(tmp_path / "job", 2)
    port = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    port["MASTER_PORT"] = free_port()
    ranks = [
        floor.warm(
            *(SCRIPT, job.records, 2, "--kind", "transformer"),
            env={**port, **job.env, "RANK": rank, "LOCAL_RANK": rank, "PRECISION": precision},
        )
        for rank, precision in enumerate(["highest", "medium"])
    ]
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].text
    words = "rank 0 and rank 1 differ in precision of matrix products: highest and medium"
    assert words in ranks[0].err
    assert words not in ranks[1].err


def test_a_resume_on_other_facts_says_so(floor, tmp_path):
    job = run(floor, tmp_path / "job", 2, steps=3)
    again = floor.ranks(1, SCRIPT, job.records, 5, env={**job.env, "PRECISION": "medium"})
    assert again[0].wait() == 0, again[0].text
    assert "bits may differ from here on: other precision of matrix products" in again[0].err
    last = floor.ranks(1, SCRIPT, job.records, 7, env={**job.env, "PRECISION": "medium"})
    assert last[0].wait() == 0, last[0].text
    assert "differ" not in last[0].err


def test_a_worker_that_dies_ends_the_others_wait(floor):
    ranks = floor.ranks(3, SCRIPTS / "many_sums.py", "forever")
    until(lambda: all("trained" in rank.out for rank in ranks), "steps", running=ranks[0])
    ranks[1].kill()
    for survivor in (ranks[0], ranks[2]):
        assert survivor.wait() == 1
        # The training's own error, not one that a thread was left with.
        assert "RuntimeError" in survivor.err
        assert "Exception in thread" not in survivor.err
