"""What is in the zoo: a name, and how to make the model, the optimizer and one step of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch

WIDTH: Final = 64  # 64 x 64 is 4,096 elements: from there on 8-bit optimizers use their own tensors

Step = Callable[[torch.nn.Module, Any, int], torch.Tensor]


class Specimen(NamedTuple):
    """One row of the table.

    Attributes:
        name: in the table.
        make: () → model and optimizer, the same each time under the same seed.
        step: (model, optimizer, number of the step) → the loss.
    """

    name: str
    make: Callable[[], tuple[torch.nn.Module, Any]]
    step: Step


# --- optimizers -----------------------------------------------------------------------------------

NEEDS: Final[dict[str, dict[str, Any]]] = {  # what an optimizer cannot do without
    "bsam": {"num_data": 8},
    "ranger21": {"num_iterations": 6},
    "adagc": {"warmup_steps": 2},
    "lorarite": {},
}
OF_THE_MODEL: Final = ("adalomo", "lomo", "adammini")
SECOND_ORDER: Final = ("adahessian", "sophiah")
OF_MATRICES: Final = ("spectralsphere",)
OF_MUON: Final = ("adago", "adamuon", "muon", "muonclip", "normuon", "distributedmuon")
BY_THEMSELVES: Final = ("lomo", "adalomo")  # they step within the backward pass


def net() -> torch.nn.Module:
    """Two layers, and dropout between them."""
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.1), torch.nn.Linear(WIDTH, 8)
    )


def matrices() -> torch.nn.Module:
    """The same without biases, for optimizers of matrices."""
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH, bias=False),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(WIDTH, 8, bias=False),
    )


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The data of one step: the same whenever it is asked for."""
    generator = torch.Generator().manual_seed(1000 + number)
    given = torch.randn(8, WIDTH, generator=generator)
    return given, torch.randn(8, 8, generator=generator)


def regression(model: torch.nn.Module, optimizer: Any, number: int) -> torch.Tensor:
    """A step with a closure where it is asked for, as it would be written."""
    given, wanted = batch(number)

    def loss_of() -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(given), wanted)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    if type(optimizer).__name__ in ("LBFGS", "SAM", "BSAM", "LookSAM", "FriendlySAM"):
        loss = closure()
        optimizer.step(closure)
        return loss.detach()
    optimizer.zero_grad()
    loss = loss_of()
    loss.backward(create_graph=type(optimizer).__name__ in ("AdaHessian", "SophiaH"))
    if "loss" in inspect.signature(optimizer.step).parameters:
        optimizer.step(loss=loss)
    elif type(optimizer).__name__.startswith("Emo") or type(optimizer).__name__ == "AliG":
        optimizer.step(lambda: loss)
    else:
        optimizer.step()
    return loss.detach()


def fused_backward(model: torch.nn.Module, optimizer: Any, number: int) -> torch.Tensor:
    """A step of an optimizer that steps within the backward pass."""
    given, wanted = batch(number)
    loss = torch.nn.functional.mse_loss(model(given), wanted)
    optimizer.fused_backward(loss, lr=1e-3)
    return loss.detach()


def two_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """The model's parameters in two groups of different learning rates."""
    first, *others = model.parameters()
    return [{"params": [first], "lr": 1e-3}, {"params": others, "lr": 2e-3}]


def of_torch() -> Iterator[Specimen]:
    """Each optimizer of torch.optim, in each of its ways of working that a CPU has."""
    for name in sorted(vars(torch.optim)):
        kind = getattr(torch.optim, name)
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            continue
        if kind is torch.optim.Optimizer or name == "SparseAdam":
            continue
        takes = inspect.signature(kind).parameters
        ways: list[dict[str, Any]] = [{}]
        if "foreach" in takes and name != "LBFGS":
            ways.append({"foreach": True})
        if "fused" in takes:
            ways.append({"fused": True})
        if "amsgrad" in takes:
            ways.append({"amsgrad": True})
        if "momentum" in takes and name != "Muon":
            ways.append({"momentum": 0.9})
        for way in ways:
            yield Specimen(
                " ".join([f"torch.{name}", *(f"{key}={value}" for key, value in way.items())]),
                lambda kind=kind, way=way: _made(kind, way),  # type: ignore[misc]
                regression,
            )
    yield Specimen("torch.SparseAdam", _sparse, _sparse_step)
    yield Specimen("torch.AdamW two groups", _in_groups, regression)
    yield Specimen("torch.AdamW bfloat16", _in_bfloat16, _bfloat16_step)
    yield Specimen("torch.AdamW quantization-aware", _quantized, regression)


