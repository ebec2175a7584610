"""What is saved of a session's objects at a boundary: plain data, tensors, and how to treat each.

Tensors that only the optimizers change may be copied behind the loop's back. They are the
parameters of models that an optimizer works on, frozen ones too, and the state that the optimizers
keep for them. Everything else (buffers, averages, schedulers, scalers) changes whenever it likes,
and is copied at the boundary. What this judges wrongly is found by the capture (a tensor that
changed under the copy) and not judged so again.

What is told of tensors (which may be copied later, in which order, which may lose bits) is worked
out once and kept: it costs more than a save may block, and it does not change until the tensors do,
as when an optimizer makes its state in its first step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import msgspec
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from outlast.checkpoint import boundary
from outlast.checkpoint.attributes import parameters_of
from outlast.checkpoint.manifest import FULL
from outlast.checkpoint.tree import Flattener, mark_narrow, names_in_parts
from outlast.config import Settings

FULLGRAPH: Final = (
    "outlast copies what is left of a snapshot before each optimizer's step; compile the step with "
    "fullgraph=False"
)
# Slots of the state that torch's optimizers keep besides parameters and that may lose bits: no
# counters, and no parameters in another guise (a master copy, a running average of weights).
MOMENTS: Final = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg"),
        *("acc_delta", "exp_inf", "sum", "row_var", "col_var", "variance"),
    }
)


class Lazy:
    """The answer for a set of named objects.

    Args:
        objects: name → object.
        tensors: name → tensor of their states.
        inner: names of those that are parts of a tensor of a subclass.

    Attributes:
        names: of tensors that may be copied later.
        order: name → when the optimizers will touch it.
        moments: names of fp32 moments, which may be stored in fewer bits.
        optimizers: keys of the optimizers.
        tensors: names of all tensors that were there, in their order.
    """

    def __init__(
        self,
        objects: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        inner: Collection[str] = (),
    ) -> None:
        self.tensors = list(tensors)
        self.optimizers = tuple(
            key for key, value in objects.items() if isinstance(value, torch.optim.Optimizer)
        )
        turn = self._turns(objects)
        self.order: dict[str, int] = {}
        last = len(turn)
        for key, value in objects.items():
            if not isinstance(value, torch.nn.Module):
                continue
            parameters = dict(value.named_parameters(remove_duplicate=False))
            if not any(id(parameter) in turn for parameter in parameters.values()):
                continue
            for name, parameter in parameters.items():
                self.order[f"{key}.{name}"] = turn.get(id(parameter), last)
        self.moments: set[str] = set()
        # With one model the optimizer's names lack the model's key.
        turns = {name.partition(".")[2]: position for name, position in self.order.items()}
        turns |= self.order
        for key in self.optimizers:
            self._add_state(key, tensors, turns, last)
        # What changes a tensor of a subclass moves no counter of the tensors inside of it.
        self.names = (frozenset(self.order) & frozenset(tensors)) - frozenset(inner)
        self.moments -= set(inner)

    def _turns(self, objects: Mapping[str, Any]) -> dict[int, int]:
        turn: dict[int, int] = {}
        for key in self.optimizers:
            for parameter in parameters_of(objects[key]):
                turn.setdefault(id(parameter), len(turn))
        return turn

    def _add_state(
        self, key: str, tensors: Mapping[str, torch.Tensor], turns: Mapping[str, int], last: int
    ) -> None:
        start = f"{key}.state."
        for name, tensor in tensors.items():
            if name.startswith(start):
                parameter, _, slot = name.removeprefix(start).rpartition(".")
                self.order[name] = turns.get(parameter, last)
                if slot in MOMENTS and tensor.dtype == torch.float32 and tensor.dim():
                    self.moments.add(name)


class BoundaryState(msgspec.Struct, frozen=True, kw_only=True):
    """What is saved at a boundary.

    Attributes:
        step: completed steps.
        data: key → small state, in which tensors are named.
        tensors: name → live tensor.
        lazy: names of tensors that only the optimizers change.
        order: name → when they are touched.
        narrow: names of tensors that are stored in bfloat16.
        kind: "full" or "weights".
    """

    step: int
    data: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    lazy: frozenset[str]
    order: Mapping[str, int]
    narrow: frozenset[str] = frozenset()
    kind: str = FULL


class States:
    """Makes them, one after the other.

    Args:
        settings: the job's.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._flatten = Flattener()
        self._lazy: Lazy | None = None

    def of(
        self, step: int, objects: Mapping[str, Any], state: dict[str, Any], kind: str = FULL
    ) -> BoundaryState:
        """What is saved of ``state``, which ``objects`` gave, after ``step``."""
        data: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}
        optimizers = self._lazy.optimizers if self._lazy is not None else ()
        for key, value in state.items():
            if kind == FULL or key not in optimizers:
                data[key], found = self._flatten(value, key)
                tensors |= found
        if self._lazy is None or (kind == FULL and self._lazy.tensors != list(tensors)):
            self._lazy = Lazy(objects, tensors, set(names_in_parts(data)))
        narrow: frozenset[str] = frozenset()
        if self._settings.checkpoint_moments == "bf16" and kind == FULL:
            narrow = frozenset(self._lazy.moments)
            mark_narrow(data, narrow, "float32")
        return BoundaryState(
            step=step,
            data=data,
            tensors=tensors,
            lazy=self._lazy.names,
            order=self._lazy.order,
            narrow=narrow,
            kind=kind,
        )


class StepsHeard:
    """Whether optimizers say when they step, at the steps where they did so before.

    One whose step is in a CUDA graph that was captured before the session says nothing, and its
    changes move no counter. So where a step has passed without a word that was due, nothing may be
    left for later.

    Args:
        step: completed steps, as the session begins.
    """

    def __init__(self, step: int) -> None:
        self._last = step
        self._period = 1
        self._is_known = False

    def stepped(self, step: int) -> None:
        """An optimizer steps, in the step that makes ``step`` the number of completed ones."""
        if step > self._last:
            self._period, self._last = step - self._last, step
        self._is_known = True

    def is_due(self, step: int) -> bool:
        """Whether one should have stepped by now, and none has; ``step`` steps are complete."""
        return step >= self._last + self._period

    def is_certain(self, step: int) -> bool:
        """Whether one has stepped, and when it should have."""
        return self._is_known and not self.is_due(step)


class Hook:
    """Stands until it is removed.

    Args:
        removes: what to call then.
    """

    def __init__(self, *removes: Callable[[], None]) -> None:
        self._removes = removes

    def remove(self) -> None:
        """Call nobody any more."""
        for remove in self._removes:
            remove()


def hook(
    before: Callable[[], None],
    graphed: Callable[[], None],
    replayed: Callable[[], None] = lambda: None,
) -> Hook:
    """Have ``before`` called ahead of the step of any optimizer, also one we were not told of.

    Args:
        before: what to do.
        graphed: called instead when the step is recorded into a CUDA graph: nothing is changed
            now, and nobody will be asked when the graph is replayed.
        replayed: called ahead of each replay of a CUDA graph, whatever is in it.
    """

    def called(*_: Any) -> None:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            graphed()
        else:
            before()

    # torch.compile must call it each time, not look into it once. Where nobody has an optimizer
    # yet, asking for that would cost a second.
    if "torch._dynamo" in sys.modules:
        called = torch.compiler.disable(called, reason=FULLGRAPH)
    return Hook(register_optimizer_step_pre_hook(called).remove, boundary.watch_graphs(replayed))
