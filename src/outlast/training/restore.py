"""What one rank takes from a checkpoint: decided from the manifest alone, before a byte is read.

A model is filled where it lies, if it keeps its state as torch's own modules do; an optimizer gets
new tensors, spread over the workers like its parameters; anything else gets its state as it was
saved. How the state is spread may have changed since it was saved, and so may the number of
workers: a tensor is found by its name, whichever rank wrote it.

Guarantees: names, shapes and dtypes are compared first; what does not fit is said (StateMismatch)
before anything is changed.
What can go wrong: with pipeline stages a rank cannot know whether a name that it lacks is another
rank's. Such names are ``absent`` here, and the ranks settle it among themselves.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final

import torch

from outlast.checkpoint.destinations import fresh
from outlast.checkpoint.load import Checkpoint, Leaf
from outlast.checkpoint.manifest import FILE_NAME
from outlast.checkpoint.optimizers import KIND, difference, load_named_state
from outlast.checkpoint.reshard import is_spread
from outlast.checkpoint.tree import flatten, replace
from outlast.errors import StateMismatch

REMEDY: Final = "build the model as it was, or start a new job with another --dir"

_METHODS: Final = (
    *("state_dict", "load_state_dict", "_load_from_state_dict", "_save_to_state_dict"),
    *("get_extra_state", "set_extra_state"),
)
_HOOKS: Final = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


class Restore:
    """What is to be read, and what is to be done with it.

    Attributes:
        checkpoint: where it comes from.
        targets: (name in the manifest, tensor to be filled).
        claims: names of the parameters that this rank has.
        absent: names that this rank's source holds and this rank has not → what to say if no other
            rank has them either.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.targets: list[tuple[str, torch.Tensor]] = []
        self.claims: set[str] = set()
        self.absent: dict[str, str] = {}
        self._is_read = False
        self._taken: set[int] = set()  # memory that is filled where it lies
        self._acts: list[tuple[str, Callable[[], None]]] = []
        self._outlines: dict[tuple[str, int], Any] = {}

    def settle(self, claimed: Collection[str] = ()) -> None:
        """Once it is known what the other ranks have.

        Raises:
            StateMismatch: a name of the checkpoint is nobody's.
        """
        for name, problem in self.absent.items():
            if name not in claimed:
                raise StateMismatch(problem)
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
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                if isinstance(error, StateMismatch):
                    raise
                raise StateMismatch(
                    f"{key} does not take the state of step {self._step}: "
                    f"{type(error).__name__}: {error}"
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
        self._acts.append((key, lambda: value.load_state_dict(state)))

    def take_model(self, key: str, model: torch.nn.Module) -> None:
        """A module's parameters and buffers.

        Raises:
            StateMismatch: other names, shapes or dtypes.
        """
        outline = self._mapping(key, "model", model)
        live = model.state_dict()
        saved: dict[str, Any] = {}
        for name in sorted({*live, *outline}):
            self._compare(key, name, live, outline, saved)
        self.claims |= {f"{key}.{name}" for name in live}
        if fills_in_place(model, live):
            self.targets += [(saved[name].name, live[name].detach()) for name in live]
            self._taken |= {_storage(live[name]) for name in live}
            return
        state = collections.OrderedDict(
            (name, self._fill(saved[name], live[name])) for name in [*live] if name in saved
        )
        # Modules read their version from here; without it some convert "old" state.
        state._metadata = getattr(live, "_metadata", None)  # type: ignore[attr-defined]
        self._acts.append((key, lambda: _ignore(model.load_state_dict(state))))

    def take_optimizer(self, key: str, optimizer: torch.optim.Optimizer, names: list[str]) -> None:
        """An optimizer's state, under its parameters' names.

        Raises:
            StateMismatch: another class, other parameters or other groups of them.
        """
        outline = self._mapping(key, "optimizer", optimizer)
        merged = self._merged(key, optimizer, names, outline)
        problem = difference(optimizer, names, merged, f"at step {self._step}")
        if problem:
            raise self._other(key, problem)
        self.claims |= {f"{key}/{name}" for name in names}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        by_name = dict(zip(names, parameters, strict=True))
        self._taken |= {_storage(parameter) for parameter in parameters}
        state = {name: self._fill(value) for name, value in merged.items() if name != "state"}
        state["state"] = {
            name: self._fill_slots(inner, by_name[name], optimizer.state.get(by_name[name]))
            for name, inner in merged["state"].items()
        }
        self._acts.append((key, lambda: load_named_state(optimizer, names, state, key)))

    # --- models ------------------------------------------------------------------------------

    def _compare(
        self,
        key: str,
        name: str,
        live: Mapping[str, Any],
        outline: Mapping[str, Any],
        saved: dict[str, Any],
    ) -> None:
        """Find what was saved under one name of a model, and see that it fits."""
        step = self._step
        if name not in live:
            where = f"{key}.{name}"
            self.absent[where] = f"{where} is only in step {step}; {REMEDY}"
            return
        then, now = outline.get(name), live[name]
        if isinstance(now, torch.Tensor):
            then = self._elsewhere(key, name) if then is None else then
            if not isinstance(then, Leaf):
                raise StateMismatch(f"{key}.{name} is only in the model; {REMEDY}")
            for what, old, new in (
                ("shape", then.shape, tuple(now.shape)),
                ("dtype", then.dtype, now.dtype),
            ):
                if old != new:
                    raise StateMismatch(
                        f"{key}.{name} has {what} {old} in step {step} and {new} in the model; "
                        f"{REMEDY}"
                    )
            saved[name] = then
        elif name in outline:
            saved[name] = then

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
        problem = difference(optimizer, names, outline, f"at step {self._step}")
        groups = [_Group(group) for group in outline["param_groups"]]
        state = dict(outline["state"])
        lacking = [name for name in names if name not in saved]
        for name in lacking:
            other = self._holder(key, name, len(groups))
            if other is None:
                raise self._other(key, problem)
            if name in other["state"]:
                state[name] = other["state"][name]
            for group, its in zip(groups, other["param_groups"], strict=True):
                group.adopt(its, name)
        for name in saved - now:
            self.absent[f"{key}/{name}"] = str(self._other(key, problem))
        return {
            **outline,
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

    @property
    def _step(self) -> int:
        return self.checkpoint.manifest.step

    def _mapping(self, key: str, kind: str, value: Any) -> Mapping[str, Any]:
        outline = self._outline(key, self.checkpoint.source_rank)
        needs = "param_groups" if kind == "optimizer" else None
        if not isinstance(outline, Mapping) or (needs is not None and needs not in outline):
            raise StateMismatch(
                f"{key} is of another kind in step {self._step} and a {type(value).__name__} now; "
                f"name the {kind} that was saved, or start a new job with another --dir"
            )
        return outline

    def _other(self, key: str, problem: str) -> StateMismatch:
        return StateMismatch(
            f"{key} {problem}; build it as it was, or start a new job with another --dir"
        )

    def _outline(self, key: str, rank: int) -> Any:
        if (key, rank) not in self._outlines:
            found = self.checkpoint.outline(key, rank)
            self._outlines[key, rank] = found
        return self._outlines[key, rank]

    def _other_ranks(self, name: str) -> Iterator[int]:
        """The ranks whose small state may name this tensor: first those that wrote it."""
        manifest, source = self.checkpoint.manifest, self.checkpoint.source_rank
        likely: list[int] = []
        for tensor, entry in manifest.tensors.items():
            if tensor == name or (name.endswith(".") and tensor.startswith(name)):
                files = [FILE_NAME.match(chunk.file) for chunk in entry.chunks]
                likely += [int(match[1]) for match in files if match]
        ranks = dict.fromkeys([*sorted(likely), *range(manifest.world_size)])
        yield from (rank for rank in ranks if rank != source and rank < manifest.world_size)

    def _fill_slots(self, saved: Any, parameter: torch.Tensor, live: Any) -> Any:
        """One parameter's state; an optimizer that has stepped before is filled where it lies."""
        if not isinstance(saved, dict) or not isinstance(live, Mapping):
            return self._fill(saved, parameter)
        found = {}
        for slot, leaf in saved.items():
            now = live.get(slot)
            if (
                isinstance(leaf, Leaf)
                and isinstance(now, torch.Tensor)
                and _is_memory_for(leaf, now, parameter)
                and _storage(now) not in self._taken  # shared with another state or a parameter
            ):
                self._taken.add(_storage(now))
                self.targets.append((leaf.name, now.detach()))
                found[slot] = now
            else:
                found[slot] = self._fill(leaf, parameter)
        return found

    def _fill(self, outline: Any, like: Any = None) -> Any:
        return replace(outline, Leaf, lambda leaf: self._want(leaf, like))

    def _want(self, leaf: Leaf, like: Any = None) -> torch.Tensor:
        """New memory for a tensor; a part of it if ``like`` is spread and has its shape."""
        if not isinstance(like, torch.Tensor) or tuple(like.shape) != leaf.shape:
            like = None
        tensor = fresh(leaf.shape, leaf.dtype, like)
        self.targets.append((leaf.name, tensor))
        return tensor


def _is_memory_for(leaf: Leaf, now: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a state's live tensor is what new memory for it would be."""
    spread = is_spread(parameter) and tuple(parameter.shape) == leaf.shape
    return (
        (tuple(now.shape), now.dtype, is_spread(now)) == (leaf.shape, leaf.dtype, spread)
        and _local(now).is_contiguous()
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


def _ignore(_: Any) -> None:
    """load_state_dict says which keys did not fit; with strict it has raised instead."""


def fills_in_place(model: torch.nn.Module, live: Mapping[str, Any]) -> bool:
    """Whether filling the tensors of ``live`` is all that load_state_dict would do.

    Args:
        model: a module.
        live: its state_dict.
    """
    own = {_storage(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    return all(map(_is_torchs_own, model.modules())) and all(
        isinstance(tensor, torch.Tensor)
        and _storage(tensor) in own  # a copy, as FSDP1 gives, would be filled in vain
        and torch._debug_has_internal_overlap(_local(tensor)) != 1
        for tensor in live.values()
    )


def _storage(tensor: torch.Tensor) -> int:
    return int(_local(tensor).untyped_storage().data_ptr())


def _local(tensor: torch.Tensor) -> Any:
    local: Any = tensor.detach()
    return local.to_local() if is_spread(tensor) else local


def _is_torchs_own(module: torch.nn.Module) -> bool:
    """Whether a module keeps, takes and gives its state as torch.nn wrote it."""
    kind = type(module)
    for name in _METHODS:
        if name in vars(module) or not _from_torch(getattr(kind, name)):
            return False
    hooks = [hook for name in _HOOKS for hook in getattr(module, name).values()]
    return all(_from_torch(getattr(hook, "hook", hook)) for hook in hooks)


def _from_torch(function: Any) -> bool:
    room = str(getattr(function, "__module__", ""))
    return room.startswith("torch.") and not room.startswith("torch.ao.")
