"""How many snapshots a worker wants to hold at once."""

import pytest

from outlast import config
from outlast.training.room import Room


def wanted(monkeypatch, world_size, local, arguments):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    return Room(config.load(arguments, environ={}), world_size)._wanted


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("world_size", "local", "arguments", "expected"),
    [
        (4, 4, {}, None),
        (4, 2, {}, 2),
        (3, 2, {}, 2),
        (4, 2, {"peer.replicas": 0}, None),
        (4, 2, {"peer.replicas": 2}, 2),
        (4, 2, {"checkpoint.buffers": 1}, 1),
        (4, 4, {"peer.replicas": 1}, None),
    ],
)
def test_what_others_keep_a_copy_of_stays_while_the_next_is_copied(
    monkeypatch, world_size, local, arguments, expected
):
    assert wanted(monkeypatch, world_size, local, arguments) == expected
