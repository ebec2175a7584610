"""What a session makes of local updates: which tensors are each replica's own; what is named."""

import pytest
import torch
from torch import nn

from outlast import LocalUpdates
from outlast.checkpoint.manifest import FULL, WEIGHTS
from outlast.config import load
from outlast.errors import ConfigError
from outlast.script.objects import Objects, States


@pytest.fixture
def made(replicas):
    replicas.alone()
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    local = LocalUpdates(model, optimizer, 2, fragments=2, overlap=1, exchange="int8")
    return model, optimizer, local


def step(model, optimizer):
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()


def test_what_is_each_replicas_own_is_known_before_the_first_save(made, tmp_path):
    model, optimizer, local = made
    step(model, optimizer)
    other = nn.Linear(2, 2)
    objects = Objects({"local": local, "model": model, "optimizer": optimizer, "other": other})
    assert list(objects.stateful)[-1] == "local"  # takes its state when its model has it
    saved = States(load({"dir": tmp_path})).of(1, objects.stateful, objects.capture(), FULL)
    assert saved.own == {name for name in saved.tensors if _is_own(name)}
    assert {"local.anchor.0", "local.momentum.1", "other.weight"} <= saved.tensors.keys()
    assert {"local.own.0.sent", "local.own.1.residual", "model.1.running_mean"} <= saved.own
    lazy = {name for name in saved.tensors if name.startswith("local.")}
    assert lazy <= saved.lazy


def _is_own(name):
    return name.startswith(("local.own.", "model.", "optimizer."))


def test_it_is_named_with_its_model_and_its_optimizer(made):
    model, optimizer, local = made
    with pytest.raises(ConfigError, match="name it too: outlast"):
        Objects({"model": model, "optimizer": optimizer})
    for lacking in (
        {"local": local, "optimizer": optimizer},
        {"local": local, "model": model},
        {"local": local, "model": model, "optimizer": torch.optim.SGD(model.parameters())},
    ):
        with pytest.raises(ConfigError, match="name all three"):
            Objects(lacking)


def test_every_optimizer_of_its_model_is_each_replicas_own(made, tmp_path):
    model, optimizer, local = made
    beside = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    elsewhere = nn.Linear(2, 2)
    other = torch.optim.SGD(elsewhere.parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer)
    beside.step()
    elsewhere(torch.ones(1, 2)).sum().backward()
    other.step()
    named = {"model": model, "elsewhere": elsewhere, "beside": beside, "other": other}
    objects = Objects({**named, "optimizer": optimizer, "local": local})
    saved = States(load({"dir": tmp_path})).of(1, objects.stateful, objects.capture(), FULL)
    starts = {name.partition(".")[0] for name in saved.own}
    assert starts == {"model", "beside", "optimizer", "local"}
    assert any(name.startswith("other.") for name in saved.tensors)


def test_weights_alone_have_none_of_it(made, tmp_path):
    """Whichever save comes first."""
    model, optimizer, local = made
    step(model, optimizer)
    objects = Objects({"model": model, "optimizer": optimizer, "local": local})
    states = States(load({"dir": tmp_path}))
    for kind in (WEIGHTS, FULL, WEIGHTS):
        saved = states.of(1, objects.stateful, objects.capture(), kind)
        keys = {name.partition(".")[0] for name in saved.tensors}
        assert keys == ({"model"} if kind == WEIGHTS else {"model", "optimizer", "local"})
        assert saved.data.keys() == keys


def test_models_without_it_are_as_before(made, tmp_path):
    objects = Objects({"model": nn.Linear(2, 2)})
    saved = States(load({"dir": tmp_path})).of(1, objects.stateful, objects.capture(), FULL)
    assert saved.own == frozenset()
