"""A script with one argument, as people write sweeps: LR [WHERE]; WHERE says what needs the loop.

It trains to STEPS and leaves at once, without a word, before step DIE, or behind its session if it
has trained.
"""

import os
import sys

import torch

import outlast

STEPS, DIE = int(os.environ.get("STEPS", "6")), os.environ.get("DIE", "")
WHERE = sys.argv[2] if len(sys.argv) > 2 else ""
RESUME = {"resume": True} if os.environ.get("SAYS_RESUME") else {}


def main():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
    data = torch.utils.data.TensorDataset(torch.randn(1000, 4))
    losses, trained = [], False
    with outlast.session(model=model, optimizer=optimizer, every=2, **RESUME) as session:
        for (x,) in session.steps(outlast.data.Loader(data, global_batch=4), until=STEPS):
            if str(session.step) == DIE:
                os._exit(9)
            loss = model(x).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            print("trained", session.step + 1, flush=True)
            trained = session.step < STEPS  # a step that comes once more is none
        if WHERE == "inside":
            print("loss", loss)
    if DIE == "behind" and trained:  # once
        os._exit(9)
    if WHERE in ("behind", "breaks"):
        print("loss", loss)
    if WHERE == "breaks":
        raise ValueError("the report cannot be written")
    if WHERE == "mean":
        print("mean", sum(losses) / len(losses))
    if WHERE == "bug":
        print(losess)  # noqa: F821 - what everybody has typed once
    if WHERE == "file":
        print(open("nowhere").read())  # noqa: SIM115
    print("end of the script")


if __name__ == "__main__":
    main()
