"""A job that saves by ``auto`` and whose storage costs much: RECORDS STEPS [BUG_AT].

Each step is a line of RECORDS/steps.jsonl, the end RECORDS/final.json with the weights. What a save
costs in storage, and the shortest interval, are set here: a test has no hours, and its disk is
quick.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

import outlast
from outlast.policy import cadence
from outlast.training import tier_turns

cadence.AUTO_MIN_S = cadence.AUTO_MAX_S = 0.2
cadence.AUTO_FIRST_S = 0.2
tier_turns.BURDEN = 1e4  # times what it took: hours between two

records, steps = Path(sys.argv[1]), int(sys.argv[2])
bug = int(sys.argv[3]) if len(sys.argv) > 3 else 0
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
loader = outlast.data.Loader(data, global_batch=4, seed=1)
with outlast.session(model=model) as session, (records / "steps.jsonl").open("a") as file:
    for (batch,) in session.steps(loader, until=steps):
        line = {"step": session.step + 1, "pid": os.getpid()}
        if bug and line["step"] >= bug:
            raise ZeroDivisionError(f"there is no step {bug}")
        with torch.no_grad():
            model.weight.add_(0.01 * (model(batch).T @ batch) / 4)
        print(json.dumps(line), file=file, flush=True)
        time.sleep(0.02)
weights = {name: one.tolist() for name, one in model.state_dict().items()}
(records / "final.json").write_text(json.dumps(weights))
