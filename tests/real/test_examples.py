"""The examples, killed in the middle, end with the weights of the scripts without Outlast."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import load

from thorough import ALL

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PLAIN = EXAMPLES / "without_outlast"
DIES_AT = Path(__file__).parent / "scripts/dies_at.py"
ENV = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "OUTLAST_CHECKPOINT_EVERY": "3"}
SHORTER = {"EPOCHS": 2, "STEPS": 60}
LINES = 80
TEST_S = 600


class Example(NamedTuple):
    """An example; ``weights`` is the file that it ends with, ``dies`` the step that kills it."""

    name: str
    weights: str
    workers: int = 1
    dies: int = 31
    is_seldom: bool = True
    is_plain: bool = True  # with the weights of the script without Outlast


JOBS = [
    Example("plain.py", "plain.safetensors", is_seldom=False),
    Example("ddp.py", "ddp.safetensors", 2),
    Example("fsdp2.py", "fsdp2.safetensors", 2),
    Example("tensor_parallel.py", "tensor_parallel.safetensors", 2),
    Example(
        *("local_updates.py", "local_updates.safetensors", 2),
        is_seldom=False,
        is_plain=False,
    ),
    Example("trainer.py", "trainer/model.safetensors", dies=14),
    Example("lightning_fit.py", "lightning.safetensors"),
    Example("accelerate_loop.py", "accelerate.safetensors"),
    Example("stream.py", "stream.safetensors", is_seldom=False, is_plain=False),
]


def shorter(path, directory):
    """A copy of an example that trains for less long: a script."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    text, count = re.subn(
        r"^(EPOCHS|STEPS)(.*?) = \d+",
        lambda found: f"{found[1]}{found[2]} = {SHORTER[found[1]]}",
        text,
        flags=re.M,
    )
    assert count == 1
    directory.mkdir()
    copy = directory / path.with_suffix(".py").name
    copy.write_text(text)
    return copy


def calm(floor, example, path, directory):
    """The weights of a run that nothing happens to."""
    script = shorter(path, directory)
    given = {"cwd": directory, "env": {**ENV, "OUTLAST_DIR": directory / "job"}}
    started = (
        floor.ranks(example.workers, script, **given)
        if example.workers > 1
        else [floor.warm(script, **given)]
    )
    for one in started:
        assert one.wait(TEST_S) == 0, one.text
    return (directory / example.weights).read_bytes()


@pytest.mark.timeout(TEST_S)
@pytest.mark.parametrize(
    "example", [one for one in JOBS if ALL or not one.is_seldom], ids=lambda one: one.name
)
def test_one_that_is_killed_ends_as_the_undisturbed_one(floor, tmp_path, example):
    before = PLAIN if example.is_plain else EXAMPLES
    wanted = calm(floor, example, before / example.name, tmp_path / "calm")
    directory = tmp_path / "killed"
    script = shorter(EXAMPLES / example.name, directory)
    command = ["run", "--nproc-per-node", example.workers, "--dir", directory / "job"]
    died = directory / "died"
    running = floor.outlast(*command, DIES_AT, died, example.dies, script, cwd=directory, env=ENV)
    assert running.wait(TEST_S) == 0, running.text
    assert died.exists()
    assert re.search(r"resumed from step [1-9]", running.text), running.text
    found = (directory / example.weights).read_bytes()
    assert found == wanted, f"{how_far(found, wanted)}\n{running.text}\n{ledger(directory)}"


def how_far(one, other):
    """Which weights differ, in how many elements, and by how much at most."""
    pairs = {name: (value, load(other)[name]) for name, value in load(one).items()}
    return {
        name: (int((a != b).sum()), a.numel(), float((a - b).abs().max()))
        for name, (a, b) in pairs.items()
        if not a.equal(b)
    }


def ledger(directory):
    """What a run that ended with other bits did, to be found out from."""
    return "\n".join(path.read_text() for path in directory.rglob("ledger.jsonl"))


# --- those that are no job of `outlast run` -------------------------------------------------------


def again(floor, script, dies):
    """What a script prints that dies in its midst, and is started again."""
    given = {"cwd": script.parent, "env": ENV}
    first = floor.warm(DIES_AT, script.parent / "died", dies, script, **given)
    assert first.wait(TEST_S) == -9, first.text
    second = floor.warm(DIES_AT, script.parent / "died", dies, script, **given)
    assert second.wait(TEST_S) == 0, second.text
    return first.out, second.out


@pytest.mark.skipif(not ALL, reason="OUTLAST_TEST_ALL=1 runs it")
def test_a_sweep_goes_on_with_the_run_it_was_in(floor, tmp_path):
    plain = floor.warm(shorter(PLAIN / "sweep.py", tmp_path / "plain"), env=ENV)
    assert plain.wait(TEST_S) == 0, plain.text
    script = shorter(EXAMPLES / "sweep.py", tmp_path / "killed")
    first, second = again(floor, script, 2 * 30 + 40)  # the second run's 40th step
    assert len(first.splitlines()) == 1
    assert second == plain.out
    assert sorted(path.name for path in (tmp_path / "killed/sweep").iterdir()) == [
        *("0.0001", "0.001", "0.01")
    ]


@pytest.mark.skipif(not ALL, reason="OUTLAST_TEST_ALL=1 runs it")
def test_a_notebook_goes_on(floor, tmp_path):
    for path in (EXAMPLES / "notebook.ipynb", PLAIN / "notebook.ipynb"):
        read = json.loads(path.read_text())
        assert read["nbformat"] == 4
        assert not any(cell.get("outputs") for cell in read["cells"])
    plain = floor.warm(shorter(PLAIN / "notebook.ipynb", tmp_path / "plain"), env=ENV)
    assert plain.wait(TEST_S) == 0, plain.text
    script = shorter(EXAMPLES / "notebook.ipynb", tmp_path / "killed")
    assert again(floor, script, 40) == ("", plain.out)


# --- what a reader sees ---------------------------------------------------------------------------


def test_each_is_short_and_has_its_pair():
    paths = sorted(path for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))
    assert [path.name for path in paths] == sorted(path.name for path in PLAIN.iterdir())
    assert len(paths) == 11
    for path in paths:
        for one in (path, PLAIN / path.name):
            if one.suffix == ".py":
                assert len(one.read_text().splitlines()) <= LINES, one
        assert "outlast" not in (PLAIN / path.name).read_text().replace("without_outlast", "")


def test_the_page_shows_the_differences():
    made = subprocess.run(
        [sys.executable, ROOT / "tools/examples.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
