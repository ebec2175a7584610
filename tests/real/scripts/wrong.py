"""A session used rightly or wrongly, as the command line says: CASE."""

import sys
import time
from pathlib import Path

import torch

import outlast


class Odd:
    def state_dict(self):
        return {"inner": {"handle": object()}}

    def load_state_dict(self, state):
        raise NotImplementedError


CALLS = {
    "no-loader": lambda session: session.steps(until=4),
    "a-number": lambda session: session.steps(10_000),
    "size-of-batches": lambda session: session.steps(range(100), batch_size=32),
    "a-slip": lambda session: session.steps(range(100), untl=4),
    "a-text": lambda session: list(session.steps(range(100), until="4")),
    "size-of-a-step": lambda session: outlast.data.Loader([1, 2], batch_size=2),
    "a-scalar": lambda session: session.log("accuracy", 0.5),
    "scalars": lambda session: session.log({"loss": 0.5}),
}


def main():
    case = sys.argv[1]
    width = 6 if case == "shapes" else 4
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    right = {"model": model, "optimizer": optimizer}
    other = torch.optim.AdamW(model[0].parameters(), lr=1e-3)
    wrong = {
        "nothing": {},
        "only-a-loader": {"loader": [1, 2, 3]},
        "stateless": {**right, "counter": 3},
        "odd": {**right, "odd": Odd()},
        "cadence": {**right, "every": "now and then"},
        "parameters": {**right, "optimizer": other},
        "more-names": {**right, "average": torch.nn.Linear(1, 1)},
        "fewer-names": {"model": model},
    }
    if case == "dtype":
        model.double()
    if case == "not-open":
        for _ in outlast.session(**right).steps(range(100), until=4):
            print("training", flush=True)
    if case == "positional":
        outlast.session(model, optimizer)
    if case == "another-argument":
        outlast.session(**right, batch_size=32)
    if case in CALLS:
        with outlast.session(**right) as session:
            CALLS[case](session)
    with outlast.session(**wrong.get(case, right)) as session:
        print("training", flush=True)
        for _ in session.steps(range(100), until=4):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        if case == "hold":
            deadline = time.monotonic() + 100
            while not Path(sys.argv[2]).exists() and time.monotonic() < deadline:
                time.sleep(0.01)


if __name__ == "__main__":
    main()
