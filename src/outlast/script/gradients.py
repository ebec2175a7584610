"""Gradients that are still being accumulated at a step boundary: seen, kept, and put back.

A script may call its optimizer after every fourth batch. What the three boundaries between have is
not the parameters alone: the gradients of the batches so far are state, until the optimizer has
used them. They go into this rank's own part of the checkpoint (with ``no_sync`` each rank has other
ones), and come back when the loop goes on. Saves that come due by the cadence wait for the
boundary behind the optimizer's next step, where there are none, as far as that can be foreseen.

Guarantees: a gradient that no optimizer has used yet is in every checkpoint, whatever asked for it.
Which those are is told by an optimizer's own step: it notes which gradients it had (the tensors,
and their version counters), and those that are others, or have been added to since, are not used.

What FSDP2 has not summed yet (``set_requires_gradient_sync(False)``) is kept too, and what HSDP has
summed within a replica group alone (``set_requires_all_reduce(False)``).

What can go wrong: with another number of workers gradients in the making mean nothing; they are
left out, in one line. A script that counts its batches in a variable of its own counts anew after a
resume; ``session.step`` goes on.

Rejected: keeping every gradient that is there (most loops clear them when the next step begins, and
a checkpoint would be a third larger); notes of all gradients in each step (0.2 µs a parameter).
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from outlast.attempt.over import over
from outlast.checkpoint.attributes import parameters_of
from outlast.checkpoint.tensors import PLAIN, spread_as
from outlast.ledger.narrator import say
from outlast.script.objects import FULLGRAPH

PROBES: Final = 4  # parameters of each optimizer whose gradients are noted
WAIT_STEPS_MAX: Final = 64  # that a save waits for gradients to be used
KEY: Final = "gradients"
_FSDP2: Final = "torch.distributed.fsdp._fully_shard._fully_shard"
_LAYOUT: Final = "_partial_reduce_output_layout"
_PLACES: Final = "/places"
Named = Mapping[str, torch.Tensor]
Mark = tuple[Any, int] | None


class ScriptGradients:
    """The gradients in the making of one session's parameters.

    Args:
        objects: gives name → object of what is saved.
        on_step: told of each optimizer that has stepped.
    """

    def __init__(
        self,
        objects: Callable[[], Mapping[str, Any]],
        on_step: Callable[[torch.optim.Optimizer], None] = lambda _: None,
    ) -> None:
        self._objects = objects
        self._on_step = on_step
        self._step = 0  # completed
        self._seen: dict[int, _SeenStep] = {}  # by optimizer
        # Weights that nothing with a hook has changed so far.
        self._by_hand: _SeenStep | None = None
        self._looks: list[Any] = []  # of some of them, as the batch was handed out
        self._handed: list[Any] | None = None  # how they stood, where the boundary was not clean
        self._unsummed: list[Any] = []  # some parameters of FSDP2
        self._groups: list[Any] = []  # all of its groups of parameters
        self._has_stepped = self._has_replayed = self._is_blind = self._is_named = False
        self._others: list[torch.Tensor] | None = None  # that no optimizer has stepped with yet
        self._saved: Mapping[str, Any] | None = None
        self._hook: Any = None

    # --- of a session ---------------------------------------------------------------------------

    def open(self, step: int) -> None:
        """The session begins after ``step``: look at all optimizers."""
        self._step = step
        models = [one for one in self._objects().values() if isinstance(one, torch.nn.Module)]
        self._by_hand = _SeenStep(lambda: (p for model in models for p in model.parameters()))
        self._unsummed = _some([held for _, held, _ in self._fsdp2()])
        self._groups = [group for _, group in self._fsdp2_groups()]
        named = self._objects().values()
        self._is_named = any(isinstance(value, torch.optim.Optimizer) for value in named)

        def called(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if not over.is_void:  # it has changed nothing
                self.stepped(optimizer)

        if "torch._dynamo" in sys.modules:
            called = torch.compiler.disable(called, reason=FULLGRAPH)
        self._hook = register_optimizer_step_post_hook(called)

    def close(self) -> None:
        """The session is over."""
        if self._hook is not None:
            self._hook.remove()

    # --- in a step ------------------------------------------------------------------------------

    def handed_out(self) -> None:
        """A batch is handed out."""
        self._has_stepped = self._has_replayed = False
        if self._by_hand is not None and not self._is_named:
            self._looks = self._by_hand.looks()
        clean = bool(self._seen) and all(one.last == self._step for one in self._seen.values())
        self._handed = None if clean else self._stand()

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped: what gradients it had are used."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._is_blind = True  # replays of the graph tell nobody
            return
        self._has_stepped = True
        one = self._seen.get(id(optimizer))
        if one is None or one.optimizer() is not optimizer:
            self._by_hand = None
            one = self._seen[id(optimizer)] = _SeenStep.of(optimizer)
            self._others = None
        one.note()
        self._on_step(optimizer)

    def replayed(self) -> None:
        """A CUDA graph is replayed: what it changes, and how, is not seen."""
        self._has_replayed = True

    def completed(self, step: int) -> None:
        """A step is complete."""
        self._step = step
        gone = False
        for one in self._seen.values():
            if one.has_stepped:
                one.has_stepped = False
                one.period, one.last = step - one.last if one.last >= 0 else 0, step
                if one.period == 1:
                    one.accumulates = False
            elif not one.is_there:
                gone = True
            elif not one.accumulates:
                one.accumulates = not one.has_used()
        if gone:
            self._seen = {key: one for key, one in self._seen.items() if one.is_there}
            self._others = None

    @property
    def have_moved(self) -> bool:
        """Whether an optimizer has stepped since the batch was handed out, or backward has run."""
        if self.have_changed_weights:
            return True
        if self._handed is None:
            return self._are_unsummed or any(not one.has_used() for one in self._seen.values())
        now = self._stand()
        return len(now) != len(self._handed) or not all(map(_is_same, now, self._handed))

    @property
    def _are_unsummed(self) -> bool:
        if any(_unsummed(one) is not None for one in self._unsummed):
            return True
        return any(group._partial_reduce_output is not None for group in self._groups)

    @property
    def have_changed_weights(self) -> bool:
        """Whether weights have changed since the batch was handed out, by whatever."""
        if self._has_stepped or self._is_blind or (self._has_replayed and not self._seen):
            return True
        by_hand = None if self._is_named else self._by_hand
        return by_hand is not None and by_hand.looks() != self._looks

    def _stand(self) -> list[Mark]:
        found = [_mark(p) for one in self._seen.values() for p in one.probes()]
        if self._by_hand is not None:
            found += [_mark(p) for p in self._by_hand.probes()]
        found += [_mark_of(_unsummed(one)) for one in self._unsummed]
        return found + [_mark_of(one._partial_reduce_output) for one in _some(self._groups)]

    def forget(self, step: int) -> None:
        """The process goes on from ``step`` in another attempt, with no gradient of before."""
        self._step = step
        for one in self._seen.values():
            one.last, one.has_stepped = step, False
        with torch.no_grad():
            for _, parameter in self._parameters():
                parameter.grad = None
            for _, held, _ in self._fsdp2():
                _drop_unsummed(held)
            for group in self._groups:
                group._partial_reduce_output = None

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Within, no weight has a gradient; behind it each has the one that it had."""
        kept = [(parameter, parameter.grad) for _, parameter in self._parameters()]
        unsummed = [(held, module, _unsummed(held)) for _, held, module in self._fsdp2()]
        self.forget(self._step)
        try:
            yield
        finally:
            self.forget(self._step)
            for parameter, gradient in kept:
                parameter.grad = gradient
            for held, module, gradient in unsummed:
                if gradient is not None:
                    _put_unsummed(held, module, gradient)

    # --- at a boundary --------------------------------------------------------------------------

    @property
    def are_unused(self) -> bool:
        """Whether some are in the making, as far as a few of them tell.

        Any gradient is of a parameter that no optimizer of torch's kind has stepped with yet.
        """
        if self._are_unsummed or any(not one.has_used() for one in self._seen.values()):
            return True
        if self._others is not None and all(p.grad is None for p in self._others):
            return False
        claimed = {id(p) for one in self._seen.values() for p in one.parameters()}
        trained = (p for _, p in self._parameters() if p.requires_grad)
        self._others = [p for p in trained if id(p) not in claimed]
        return any(p.grad is not None for p in self._others)

    def foreseen(self, step: int) -> int:
        """The first boundary, from ``step`` on, at which all are used, as far as is foreseen."""
        found = step
        for one in self._seen.values():
            if one.accumulates and one.period > 1:
                left = (step - one.last) % one.period
                found = max(found, step + (one.period - left if left else 0))
        return found if found - step <= WAIT_STEPS_MAX else step

    def accumulated(
        self, tensors: Collection[torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Name of parameter → its gradient, of those that no optimizer has used yet.

        Args:
            tensors: all of the models', where somebody has just gone through them.
        """
        used: set[int] = set()
        unused: set[int] = set()
        for one in self._seen.values():
            is_used = one.has_used(is_now=one.last == self._step or one.has_stepped)
            (used if is_used else unused).update(map(id, one.parameters()))
        used -= unused
        if not unused and tensors is not None and self._are_all(used, tensors):
            return {}
        found = {
            name: _local(parameter.grad).detach()
            for name, parameter in self._parameters()
            if parameter.grad is not None and id(parameter) not in used
        }
        found |= {
            name: _unsummed(held) for name, held, _ in self._fsdp2() if _unsummed(held) is not None
        }
        for name, group in self._fsdp2_groups():
            if group._partial_reduce_output is not None:
                found |= {name: group._partial_reduce_output, name + _PLACES: _places_in(group)}
        # Set to zero where they lie, they are as good as none.
        return found if any(bool(gradient.any()) for gradient in found.values()) else {}

    def _are_all(self, used: Collection[int], tensors: Collection[torch.Tensor]) -> bool:
        """Whether no other parameter has a gradient, told quickly: nearly always it is so."""
        if not set(map(type, tensors)) <= PLAIN:  # FSDP2 keeps some elsewhere
            return False
        held = [one for one in tensors if type(one) is torch.nn.Parameter]
        for value in self._objects().values():
            if isinstance(value, torch.optim.Optimizer):
                held += parameters_of(value)
        return all(id(one) in used or one.grad is None for one in held)

    # --- from a checkpoint ----------------------------------------------------------------------

    def resumed(self, own: Mapping[str, Any], saved_by: int, world_size: int, rank: int) -> None:
        """A checkpoint has these; they are put in place when the loop goes on."""
        saved = own.get(KEY)
        if not saved:
            return
        if saved_by != world_size:
            if rank == 0:
                say(
                    f"the checkpoint has gradients in the making, of {saved_by} workers; this "
                    f"attempt has {world_size}: they are left out, and the optimizer's next step "
                    "has those of fewer batches. Have checkpoints taken behind the optimizer's step"
                )
            return
        self._saved = saved

    def restore(self) -> None:
        """The loop goes on: put in place what was in the making."""
        saved, self._saved = self._saved, None
        if saved is None:
            return
        with torch.no_grad():
            for name, parameter in self._parameters():
                if name in saved:
                    parameter.grad = _like(parameter, saved[name])
            for name, held, module in self._fsdp2():
                if name in saved:
                    _put_unsummed(held, module, saved[name].to(held.sharded_param.device))
            for name, group in self._fsdp2_groups():
                if name in saved:
                    _put_partial(group, saved[name], saved[name + _PLACES])

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        known: set[int] = set()
        objects = self._objects()
        for key, value in objects.items():
            if isinstance(value, torch.nn.Module):
                for name, parameter in value.named_parameters():
                    known.add(id(parameter))
                    yield f"{key}/{name}", parameter
        for key, value in objects.items():
            if isinstance(value, torch.optim.Optimizer):
                for number, parameter in enumerate(parameters_of(value)):
                    if id(parameter) not in known:
                        known.add(id(parameter))
                        yield f"{key}/{number}", parameter

    def _fsdp2(self) -> Iterator[tuple[str, Any, Any]]:
        """What FSDP2 keeps of each parameter, by a name, and the module that it is divided with."""
        if _FSDP2 not in sys.modules:
            return
        for key, value in self._objects().items():
            if isinstance(value, torch.nn.Module):
                for number, (held, module) in enumerate(_fsdp_parameters(value)):
                    yield f"{key}/unsummed/{number}", held, module

    def _fsdp2_groups(self) -> Iterator[tuple[str, Any]]:
        """The groups of parameters that FSDP2 sums together, by a name."""
        for key, value in self._objects().items():
            if isinstance(value, torch.nn.Module):
                for number, (group, _) in enumerate(_fsdp_groups(value)):
                    yield f"{key}/partial/{number}", group


class _SeenStep:
    """An optimizer that has stepped, or weights that are changed without one.

    Attributes:
        parameters: gives all of its.
        last: the step in which it stepped last; -1 before.
        period: steps from one of its own to the next.
        accumulates: whether gradients were seen at a boundary that it had not used.
        has_stepped: in the step in progress.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterable[torch.Tensor]],
        optimizer: Callable[[], torch.optim.Optimizer | None] | None = None,
    ) -> None:
        self.parameters = parameters
        self._optimizer = optimizer
        self.last = -1
        self.period = 0
        self.accumulates = self.has_stepped = False
        self._probes: list[torch.Tensor] = []
        self._marks: list[Mark] = []

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> _SeenStep:
        """Of an optimizer, which is not held."""
        found = weakref.ref(optimizer)

        def parameters() -> Iterable[torch.Tensor]:
            one = found()
            return parameters_of(one) if one is not None else ()

        return cls(parameters, found)

    def optimizer(self) -> torch.optim.Optimizer | None:
        """Which it is, as long as it lives."""
        return self._optimizer() if self._optimizer is not None else None

    @property
    def is_there(self) -> bool:
        """Whether it may step again."""
        return self._optimizer is None or self._optimizer() is not None

    def note(self) -> None:
        """It has stepped."""
        self.has_stepped = True
        self._marks = [_mark(p) for p in self.probes()]

    def looks(self) -> list[Any]:
        """Versions and first bytes of some parameters: whether anything has changed these."""
        return [_look(p) for p in self.probes()]

    def probes(self) -> list[torch.Tensor]:
        """Parameters that stand for all of its."""
        if not self._probes:
            parameters = [p for p in self.parameters() if p.requires_grad]
            with_one = [p for p in parameters if p.grad is not None]
            self._probes = _some(with_one or parameters)
        return self._probes

    def has_used(self, *, is_now: bool = True) -> bool:
        """Whether the gradients that are there are those that it had when it stepped.

        Args:
            is_now: the answer where no gradient is there to tell.
        """
        found = [(_mark(p), mark) for p, mark in zip(self.probes(), self._marks, strict=False)]
        if all(now is None for now, _ in found):
            return is_now
        return all(now is None or _is_same(now, mark) for now, mark in found)


