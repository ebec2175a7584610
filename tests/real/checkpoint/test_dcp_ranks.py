"""DCP with gloo between real processes: FSDP2, resharding, ranks that fail and ranks that die."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from saved import saved

import outlast
from outlast.checkpoint.export import export
from outlast.checkpoint.manifest import as_places
from outlast.checkpoint.transfer import inventory_of, read_manifest
from outlast.storage import Directory
from thorough import some
from whole_reads import load, verify

SCRIPT = Path(__file__).with_name("dcp_script.py")


class Ranks:
    """Starts the ranks of a job, which act one thing after the other, and gathers their answers."""

    def __init__(self, floor):
        self.floor = floor

    def start(self, world_size, *actions):
        text = json.dumps([[str(word) for word in action] for action in actions])
        if world_size:
            return self.floor.ranks(world_size, SCRIPT, text)
        return [self.floor.warm(SCRIPT, text)]

    def answers(self, world_size, *actions):
        """For each action, each rank's answer."""
        ranks = self.start(world_size, *actions)
        for rank in ranks:
            assert rank.wait() == 0, rank.text
        lines = [rank.out.splitlines() for rank in ranks]
        return [[json.loads(line) for line in one] for one in zip(*lines, strict=True)]

    def run(self, world_size, *actions):
        found = self.answers(world_size, *actions)
        assert all("answer" in answer for one in found for answer in one), found
        return [[answer["answer"] for answer in one] for one in found]


@pytest.fixture
def job(floor):
    return Ranks(floor)


def test_saved_by_any_number_of_ranks_and_loaded_by_any_other(job, tmp_path):
    """2 with FSDP2 → 2, 3, 1 with FSDP2, and plain; and back: plain → 2."""
    path, other = tmp_path / "ckpt", tmp_path / "plain"
    (first, second), loaded = job.run(2, ("save", path, "sharded", 7), ("load", path, "sharded"))
    assert first == second
    manifest = verify(Directory(path), 7)
    assert (manifest.world_size, manifest.layout) == (2, {"dcp": 2})
    loaded += job.run(3, ("load", path, "sharded"))[0]
    loaded += job.run(1, ("load", path, "sharded"))[0]
    ((plain,), found) = job.run(0, ("save", other, "plain", 7), ("load", path, "plain"))
    loaded += found
    assert {one["digest"] for one in loaded} == {first}
    own = [one["mine"] for one in loaded]
    assert own == [{"rank": rank, "n": [rank, 3.0]} for rank in (0, 1, 0, 1, 0, 0, 0)]
    (found,) = job.run(2, ("load", other, "sharded"))
    assert {one["digest"] for one in found} == {plain}


def test_each_byte_is_written_once_and_read_by_outlast_too(job, tmp_path):
    path = tmp_path / "ckpt"
    job.run(2, ("save", path, "sharded", 7))
    manifest = read_manifest(Directory(path), 7)
    inventory = inventory_of(manifest, as_places(Directory(path)))
    tensors = inventory.tensors()
    found = inventory.locate(
        {name: [((0,) * len(one.shape), one.shape)] for name, one in tensors.items()}, 0
    )
    chunks = {name: [c.file for c in e.chunks] for name, e in found.items()}
    assert sorted(chunks["model.0.weight"]) == ["rank-00000.safetensors", "rank-00001.safetensors"]
    assert len(chunks["optimizer.state.0.weight.step"]) == 1
    names = set()
    for rank in range(2):
        with safe_open(saved(path, 7) / f"rank-{rank:05d}.safetensors", "pt") as file:
            names |= set(file.keys())
    assert names == set(tensors)
    rows = {tuple(one.offsets): one.shape for one in found["model.0.weight"].chunks}
    assert rows == {(0, 0): (4, 6), (4, 0): (3, 6)}
    found = load(Directory(path), 7, rank=1)
    assert found.state("mine") == {"rank": 1, "n": [1, 3.0]}
    assert found.state("model")["0.weight"].shape == (7, 6)


