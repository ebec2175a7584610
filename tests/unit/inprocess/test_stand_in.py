"""An optimizer that steps in a void step changes nothing."""

import pytest
import torch

from outlast.attempt.over import over
from outlast.inprocess import interrupted


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_stand_in_steps_in_its_place(monkeypatch, kind):
    model = torch.nn.Linear(2, 1)
    optimizer = kind(model.parameters(), lr=0.5)
    hook = interrupted.stand_in()
    for is_void in (True, False):
        before = model.weight.detach().clone()
        monkeypatch.setattr(over, "is_void", is_void)
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        assert torch.equal(model.weight, before) == is_void
        assert (not optimizer.state) == is_void or kind is torch.optim.SGD
    hook.remove()
    monkeypatch.setattr(over, "is_void", True)
    before = model.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.weight, before)
