"""A session in this very process: what it refuses, and what it leaves in the ledger."""

import pytest
import torch

import outlast
from outlast.errors import ConfigError
from outlast.ledger.file import read_events
from outlast.report.facts import facts


@pytest.fixture
def job(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "OUTLAST_STORE", "OUTLAST_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "job"


def test_waiting_for_a_save_ahead_of_its_boundary_is_refused(job):
    with outlast.session(model=torch.nn.Linear(2, 1), dir=job, every="1 h") as session:
        pending = None
        for _ in session.steps([0] * 4000, until=4000):
            if pending is None:
                pending = session.save()
                with pytest.raises(ConfigError, match="would wait for ever"):
                    pending.wait()
                assert not pending.wait(60)  # at once: it would wait for itself
            elif pending.step is not None and session.step > pending.step:
                assert pending.wait(60)
                break
    assert pending.committed
    assert [e["step"] for e in read_events(job) if e.event == "commit"] == [pending.step]


def test_a_save_asked_for_outside_of_the_loop_is_the_final_one(job):
    with outlast.session(model=torch.nn.Linear(2, 1), dir=job, every="1 h") as session:
        for _ in session.steps([0] * 3, until=3):
            pass
        pending = session.save()
        with pytest.raises(ConfigError, match="would wait for ever"):
            pending.wait()
    assert pending.wait(0)
    assert pending.step == 3


def test_misuse_is_named(job):
    with pytest.raises(ConfigError, match="did you mean every"):
        outlast.session(model=torch.nn.Linear(2, 1), dir=job, evry="5 steps")
    with (
        outlast.session(model=torch.nn.Linear(2, 1), dir=job) as session,
        pytest.raises(ConfigError, match="until=-3"),
    ):
        next(session.steps([0], until=-3))
    with pytest.raises(ConfigError, match="the session is over"):
        next(session.steps([0], until=3))


def test_the_ledger_knows_how_it_ended_without_our_launcher(job):
    def state():
        return facts(read_events(job)).state

    with outlast.session(model=torch.nn.Linear(2, 1), dir=job) as session:
        assert state() == "running"
        list(session.steps([0] * 3, until=3))
    assert state() == "finished"
    with pytest.raises(ZeroDivisionError):
        _fail_in_the_loop(job)
    assert state() == "failed"


def _fail_in_the_loop(job):
    with outlast.session(model=torch.nn.Linear(2, 1), dir=job) as session:
        for _ in session.steps([0] * 6, until=6):
            raise ZeroDivisionError


def test_lbfgs_goes_on_bit_for_bit(job, tmp_path):
    """It sums over its state: the memory that state lies in must not change the sums."""

    def train(directory, until):
        torch.manual_seed(0)
        model = torch.nn.Linear(7, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        x, y = torch.randn(64, 7), torch.randn(64, 1)

        def closure():
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        with outlast.session(model=model, optimizer=optimizer, dir=directory) as session:
            for _ in session.steps([0] * 100, until=until):
                optimizer.step(closure)
        return [p.detach().clone() for p in model.parameters()]

    undisturbed = train(tmp_path / "undisturbed", 24)
    for until in (5, 11, 17):
        train(job, until)
    resumed = train(job, 24)
    assert all(torch.equal(a, b) for a, b in zip(undisturbed, resumed, strict=True))


def test_what_a_script_draws_ahead_of_its_loops_is_what_it_drew_before(job, tmp_path):
    """Random data made inside the with block; draws before, between and in two loops."""

    def train(directory, until):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        drawn = []
        with outlast.session(model=model, optimizer=optimizer, dir=directory) as session:
            data = [torch.randn(4) for _ in range(40)]
            for part in (10, 20):
                torch.rand(3)
                for x in session.steps(data, until=min(part, until)):
                    loss = (model(x) + torch.rand(())).square().sum()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            drawn.append(torch.rand(()))
        return [*model.parameters(), *drawn]

    undisturbed = train(tmp_path / "undisturbed", 20)
    for until in (4, 10, 13):
        train(job, until)
    assert all(torch.equal(a, b) for a, b in zip(undisturbed, train(job, 20), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(undisturbed, train(job, 20), strict=True))
