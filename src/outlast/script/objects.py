"""The named objects of a session as one state tree, what is saved of it, and back.

A model is unwrapped from DDP, SameBits and torch.compile first, so that a checkpoint does not
depend on how the model was wrapped; an optimizer's state goes under its parameters' names.

A model is asked for its ``state_dict`` at each save (``ModelState``). torch walks the modules anew
each time, which at a step boundary is a good part of what a save costs the loop. Where nothing but
stock modules without hooks is found, that walk has one outcome while the modules hold the same
names, and then only the tensors are collected. Every dict that torch's walk reads is compared;
whatever else there is goes torch's way.

What is saved at a boundary (``States``): plain data, tensors, and how to treat each. Tensors that
only the optimizers change may be copied behind the loop's back (``Lazy``). They are the parameters
of models that an optimizer works on, frozen ones too, and the state that the optimizers keep for
them. Everything else (buffers, averages, schedulers, scalers) changes whenever it likes, and is
copied at the boundary. What this judges wrongly is found by the capture (a tensor that changed
under the copy) and not judged so again.

What is told of tensors (which may be copied later, in which order, which may lose bits) is worked
out once and kept: it costs more than a save may block, and it does not change until the tensors do,
as when an optimizer makes its state in its first step.
"""

from __future__ import annotations

import difflib
import itertools
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch.nn import Module
from torch.optim.optimizer import register_optimizer_step_pre_hook

from outlast.checkpoint import writers
from outlast.checkpoint.attributes import Attributes, parameters_of
from outlast.checkpoint.manifest import FULL
from outlast.checkpoint.optimizers import (
    load_named_state,
    named_state,
    names_by_id,
    parameter_names,
)
from outlast.checkpoint.plan import OWN
from outlast.checkpoint.reader import Checkpoint
from outlast.checkpoint.tree import Flattener, mark_narrow, names_in_parts
from outlast.config import Settings
from outlast.errors import ConfigError, StateMismatch
from outlast.fleet import local_updates
from outlast.fleet.local_updates import LocalUpdates
from outlast.reduce.same_bits import Bits, unwrapped
from outlast.script.restore import Restore, put

# --- a model's state, as often as it is asked for -------------------------------------------------

_TABLES: Final = ("_parameters", "_buffers", "_modules")
_STOCK: Final = ("state_dict", "_save_to_state_dict", "get_extra_state")
_READ: Final = operator.itemgetter(  # what Module.state_dict reads of a module
    *_TABLES,
    *("_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks"),
)
_chain: Final = itertools.chain.from_iterable


class ModelState:
    """The state of one model, as often as it is asked for.

    Args:
        model: of any kind.
    """

    def __init__(self, model: Module) -> None:
        self._model = model
        self._walk: _Walk | None = None

    def __call__(self) -> Any:
        """What ``state_dict`` returns; tensors are the live ones, parameters are parameters."""
        if self._walk is not None:
            values = self._walk.again()
            if values is not None:
                return OrderedDict(zip(self._walk.names, values, strict=True))
        self._walk = None
        if not is_stock(self._model):
            return self._model.state_dict()
        with torch.no_grad():  # whoever copies detaches, more cheaply than a DTensor does
            state = self._model.state_dict(keep_vars=True)
        self._walk = _learn(self._model, state)
        return state

    def walked(self) -> tuple[list[str], list[Any]] | None:
        """The names, the same list while they are the same ones, and what they stand for.

        None where the state has to be asked for.
        """
        values = self._walk.again() if self._walk is not None else None
        return None if self._walk is None or values is None else (self._walk.names, values)

    def places(self) -> list[tuple[dict[str, Any], str]]:
        """Of the same: which table of its module has it, and as what."""
        return [] if self._walk is None else self._walk.places()

    @property
    def is_known(self) -> bool:
        """Whether what was returned last has all parameters, each of them itself."""
        return self._walk is not None


def is_stock(model: Module) -> bool:
    """Whether the model's ``state_dict`` is torch's own."""
    return type(model).state_dict is Module.state_dict


