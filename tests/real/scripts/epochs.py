"""Epochs as people write them, each with a file of its own: NUM [FORM]; says what it goes through.

It is killed in the step KILL, or behind the loop of an epoch that has come to its end with it.
"""

import os
import signal
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import outlast

NUM, FORM = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "epochs"
KILL, BEHIND = int(os.environ.get("KILL", "-1")), int(os.environ.get("BEHIND", "-1"))


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def main():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(12, 4))
    loader, other = DataLoader(data, 4, shuffle=True), DataLoader(data, 6, shuffle=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(batches):
        for (x,) in batches:
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            print("step", session.step + 1, flush=True)
            session.save()
            if session.step + 1 == KILL:
                die()

    with outlast.session(model=model, optimizer=optimizer, every=1000) as session:
        if FORM == "refused":
            for _ in session.epochs(2):
                next(session.epochs(2))
        for epoch in range(NUM) if FORM == "range" else session.epochs(NUM):
            print("begin", epoch, flush=True)
            train(session.steps(loader))
            if FORM == "two":
                train(session.steps(other))
            if session.step == BEHIND:
                die()
            value = model.weight.sum().item()
            print("behind", epoch, session.step, value, flush=True)
            torch.save(model.state_dict(), f"epoch{epoch}.pt")
            if FORM == "stop" and epoch == 1:
                break
        print("end", session.step, model.weight.sum().item(), torch.rand(()).item())


if __name__ == "__main__":
    main()
