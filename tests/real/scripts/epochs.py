"""Epochs as people write them, each with a file of its own: NUM [FORM]; says what it goes through.

Leaves at once, without a word, in the step KILL, or behind the loop of the epoch KILL_BEHIND.
"""

import os
import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import outlast

NUM, FORM = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "epochs"
KILL, KILL_BEHIND = os.environ.get("KILL"), os.environ.get("KILL_BEHIND")


def leave(session):
    """Once the newest step is committed, so that it is known what is gone on from."""
    pending = session.save()
    if pending.committed or not KILL_BEHIND:
        time.sleep(0.2)
    os._exit(9)


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
            if str(session.step) == KILL:
                leave(session)

    with outlast.session(model=model, optimizer=optimizer, every=1) as session:
        if FORM == "refused":
            for _ in session.epochs(2):
                next(session.epochs(2))
        for epoch in range(NUM) if FORM == "range" else session.epochs(NUM):
            print("begin", epoch, flush=True)
            train(session.steps(loader))
            if FORM == "two":
                train(session.steps(other))
            if str(epoch) == KILL_BEHIND:
                leave(session)
            value = model.weight.sum().item()
            print("behind", epoch, session.step, value, flush=True)
            torch.save(model.state_dict(), f"epoch{epoch}.pt")
            if FORM == "stop" and epoch == 1:
                break
        print("end", session.step, model.weight.sum().item(), torch.rand(()).item())


if __name__ == "__main__":
    main()