class _Walk:
    """What torch's walk reads of these modules, and what it makes of it.

    Args:
        modules: in the order of the walk, one that is held twice twice.
        prefixes: of their names.
    """

    def __init__(self, modules: list[Module], prefixes: list[str]) -> None:
        self._modules = modules  # held on to: while one lives, no other module has its id
        self._dicts = [module.__dict__ for module in modules]
        self._read = list(map(_READ, self._dicts))  # held on to, so that an id is theirs alone
        self._ids = list(map(id, _chain(self._read)))
        parts = list(zip(*self._read, strict=True))
        parameters, buffers, self._children, self._skipped, *hooks = parts
        self._hooks = list(_chain(hooks))
        self._skips = list(map(set, self._skipped))
        self._tables = list(_chain(zip(parameters, buffers, strict=True)))
        self._keys = list(_chain(self._tables))
        values = list(_chain(map(dict.values, self._tables)))
        names, chosen = [], []
        at = 0
        for module, prefix in zip(modules, prefixes, strict=True):
            skipped = module._non_persistent_buffers_set
            own = [*module._parameters, *module._buffers]
            for name in own:
                if values[at] is not None and name not in skipped:
                    names.append(prefix + name)
                    chosen.append(at)
                at += 1
        self.names = names
        self._absent = [value is None for value in values]
        self._choose = chosen if len(chosen) < len(values) else None
        self._child_keys = list(_chain(self._children))
        self._child_ids = self._ids_of_children()

    def again(self) -> list[Any] | None:
        """The tensors, under ``names``; None if the walk would not be the same."""
        if (
            list(map(id, _chain(map(_READ, self._dicts)))) != self._ids
            or list(_chain(self._tables)) != self._keys
            or list(_chain(self._children)) != self._child_keys
            or self._ids_of_children() != self._child_ids
            or any(self._hooks)
            or any(map(operator.ne, self._skipped, self._skips))
        ):
            return None
        values = list(_chain(map(dict.values, self._tables)))
        if [value is None for value in values] != self._absent:
            return None
        return values if self._choose is None else [values[at] for at in self._choose]

    def places(self) -> list[tuple[dict[str, Any], str]]:
        """The dict that has each of them, and its key there."""
        every = [(table, key) for table in self._tables for key in table]
        return every if self._choose is None else [every[at] for at in self._choose]

    def _ids_of_children(self) -> list[int]:
        return list(map(id, _chain(map(dict.values, self._children))))


def _learn(model: Module, state: dict[str, Any]) -> _Walk | None:
    """The walk that made ``state``, if it is that of stock modules."""
    modules: list[Module] = []
    prefixes: list[str] = []

    def visit(module: Module, prefix: str) -> bool:
        own = module.__dict__
        if not all(isinstance(own.get(name), dict) for name in _TABLES):  # a scripted module
            return False
        if any(getattr(type(module), name) is not getattr(Module, name) for name in _STOCK):
            return False
        if any(name in own for name in _STOCK):
            return False
        modules.append(module)
        prefixes.append(prefix)
        children = module._modules.items()
        return all(child is None or visit(child, f"{prefix}{name}.") for name, child in children)

    if not visit(model, ""):
        return None
    walk = _Walk(modules, prefixes)
    values = walk.again()
    if values is None or walk.names != list(state):  # it has hooks, or what we did not think of
        return None
    return walk if all(map(operator.is_, values, state.values())) else None


# --- what a session was given by name -------------------------------------------------------------

ARGUMENTS: Final = ("dir", "every", "keep", "resume", "init_from", "init_except", "keep_new")
EXAMPLE: Final = "outlast.session(model=model, optimizer=optimizer)"


