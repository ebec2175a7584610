"""A counter around steps() in a loop that goes on in its midst: said; inside of it: exact."""

import sys

import pytest
import torch
from floor import alone
from torch.utils.data import DataLoader, TensorDataset

import outlast

MAX_BATCHES, EPOCHS = 6, 2
CALM = {}  # form and kind → the run that nothing stopped


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    alone(monkeypatch)
    monkeypatch.chdir(tmp_path)


def around(session, loader, epoch):
    return enumerate(session.steps(loader))


def inside(session, loader, epoch):
    return session.steps(enumerate(loader))


def zipped(session, loader, epoch):
    return session.steps(zip(range(99), loader))  # noqa: B905


def until(session, loader, epoch):
    for batch in session.steps(loader, until=MAX_BATCHES * (epoch + 1)):
        yield 0, batch


def two_loaders(session, loader, epoch):
    # Sequential, so that nothing but its place differs.
    return zip(DataLoader(range(10)), session.steps(loader), strict=False)


class Run:
    """A script that takes at most so many batches in each epoch, to its end or to ``stop``."""

    def __init__(self, capfd, form, kind, stop=None, job="job"):
        capfd.readouterr()
        torch.manual_seed(0)
        data = TensorDataset(torch.arange(40.0).reshape(20, 2))
        loader = (
            DataLoader(data, batch_size=2, shuffle=True)
            if kind == "stock"
            else outlast.data.Loader(data, global_batch=2)
        )
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        try:
            with outlast.session(model=model, optimizer=optimizer, dir=job) as session:
                for epoch in session.epochs(EPOCHS):
                    for i, batch in form(session, loader, epoch):
                        if i >= MAX_BATCHES:
                            break
                        optimizer.zero_grad()
                        model(batch[0]).sum().backward()
                        optimizer.step()
                        if session.step + 1 == stop:
                            sys.exit()
        except SystemExit:
            assert stop
        self.steps = session.step
        self.weights = model.weight.tolist()
        self.said = [
            line for line in capfd.readouterr().err.splitlines() if "going on at step" in line
        ]


@pytest.mark.parametrize("kind", ["stock", "outlast"])
@pytest.mark.parametrize("stop", [1, 3, 8])
def test_one_around_steps_is_said_in_one_line_with_what_to_write(capfd, kind, stop):
    assert not Run(capfd, around, kind, stop).said
    again = Run(capfd, around, kind)
    (line,) = again.said
    assert f"going on at step {stop}: `i` of enumerate(session.steps(…))" in line
    assert ("Write session.steps(enumerate(loader))" in line) is (kind == "stock")
    assert ("or end the loop by until=" in line) is (kind == "outlast")
    assert again.steps != MAX_BATCHES * EPOCHS


@pytest.mark.parametrize(
    ("form", "kind"),
    [(inside, "stock"), (zipped, "stock"), (until, "stock"), (until, "outlast")],
)
@pytest.mark.parametrize("stop", [1, 3, 6, 8])
def test_what_to_write_is_exact(capfd, form, kind, stop):
    calm = CALM.get((form, kind))
    if calm is None:
        calm = CALM[form, kind] = Run(capfd, form, kind, job="calm")
    Run(capfd, form, kind, stop)
    again = Run(capfd, form, kind)
    assert not again.said
    assert (again.steps, again.weights) == (calm.steps, calm.weights)


def test_another_loader_beside_is_said_in_one_line(capfd):
    Run(capfd, two_loaders, "stock", 3)
    (line,) = Run(capfd, two_loaders, "stock").said
    assert "`i` of zip(…, session.steps(…))" in line


def test_at_the_end_of_a_loop_nothing_is_counted_anew(capfd):
    def all_of_it(session, loader, epoch):
        for i, batch in enumerate(session.steps(loader)):
            yield i % MAX_BATCHES, batch

    Run(capfd, all_of_it, "stock", 10)
    assert not Run(capfd, all_of_it, "stock").said
