"""Several ranks: each writes its part, once; as many as there are, spread as they are, go on."""

import json

import pytest
import torch
from floor import SCRIPTS, Job
from state_bits import difference

from outlast.checkpoint.manifest import shard_file
from outlast.ledger.file import read_events
from whole_reads import load

SHARDED = SCRIPTS / "sharded.py"
ONE_TENSOR = 64 * 401 * 4


class Sharded:
    """Runs of one job in several worlds, and what each recorded."""

    def __init__(self, floor, tmp_path):
        self.floor, self.path = floor, tmp_path
        self.job = Job(tmp_path / "job")
        self.runs = 0

    def run(self, world_size, mode, steps, *options, env=None):
        self.runs += 1
        records = self.path / f"run-{self.runs}"
        records.mkdir()
        arguments = (SHARDED, records, mode, steps, *options)
        environ = {**self.job.env, **(env or {})}
        if world_size == 1:
            started = [self.floor.warm(*arguments, env=environ)]
        else:
            started = self.floor.ranks(world_size, *arguments, env=environ)
        for one in started:
            assert one.wait() == 0, one.text
        return Run(records, world_size)

    def loaded(self, step, rank=0):
        return load(self.job.storage, step, rank=rank)

    def sizes(self, step, world_size):
        paths = [self.job.path(step, shard_file(rank)) for rank in range(world_size)]
        return [path.stat().st_size if path.exists() else 0 for path in paths]

    def reasons(self):
        """What kept saves from being committed, other than the one before."""
        events = read_events(self.job.directory)
        kinds = ("save_skipped", "storage_error")
        reasons = [e.get("reason") or e.get("error") for e in events if e.event in kinds]
        return [reason for reason in reasons if not reason.startswith("the save before it is")]


class Run:
    def __init__(self, records, world_size):
        self.records, self.world_size = records, world_size

    def state(self, name, rank=0):
        return torch.load(self.records / f"{name}-{rank}.pt")

    def final(self, rank=0):
        return json.loads((self.records / f"final-{rank}.json").read_text())


@pytest.fixture
def sharded(floor, tmp_path):
    return Sharded(floor, tmp_path)


def assert_same(loaded, recorded, keys=("model", "optimizer")):
    for key in keys:
        state = loaded.state(key)
        if "optimizer_class" in state:
            names = [name for group in state["param_groups"] for name in group["params"]]
            moments = {number: state["state"][name] for number, name in enumerate(names)}
            assert not difference(moments, recorded[key]["state"], key)
        else:
            assert not difference(dict(state), dict(recorded[key]), key)


@pytest.mark.parametrize("world_size", [2, 3])
def test_replicas_are_written_once_and_evenly(sharded, world_size):
    run = sharded.run(world_size, "ddp", 6)
    committed = sharded.job.steps().committed
    assert committed[-1] == 6
    assert len(committed) >= 2
    for step in committed:
        for rank in range(world_size):
            assert_same(sharded.loaded(step, rank), run.state(f"at-{step}", rank))
    sizes = sharded.sizes(6, world_size)
    assert all(sizes), "each rank writes a part"
    assert max(sizes) - min(sizes) <= ONE_TENSOR + 20_000
    one_state = 3 * (2 * ONE_TENSOR + (401 + 64 + 1) * 4)
    assert one_state <= sum(sizes) <= one_state + world_size * 40_000
    assert sharded.reasons() == []
    assert all(any(run.final(rank)["left"]) for rank in range(world_size))


@pytest.mark.parametrize("buffers", ["auto", "0"])
def test_a_replica_that_has_gone_its_own_way_is_found_and_kept(sharded, buffers):
    env = {"OUTLAST_CHECKPOINT_BUFFERS": buffers}
    run = sharded.run(2, "ddp", 8, "--perturb-at", "1", env=env)
    committed = sharded.job.steps().committed
    reasons = sharded.reasons()
    assert len(reasons) == 1
    assert "not the same on all ranks: model.up.weight[0,0]" in reasons[0]
    assert committed[-1] == 8
    for step in committed:
        for rank in range(2):
            assert_same(sharded.loaded(step, rank), run.state(f"at-{step}", rank))
    weights = [run.state("at-8", rank)["model"]["up.weight"] for rank in range(2)]
    assert not torch.equal(*weights)
    again = sharded.run(2, "ddp", 8)
    for rank in range(2):
        found = again.state("entered", rank)["model"]["up.weight"]
        assert torch.equal(found, weights[rank]) or rank == 0  # DDP copies rank 0's to all


