"""What one rank takes from a checkpoint: decided from the manifest alone, before a byte is read.

A model is filled where it lies, as far as its modules keep their state as torch's own do; one that
loads in its own way is given its part (``modules``). An optimizer gets new tensors, spread over the
workers like its parameters; anything else gets its state as it was saved. How the state is spread
may have changed since it was saved, and so may the number of
workers: a tensor is found by its name, whichever rank wrote it.

Guarantees: names, shapes and dtypes are compared first; what does not fit is said (StateMismatch)
before anything is changed.
What can go wrong: with pipeline stages a rank cannot know whether a name that it lacks is another
rank's. Such names are ``absent`` here, and the ranks settle it among themselves.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, Protocol

import torch

from outlast.checkpoint.attributes import Attributes, like, parameters_of
from outlast.checkpoint.optimizers import (
    KIND,
    NOTES,
    SPREAD,
    difference,
    load_named_state,
    memory_for,
)
from outlast.checkpoint.reader import Leaf
from outlast.checkpoint.tensors import (
    PLAIN,
    Parts,
    fresh,
    is_spread,
    is_subclass,
    lay,
    memories,
    overlaps,
    paired_parts,
    parts_difference,
    put_together,
    storages,
)
from outlast.checkpoint.tree import flatten, replace
from outlast.errors import StateMismatch
from outlast.script import modules

READ_TIMEOUT_S: Final = 3600.0  # for a rank to read its part
ANEW: Final = "start a new job with another --dir"


class RestoreSource(Protocol):
    """What a restore draws from: a checkpoint, or what is made to look like one."""

    @property
    def source_rank(self) -> int:
        """The rank whose state is taken."""

    @property
    def inventory(self) -> Any:
        """Says which other ranks may have saved a tensor."""

    def outline(self, key: str, rank: int | None = None) -> Any:
        """The state saved under ``key``, with a Leaf in place of each tensor."""

    def read(
        self, wanted: Iterable[tuple[str, torch.Tensor]], *, share: tuple[int, int] | None = None
    ) -> None:
        """Fill tensors; see :meth:`Checkpoint.read`."""


class Restore:
    """What is to be read, and what is to be done with it.

    Args:
        checkpoint: where it comes from.
        what: what people call that, as in "step 400".
        way_on: what to do where it does not fit, other than to build things as they were.

    Attributes:
        checkpoint: where it comes from.
        targets: (name in the manifest, tensor to be filled).
        claims: names of the parameters that this rank has.
        absent: names that this rank's source holds and this rank has not → what to say if no other
            rank has them either.
        remarks: what to say once the state is applied.
    """

    def __init__(self, checkpoint: RestoreSource, what: str, way_on: str = ANEW) -> None:
        self.checkpoint = checkpoint
        self._what = what
        self._way_on = way_on
        self._remedy = f"build the model as it was, or {way_on}"
        self.targets: list[tuple[str, torch.Tensor]] = []
        self.claims: set[str] = set()
        self.absent: dict[str, str] = {}
        self.remarks: list[str] = []
        self._offers: dict[str, Callable[[], None]] = {}  # of what is absent, if it is nobody's
        self._is_read = False
        self._taken: set[int] = set()  # memory that is filled where it lies
        self._acts: list[tuple[str, Callable[[], None]]] = []
        self._outlines: dict[tuple[str, int], Any] = {}

    def settle(self, claimed: Collection[str] = ()) -> None:
        """Once it is known what the other ranks have.

        Raises:
            StateMismatch: a name of the checkpoint is nobody's.
        """
        left = {name: one for name, one in self.absent.items() if name not in claimed}
        for name, problem in left.items():
            if name not in self._offers:
                raise StateMismatch(problem)
        for name in left:
            self._offers[name]()
        self.absent = {}

    def read(self, share: tuple[int, int] | None = None) -> None:
        """Fill the targets, once; see :meth:`Checkpoint.read`.

        Raises:
            StateMismatch: names are still absent.
            CheckpointInvalid, OSError: something is right in no place.
        """
        self.settle()
        if not self._is_read:
            self.checkpoint.read(self.targets, share=share)
            self._is_read = True

    def apply(self) -> None:
        """Give every object its state, which is read first if it was not.

        Raises:
            StateMismatch: an object refused its state.
        """
        self.read()
        for key, act in self._acts:
            try:
                act()
            except StateMismatch:
                raise
            except Exception as error:  # whatever a load_state_dict of the script's does
                raise StateMismatch(
                    f"{key} does not take the state of {self._what}: "
                    f"{type(error).__name__}: {' '.join(str(error).split())}"
                ) from error

    # --- what is taken -----------------------------------------------------------------------

    def take(self, key: str) -> None:
        """Read what was saved under ``key``, for whoever asks the checkpoint for it."""
        self._fill(self.checkpoint.outline(key))

    def take_object(self, key: str, value: Any) -> None:
        """Anything with state_dict and load_state_dict."""
        likes: dict[str, torch.Tensor] = {}
        # Only where tensors may be spread: a loader that is asked for its state starts processes.
        if "torch.distributed.tensor" in sys.modules and not isinstance(value, Iterable):
            _, live = flatten(value.state_dict(), key)
            likes = {name: tensor for name, tensor in live.items() if is_spread(tensor)}
        outline = self.checkpoint.outline(key)
        state = replace(outline, Leaf, lambda leaf: self._want(leaf, likes.get(leaf.name)))
        self._acts.append((key, lambda: value.load_state_dict(_whole(state))))

    def take_model(self, key: str, model: torch.nn.Module, *, kept: Collection[str] = ()) -> None:
        """A module's parameters and buffers, and what else its modules give.

        Args:
            key: its name in the session.
            model: itself.
            kept: names that stay as they are in the model.

        Raises:
            StateMismatch: other names, shapes or dtypes.
        """
        one = _Model(key, model, model.state_dict(), self._mapping(key, "model", model))
        self.claims |= {f"{key}.{name}" for name in one.live}
        owners = modules.owners_of(model)
        plain = {n: it for n, it in one.live.items() if modules.owner_in(owners, n) is None}
        fills = lies_in(model, plain)
        if not fills:  # it gives copies: it takes all of it back in one go
            owners = {"": model}
        parts: dict[str, dict[str, Any]] = {prefix: {} for prefix in owners}
        saved: dict[str, Any] = {}
        for name in sorted({*one.live, *one.outline}):
            prefix = modules.owner_in(owners, name)
            if name in kept:
                if prefix is not None:
                    parts[prefix][name.removeprefix(prefix)] = one.live[name]
                continue
            if fills and prefix is not None and not modules.is_plain_parameter(model, name):
                self._leave_to_owner(one, name, parts[prefix], prefix)
                continue
            if fills and self._take_place(one, name):
                continue
            self._compare(one, name, saved)
            if name not in saved:
                continue
            if prefix is None:
                self._want_in_place(saved[name], one.live[name])
            else:
                filled = self._fill(saved[name], one.live[name])
                parts[prefix][name.removeprefix(prefix)] = filled
        for prefix, module in owners.items():
            where, part = modules.name_of(key, prefix), parts[prefix]
            given = modules.ModuleInput(where, part, modules.versions_in(one.live, prefix))
            self._acts.append((where, functools.partial(self._load, module, given, fills)))

    def _load(self, module: torch.nn.Module, given: modules.ModuleInput, is_own: bool) -> None:
        whole = given._replace(state=_whole(dict(given.state)))
        self.remarks += modules.load(module, whole, own=is_own)

    def take_optimizer(
        self,
        key: str,
        optimizer: torch.optim.Optimizer,
        names: list[str],
        attributes: Attributes | None = None,
    ) -> None:
        """An optimizer's state, under its parameters' names, and its attributes.

        Raises:
            StateMismatch: another class, other parameters or other groups of them.
        """
        outline = self._mapping(key, "optimizer", optimizer)
        merged = self._merged(key, optimizer, names, outline)
        problem = difference(optimizer, names, merged, f"at {self._what}")
        if problem:
            raise self._other(key, problem)
        self.claims |= {f"{key}/{name}" for name in names}
        parameters = parameters_of(optimizer)
        by_name = dict(zip(names, parameters, strict=True))
        self._taken |= {at for parameter in parameters for at in storages(parameter)}
        memory = _Memory(key, merged.get(NOTES, {}), by_name)
        state = {
            name: self._fill(value, memory=memory)
            for name, value in merged.items()
            if name != "state"
        }
        state["state"] = {
            name: self._fill_slots(inner, by_name[name], optimizer.state.get(by_name[name]), memory)
            for name, inner in merged["state"].items()
        }
        self._acts.append(
            (key, lambda: load_named_state(optimizer, names, _whole(state), key, attributes))
        )

    # --- models ------------------------------------------------------------------------------

    def _compare(self, one: _Model, name: str, saved: dict[str, Any]) -> None:
        """Find what was saved under one name of a model, and see that it fits."""
        key, live, outline = one.key, one.live, one.outline
        if name not in live:
            where = f"{key}.{name}"
            self.absent[where] = f"{where} is only in {self._what}; {self._remedy}"
            return
        then, now = outline.get(name), live[name]
        if isinstance(now, torch.Tensor):
            then = self._elsewhere(key, name) if then is None else then
            if not isinstance(then, Leaf | Parts):
                raise StateMismatch(f"{key}.{name} is only in the model; {self._remedy}")
            if isinstance(then, Parts) or is_subclass(now):
                problem = parts_difference(then, now, lambda leaf: (leaf.shape, leaf.dtype))
                if problem:
                    raise StateMismatch(f"{key}.{name} {problem} ({self._what}); {self._remedy}")
                saved[name] = then
                return
            for what, old, new in (
                ("shape", then.shape, tuple(now.shape)),
                ("dtype", then.dtype, now.dtype),
            ):
                if old != new:
                    raise StateMismatch(
                        f"{key}.{name} has {what} {old} in {self._what} and {new} in the model; "
                        f"{self._remedy}{modules.hint(one.model, name, what)}"
                    )
            saved[name] = then
        elif name in outline:
            saved[name] = then

    def _leave_to_owner(self, one: _Model, name: str, part: dict[str, Any], prefix: str) -> None:
        """What a module that loads in its own way is given, whether it has that now or not."""
        inner, then, live = name.removeprefix(prefix), one.outline.get(name), one.live
        if name in live:
            if name not in one.outline and isinstance(live[name], torch.Tensor):
                then = self._elsewhere(one.key, name)
            if name in one.outline or then is not None:
                part[inner] = self._fill(then, live[name])
            return
        where = f"{one.key}.{name}"
        self.absent[where] = f"{where} is only in {self._what}; {self._remedy}"

        def take() -> None:
            part[inner] = self._fill(then)

        self._offers[where] = take

    def _take_place(self, one: _Model, name: str) -> bool:
        """Whether a buffer is made that is None or empty now, and was not when it was saved."""
        now, then = one.live.get(name), one.outline.get(name)
        if not isinstance(then, Leaf) or (isinstance(now, torch.Tensor) and now.numel()):
            return False
        place = modules.place_for(one.model, name)
        if place is None or not place.is_for(now, then.shape, then.dtype):
            return False
        where = f"{one.key}.{name}"
        self.claims.add(where)
        value, home = self._want(then), modules.home_of(one.model)
        self._acts.append((where, lambda: place.put(value, home)))
        return True

    def _elsewhere(self, key: str, name: str) -> Any:
        """What another rank saved under a name of this model that the source rank has not."""
        for rank in self._other_ranks(f"{key}.{name}"):
            outline = self._outline(key, rank)
            if isinstance(outline, Mapping) and name in outline:
                return outline[name]
        return None

    # --- optimizers --------------------------------------------------------------------------

    def _merged(
        self,
        key: str,
        optimizer: torch.optim.Optimizer,
        names: list[str],
        outline: Mapping[str, Any],
    ) -> Mapping[str, Any]:
        """The state of this rank's parameters, from all the ranks that saved them."""
        now = set(names)
        saved = {name for group in outline["param_groups"] for name in group["params"]}
        if saved == now or outline.get(KIND, "") != type(optimizer).__name__:
            return outline
        problem = difference(optimizer, names, outline, f"at {self._what}")
        groups = [_Group(group) for group in outline["param_groups"]]
        state, notes = dict(outline["state"]), dict(outline.get(NOTES, {}))
        lacking = [name for name in names if name not in saved]
        for name in lacking:
            other = self._holder(key, name, len(groups))
            if other is None:
                raise self._other(key, problem)
            if name in other["state"]:
                state[name] = other["state"][name]
            theirs = other.get(NOTES, {})
            notes |= {path: theirs[path] for path in theirs if path.startswith(f"state.{name}.")}
            for group, its in zip(groups, other["param_groups"], strict=True):
                group.adopt(its, name)
        for name in saved - now:
            self.absent[f"{key}/{name}"] = str(self._other(key, problem))
        return {
            **outline,
            **({NOTES: notes} if notes else {}),
            "state": {name: inner for name, inner in state.items() if name in now},
            "param_groups": [group.only(now) for group in groups],
        }

    def _holder(self, key: str, parameter: str, num_groups: int) -> Mapping[str, Any] | None:
        """The state of an optimizer of another rank that had ``parameter``."""
        for rank in self._other_ranks(f"{key}.state.{parameter}."):
            outline = self._outline(key, rank)
            if not isinstance(outline, Mapping) or len(outline["param_groups"]) != num_groups:
                continue
            if any(parameter in group["params"] for group in outline["param_groups"]):
                return outline
        return None

    # --- inside ------------------------------------------------------------------------------

    def _mapping(self, key: str, kind: str, value: Any) -> Mapping[str, Any]:
        outline = self._outline(key, self.checkpoint.source_rank)
        needs = "param_groups" if kind == "optimizer" else None
        if not isinstance(outline, Mapping) or (needs is not None and needs not in outline):
            raise StateMismatch(
                f"{key} is of another kind in {self._what} and a {type(value).__name__} now; "
                f"name the {kind} that was saved, or {self._way_on}"
            )
        return outline

    def _other(self, key: str, problem: str) -> StateMismatch:
        return StateMismatch(f"{key} {problem}; build it as it was, or {self._way_on}")

    def _outline(self, key: str, rank: int) -> Any:
        if (key, rank) not in self._outlines:
            found = self.checkpoint.outline(key, rank)
            self._outlines[key, rank] = found
        return self._outlines[key, rank]

    def _other_ranks(self, name: str) -> Iterator[int]:
        """The ranks whose small state may name this tensor, the likely ones first."""
        checkpoint = self.checkpoint
        for rank in checkpoint.inventory.ranks_with(name):
            if rank != checkpoint.source_rank:
                yield rank

    def _fill_slots(self, saved: Any, parameter: torch.Tensor, live: Any, memory: _Memory) -> Any:
        """One parameter's state; an optimizer that has stepped before is filled where it lies."""
        if not isinstance(saved, dict) or not isinstance(live, Mapping):
            return self._fill(saved, parameter, memory)
        found = {}
        for slot, leaf in saved.items():
            now = live.get(slot)
            if isinstance(leaf, Parts) and isinstance(now, torch.Tensor):
                found[slot] = self._fill_parts(leaf, now)
            elif (
                isinstance(leaf, Leaf)
                and isinstance(now, torch.Tensor)
                and not is_subclass(now)
                and _is_memory_for(leaf, now, parameter)
                and not memory.is_noted(leaf)
                and storages(now)[0] not in self._taken  # shared with another state or a parameter
            ):
                self._taken.add(storages(now)[0])
                self.targets.append((leaf.name, now.detach()))
                found[slot] = now
            else:
                found[slot] = self._fill(leaf, parameter, memory)
        return like(saved, found)

    def _fill_parts(self, parts: Parts, now: torch.Tensor) -> Any:
        """A state of a subclass: the live one, where it is what was saved."""
        problem = parts_difference(parts, now, lambda leaf: (leaf.shape, leaf.dtype))
        if problem or not self._taken.isdisjoint(storages(now)):
            return self._fill(parts)
        self._want_in_place(parts, now)
        return now

    def _want_in_place(self, saved: Any, live: torch.Tensor) -> None:
        """A live tensor is filled where it lies, or the tensors that it is made of."""
        for leaf, tensor in paired_parts(saved, live):
            self.targets.append((leaf.name, tensor.detach()))
        self._taken |= set(storages(live))

    def _fill(self, outline: Any, alike: Any = None, memory: _Memory | None = None) -> Any:
        return replace(outline, Leaf, lambda leaf: self._want(leaf, alike, memory))

    def _want(self, leaf: Leaf, alike: Any = None, memory: _Memory | None = None) -> torch.Tensor:
        """New memory for a tensor; a part of it if ``alike`` is spread and has its shape."""
        tensor = memory.of(leaf, alike) if memory is not None else None
        if tensor is None:
            if not isinstance(alike, torch.Tensor) or tuple(alike.shape) != leaf.shape:
                alike = None
            tensor = fresh(leaf.shape, leaf.dtype, alike)
        self.targets.append((leaf.name, tensor))
        return tensor


