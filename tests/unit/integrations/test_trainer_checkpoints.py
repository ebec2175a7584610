"""Which checkpoint of a Trainer is whole, and which of them is the newest."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from outlast.integrations.trainer_checkpoints import broken, newest_whole


def checkpoint(directory, step, written_t):
    """One as a Trainer writes it."""
    place = directory / f"checkpoint-{step}"
    place.mkdir()
    save_file({"weight": torch.arange(8.0)}, place / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"value": torch.arange(4.0)}, place / name)
    (place / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    os.utime(place / "trainer_state.json", (written_t, written_t))
    return place


def cut(path):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip(path):
    content = bytearray(path.read_bytes())
    content[content.index(b"\x00\x00\x80\x3f") + 2] ^= 1  # within the numbers
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda place: (place / "trainer_state.json").unlink(), "trainer_state.json is missing"),
        (lambda place: (place / "trainer_state.json").write_text("{"), "cannot be read"),
        (lambda place: (place / "trainer_state.json").write_text("[1]"), "cannot be read"),
        (lambda place: (place / "model.safetensors").unlink(), "no weights"),
        (lambda place: (place / "optimizer.pt").unlink(), "optimizer.pt is missing"),
        (lambda place: cut(place / "model.safetensors"), "model.safetensors is cut off"),
        (lambda place: (place / "model.safetensors").write_bytes(b""), "model.safetensors"),
        (lambda place: cut(place / "optimizer.pt"), "optimizer.pt is cut off"),
        (lambda place: flip(place / "optimizer.pt"), "optimizer.pt"),
        (
            lambda place: (place / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"weight": "model-2.safetensors"}})
            ),
            "names parts that are missing",
        ),
        (lambda place: place.rename(place.with_name("checkpoint-9")), "is of step 8"),
    ],
)
def test_what_is_not_whole_is_not_gone_on_from(tmp_path, capsys, harm, words):
    whole = checkpoint(tmp_path, 4, 100)
    harmed = checkpoint(tmp_path, 8, 200)
    assert not broken(harmed)
    harm(harmed)
    assert newest_whole(str(tmp_path)) == str(whole)
    assert words in capsys.readouterr().err


def test_one_without_a_workers_random_states_is_the_last_resort(tmp_path, capsys):
    whole, torn = checkpoint(tmp_path, 4, 100), checkpoint(tmp_path, 8, 200)
    for place, num in ((whole, 2), (torn, 1)):
        for rank in range(num):
            (place / f"rng_state_{rank}.pth").write_bytes((place / "rng_state.pth").read_bytes())
    assert newest_whole(str(tmp_path), 2) == str(whole)
    assert "rng_state_1.pth is missing" in capsys.readouterr().err
    assert newest_whole(str(tmp_path), 3) == str(torn)
    assert "has no rng_state_1.pth" in capsys.readouterr().err


def test_an_older_runs_higher_number_is_not_the_newest(tmp_path):
    checkpoint(tmp_path, 900, 100)
    newer = checkpoint(tmp_path, 300, 200)
    assert newest_whole(str(tmp_path)) == str(newer)


def test_where_none_is_whole_there_is_none(tmp_path):
    assert newest_whole(str(tmp_path)) is None
    cut(checkpoint(tmp_path, 4, 100) / "scheduler.pt")
    assert newest_whole(str(tmp_path)) is None
