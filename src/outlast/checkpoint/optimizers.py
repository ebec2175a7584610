"""An optimizer's state under its parameters' names instead of their positions.

torch numbers parameters in the order the optimizer saw them. A name (``layers.0.weight``) says what
a tensor is, lets a shape be checked, and stays right when parameters are split over ranks. A
parameter that no saved model holds keeps its number, as ``#3``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from outlast.errors import StateMismatch

KIND: Final = "optimizer_class"


def parameter_names(
    optimizer: torch.optim.Optimizer, models: Mapping[str, torch.nn.Module]
) -> list[str]:
    """Names of the optimizer's parameters, in the order in which torch numbers them.

    With several models a parameter's name starts with the model's key.
    """
    known: dict[int, str] = {}
    for key, model in models.items():
        for name, parameter in model.named_parameters():
            known.setdefault(id(parameter), name if len(models) == 1 else f"{key}.{name}")
    names: list[str] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            names.append(known.get(id(parameter), f"#{len(names)}"))
    return names


def named_state(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Any]:
    """The optimizer's state_dict with names in place of numbers."""
    state = optimizer.state_dict()
    renamed = dict(state)
    renamed[KIND] = type(optimizer).__name__
    renamed["state"] = {names[index]: inner for index, inner in state["state"].items()}
    renamed["param_groups"] = [
        {**group, "params": [names[index] for index in group["params"]]}
        for group in state["param_groups"]
    ]
    return renamed


def difference(
    optimizer: torch.optim.Optimizer, names: list[str], state: Mapping[str, Any], then: str
) -> str:
    """How the parameters of a saved optimizer differ from today's, in words; "" if they do not.

    Their order within a group may differ: state goes by name.
    """
    kind = state.get(KIND, type(optimizer).__name__)
    if kind != type(optimizer).__name__:
        return f"was of class {kind} {then} and is of class {type(optimizer).__name__} now"
    before = [list(group["params"]) for group in state["param_groups"]]
    now = _by_group(optimizer, names)
    was, now_all = {name for group in before for name in group}, set(names)
    if was != now_all:
        other = ", ".join(sorted(was ^ now_all)[:3])
        return (
            f"had {len(was)} parameters {then} and has {len(now_all)} now "
            f"(only on one side: {other})"
        )
    if [sorted(group) for group in before] != [sorted(group) for group in now]:
        sizes = [", ".join(str(len(group)) for group in groups) for groups in (before, now)]
        return f"had its parameters in other groups {then} (of {sizes[0]}; now of {sizes[1]})"
    return ""


def load_named_state(
    optimizer: torch.optim.Optimizer, names: list[str], state: Mapping[str, Any], key: str
) -> None:
    """Load what ``named_state`` gave.

    Raises:
        StateMismatch: the saved optimizer had other parameters, or other groups of them.
    """
    problem = difference(optimizer, names, state, "when it was saved")
    if problem:
        raise StateMismatch(f"{key} {problem}")
    number = {name: index for index, name in enumerate(names)}
    plain = {key: value for key, value in state.items() if key != KIND}
    plain["state"] = {number[name]: inner for name, inner in state["state"].items()}
    # torch matches the two sides by position, so the saved side takes today's order.
    plain["param_groups"] = [
        _ordered(group, now, number)
        for group, now in zip(state["param_groups"], _by_group(optimizer, names), strict=True)
    ]
    optimizer.load_state_dict(plain)
    _undo_casts(optimizer, plain["state"])


def _by_group(optimizer: torch.optim.Optimizer, names: list[str]) -> list[list[str]]:
    left = iter(names)
    return [[next(left) for _ in group["params"]] for group in optimizer.param_groups]


def _ordered(group: Mapping[str, Any], now: list[str], number: Mapping[str, int]) -> dict[str, Any]:
    ordered = {**group, "params": [number[name] for name in now]}
    if "param_names" in group:  # torch keeps them for an optimizer made from named parameters
        given = dict(zip(group["params"], group["param_names"], strict=True))
        ordered["param_names"] = [given[name] for name in now]
    return ordered


def _undo_casts(optimizer: torch.optim.Optimizer, state: Mapping[int, Any]) -> None:
    # load_state_dict casts floating-point state to the parameter's dtype: fp32 moments of a bf16
    # parameter would come back rounded, and the run would no longer be the same run.
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, saved in state.items():
        if not isinstance(saved, Mapping):
            continue
        loaded = optimizer.state[parameters[index]]
        for name, value in saved.items():
            now = loaded.get(name)
            if (
                isinstance(value, torch.Tensor)
                and isinstance(now, torch.Tensor)
                and now.dtype != value.dtype
            ):
                loaded[name] = value.to(device=now.device, copy=True)