class _Model(NamedTuple):
    """A model that is restored.

    Attributes:
        key: its name in the session.
        model: itself.
        live: its state_dict.
        outline: what was saved of it.
    """

    key: str
    model: torch.nn.Module
    live: Any
    outline: Mapping[str, Any]


class _Memory:
    """How the tensors of an optimizer's state are spread, where that is not as by default.

    Args:
        key: the optimizer's.
        notes: of when it was saved.
        parameters: name → parameter of today.
    """

    def __init__(
        self, key: str, notes: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]
    ) -> None:
        self._prefix = f"{key}."
        self._notes = notes
        self._parameters = parameters

    def is_noted(self, leaf: Leaf) -> bool:
        """Whether something was noted of it."""
        return leaf.name.removeprefix(self._prefix) in self._notes

    def of(self, leaf: Leaf, parameter: Any) -> torch.Tensor | None:
        """New memory for it; None where the default is right."""
        return memory_for(
            *(leaf.shape, leaf.dtype, self._notes.get(leaf.name.removeprefix(self._prefix))),
            *(parameter, self._parameters),
            was_spread=SPREAD in self._notes,
        )


def _is_memory_for(leaf: Leaf, now: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a state's live tensor is what new memory for it would be."""
    spread = is_spread(parameter) and tuple(parameter.shape) == leaf.shape
    return (
        (tuple(now.shape), now.dtype, is_spread(now)) == (leaf.shape, leaf.dtype, spread)
        and memories(now)[0].is_contiguous()
        and not now.requires_grad
    )


class _Group:
    """A saved parameter group while parameters of other ranks are put into it."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        self._group = dict(group)
        self._given = _given_names(group)

    def adopt(self, other: Mapping[str, Any], parameter: str) -> None:
        """Take ``parameter`` over if ``other``, the same group of another rank, has it."""
        if parameter in other["params"]:
            self._given[parameter] = _given_names(other)[parameter]

    def only(self, names: set[str]) -> dict[str, Any]:
        """The group with these parameters alone."""
        kept = [name for name in self._given if name in names]
        group = {**self._group, "params": kept}
        if "param_names" in group:
            group["param_names"] = [self._given[name] for name in kept]
        return group


def _given_names(group: Mapping[str, Any]) -> dict[str, str]:
    """Our names of a group's parameters → those that torch was given, if it was."""
    return dict(zip(group["params"], group.get("param_names", group["params"]), strict=True))


def _whole(state: Any) -> Any:
    """A state of which all tensors have been read: those of subclasses are put together."""
    return replace(state, Parts, put_together)


# --- models whose state is in memory --------------------------------------------------------------


def put(key: str, model: torch.nn.Module, state: Mapping[str, Any]) -> list[str]:
    """Give a model a state that is in memory, as a whole.

    Args:
        key: the model's, for messages.
        model: of any kind.
        state: name → what ``state_dict`` gave.

    Returns:
        What to say; see :func:`modules.load`.

    Raises:
        StateMismatch: it does not fit.
        Exception: whatever a ``load_state_dict`` of the script's does.
    """
    owners, live = modules.owners_of(model), model.state_dict()
    plain = {name: one for name, one in live.items() if modules.owner_in(owners, name) is None}
    if not lies_in(model, plain):
        return modules.load(
            model, modules.ModuleInput(key, state, modules.versions_in(live)), own=False
        )
    home = modules.home_of(model)
    for name, value in state.items():
        if modules.owner_in(owners, name) is not None:
            continue
        now, place = plain.pop(name, None), modules.place_for(model, name)
        if place is not None and place.is_for(now, tuple(value.shape), value.dtype):
            place.put(value.clone(), home)
        elif now is None or (now.shape, now.dtype) != (value.shape, value.dtype):
            raise StateMismatch(f"{key} does not take its state: {key}.{name} is not what it was")
        else:
            _fill(f"{key}.{name}", now, value)
    if plain:
        raise StateMismatch(f"{key} does not take its state: {key}.{min(plain)} was not kept")
    said = []
    for prefix, module in owners.items():
        part, versions = modules.part_of(state, prefix), modules.versions_in(live, prefix)
        said += modules.load(
            module, modules.ModuleInput(modules.name_of(key, prefix), part, versions), own=True
        )
    return said


def lies_in(model: torch.nn.Module, tensors: Mapping[str, Any]) -> bool:
    """Whether ``tensors`` are the model's memory; a copy, as FSDP1 gives, is filled in vain."""
    own = {at for tensor in [*model.parameters(), *model.buffers()] for at in storages(tensor)}
    return all(
        isinstance(tensor, torch.Tensor) and own.issuperset(storages(tensor))
        for tensor in tensors.values()
    )


def _fill(name: str, live: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        if type(live) not in PLAIN or not overlaps(live):
            live.detach().copy_(value)
        elif not lay(value, live):
            raise StateMismatch(f"the elements of {name} share memory, and did not in its state")
