"""The named objects of a session as one state tree, and back.

A model is unwrapped from DDP and torch.compile first, so that a checkpoint does not depend on how
the model was wrapped; an optimizer's state goes under its parameters' names.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from outlast.checkpoint.load import Loaded
from outlast.checkpoint.optimizers import (
    difference,
    load_named_state,
    named_state,
    parameter_names,
)
from outlast.checkpoint.save import OWN
from outlast.errors import ConfigError, StateMismatch

EXAMPLE: Final = "outlast.session(model=model, optimizer=optimizer)"


class Objects:
    """What a session was given by name.

    Args:
        named: name → anything with state_dict and load_state_dict; loaders may lack them.

    Raises:
        ConfigError: nothing to save, a name that is taken, an object without state.
    """

    def __init__(self, named: Mapping[str, Any]) -> None:
        self.loaders: list[Any] = []
        self._stateful: dict[str, Any] = {}
        for name, value in named.items():
            if name == OWN or "@" in name or "." in name:  # with a dot, a tensor of another object
                raise ConfigError(f"{name!r} is a name that outlast keeps for itself; use another")
            if callable(getattr(value, "state_dict", None)) and callable(
                getattr(value, "load_state_dict", None)
            ):
                self._stateful[name] = _unwrapped(value)
            elif isinstance(value, Iterable) and not isinstance(value, torch.Tensor | str | bytes):
                self.loaders.append(value)  # its position is kept by steps()
            else:
                raise ConfigError(
                    f"{name} is a {type(value).__name__} without state_dict and load_state_dict; "
                    "wrap it in an object that has both"
                )
        if not self._stateful:
            raise ConfigError(f"a session needs something to save, as in {EXAMPLE}")

    def forget_loader(self, loader: Any) -> None:
        """``steps`` keeps this loader's position: it is not saved a second time by its name."""
        self._stateful = {k: value for k, value in self._stateful.items() if value is not loader}

    def _may_be_absent(self, name: str) -> bool:
        # A loader with state of its own is saved under its name only until steps() has it.
        value = self._stateful[name]
        return isinstance(value, Iterable) and not isinstance(value, torch.nn.Module)

    def capture(self, *, loaders: bool = True) -> dict[str, Any]:
        """Return name → state; tensors are the live ones, not copies.

        Args:
            loaders: those with state of their own too. Asked before its first batch, torchdata's
                starts its processes, unshielded, and draws random numbers.
        """
        return {
            name: self._state(value)
            for name, value in self._stateful.items()
            if loaders or not self._may_be_absent(name)
        }

    def check(self, loaded: Loaded) -> None:
        """See that a checkpoint fits before anything is changed.

        Raises:
            StateMismatch: other names, shapes or dtypes; names the first and both sides.
        """
        step = loaded.manifest.step
        saved = {key for key in loaded.data if key != OWN}
        for name in sorted(saved - set(self._stateful)):
            raise StateMismatch(
                f"step {step} holds {name!r}, which this session does not name; add "
                f"{name}=… to outlast.session(), or start a new job with another --dir"
            )
        # Names first: another model changes how parameters are named, and the optimizer's then
        # seem to have changed.
        for name in self._stateful:
            if name not in saved and not self._may_be_absent(name):
                raise StateMismatch(
                    f"step {step} does not hold {name!r}, which this session names; remove it from "
                    "outlast.session(), or start a new job with another --dir"
                )
        for name, value in self._stateful.items():
            if name not in saved:
                continue
            if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
                self._check_state(name, value, loaded.state(name, shared=True), step)

    def apply(self, loaded: Loaded) -> None:
        """Load every object's state; ``check`` comes first.

        Raises:
            StateMismatch: an object refused its state.
        """
        for name, value in self._stateful.items():
            if name not in loaded.data:
                continue
            # A model copies into its parameters; anything else may keep what it is given.
            state = loaded.state(name, shared=isinstance(value, torch.nn.Module))
            try:
                if isinstance(value, torch.optim.Optimizer):
                    load_named_state(value, self._names(value), state, name)
                elif isinstance(value, torch.nn.Module):
                    # Modules read their version from here; without it some convert "old" state.
                    ordered = collections.OrderedDict(state)
                    ordered._metadata = getattr(  # type: ignore[attr-defined]
                        value.state_dict(), "_metadata", None
                    )
                    value.load_state_dict(ordered)
                else:
                    value.load_state_dict(state)
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                if isinstance(error, StateMismatch):
                    raise
                raise StateMismatch(
                    f"{name} does not take the state of step {loaded.manifest.step}: "
                    f"{type(error).__name__}: {error}"
                ) from error

    def _state(self, value: Any) -> Any:
        if isinstance(value, torch.optim.Optimizer):
            return named_state(value, self._names(value))
        return value.state_dict()

    def _names(self, optimizer: torch.optim.Optimizer) -> list[str]:
        models = {k: v for k, v in self._stateful.items() if isinstance(v, torch.nn.Module)}
        return parameter_names(optimizer, models)

    def _check_state(self, name: str, value: Any, saved: Any, step: int) -> None:
        kind = "model" if isinstance(value, torch.nn.Module) else "optimizer"
        if not isinstance(saved, Mapping) or (kind == "optimizer" and "param_groups" not in saved):
            raise StateMismatch(
                f"{name} is of another kind in step {step} and a {type(value).__name__} now; name "
                f"the {kind} that was saved, or start a new job with another --dir"
            )
        if isinstance(value, torch.nn.Module):
            _check_model(name, value, saved, step)
        else:
            self._check_optimizer(name, value, saved, step)

    def _check_optimizer(
        self, name: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], step: int
    ) -> None:
        problem = difference(optimizer, self._names(optimizer), saved, f"at step {step}")
        if problem:
            raise StateMismatch(
                f"{name} {problem}; build it as it was, or start a new job with another --dir"
            )


def _unwrapped(value: Any) -> Any:
    while isinstance(value, torch.nn.Module):
        inner = getattr(value, "_orig_mod", None)
        if isinstance(value, torch.nn.parallel.DistributedDataParallel):
            inner = value.module
        if inner is None:
            break
        value = inner
    return value


def _check_model(name: str, model: torch.nn.Module, saved: Mapping[str, Any], step: int) -> None:
    remedy = "build the model as it was, or start a new job with another --dir"
    now = {k: v for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
    then = {k: v for k, v in saved.items() if isinstance(v, torch.Tensor)}
    for key in sorted(set(now) | set(then)):
        if key not in now or key not in then:
            where = f"in step {step}" if key in then else "in the model"
            raise StateMismatch(f"{name}.{key} is only {where}; {remedy}")
        for what in ("shape", "dtype"):
            old, new = getattr(then[key], what), getattr(now[key], what)
            if old != new:
                shown = [tuple(x) if what == "shape" else x for x in (old, new)]
                raise StateMismatch(
                    f"{name}.{key} has {what} {shown[0]} in step {step} and {shown[1]} in the "
                    f"model; {remedy}"
                )