def _made(kind: type, way: dict[str, Any]) -> tuple[torch.nn.Module, Any]:
    if kind.__name__ == "Muon":
        model = matrices()
        return model, kind(model.parameters(), **way)
    model = net()
    lr = {"lr": 1e-2} if kind.__name__ == "SGD" else {}
    return model, kind(model.parameters(), **lr, **way)


def _in_groups() -> tuple[torch.nn.Module, Any]:
    model = net()
    return model, torch.optim.AdamW(two_groups(model))


def _in_bfloat16() -> tuple[torch.nn.Module, Any]:
    model = net().to(torch.bfloat16)
    return model, torch.optim.AdamW(model.parameters())


def _bfloat16_step(model: torch.nn.Module, optimizer: Any, number: int) -> torch.Tensor:
    given, wanted = batch(number)
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(given.bfloat16()), wanted.bfloat16())
    loss.backward()
    optimizer.step()
    return loss.detach()


def _quantized() -> tuple[torch.nn.Module, Any]:
    """Observers have ranges without a shape before the first batch, and load in their own way."""
    from torch.ao import quantization

    model = torch.nn.Sequential(quantization.QuantStub(), net(), quantization.DeQuantStub())
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    model = quantization.prepare_qat(model.train())
    return model, torch.optim.AdamW(model.parameters())


def _sparse() -> tuple[torch.nn.Module, Any]:
    model = torch.nn.Embedding(WIDTH, WIDTH, sparse=True)
    return model, torch.optim.SparseAdam(model.parameters())


def _sparse_step(model: torch.nn.Module, optimizer: Any, number: int) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(torch.arange(number, number + 8)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def of_pytorch_optimizer() -> Iterator[Specimen]:
    """Each optimizer of the package ``pytorch-optimizer``, and what wraps one."""
    try:
        import pytorch_optimizer
    except ImportError:
        return
    for name in pytorch_optimizer.get_supported_optimizers():
        if name in ("sgd", "adam", "adamw", "lbfgs", "nadam", "rmsprop"):
            continue  # these are torch's own
        yield Specimen(
            name,
            lambda name=name: _from_package(name),  # type: ignore[misc]
            fused_backward if name in BY_THEMSELVES else regression,
        )
    for name in WRAPPERS:
        yield Specimen(
            f"{name}(AdamW)",
            lambda name=name: _wrapped(name),  # type: ignore[misc]
            _wsam_step if name == "WSAM" else regression,
        )


WRAPPERS: Final = (
    *("Lookahead", "SAM", "LookSAM", "FriendlySAM", "WSAM"),
    *("OrthoGrad", "TRAC", "ScheduleFreeWrapper"),
)


def _from_package(name: str) -> tuple[torch.nn.Module, Any]:
    import pytorch_optimizer

    kind: Any = pytorch_optimizer.load_optimizer(name)
    given = NEEDS.get(name, {})
    model = matrices() if name in OF_MATRICES else net()
    if name in ("demo", "distributedmuon") and not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    if name in OF_THE_MODEL:
        return model, kind(model, **given)
    if name in OF_MUON:
        weights = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        groups = [{"params": weights, "use_muon": True}, {"params": others, "use_muon": False}]
        return model, kind(groups, **given)
    return model, kind(model.parameters(), **given)


def _wrapped(name: str) -> tuple[torch.nn.Module, Any]:
    import pytorch_optimizer

    kind: Any = getattr(pytorch_optimizer, name)
    model = net()
    if name == "WSAM":
        return model, kind(model, model.parameters(), torch.optim.AdamW, lr=1e-3)
    if "SAM" in name:
        return model, kind(model.parameters(), torch.optim.AdamW, lr=1e-3)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = kind(inner, **({"k": 2} if name == "Lookahead" else {}))
    if hasattr(optimizer, "train"):
        optimizer.train()
    return model, optimizer


def _wsam_step(model: torch.nn.Module, optimizer: Any, number: int) -> torch.Tensor:
    given, wanted = batch(number)

    def closure() -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(model(given), wanted)
        loss.backward()
        return loss

    optimizer.zero_grad()
    loss = closure()
    optimizer.step(closure)
    return loss.detach()


def of_torchao() -> Iterator[Specimen]:
    """The low-bit optimizers of ``torchao``."""
    try:
        from torchao import optim
    except ImportError:
        return
    for name in ("Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8"):
        if hasattr(optim, name):
            yield Specimen(
                f"torchao.{name}",
                lambda name=name: _made(getattr(optim, name), {}),  # type: ignore[misc]
                regression,
            )