class Objects:
    """What a session was given by name.

    Args:
        named: name → anything with state_dict and load_state_dict; loaders may lack them.

    Attributes:
        loaders: those without state of their own.
        bits: what the models' wrappers promise.

    Raises:
        ConfigError: nothing to save, a name that is taken, an object without state.
    """

    def __init__(self, named: Mapping[str, Any]) -> None:
        self.loaders: list[Any] = []
        self._stateful: dict[str, Any] = {}
        self._known_names: dict[str, tuple[Any, list[str]]] = {}  # by optimizer, and for what
        self._restore: Restore | None = None
        self._waiting: list[Callable[[Mapping[str, Any]], None]] = []
        wrappers: list[torch.nn.Module] = []
        for name, value in named.items():
            if name == OWN or "@" in name or "." in name:  # with a dot, a tensor of another object
                raise ConfigError(f"{name!r} is a name that outlast keeps for itself; use another")
            if callable(getattr(value, "state_dict", None)) and callable(
                getattr(value, "load_state_dict", None)
            ):
                self._stateful[name] = unwrapped(value, wrappers)
            elif isinstance(value, Iterable) and not isinstance(value, torch.Tensor | str | bytes):
                self.loaders.append(value)  # its position is kept by steps()
            elif isinstance(value, str | int | float):
                raise ConfigError(
                    f"{name}={value!r} is neither an argument of a session nor an object to save; "
                    f"write: {EXAMPLE}"
                )
            else:
                raise ConfigError(
                    f"{name} is a {type(value).__name__} without state_dict and load_state_dict; "
                    "wrap it in an object that has both, or leave it out if it does not change"
                )
        self._put_last()
        models = self._models()
        self.bits = Bits(wrappers, models.values())
        self._model_states = {name: ModelState(model) for name, model in models.items()}
        self._attributes = {
            name: Attributes(value, names_by_id(value, self._names(value)), models.values())
            for name, value in self._stateful.items()
            if isinstance(value, torch.optim.Optimizer)
        }
        if not self._stateful:
            raise ConfigError(f"a session needs something to save, as in {EXAMPLE}")

    @property
    def stateful(self) -> Mapping[str, Any]:
        """Name → object that has state."""
        return self._stateful

    @property
    def models(self) -> Mapping[str, torch.nn.Module]:
        """Name → model, without what was wrapped around it."""
        return self._models()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those among them."""
        return [one for one in self._stateful.values() if isinstance(one, torch.optim.Optimizer)]

    @property
    def local_updates(self) -> list[LocalUpdates]:
        """Those among them."""
        return [one for one in self._stateful.values() if isinstance(one, LocalUpdates)]

    def _put_last(self) -> None:
        """Local updates take their state when their models have theirs: they may average them.

        Raises:
            ConfigError: one of the models' is not named, or its model is not.
        """
        ours = {id(parameter) for one in self._models().values() for parameter in one.parameters()}
        for each in local_updates.living:
            if each.trains(ours) and each not in self.local_updates:
                raise ConfigError(
                    "outlast.LocalUpdates has state that is to be saved; name it too: "
                    "outlast.session(model=model, optimizer=optimizer, local=local)"
                )
        for name, value in list(self._stateful.items()):
            if not isinstance(value, LocalUpdates):
                continue
            if not value.trains(ours) or value.optimizer not in self.optimizers():
                raise ConfigError(
                    f"{name} is an outlast.LocalUpdates, and a session without its model and its "
                    "optimizer cannot be resumed; name all three: "
                    "outlast.session(model=model, optimizer=optimizer, local=local)"
                )
            self._stateful[name] = self._stateful.pop(name)

    @property
    def model(self) -> torch.nn.Module | None:
        """The first model, if there is one."""
        return next(iter(self._models().values()), None)

    def forget_loader(self, loader: Any) -> None:
        """``steps`` keeps this loader's position: it is not saved a second time by its name."""
        self._stateful = {k: value for k, value in self._stateful.items() if value is not loader}

    @property
    def unasked(self) -> list[str]:
        """The names that ``capture`` without loaders leaves out."""
        return [name for name in self._stateful if self._may_be_absent(name)]

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
        state: dict[str, Any] = {}
        for name, value in self._stateful.items():
            if isinstance(value, torch.optim.Optimizer):
                state[name] = None  # its parameters' names are told from the models' states
            elif loaders or not self._may_be_absent(name):
                model = self._model_states.get(name)
                state[name] = model() if model is not None else value.state_dict()
        for name, value in self._stateful.items():
            if isinstance(value, torch.optim.Optimizer):
                names = self._names_again(name, value, state)
                try:
                    state[name] = named_state(value, names, self._attributes[name])
                except ConfigError as error:
                    raise ConfigError(f"{name}: {error}") from error
        waiting, self._waiting = self._waiting, []
        for look in waiting:
            look(state)
        return state

    def show(self, look: Callable[[Mapping[str, Any]], None]) -> None:
        """Have ``look`` see what is given next: name → state.

        One rank by itself asks no object: to give its state it may need the other ranks (a DTensor
        that is put together), which would not know of it. It sees what all ranks give together.
        """
        self._waiting.append(look)
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            self.capture(loaders=False)

    def walked(self, name: str) -> tuple[list[str], list[Any]] | None:
        """Of one model: what its state holds, if ``capture`` has shown how; else None."""
        model = self._model_states.get(name)
        return model.walked() if model is not None else None

    def places(self, name: str) -> list[tuple[dict[str, Any], str]]:
        """Of the same: the dict that has each of what was walked to, and its key there."""
        return self._model_states[name].places() if name in self._model_states else []

    def gone_through(self, state: Mapping[str, Any]) -> list[torch.Tensor] | None:
        """All tensors of the models, if what ``capture`` has just given holds all of them."""
        if not all(model.is_known for model in self._model_states.values()):
            return None
        return [tensor for name in self._model_states for tensor in state[name].values()]

    def check(self, loaded: Checkpoint) -> Restore:
        """See that a checkpoint fits, before anything is read or changed.

        Returns:
            What this session takes from it.

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
        restore = self._taken(loaded, saved)
        if OWN in loaded.data:
            restore.take(OWN)
        self._restore = restore
        return restore

    def _taken(self, loaded: Checkpoint, names: Collection[str]) -> Restore:
        """What the objects with these names take from a checkpoint that has them."""
        restore = Restore(loaded, f"step {loaded.manifest.step}")
        for name in self._stateful:
            if name in names:
                self.take(restore, name)
        return restore

    def take(self, restore: Restore, name: str, *, kept: Collection[str] = ()) -> None:
        """Have one object take what was saved under its name.

        Args:
            restore: from where.
            name: the object's.
            kept: of a model, names that stay as they are.

        Raises:
            StateMismatch: it does not fit.
        """
        value = self._stateful[name]
        if isinstance(value, torch.nn.Module):
            restore.take_model(name, value, kept=kept)
        elif isinstance(value, torch.optim.Optimizer):
            restore.take_optimizer(name, value, self._names(value), self._attributes[name])
        else:
            restore.take_object(name, value)

    def apply(self, loaded: Checkpoint) -> list[str]:
        """Give every object its state; ``check`` comes first, or is done now.

        Returns:
            What to say of it.

        Raises:
            StateMismatch: it does not fit, or an object refused its state.
        """
        restore, self._restore = self._restore, None  # what was read is the objects' from here on
        if restore is None or restore.checkpoint is not loaded:
            restore = self.check(loaded)
            self._restore = None
        restore.apply()
        return restore.remarks

    def apply_again(self, loaded: Checkpoint, names: Collection[str]) -> None:
        """Give some objects the state again that ``apply`` gave them; each rank by itself.

        Raises:
            StateMismatch: it does not fit any more, or an object refused its state.
            CheckpointInvalid, OSError: it cannot be read any more.
        """
        restore = self._taken(loaded, loaded.data.keys() & set(names))
        restore.settle(restore.absent.keys())  # they are other ranks': that was found at the start
        restore.apply()

    def put(self, state: Mapping[str, Any]) -> list[str]:
        """Give every object the state that ``capture`` gave elsewhere.

        Returns:
            What to say of it.

        Raises:
            StateMismatch: an object refused its state.
        """
        said: list[str] = []
        for name, value in self._stateful.items():
            if name not in state:
                continue
            try:
                if isinstance(value, torch.optim.Optimizer):
                    names = self._names(value)
                    load_named_state(value, names, state[name], name, self._attributes[name])
                elif isinstance(value, torch.nn.Module):
                    said += put(name, value, state[name])
                else:
                    value.load_state_dict(state[name])
            except StateMismatch:
                raise
            except Exception as error:  # whatever a load_state_dict of the script's does
                raise StateMismatch(
                    f"{name} does not take its state of the attempt before: "
                    f"{type(error).__name__}: {error}"
                ) from error
        return said

    def _names(self, optimizer: torch.optim.Optimizer) -> list[str]:
        return parameter_names(optimizer, self._models())

    def _models(self) -> dict[str, torch.nn.Module]:
        return {k: v for k, v in self._stateful.items() if isinstance(v, torch.nn.Module)}

    def _names_again(
        self, name: str, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> list[str]:
        """As ``_names``, worked out only where a model's state or a parameter is another one."""
        models = self._models()
        if not all(is_stock(model) for model in models.values()):
            return self._names(optimizer)
        key = (
            [list(state[model]) for model in models],
            [list(map(id, state[model].values())) for model in models],
            [list(map(id, group["params"])) for group in optimizer.param_groups],
        )
        known = self._known_names.get(name)
        if known is None or known[0] != key:
            known = self._known_names[name] = key, parameter_names(optimizer, models)
        return known[1]


