"""A model's trained parameters in fragments, each a flat fp32 vector in the host's memory.

A fragment is what is exchanged at once (Streaming DiLoCo, arXiv 2501.18512, section 2.2). All
trained parameters are in exactly one; where a tensor lies in its fragment follows from the model
alone, so that all replicas lay it out alike.

Guarantees: no tensor is left out, whatever the sizes; what cannot be averaged is refused by name.
Rejected: fragments that end within a tensor (a phase could not be told by names); whole layers
found by their class (nothing says what a layer is: whoever wants that names the parameters).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch

from outlast.errors import ConfigError

_SHARDED: Final = "FullyShardedDataParallel"
HOST: Final = torch.device("cpu")


class Fragment:
    """Some parameters, one behind the other.

    Args:
        names: theirs.
        parameters: in the same order.

    Attributes:
        names: theirs.
        num_elements: of all of them.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
        self.names = tuple(names)
        self._parameters = list(parameters)
        self.num_elements = sum(parameter.numel() for parameter in parameters)

    def values(self) -> torch.Tensor:
        """The parameters now: (num_elements,), fp32, a copy in the host's memory."""
        found = torch.empty(self.num_elements, dtype=torch.float32, device=HOST)
        for parameter, part in zip(self._parameters, self._parts(found), strict=True):
            part.copy_(parameter.detach())
        return found

    def take(self, values: torch.Tensor, own_share: float = 0.0) -> None:
        """Set the parameters to ``own_share`` of themselves and the rest of ``values``.

        Every operation rounds once, so that the bits are the same on processors of any kind.

        Args:
            values: (num_elements,), fp32.
            own_share: Streaming DiLoCo's alpha, 0 to 1.
        """
        with torch.no_grad():
            for parameter, part in zip(self._parameters, self._parts(values), strict=True):
                if own_share:
                    own = parameter.detach().to(HOST, torch.float32).mul(own_share)
                    part = own.add_(part.mul(1 - own_share))  # noqa: PLW2901 - mixed
                parameter.copy_(part)

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """What the parameters are once they are set to ``values``: (num_elements,), fp32."""
        found = values.clone()
        for parameter, part in zip(self._parameters, self._parts(found), strict=True):
            if parameter.dtype != torch.float32:
                part.copy_(part.to(parameter.dtype))
        return found

    def ids(self) -> set[int]:
        """Of the parameters themselves."""
        return set(map(id, self._parameters))

    def layout(self) -> list[Any]:
        """What replicas must have in common: names, shapes, dtypes."""
        return [
            (name, list(parameter.shape), str(parameter.dtype))
            for name, parameter in zip(self.names, self._parameters, strict=True)
        ]

    def _parts(self, flat: torch.Tensor) -> Iterable[torch.Tensor]:
        start = 0
        for parameter in self._parameters:
            stop = start + parameter.numel()
            yield flat[start:stop].view(parameter.shape)
            start = stop


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that are averaged: those that require a gradient, by name.

    Args:
        model: itself, without what is wrapped around it.

    Raises:
        ConfigError: there are none, or one that cannot be averaged.
    """
    if any(type(module).__name__ == _SHARDED for module in model.modules()):
        raise ConfigError(f"{_DIVIDED}, as {_SHARDED} has them; use one process a replica, or DDP")
    found: dict[str, torch.nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise ConfigError(f"{name} has no shape yet; run the model once before LocalUpdates")
        if hasattr(parameter, "device_mesh"):
            raise ConfigError(
                f"{_DIVIDED}, as {name} is (FSDP2 or tensor parallel); use one process a "
                "replica, or DDP within a replica"
            )
        if not parameter.dtype.is_floating_point or parameter.dtype == torch.float64:
            raise ConfigError(
                f"{name} is of {parameter.dtype}: outlast.LocalUpdates averages in fp32, and takes "
                "parameters in fp32, bf16 or fp16 alone; convert it, or set its requires_grad=False"
            )
        found[name] = parameter
    if not found:
        raise ConfigError(
            "the model has no parameter that requires a gradient, so there is nothing for "
            "outlast.LocalUpdates to average"
        )
    return found


def missing(model: torch.nn.Module, fragments: Iterable[Fragment]) -> str:
    """What is trained and in no fragment, or in one and trained no more, in a line; "" for nothing.

    Args:
        model: itself.
        fragments: that were cut of what it trained before.
    """
    held = set[int]().union(*(each.ids() for each in fragments))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in held:
            return (
                f"{name} requires a gradient now and did not when outlast.LocalUpdates was made, "
                "so it would never be averaged; make LocalUpdates once all that is ever trained "
                "requires a gradient"
            )
        if not parameter.requires_grad and id(parameter) in held:
            return (
                f"{name} does not require a gradient any more, and the outer momentum would go on "
                "moving it; freeze it before outlast.LocalUpdates is made"
            )
    return ""


_DIVIDED: Final = "outlast.LocalUpdates cannot save replicas whose parameters are divided"


def cut(
    parameters: dict[str, torch.nn.Parameter], fragments: int | Sequence[Sequence[str]]
) -> list[Fragment]:
    """The fragments.

    Args:
        parameters: of the model, by name, in its order.
        fragments: how many, of parameters that follow each other and of about the same size; or the
            names in each, where the beginning of a name up to a dot stands for all that begin so.

    Raises:
        ConfigError: they are more than there are tensors, leave one out, or name one twice.
    """
    if isinstance(fragments, int):
        chosen = _evenly(parameters, fragments)
    else:
        chosen = _named(parameters, fragments)
    return [Fragment(names, [parameters[name] for name in names]) for names in chosen]


def _evenly(parameters: dict[str, torch.nn.Parameter], num: int) -> list[list[str]]:
    if not 1 <= num <= len(parameters):
        raise ConfigError(
            f"fragments={num} cannot be: the model has {len(parameters)} trained tensors, and each "
            f"fragment wants one or more; give 1 to {len(parameters)}"
        )
    total = sum(parameter.numel() for parameter in parameters.values())
    found: list[list[str]] = [[]]
    so_far = 0
    left = len(parameters)
    for name, parameter in parameters.items():
        is_full = so_far * num >= total * len(found)
        # As many tensors must be left as there are fragments to come.
        if found[-1] and len(found) < num and (is_full or left == num - len(found)):
            found.append([])
        found[-1].append(name)
        so_far += parameter.numel()
        left -= 1
    return found


def _named(
    parameters: dict[str, torch.nn.Parameter], fragments: Sequence[Sequence[str]]
) -> list[list[str]]:
    if not isinstance(fragments, Sequence) or not all(_is_names(one) for one in fragments):
        raise ConfigError(
            "fragments is a number, or for each fragment a list of names, as in "
            '[["embed", "layers.0"], ["layers.1", "head"]]'
        )
    chosen: list[list[str]] = [[] for _ in fragments]
    for name in parameters:
        holders = [
            number
            for number, beginnings in enumerate(fragments)
            if any(name == one or name.startswith(f"{one}.") for one in beginnings)
        ]
        if not holders:
            raise ConfigError(
                f"fragments do not cover {name}, and it would never be averaged; put it into one"
            )
        if holders[1:]:
            raise ConfigError(
                f"{name} is in fragments {holders[0]} and {holders[1]}; leave it in one of them"
            )
        chosen[holders[0]].append(name)
    for number, names in enumerate(chosen):
        if not names:
            raise ConfigError(
                f"fragment {number} ({', '.join(fragments[number])}) has none of the model's "
                "trained parameters; leave it out, or correct its names"
            )
    return chosen


def _is_names(one: Any) -> bool:
    return (
        not isinstance(one, str)
        and isinstance(one, Sequence)
        and all(isinstance(name, str) for name in one)
    )
