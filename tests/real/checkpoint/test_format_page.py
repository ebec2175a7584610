"""The reader in docs/format.md reads real checkpoints, and needs neither Outlast nor torch."""

import json
import re
from pathlib import Path

import pytest
import torch
from floor import SCRIPTS, Job
from safetensors.torch import load_file

from outlast.checkpoint.manifest import named, rank_of_own
from outlast.checkpoint.reader import open_checkpoint
from thorough import ALL

PAGE = Path(__file__).parents[3] / "docs/format.md"
ALONE = (
    "import sys; sys.modules.update(dict.fromkeys(['outlast', 'torch']))\n"  # neither can be had
)


@pytest.fixture(name="reader")
def _reader(tmp_path):
    (text,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(text.splitlines()) <= 60
    path = tmp_path / "read_checkpoint.py"
    path.write_text(ALONE + text)
    return path


def tensors_in(data):
    if isinstance(data, dict):
        yield from [data["name"]] if data.get("$") == "tensor" else tensors_in([*data.values()])
    elif isinstance(data, list):
        for one in data:
            yield from tensors_in(one)


KINDS = [("plain", 1), ("fsdp", 2), *([("ddp", 2), ("hsdp", 4)] if ALL else ())]


@pytest.mark.parametrize(("mode", "num_ranks"), KINDS)
def test_a_stranger_reads_every_tensor(floor, tmp_path, reader, mode, num_ranks):
    job, records = Job(tmp_path / "job", num_ranks), tmp_path / "records"
    records.mkdir()
    arguments = (SCRIPTS / "sharded.py", records, mode, 4)
    for one in floor.ranks(num_ranks, *arguments, env=job.env):
        assert one.wait() == 0, one.text
    for save in sorted((tmp_path / "job/checkpoints").glob("step-*"))[-2:]:
        out = tmp_path / save.name
        out.mkdir()
        done = floor.cold(reader, save, out)
        assert done.wait() == 0, done.text
        found = load_file(out / "whole.safetensors")
        checkpoint = open_checkpoint(job.storage, named(save.name))
        small = json.loads((out / "state.json").read_text())
        assert [one["rank"] for one in small] == list(range(num_ranks))
        said = {
            f"{name}@rank-{one['rank']:05d}" if name in one["own"] else name
            for one in small
            for name in tensors_in(one["state"])
        }
        assert said == set(found)
        assert {name.partition(".")[0] for name in said} > {"model", "optimizer"}
        for name, tensor in found.items():
            if rank_of_own(name) is None:
                same = checkpoint.tensor(name)
                assert same.dtype == tensor.dtype
                assert torch.equal(same, tensor), name
