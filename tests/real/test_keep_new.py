"""Hyperparameters that a script has changed, over real checkpoints: said, and taken where named."""

import pytest
import torch
from floor import alone

import outlast
from outlast.errors import ConfigError


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    alone(monkeypatch)
    monkeypatch.chdir(tmp_path)


class Run:
    """A script with a schedule, as far as ``until``; the rates of its steps."""

    def __init__(self, capfd, until, lr, *, gamma=0.5, between=None, **how):
        capfd.readouterr()
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma)
        named = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        self.rates = []
        with outlast.session(**named, dir="job", **how) as session:
            if between is not None:
                between(optimizer, scheduler)
            for _ in session.steps([0] * until, until=until):
                self.rates.append(optimizer.param_groups[0]["lr"])
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                scheduler.step()
        self.said = [line for line in capfd.readouterr().err.splitlines() if ".lr is " in line]


def test_a_changed_rate_is_said_at_each_resume_and_the_checkpoints_is_used(capfd):
    assert not Run(capfd, 3, 1.0).said
    assert not Run(capfd, 5, 1.0).said
    for until, rates in ((6, [0.25]), (7, [0.125])):
        run = Run(capfd, until, 8.0)
        assert run.rates == rates
        (line,) = run.said
        assert "optimizer.lr is 1.0 in the checkpoint and 8.0 in the script" in line
        assert 'keep_new=("optimizer.lr",)' in line


def test_a_rate_kept_new_is_the_runs_own_from_then_on(capfd):
    Run(capfd, 3, 1.0)
    run = Run(capfd, 6, 8.0, keep_new=("optimizer.lr",))
    assert run.rates == [4.0, 2.0, 2.0]
    assert "the script's is used (keep_new)" in run.said[0]
    for until, how in ((8, {}), (10, {"keep_new": "optimizer.lr"})):
        run = Run(capfd, until, 8.0, **how)
        assert run.rates == [8.0 / 2 ** (step // 2) for step in range(until - 2, until)]
        assert not run.said
    run = Run(capfd, 11, 1.0)
    assert "optimizer.lr is 8.0 in the checkpoint and 1.0 in the script" in run.said[0]


def test_what_code_in_front_of_the_loop_changes_is_put_back_to_what_is_kept(capfd):
    Run(capfd, 3, 1.0)

    def between(optimizer, scheduler):
        for state in optimizer.state.values():  # so that all of it is read again
            state["momentum_buffer"].add_(1.0)
        optimizer.param_groups[0]["lr"] = 77.0
        scheduler.base_lrs[0] = 77.0

    run = Run(capfd, 6, 8.0, between=between, keep_new=("optimizer.lr",))
    assert run.rates == [4.0, 2.0, 2.0]


def test_a_name_that_there_is_not_is_refused_and_the_job_can_go_on(capfd):
    Run(capfd, 1, 1.0)
    with pytest.raises(ConfigError, match=r"'optimizer\.rate'; the hyperparameters are: optimizer"):
        Run(capfd, 2, 1.0, keep_new=("optimizer.rate",))
    assert Run(capfd, 2, 1.0).rates == [1.0]
