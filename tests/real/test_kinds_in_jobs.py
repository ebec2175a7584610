"""Modules that load in a way of their own, in processes that are killed and started again."""

import pytest
import torch
from floor import SCRIPTS, Job
from torch import nn

import outlast
from outlast.errors import StateMismatch

QUANTIZED = SCRIPTS / "quantized.py"


@pytest.mark.parametrize("wrapper", ["plain", "ddp"])
def test_quantization_aware_training_goes_on_where_it_was_killed(floor, tmp_path, wrapper):
    def run(name, killed_in):
        one = floor.warm(QUANTIZED, tmp_path / name, str(killed_in), wrapper)
        assert one.wait() == (-9 if killed_in else 0), one.text
        return one

    calm = run("calm", 0)
    run("job", 4)
    assert 1 <= Job(tmp_path / "job").newest() <= 4
    again = run("job", 0)
    assert "resumed from step" in again.err, again.text
    lines = again.out.splitlines()
    assert lines == calm.out.splitlines()[-len(lines) :]
    assert len(lines) < 9  # eight losses, and the end


class Counting(nn.Linear):
    """Counts its batches where no checkpoint has it."""

    def __init__(self):
        super().__init__(2, 1)
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.count += 1
        return super().forward(x) / self.count


def test_what_training_changes_and_no_checkpoint_holds_is_said(job, capfd):
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with outlast.session(dir=job, model=model, optimizer=optimizer) as session:
        for _ in session.steps(range(20)):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert capfd.readouterr().err.count("model.count is changed by training") == 1


def open_and_leave(job, model):
    with outlast.session(dir=job, model=model) as session:
        for _ in session.steps(range(1)):
            pass


def test_several_values_for_one_place_are_refused_and_no_older_checkpoint_is_tried(job):
    model = nn.Linear(2, 1)
    model.register_buffer("scale", torch.arange(3.0))
    open_and_leave(job, model)
    model.register_buffer("scale", torch.ones(1).expand(3))
    with pytest.raises(StateMismatch, match=r"model\.scale has several values in step 1"):
        open_and_leave(job, model)


class Halved(nn.Linear):
    """Does not take back what it gave."""

    def set_extra_state(self, state):
        self.weight.data /= state

    def get_extra_state(self):
        return 2


def test_what_a_module_made_of_its_state_is_said(job, capfd):
    open_and_leave(job, nn.Sequential(Halved(2, 1)))
    open_and_leave(job, nn.Sequential(Halved(2, 1)))
    assert "model.0.weight is not what was saved: Halved loads" in capfd.readouterr().err
