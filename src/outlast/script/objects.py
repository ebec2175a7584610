"""The named objects of a session as one state tree, what is saved of it, and back.

A model is unwrapped from DDP, SameBits and torch.compile first, so that a checkpoint does not
depend on how the model was wrapped; an optimizer's state goes under its parameters' names.

The wrappers tell whether a resume will have the same bits, and if not, why (``Bits``). With three
workers or more, torch's DDP lays out its buckets anew after its first iteration, so that the first
step after a resume sums in another order than it would have undisturbed. A wrapper that was not
named is found by the parameters that it holds; one that is made later than the session is entered
is not.

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
import gc
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
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
from outlast.ledger.narrator import say
from outlast.reduce import SameBits, same_bits
from outlast.reduce.same_bits import difference
from outlast.script import modules
from outlast.script.modules import ModelState, is_stock
from outlast.script.restore import Restore

DDP: Final = torch.nn.parallel.DistributedDataParallel
WHERE: Final = "See docs/same-bits.md"


class Bits:
    """What the wrappers of a session's models promise.

    Args:
        wrappers: modules that were taken off: SameBits, DDP, others.
        models: what was inside of them, and those that came without.
    """

    def __init__(
        self,
        wrappers: Iterable[torch.nn.Module] = (),
        models: Iterable[torch.nn.Module] = (),
    ) -> None:
        wrappers = list(wrappers)
        self._ddp = [each for each in wrappers if isinstance(each, DDP)]
        self._models = list(models)
        named = [each for each in wrappers if isinstance(each, SameBits)]
        self._same = named or _around(self._models, list(same_bits.living))

    @property
    def any_size(self) -> bool:
        """Whether the bits are meant to be the same at any number of workers."""
        return bool(self._same)

    def facts(self) -> list[dict[str, str]]:
        """What they depend on; goes into each checkpoint."""
        return [each.facts for each in self._same]

    def tell_at_start(self, rank: int, world_size: int) -> None:
        """Say what will not be the same after a resume, and the remedy."""
        if rank or world_size < 3:
            return
        # As torch's Reducer::should_rebuild_buckets has it.
        found = [
            each
            for each in (*self._ddp, *_around(self._models, _ddp_objects()))
            if each.static_graph or not each.find_unused_parameters
        ]
        if found:
            more = " and no static_graph" if any(each.static_graph for each in found) else ""
            say(
                f"DDP on {world_size} workers sums in another order in the first step after a "
                f"resume; for the same bits give it find_unused_parameters=True{more}, or use "
                f"outlast.SameBits in its place. {WHERE}"
            )

    def tell_of_resume(
        self, saved: Iterable[Mapping[str, Any]], rank: int, saved_by: int, world_size: int
    ) -> None:
        """Say what is not as it was when the checkpoint was written.

        Args:
            saved: the facts then.
            rank: this worker's.
            saved_by: the number of workers then.
            world_size: the number of workers now.
        """
        if rank:
            return
        found = next(filter(None, map(difference, saved, self.facts())), "")
        if found:
            say(f"the run's bits may differ from here on: other {found} than before. {WHERE}")
        elif world_size != saved_by and not self.any_size:
            say(
                f"resumed with {world_size} in place of {saved_by} workers: random numbers "
                "and sums of gradients are not those of an undisturbed run"
            )


def _around(models: Iterable[torch.nn.Module], wrappers: Iterable[Any]) -> list[Any]:
    """Those of the wrappers that hold a parameter of ``models``."""
    ours = {id(parameter) for model in models for parameter in model.parameters()}
    return [each for each in wrappers if any(id(p) in ours for p in each.parameters())]


def _ddp_objects() -> list[torch.nn.parallel.DistributedDataParallel]:
    """Of this process.

    DDP keeps no list of them, so the garbage collector is asked: some tens of milliseconds, once.
    """
    kinds = [DDP]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return [each for each in gc.get_referrers(*kinds) if isinstance(each, DDP)]


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
        wrappers: list[torch.nn.Module] = []
        for name, value in named.items():
            if name == OWN or "@" in name or "." in name:  # with a dot, a tensor of another object
                raise ConfigError(f"{name!r} is a name that outlast keeps for itself; use another")
            if callable(getattr(value, "state_dict", None)) and callable(
                getattr(value, "load_state_dict", None)
            ):
                self._stateful[name] = _unwrapped(value, wrappers)
            elif isinstance(value, Iterable) and not isinstance(value, torch.Tensor | str | bytes):
                self.loaders.append(value)  # its position is kept by steps()
            else:
                raise ConfigError(
                    f"{name} is a {type(value).__name__} without state_dict and load_state_dict; "
                    "wrap it in an object that has both, or leave it out if it does not change"
                )
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
        return state

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
                    said += modules.put(name, value, state[name])
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


def _unwrapped(value: Any, wrappers: list[torch.nn.Module]) -> Any:
    """What is inside of DDP, SameBits and torch.compile; ``wrappers`` gets what is around it."""
    while isinstance(value, torch.nn.Module):
        inner = getattr(value, "_orig_mod", None)
        if isinstance(value, torch.nn.parallel.DistributedDataParallel | SameBits):
            inner = value.module
        if inner is None:
            break
        wrappers.append(value)
        value = inner
    return value


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