def test_saving_while_training_goes_on(job, tmp_path):
    path = tmp_path / "ckpt"
    expected, found = job.run(2, ("async", path, 7), ("load", path, "sharded"))
    assert [one["digest"] for one in found] == expected


def test_wrong_bytes_are_refused_on_every_rank_and_named(job, tmp_path):
    path = tmp_path / "ckpt"
    job.run(2, ("save", path, "sharded", 7))
    shard = saved(path, 7) / "rank-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    (answers,) = job.answers(2, ("load", path, "sharded"))
    for answer in answers:
        for failure in answer["failures"].values():
            assert failure["kind"] == "CheckpointInvalid"
            assert "rank-00001.safetensors does not match its checksum (block 0" in failure["text"]


def test_ranks_that_would_load_different_steps_are_stopped(job, tmp_path):
    path = tmp_path / "ckpt"
    saves = [("save", path, "sharded", step) for step in (1, 2)]
    for answer in job.answers(2, *saves, ("load-different", path))[-1]:
        (failure,) = answer["failures"].values()
        assert failure["kind"] == "ConfigError"
        assert "the ranks found different checkpoints (steps 1, 2)" in failure["text"]


def test_a_rank_that_fails_leaves_the_older_commit_in_force(job, tmp_path):
    path = tmp_path / "ckpt"
    expected, first, second, found, again = job.answers(
        2,
        ("save", path, "sharded", 3),
        ("fail", path, 0, 7),
        ("fail", path, 1, 7),
        ("load", path, "sharded"),
        ("save", path, "sharded", 7),
    )
    for rank, answers in (("0", first), ("1", second)):
        for answer in answers:
            assert list(answer["failures"]) == [rank]
            assert "No space left" in answer["failures"][rank]["text"]
    assert found[0]["answer"]["digest"] == expected[0]["answer"]
    assert again == expected
    verify(Directory(path), 7)


@pytest.mark.parametrize("moment", ["before-data", "before-manifest", "after-manifest"])
def test_a_coordinator_killed_at_any_moment(job, tmp_path, moment):
    path = tmp_path / "ckpt"
    ranks = job.start(2, ("save", path, "sharded", 3), ("die", path, moment, 7))
    assert ranks[0].wait() == -9, ranks[0].text
    ranks[1].kill()  # as a launcher would
    expected = json.loads(ranks[1].out.splitlines()[0])["answer"]
    committed = moment == "after-manifest"
    assert (saved(path, 7) / "manifest.json").exists() == committed
    again = [] if committed else [("save", path, "sharded", 7)]
    found, *_ = job.run(2, ("load", path, "sharded"), *again)
    assert [one["digest"] for one in found] == [expected, expected]
    verify(Directory(path), 3)
    verify(Directory(path), 7)


def test_an_exported_checkpoint_is_loaded_by_stock_dcp(job, tmp_path):
    path, out = tmp_path / "ckpt", tmp_path / "out"
    ((expected, _),) = job.run(2, ("save", path, "sharded", 7))
    export(Directory(path), 7, "dcp", out)
    shutil.rmtree(path)
    (found,) = job.run(2, ("load-stock", out, "sharded"))
    (alone,) = job.run(0, ("load-stock", out, "plain"))
    assert {one["digest"] for one in found + alone} == {expected}


@pytest.mark.parametrize("to", some(["safetensors", "torch", "dcp"], 1))
@pytest.mark.filterwarnings("ignore:.*single process.*")
def test_the_memory_of_an_export_does_not_grow_with_the_state(job, tmp_path, to):
    """1.25 GiB in tensors of 8 MiB: read ahead and caches take half of it, whatever there is."""
    state = {"m": {f"{i}": torch.full((2 << 20,), float(i)) for i in range(160)}}
    dcp.save(state, storage_writer=outlast.dcp_writer(tmp_path / "ckpt", 7), no_dist=True)
    del state
    ((grown,),) = job.run(0, ("export", tmp_path / "ckpt", 7, to, tmp_path / "out"))
    assert grown < 1024 << 20
