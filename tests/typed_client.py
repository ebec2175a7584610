"""A script with types, as somebody else writes it: mypy reads it against the package's own types.

It is checked and never run. Each line that mypy must refuse says so: with ``--strict`` an ignore
that is not needed is an error, so a wrong call that passes would be found.
"""

from typing import assert_type

import torch

import outlast


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    loader = outlast.data.Loader(range(100), global_batch=8, seed=1)
    with outlast.session(model=model, optimizer=optimizer, every="5 min", keep=2) as session:
        assert_type(session, outlast.Session)
        for epoch in session.epochs(3):
            assert_type(epoch, int)
            for _ in session.steps(loader, epochs=epoch + 1):
                session.log(loss=0.5)
        for number in session.steps([1, 2, 3], until=10):
            assert_type(number, int)
    try:
        outlast.session(model=model, dir="elsewhere", resume=True)
    except outlast.ConfigError as error:
        assert_type(error, outlast.ConfigError)
    except (outlast.StorageError, outlast.OutlastError):
        raise
    return session.step


def wrong(model: torch.nn.Module) -> None:
    outlast.sesion(model=model)  # type: ignore[attr-defined]
    outlast.session(object())  # type: ignore[arg-type]
    outlast.session(model=model, keep="three")  # type: ignore[arg-type]
    with outlast.session(model=model) as session:
        session.log("loss", 0.5)  # type: ignore[arg-type]
        session.steps([1], batch_size=2)  # type: ignore[arg-type]
        session.epochs("3")  # type: ignore[arg-type]