def _mark(parameter: torch.Tensor) -> Mark:
    gradient = parameter.grad
    return None if gradient is None else _mark_of(gradient)


def _mark_of(gradient: torch.Tensor | None) -> Mark:
    if gradient is None:
        return None
    # A tensor that another one takes the place of may get its address; a dead reference is unique.
    return weakref.ref(gradient), _local(gradient)._version


def _look(parameter: torch.Tensor) -> tuple[int, bytes]:
    version = 0 if parameter.is_inference() else parameter._version
    local = _local(parameter.detach())
    if not local.is_cpu or not local.nbytes:
        return version, b""
    return version, ctypes.string_at(local.data_ptr(), min(local.element_size() * 4, local.nbytes))


def _is_same(one: Mark, other: Mark) -> bool:
    # Not by ==, which for references to two tensors would compare these.
    if one is None or other is None:
        return one is other
    return one[0] is other[0] and one[1] == other[1]


def _unsummed(held: Any) -> Any:
    """What FSDP2 has of a parameter's gradient and has not summed yet, or None."""
    found = held.unsharded_accumulated_grad
    if found is None:
        found = getattr(getattr(held, "_unsharded_param", None), "grad", None)
    return None if found is None else _local(found)


def _local(gradient: torch.Tensor) -> torch.Tensor:
    if type(gradient) is torch.Tensor:  # to ask a tensor for what it lacks takes a microsecond
        return gradient
    found: torch.Tensor = getattr(gradient, "_local_tensor", gradient)
    return found


