"""Quantization-aware training, as torch's tutorial has it; killed in the midst of a step if asked.

Arguments: the job's directory, the step in which it is killed (0: none), how the model is wrapped.
"""

import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.ao import quantization
from torch.nn.parallel import DistributedDataParallel

import outlast

warnings.simplefilter("ignore")  # torch says that another package follows its quantization
job, killed_in, wrapper = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


class Smoothed(nn.Module):
    """A range that has no shape before the first batch, and loads in a way of its own."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.register_buffer("rows", torch.zeros(0))

    def forward(self, x):
        rows = x.detach().abs().mean(0)
        self.rows = 0.9 * self.rows + rows if len(self.rows) else rows
        return self.line(x) / (1 + self.rows)

    def _load_from_state_dict(self, state_dict, prefix, *more):
        self.rows = torch.empty_like(state_dict[f"{prefix}rows"])
        super()._load_from_state_dict(state_dict, prefix, *more)


def digest(model):
    return [tensor.double().sum().item().hex() for tensor in model.state_dict().values()]


torch.manual_seed(0)
model = nn.Sequential(
    *(quantization.QuantStub(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)),
    *(quantization.DeQuantStub(), Smoothed()),
)
model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
quantization.prepare_qat(model.train(), inplace=True)
wrapped = model
if wrapper == "ddp":
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
with outlast.session(dir=job, every="1 steps", model=wrapped, optimizer=optimizer) as session:
    for number in session.steps(range(100), until=8):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        loss = wrapped(x).sub(x).square().mean()
        loss.backward()
        if number == killed_in > 0:
            while not list(job.glob("checkpoints/*/manifest.json")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        print("loss", number, loss.item().hex(), flush=True)
print("state", *digest(model))
