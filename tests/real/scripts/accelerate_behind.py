"""Accelerate, and code behind the loop of an epoch that reads what the loop's body sets: PLACE.

It kills itself once, two steps behind the commit of the first epoch's end.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from outlast.integrations.accelerate import session_of

BATCHES, EPOCHS = 6, 3


def until_committed(place, step):
    deadline = time.monotonic() + 60
    ledger = place / "job" / "ledger.jsonl"
    while f'"event":"commit","step":{step},' not in ledger.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def main():
    place = Path(sys.argv[1])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    data = TensorDataset(torch.randn(4 * BATCHES, 4))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with session_of(accelerator, every=f"{BATCHES} steps") as session:
        for _ in session.epochs(EPOCHS):
            for (batch,) in session.steps(loader):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                if session.step == BATCHES + 1 and not (place / "killed").exists():
                    until_committed(place, BATCHES)
                    (place / "killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            with (place / "losses").open("a") as losses:
                losses.write(f"{loss.item()}\n")
    weights = [weight.tolist() for weight in model.parameters()]
    (place / "final").write_text(repr(weights))


if __name__ == "__main__":
    main()
