"""The moment in which a script makes its first model is noted; afterwards torch is as it was."""

import importlib
import sys
import time

import pytest
import torch

from outlast.attempt import early

SOURCE = """
class Module:
    def __init__(self, size=1):
        self.size = size
"""


@pytest.fixture(autouse=True)
def _anew(monkeypatch):
    """No model has been made; what a test does to torch is undone."""
    monkeypatch.setattr(early, "_made_s", [])
    monkeypatch.setattr(torch.nn.Module, "__init__", torch.nn.Module.__init__)


def test_the_first_model_is_noted_and_no_other():
    init = torch.nn.Module.__init__
    early.watch_models()
    assert early.first_model_s() is None
    before_s = time.monotonic()
    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    after_s, noted_s = time.monotonic(), early.first_model_s()
    assert before_s <= noted_s <= after_s
    assert torch.nn.Module.__init__ is init
    assert model(torch.ones(1, 2)).shape == (1, 3)
    torch.nn.Linear(2, 3)
    assert early.first_model_s() == noted_s


def test_a_model_with_arguments_of_its_own_is_made_as_ever():
    early.watch_models()

    class Own(torch.nn.Module):
        def __init__(self, size, *, bias):
            super().__init__()
            self.size, self.bias = size, bias

    own = Own(4, bias=False)
    assert (own.size, own.bias) == (4, False)
    assert early.first_model_s() is not None


def test_what_somebody_else_has_put_around_it_stays(monkeypatch):
    early.watch_models()
    noted, made = torch.nn.Module.__init__, []

    def theirs(module):
        made.append(module)
        noted(module)

    monkeypatch.setattr(torch.nn.Module, "__init__", theirs)
    first = torch.nn.Identity()
    noted_s = early.first_model_s()
    assert noted_s is not None
    second = torch.nn.Identity()
    assert made == [first, second]
    assert torch.nn.Module.__init__ is theirs
    assert early.first_model_s() == noted_s


def test_where_torch_comes_later_its_first_model_is_noted(tmp_path, monkeypatch):
    name = "modules_of_a_later_torch"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(early, "_MODULES", name)
    early.watch_models()
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    assert early.first_model_s() is None
    assert module.Module(size=7).size == 7
    noted_s = early.first_model_s()
    assert noted_s is not None
    module.Module()
    assert early.first_model_s() == noted_s


def test_a_module_without_models_is_left_alone(monkeypatch):
    name = "no_modules_at_all"
    monkeypatch.setitem(sys.modules, name, type(sys)(name))
    monkeypatch.setattr(early, "_MODULES", name)
    early.watch_models()
    assert vars(sys.modules[name]).get("Module") is None