def test_a_spread_replica_that_has_gone_its_own_way_is_said_once_and_saved_as_one(sharded):
    run = sharded.run(4, "hsdp", 8, "--perturb-at", "1", "--vector-scale")
    reasons = sharded.reasons()
    assert len(reasons) == 1
    assert "not the same on all ranks: model.up.weight[" in reasons[0]
    committed = sharded.job.steps().committed
    assert committed[-1] == 8
    found = sharded.loaded(8).state("model")["up.weight"]
    versions = [run.state("at-8", rank)["model"]["up.weight"] for rank in range(4)]
    assert any(not torch.equal(one, versions[0]) for one in versions)
    assert found.shape == versions[0].shape


def test_buffers_differ_per_rank_and_come_back_per_rank(sharded):
    run = sharded.run(2, "ddp", 4, "--norm")
    assert sharded.reasons() == []
    means = [run.state("at-4", rank)["model"]["norm.running_mean"] for rank in range(2)]
    again = sharded.run(2, "ddp", 4, "--norm")
    for rank in range(2):
        assert_same(sharded.loaded(4, rank), run.state("at-4", rank))
        assert torch.equal(again.state("entered", rank)["model"]["norm.running_mean"], means[rank])


def test_stages_have_each_their_own_structure(sharded):
    run = sharded.run(2, "stages", 4)
    assert sharded.reasons() == []
    for rank in range(2):
        keys = (f"stage{rank}", f"optimizer{rank}")
        assert_same(sharded.loaded(4, rank), run.state("at-4", rank), keys)


WORLDS = {
    "fsdp": [(1, "plain"), (2, "fsdp"), (3, "fsdp"), (4, "hsdp"), (2, "ddp")],
    "tp": [(1, "plain"), (2, "tp"), (4, "tp"), (2, "ddp")],
    "hsdp": [(1, "plain"), (2, "fsdp"), (4, "hsdp"), (2, "ddp")],
}


@pytest.mark.parametrize("mode", WORLDS)
def test_spread_state_comes_back_however_it_is_spread_then(sharded, mode):
    # Torch computes with evenly cut tensors only in tensor parallelism; 4 ranks hold uneven ones.
    scale = ("--width", "402") if mode == "tp" else ("--vector-scale",)
    run = sharded.run(4 if mode == "hsdp" else 2, mode, 5, *scale)
    assert sharded.reasons() == []
    committed = sharded.job.steps().committed
    assert len(committed) >= 2
    for step in committed:
        assert_same(sharded.loaded(step), run.state(f"at-{step}"))
    assert any(run.final()["left"]), "nothing was left for later"
    assert min(sharded.sizes(5, run.world_size)) > ONE_TENSOR, "each rank writes its shards"
    expected = run.state("at-5")
    for world_size, again in WORLDS[mode]:
        entered = sharded.run(world_size, again, 5, *scale)
        assert entered.final()["resumed"]
        for rank in range(world_size):
            found = entered.state("entered", rank)
            assert not difference(found["model"], expected["model"], f"{again} at {world_size}")
            ours, theirs = (s["optimizer"]["state"] for s in (found, expected))
            assert not difference(ours, theirs, f"{again} at {world_size}")


def test_statistics_of_rows_stay_spread_as_they_were(sharded):
    other = {"OUTLAST_DIR": str(sharded.path / "undisturbed")}
    undisturbed = sharded.run(2, "fsdp", 6, "--rows", "--vector-scale", env=other)
    sharded.run(2, "fsdp", 3, "--rows", "--vector-scale")
    again = sharded.run(2, "fsdp", 6, "--rows", "--vector-scale")
    assert again.final()["resumed"]
    for rank in range(2):
        entered = again.state("entered", rank)
        assert not difference(entered, undisturbed.state("at-3", rank))
        assert not difference(again.state("at-6", rank), undisturbed.state("at-6", rank))
    alone = sharded.run(1, "plain", 6, "--rows", "--vector-scale").state("entered")
    expected = undisturbed.state("at-6")["optimizer"]["state"]
    assert not difference(alone["optimizer"]["state"], expected)