def refuse_misspelt(named: Mapping[str, Any]) -> None:
    """What looks like an argument of ``session`` is not taken for an object to save.

    Raises:
        ConfigError: names the argument.
    """
    for name, value in named.items():
        close = difflib.get_close_matches(name, ARGUMENTS, n=1)
        if close and isinstance(value, str | int | float | tuple | list | Path):
            raise ConfigError(f"{name} is not an argument; did you mean {close[0]}?")


def refuse_unnamed(objects: Sequence[Any]) -> None:
    """Objects are given by name: the names are the checkpoint's keys.

    Raises:
        ConfigError: some are not; shows how it is written.
    """
    if objects:
        kinds = ", ".join(type(value).__name__ for value in objects)
        raise ConfigError(
            f"a session takes its objects by name, not {kinds} alone; write: {EXAMPLE}"
        )


# --- what is saved at a boundary ------------------------------------------------------------------

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
    """Says which tensors of some objects may be copied later.

    Args:
        objects: name → object.
        tensors: name → tensor of their states.
        inner: names of those that are parts of a tensor of a subclass.

    Attributes:
        names: of tensors that may be copied later.
        order: name → when the optimizers will touch it.
        moments: names of fp32 moments, which may be stored in fewer bits.
        own: names of those that differ from rank to rank.
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
            if isinstance(value, torch.nn.Module):
                parameters = dict(value.named_parameters(remove_duplicate=False))
                if not any(id(parameter) in turn for parameter in parameters.values()):
                    continue
                for name, parameter in parameters.items():
                    self.order[f"{key}.{name}"] = turn.get(id(parameter), last)
            elif isinstance(value, LocalUpdates):  # acts behind an optimizer's step
                self.order |= {one: last for one in tensors if one.startswith(f"{key}.")}
        self.own = frozenset(self._own(objects, tensors))
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

    def _own(self, objects: Mapping[str, Any], tensors: Iterable[str]) -> list[str]:
        """Names of tensors of which each replica of local updates has its own."""
        starts: list[str] = []
        for key, value in objects.items():
            if not isinstance(value, LocalUpdates):
                continue
            starts.append(f"{key}.{local_updates.OWN}.")
            for other, one in objects.items():
                held: Iterable[torch.Tensor] = ()
                if isinstance(one, torch.nn.Module):
                    held = one.parameters()
                elif isinstance(one, torch.optim.Optimizer):  # not only the one that is counted
                    held = parameters_of(one)
                if value.trains(set(map(id, held))):
                    starts.append(f"{other}.")
        return [name for name in tensors if name.startswith(tuple(starts))] if starts else []

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
        own: names of tensors that are known to differ from rank to rank.
        kind: "full" or "weights".
    """

    step: int
    data: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    lazy: frozenset[str]
    order: Mapping[str, int]
    narrow: frozenset[str] = frozenset()
    own: frozenset[str] = frozenset()
    kind: str = FULL


class States:
    """Makes what is saved at each boundary, one after the other.

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
        for key, value in state.items():
            # Weights alone: neither optimizers nor what local updates keep beside the model.
            is_weight = not isinstance(objects.get(key), torch.optim.Optimizer | LocalUpdates)
            if kind == FULL or is_weight:
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
            own=self._lazy.own,
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
    """A hook on torch that stands until it is removed.

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
    before: Callable[[torch.optim.Optimizer], None],
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

    def called(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            graphed()
        else:
            before(optimizer)

    # torch.compile must call it each time, not look into it once. Where nobody has an optimizer
    # yet, asking for that would cost a second.
    if "torch._dynamo" in sys.modules:
        called = torch.compiler.disable(called, reason=FULLGRAPH)
    return Hook(register_optimizer_step_pre_hook(called).remove, writers.watch_graphs(replayed))
