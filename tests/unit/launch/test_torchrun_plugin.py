"""torch's own launcher knows our rendezvous by the package's entry point."""

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[3] / "pyproject.toml"


def test_the_entry_point_gives_what_makes_a_rendezvous():
    named = tomllib.loads(PROJECT.read_text())["project"]["entry-points"]["torchrun.handlers"]
    (point,) = [EntryPoint(name, value, "torchrun.handlers") for name, value in named.items()]
    assert point.name == "outlast"
    create = point.load()()
    parameters = type("Parameters", (), {"endpoint": ""})()
    with pytest.raises(ValueError, match="--rdzv-endpoint must name a directory"):
        create(parameters)
