"""Replicas with outlast.LocalUpdates: RECORDS STEPS KIND [STEP …], killed once for each STEP.

From that step on, one rank kills itself as soon as a checkpoint of the step that all are in is
committed. The end is RECORDS/final-RANK.json: hashes of what is the same on all replicas, and of
what is each one's own.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from train import Points, update

import outlast

RECORDS, STEPS, KIND = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
KILLS = [int(each) for each in sys.argv[4:]]
KINDS = {
    "diloco": {"every": 4},
    "streaming": {"every": 4, "fragments": 2, "overlap": 3},
    "int8": {"every": 4, "fragments": 2, "overlap": 3, "exchange": "int8"},
}
COMMIT_S = 100.0


class Strikes:
    """Asks for a checkpoint where one is due to be killed, and kills a rank that is in its step."""

    def __init__(self, session):
        self._session = session
        self._pending = None
        done = len(list(RECORDS.glob("killed-*")))
        self._due = KILLS[done] if done < len(KILLS) else None

    def step(self):
        if self._due is None:
            return
        dist.barrier()  # nobody is steps ahead when a checkpoint is asked for
        step, pending = self._session.step, self._pending
        is_here = pending is not None and pending.wait(COMMIT_S) and pending.step == step
        dist.all_reduce(all_agree := torch.tensor([int(is_here)]), dist.ReduceOp.MIN)
        if all_agree:  # one rank may hear of a commit later than another
            if dist.get_rank() == step % dist.get_world_size():
                (RECORDS / f"killed-{step}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()  # which is never complete
        if step + 1 >= self._due and (pending is None or pending.committed or pending.error):
            self._pending = self._session.save()


def digest(state):
    found = hashlib.sha256()
    update(found, state)
    return found.hexdigest()


def main():
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)  # replica 0's becomes everybody's
    net = nn.Sequential(nn.Linear(8, 160), nn.BatchNorm1d(160), nn.Dropout(0.1), nn.Linear(160, 8))
    net.append(nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    local = outlast.LocalUpdates(net, optimizer, **KINDS[KIND])
    loader = outlast.data.Loader(Points(60), global_batch=12, seed=3)
    named = {"model": net, "optimizer": optimizer, "local": local}
    with outlast.session(every=100, **named) as session:
        strikes = Strikes(session)
        for _, samples in session.steps(loader, until=STEPS):
            strikes.step()
            loss = nn.functional.mse_loss(net(samples), samples)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        before = digest({"model": net.state_dict(), "optimizer": optimizer.state_dict()})
        local.sync()
        after = {"anchor": local.state_dict()["anchor"], "momentum": local.state_dict()["momentum"]}
        after["model"] = [parameter.detach() for parameter in net.parameters()]
    text = {"own": before, "all": digest(after), "local_step": local.local_step}
    text["closed"] = local.closed
    (RECORDS / f"final-{rank}.json").write_text(json.dumps(text))


if __name__ == "__main__":
    main()
