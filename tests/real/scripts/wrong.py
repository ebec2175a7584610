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


def main():
    case = sys.argv[1]
    width = 6 if case == "shapes" else 4
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    named = {"model": model, "optimizer": optimizer}
    if case == "nothing":
        named = {}
    elif case == "only-a-loader":
        named = {"loader": [1, 2, 3]}
    elif case == "stateless":
        named["counter"] = 3
    elif case == "odd":
        named["odd"] = Odd()
    elif case == "cadence":
        named["every"] = "now and then"
    elif case == "dtype":
        model.double()
    elif case == "parameters":
        named["optimizer"] = torch.optim.AdamW(model[0].parameters(), lr=1e-3)
    elif case == "more-names":
        named["average"] = torch.nn.Linear(1, 1)
    elif case == "fewer-names":
        del named["optimizer"]
    with outlast.session(**named) as session:
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