def _like(parameter: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
    local = torch.empty_like(_local(parameter), requires_grad=False)
    local.copy_(saved)
    if not hasattr(parameter, "_local_tensor"):
        return local
    return spread_as(parameter, local)


def _some(parameters: list[Any]) -> list[Any]:
    """A few of them, from the first to the last."""
    if len(parameters) <= PROBES:
        return parameters
    return [parameters[n * (len(parameters) - 1) // (PROBES - 1)] for n in range(PROBES)]


def _put_unsummed(held: Any, module: Any, gradient: torch.Tensor) -> None:
    if not isinstance(getattr(type(held), "unsharded_accumulated_grad", None), property):
        held.unsharded_accumulated_grad = gradient
        return
    # From torch 2.15 on it is the gradient of the whole parameter, which is there once it was put
    # together; all ranks do this.
    if not hasattr(held, "_unsharded_param"):
        module.unshard()
        module.reshard()
    held._unsharded_param.grad = gradient


def _drop_unsummed(held: Any) -> None:
    if not isinstance(getattr(type(held), "unsharded_accumulated_grad", None), property):
        held.unsharded_accumulated_grad = None
    if hasattr(held, "_unsharded_param"):
        held._unsharded_param.grad = None


def _places_in(group: Any) -> torch.Tensor:
    """In what HSDP has summed partly: rows of the number of a parameter, its offset, its size.

    Empty before torch 2.15, whose groups are the first to ask for it.
    """
    known = getattr(group, _LAYOUT, {})
    rows = [(at, *known[one]) for at, one in enumerate(group.fsdp_params) if one in known]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)


def _put_partial(group: Any, summed: torch.Tensor, places: torch.Tensor) -> None:
    group._partial_reduce_output = summed.to(group.device)
    if hasattr(group, _LAYOUT):
        rows = {group.fsdp_params[at]: (start, size) for at, start, size in places.tolist()}
        getattr(group, _LAYOUT).update(rows)


def _fsdp_parameters(model: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
    for group, module in _fsdp_groups(model):
        yield from ((held, module) for held in group.fsdp_params)


def _fsdp_groups(model: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
    if _FSDP2 not in sys.modules:
        return
    for module in model.modules():
        find = getattr(module, "_get_fsdp_state", None)
        state = find() if find is not None else None
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch 2.11 has one at most
            groups = filter(None, [getattr(state, "_fsdp_param_group", None)])
        yield from ((group, module) for group in groups)
