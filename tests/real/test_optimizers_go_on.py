"""Each of torch's optimizers goes on where it was, each of its ways: bits and devices.

Where an implementation keeps what (a ``step`` beside its parameter or on the CPU) is torch's to
say, and torch refuses a step in which it lies elsewhere.
"""

import inspect

import pytest
import torch
from state_bits import copy_of, difference
from torch import nn
from torch.nn.functional import mse_loss

import outlast
from thorough import some

HALF, ALL_STEPS = 3, 6
GPU = pytest.param(
    "cuda:0",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    ],
)


class StepsBeside(torch.optim.Optimizer):
    """A class that nobody here knows, whose step lies beside the parameter."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                own = self.state[parameter]
                own.setdefault("step", torch.zeros((), device=parameter.device)).add_(1)
                parameter.sub_(parameter.grad * group["lr"] / own["step"])


CLASSES = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop")
CLASSES += ("Rprop", "SGD")
WAYS = ("plain", "fused", "capturable", "foreach")
KINDS = [
    (getattr(torch.optim, name), way)
    for name in CLASSES
    for way in WAYS
    if way == "plain" or way in inspect.signature(getattr(torch.optim, name)).parameters
]
KINDS.append((StepsBeside, "plain"))


def make(kind, device):
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to(device)
    cls, way = kind
    if way == "capturable" and device == "cpu":
        pytest.skip("a CPU's work is not captured")
    if cls is torch.optim.Adagrad and way == "fused" and device != "cpu":
        pytest.skip("torch has none for CUDA")
    options = {} if way == "plain" else {way: True}
    if cls is torch.optim.SGD:
        options["momentum"] = 0.9
    return model, cls(model.parameters(), lr=0.01, **options)


def train(job, kind, device, until):
    """The named objects behind this step, and where each tensor of the optimizer lies."""
    model, optimizer = make(kind, device)
    x = torch.linspace(-1, 1, 32, device=device).reshape(4, 8)
    named = {"model": model, "optimizer": optimizer}
    with outlast.session(dir=job, every="1 step", **named) as session:
        for _ in session.steps(range(ALL_STEPS), until=until):
            optimizer.zero_grad()
            mse_loss(model(x), -x).backward()
            optimizer.step()
    places = [
        {key: str(value.device) for key, value in own.items() if isinstance(value, torch.Tensor)}
        for own in optimizer.state.values()
    ]
    return copy_of(named), places


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("kind", some(KINDS, 4), ids=lambda kind: f"{kind[0].__name__}-{kind[1]}")
def test_it_goes_on_as_if_nothing_had_happened(tmp_path, kind, device):
    wanted, wanted_places = train(tmp_path / "calm", kind, device, ALL_STEPS)
    train(tmp_path / "job", kind, device, HALF)
    found, places = train(tmp_path / "job", kind, device, ALL_STEPS)
    assert not difference(wanted, found), difference(wanted, found)
    assert places == wanted_places
