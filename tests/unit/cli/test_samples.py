"""``outlast checkpoints show --samples``: what all workers noted, and what it amounts to."""

import json

import pytest
import torch
from unit_checkpoints import write

from outlast.data import Loader, open_feed
from outlast.data.feed import TRAIL
from outlast.data.trail import Trail
from outlast.storage import Directory

STEPS = 6


class Swapping(Loader):
    """Its third batch has two samples in each other's place."""

    def __iter__(self):
        for batch in super().__iter__():
            if self.position == 3 * self.global_batch:
                self.handed = self.handed[[1, 0, *range(2, len(self.handed))]]
            yield batch


def save(job, kind=Loader, *, workers=2, noted=True):
    """A checkpoint of a run by so many workers."""
    states = []
    for rank in range(workers):
        trail = Trail()
        loader = kind(range(40), global_batch=8, seed=2)
        feed = open_feed(loader, rank=rank, world_size=workers, trail=trail)
        for _ in range(STEPS):
            next(feed)
        data = {"loop": 1, "position": feed.state()} | ({TRAIL: trail.state()} if noted else {})
        own = {"step": STEPS, "random": torch.zeros(2), "data": data}
        states.append({"model": {"w": torch.ones(2)}, "outlast": own})
    storage = Directory(job.place / "fast")
    write(storage, states, STEPS, job="0123456789ab", serial=STEPS)
    job.ledger.append("commit", step=STEPS)
    return loader


def test_a_run_that_is_proved(job, outlast):
    save(job)
    code, out, err = outlast("checkpoints", "show", "--samples")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "step 6 of job 0123456789ab: 48 samples in 6 steps, by 2 workers in 1 stretch",
        "proved: each came exactly when it was its turn, none lost, none repeated",
    ]
    found = json.loads(outlast("checkpoints", "show", "--samples", "--json")[1])
    assert (found["step"], found["proved"], found["faults"]) == (6, True, [])
    assert [one["world_size"] for one in found["stretches"]] == [2]


def test_the_ids_of_some_steps(job, outlast):
    loader = save(job)
    code, out, _ = outlast("checkpoints", "show", "--ids", "2-3")
    assert code == 0
    assert out.splitlines() == [
        f"step {step}: {' '.join(map(str, loader.ids(8 * (step - 1))))}" for step in (2, 3)
    ]
    found = json.loads(outlast("checkpoints", "show", "--ids", 2, "--json")[1])
    assert found == {"step": 6, "job": "0123456789ab", "ids": {"2": loader.ids(8)}}


def test_a_run_that_is_not(job, outlast):
    loader = save(job, Swapping, workers=1)
    code, out, _ = outlast("checkpoints", "show", "--samples")
    assert code == 1
    one, other = loader.ids(16, 2)
    assert out.splitlines()[1:] == [
        f"  samples {one} and {other} in step 3 came in each other's place",
        "not proved; the first step that is not as it should be: 3",
    ]
    code, out, _ = outlast("checkpoints", "show", "--samples", "--ids", 3, "--json")
    found = json.loads(out)
    assert (code, found["proved"]) == (1, False)
    (fault,) = found["faults"]
    assert (fault["what"], fault["step"]) == ("swap", 3)
    assert found["ids"]["3"] == [other, one, *loader.ids(18, 6)]


def test_a_worker_whose_record_is_missing(job, outlast):
    save(job)
    rank_1 = job.path("fast", STEPS, "rank-00001.json")
    rank_1.write_text(rank_1.read_text().replace("a", "b"))
    code, out, err = outlast("checkpoints", "show", "--samples")
    assert (code, out) == (1, "")
    (line,) = err.splitlines()
    assert "step 6 is not valid" in line
    assert "rank-00001.json" in line


@pytest.mark.parametrize("ids", ["0", "7", "3-2", "x", "1-", "-1", "1-2-3"])
def test_no_step_of_the_run(job, outlast, ids):
    save(job)
    code, out, err = outlast("checkpoints", "show", f"--ids={ids}")
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert f"--ids {ids} is not a step from 1 to 6" in line


def test_a_loader_that_tells_no_ids(job, outlast):
    save(job, noted=False)
    code, out, err = outlast("checkpoints", "show", "--samples")
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert "step 6 holds no record of samples" in line
