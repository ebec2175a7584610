"""Hyperparameters: what the script says, what the checkpoint says, and which of them counts.

A resume gives optimizers and schedulers the state that was saved, hyperparameters and all: a
learning rate that was changed in the script would be passed over without a word. So what the script
has set is noted where the session opens (each entry of ``param_groups``, each plain
attribute of a scheduler), kept in every checkpoint, and compared with what the next run's script
sets. The two sides are both from before training: what a scheduler makes of the learning rate on
its way is no difference.

The checkpoint's value counts, and one line says so. ``keep_new`` names those of which the script's
counts; from then on it is what the checkpoints hold as set, so that a later resume without
``keep_new`` does not fall back.

A learning rate that is kept new: the one that the schedule begins with is the script's
(``initial_lr``, and ``base_lrs`` of the schedulers on that optimizer), and the present one is
multiplied by new / old. With schedules that multiply (step, exponential, lambda, cosine down to 0)
the run goes on as if it had begun with the new one; others go on from there in their own way.
OneCycleLR and CyclicLR compute the rate anew at each step, from a highest one and a lowest one:
these go with the rate, and the present one is computed from them. Any other hyperparameter is
replaced, and counts from the next step on.

What can go wrong: values that are no plain data (functions, lambdas) are the script's always.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedulers

from outlast.errors import ConfigError

_LR: Final = "lr"
_INITIAL: Final = "initial_lr"
_BASES: Final = "base_lrs"
_NESTED: Final = "_schedulers"  # of SequentialLR and ChainedScheduler
_NO_SETTING: Final = frozenset({"params", "param_names", _INITIAL})
# What torch's schedulers count, or work out of what is a setting.
_PROGRESS: Final = frozenset(
    {
        *("last_epoch", "_step_count", "_last_lr", "_initial_step", "_is_initial", _NESTED),
        *("_get_lr_called_within_step", "T_cur", "T_i", "best", "num_bad_epochs"),
        *("cooldown_counter", "mode_worse", "optimizer"),
    }
)
# What OneCycleLR and CyclicLR change besides the learning rate, in checkpoints without settings.
_CYCLED: Final = frozenset({"momentum", "betas"})
# What a scheduler computes from besides → the setting that it was worked out from. Kept alone, that
# setting would have no effect on the next step, so these go with it.
_WITH_RATE: Final = frozenset({"max_lr", "min_lr", "max_lrs", "base_values"})
_WITH: Final = {"_schedule_phases": "total_steps"}
_CLOSED: Final = (schedulers.OneCycleLR, schedulers.CyclicLR)  # the rate of a step, from its number
_SHOWN: Final = 48  # characters of a value
_GROUPS_SHOWN: Final = 4


class _NotPlain(Exception):
    pass


class _Hyperparameter(NamedTuple):
    """One hyperparameter.

    Attributes:
        name: as people write it, as in ``optimizer.lr``.
        key: the session's name of the object.
        holder: an optimizer, or a scheduler that is that object or in it.
        attribute: of each of its groups, or of the scheduler.
        values: of the script, as plain data: one for each group.
        given: the same as the script made them.
    """

    name: str
    key: str
    holder: Any
    attribute: str
    values: list[Any]
    given: list[Any]


class Hyperparameters:
    """Those of a session's optimizers and schedulers, as the script has set them.

    Args:
        stateful: the session's objects, before anything was restored.
        keep_new: names of those that stay as the script has set them.

    Raises:
        ConfigError: ``keep_new`` names what there is not.
    """

    def __init__(self, stateful: Mapping[str, Any], keep_new: str | Sequence[str] = ()) -> None:
        self._stateful = stateful
        self._settings = {one.name: one for one in _settings_in(stateful)}
        self._keep = (keep_new,) if isinstance(keep_new, str) else tuple(keep_new)
        for name in self._keep:
            if name not in self._settings:
                there = ", ".join(self._settings) or "none"
                raise ConfigError(f"keep_new names {name!r}; the hyperparameters are: {there}")
        self._set = {name: one.values for name, one in self._settings.items()}
        self._acts: list[tuple[str, Callable[[], None]]] = []
        self._told: dict[str, list[Any]] | None = None

    def state(self) -> Mapping[str, list[Any]]:
        """Name → what the run was set to, for the checkpoint; where all groups agree, once."""
        if self._told is None:
            self._told = {
                name: values[:1] if all(_is_same(one, values[0]) for one in values) else values
                for name, values in self._set.items()
            }
        return self._told

    def resumed(self, saved: Mapping[str, list[Any]] | None) -> list[str]:
        """The objects have what was saved: keep what is to be kept, and see what else differs.

        Args:
            saved: what ``state`` gave; None of a checkpoint without.

        Returns:
            What to say.
        """
        then = dict(saved) if saved is not None else self._as_loaded()
        return self._compare(then, self._act_of)

    def started(self, keys: Collection[str]) -> list[str]:
        """The same for objects of a new job that were given a state from elsewhere."""
        then = {
            one.name: _plain_values(one.holder, one.attribute, initial=False)
            for one in self._settings.values()
            if one.key in keys
        }
        return self._compare(then, lambda one, _: [(one.key, functools.partial(_put_given, one))])

    def put(self, keys: Collection[str]) -> None:
        """These objects have what was saved once more: keep again what is to be kept."""
        for key, act in self._acts:
            if key in keys:
                act()

    # --- inside ------------------------------------------------------------------------------

    def _compare(
        self,
        then: Mapping[str, list[Any]],
        act_of: Callable[[_Hyperparameter, list[Any]], list[tuple[str, Callable[[], None]]]],
    ) -> list[str]:
        kept, others, names = [], [], list(self._keep)
        differing = {
            name: (one, old)
            for name, one in self._settings.items()
            if (old := _of_each(then.get(name) or [], one)) is not None
        }
        for name, (one, old) in differing.items():
            leader = self._leader_of(one)
            words = _difference(one, old) + self._followers_of(name, differing)
            is_told = leader not in differing
            if name in self._keep or leader in self._keep:
                self._acts += act_of(one, old)
                if is_told:
                    kept.append(f"{words}: the script's is used (keep_new)")
                continue
            self._set[name], self._told = old, None
            # An object that a session before has trained holds what it was saved with.
            holds_old = not all(map(_is_same, _plain_values(one.holder, one.attribute), one.values))
            if holds_old and is_told:
                names.append(name)
                others.append(f"{words}: the checkpoint's is used")
        self.put([key for key, _ in self._acts])
        if others:
            quoted = ", ".join(f'"{name}"' for name in names)
            takes = f"outlast.session(…, keep_new=({quoted},)) takes the script's"
            others = [f"{others[0]}; {takes}"] if len(others) == 1 else [*others, takes]
        return [*kept, *others]

    def _leader_of(self, one: _Hyperparameter) -> str:
        """The setting that this one goes with; "" where it stands for itself."""
        holder, leader = one.holder, ""
        if one.attribute in _WITH:
            leader = one.name.removesuffix(one.attribute) + _WITH[one.attribute]
        elif one.attribute in _WITH_RATE:
            optimizer = holder if isinstance(holder, Optimizer) else holder.optimizer
            on_it = [scheduler for _, scheduler in self._schedulers_of(optimizer)]
            if holder is not optimizer or any(
                isinstance(it, schedulers.OneCycleLR) for it in on_it
            ):
                names = (key for key, value in self._stateful.items() if value is optimizer)
                leader = f"{next(names, '')}.{_LR}"
        is_named_alone = one.name in self._keep and leader not in self._keep
        return leader if leader in self._settings and not is_named_alone else ""

    def _followers_of(self, name: str, differing: Mapping[str, tuple[_Hyperparameter, Any]]) -> str:
        """In words, what goes with a setting."""
        found = [one.name for one, _ in differing.values() if self._leader_of(one) == name]
        if not found:
            return ""
        return f" ({' and '.join(found)} {'go' if len(found) > 1 else 'goes'} with it)"

    def _act_of(self, one: _Hyperparameter, old: list[Any]) -> list[tuple[str, Callable[[], None]]]:
        """What keeps a setting, and of which object it changes what was restored."""
        is_rate = one.attribute == _LR and isinstance(one.holder, Optimizer)
        acts: list[tuple[str, Callable[[], None]]] = []
        if is_rate:
            acts = [
                (one.key, functools.partial(_put_rate, one, old)),
                *(
                    (key, functools.partial(_put_bases, scheduler, one, old))
                    for key, scheduler in self._schedulers_of(one.holder)
                ),
            ]
        else:
            acts = [(one.key, functools.partial(_put_given, one))]
        if is_rate or one.attribute in _WITH_RATE:
            acts += self._recomputing(one.holder)
        return acts

    def _recomputing(self, holder: Any) -> Iterator[tuple[str, Callable[[], None]]]:
        """What computes the present rate anew, whichever of the two objects was restored."""
        optimizer = holder if isinstance(holder, Optimizer) else holder.optimizer
        on_it = [(key, one) for key, one in self._schedulers_of(optimizer)]
        if len(on_it) == 1 and isinstance(on_it[0][1], _CLOSED):
            key, scheduler = on_it[0]
            keys = {key, *(name for name, value in self._stateful.items() if value is optimizer)}
            yield from ((name, functools.partial(_put_computed, scheduler)) for name in keys)

    def _schedulers_of(self, optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
        for key, value in self._stateful.items():
            for _, scheduler in _schedulers_in(key, value):
                if scheduler.optimizer is optimizer:
                    yield key, scheduler

    def _as_loaded(self) -> dict[str, list[Any]]:
        """What a checkpoint without settings says, as far as training does not change that."""
        found = {}
        for one in self._settings.values():
            if isinstance(one.holder, Optimizer):
                is_scheduled = any(True for _ in self._schedulers_of(one.holder)) or any(
                    _INITIAL in group for group in one.holder.param_groups
                )
                groups = one.holder.param_groups
                if one.attribute == _LR and is_scheduled and not all(_INITIAL in g for g in groups):
                    continue
                if one.attribute in _CYCLED and is_scheduled:
                    continue
            elif not type(one.holder).__module__.startswith("torch.optim."):
                continue
            found[one.name] = _plain_values(one.holder, one.attribute)
        return found


# --- what there is --------------------------------------------------------------------------------


def _settings_in(stateful: Mapping[str, Any]) -> Iterator[_Hyperparameter]:
    optimizers = [value for value in stateful.values() if isinstance(value, Optimizer)]
    for key, value in stateful.items():
        if isinstance(value, Optimizer):
            names = dict.fromkeys(name for group in value.param_groups for name in group)
            for attribute in names:
                if attribute not in _NO_SETTING:
                    yield from _setting(f"{key}.{attribute}", key, value, attribute)
        for name, scheduler in _schedulers_in(key, value):
            state = scheduler.state_dict()
            for attribute in vars(scheduler) if isinstance(state, Mapping) else ():
                if attribute not in state:
                    continue
                if attribute in _PROGRESS or _follows(scheduler, attribute, optimizers):
                    continue
                yield from _setting(f"{name}.{attribute}", key, scheduler, attribute)


def _setting(name: str, key: str, holder: Any, attribute: str) -> Iterator[_Hyperparameter]:
    """The setting, where it is plain data, and each group has it."""
    values = _plain_values(holder, attribute)
    if values:
        given = [copy.deepcopy(one) for one in _given_values(holder, attribute)]
        yield _Hyperparameter(name, key, holder, attribute, values, given)


def _schedulers_in(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A scheduler, and those in it, by their names."""
    is_data = not isinstance(value, torch.nn.Module | Optimizer)
    if is_data and isinstance(getattr(value, "optimizer", None), Optimizer):
        yield name, value
        for number, inner in enumerate(getattr(value, _NESTED, ())):
            yield from _schedulers_in(f"{name}.{_NESTED}.{number}", inner)


def _follows(scheduler: Any, attribute: str, optimizers: Sequence[Optimizer]) -> bool:
    """Whether these are the learning rates that the optimizer's groups begin with."""
    optimizer = scheduler.optimizer
    if attribute != _BASES or not any(optimizer is one for one in optimizers):
        return False
    with contextlib.suppress(_NotPlain):
        return all(
            map(_is_same, _plain(scheduler.base_lrs), _plain_values(optimizer, _LR))
        ) and len(scheduler.base_lrs) == len(optimizer.param_groups)
    return False


def _given_values(holder: Any, attribute: str) -> list[Any]:
    if isinstance(holder, Optimizer):
        return [group[attribute] for group in holder.param_groups]
    return [getattr(holder, attribute)]


def _plain_values(holder: Any, attribute: str, *, initial: bool = True) -> list[Any]:
    """As plain data, one for each group; none where it is no such data, or not in each.

    Of the learning rate it is the one that the schedule begins with, if ``initial``.
    """
    try:
        if not isinstance(holder, Optimizer):
            return [_plain(getattr(holder, attribute))]
        is_rate = initial and attribute == _LR
        return [
            _plain(group[_INITIAL if is_rate and _INITIAL in group else attribute])
            for group in holder.param_groups
        ]
    except (_NotPlain, KeyError, AttributeError):
        return []


def _plain(value: Any) -> Any:
    """A value as what can be compared and saved: numbers, strings, lists of them."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        number = value.item()
        # A rate of 0.1 is not to differ from 0.1 for the bits that float32 does not have.
        return float(str(np.float32(number))) if value.dtype == torch.float32 else number
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple):
        return [_plain(one) for one in value]
    if type(value) in (dict, collections.Counter):
        return [[_plain(name), _plain(one)] for name, one in value.items()]
    raise _NotPlain


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other) or (one != one and other != other)  # noqa: PLR0124 - NaN


# --- what is put ----------------------------------------------------------------------------------


def _put_given(one: _Hyperparameter) -> None:
    """The script's value takes the place of the checkpoint's."""
    if not isinstance(one.holder, Optimizer):
        setattr(one.holder, one.attribute, copy.deepcopy(one.given[0]))
        return
    for group, value, initial in zip(one.holder.param_groups, one.given, one.values, strict=True):
        _put(group, one.attribute, value)
        if one.attribute == _LR and _INITIAL in group:
            _put(group, _INITIAL, initial)


def _put_rate(one: _Hyperparameter, old: Sequence[Any]) -> None:
    """The schedule begins with the script's rate, and is now where it would be with that."""
    groups = one.holder.param_groups
    rates = _all_scaled([group[_LR] for group in groups], one, old)
    for group, rate, now in zip(groups, rates, one.values, strict=True):
        _put(group, _LR, rate)
        if _INITIAL in group:
            _put(group, _INITIAL, now)


def _put_bases(scheduler: Any, one: _Hyperparameter, old: Sequence[Any]) -> None:
    """The same for what a scheduler keeps of it."""
    bases, last = (getattr(scheduler, name, None) for name in (_BASES, "_last_lr"))
    if isinstance(bases, list) and _is_same(_plain(bases), list(old)):
        for number, now in enumerate(one.values):
            _put(bases, number, now)
    if isinstance(last, list) and len(last) == len(old):
        for number, rate in enumerate(_all_scaled(last, one, old)):
            _put(last, number, rate)


def _put_computed(scheduler: Any) -> None:
    """The present rate is the one that the schedule has at this step."""
    # Past its last step it has none: the rate stays as it is.
    with warnings.catch_warnings(), contextlib.suppress(ValueError):
        warnings.simplefilter("ignore")  # that this is for step() to ask
        rates = [_plain(rate) for rate in scheduler.get_lr()]
        for number, (group, rate) in enumerate(
            zip(scheduler.optimizer.param_groups, rates, strict=True)
        ):
            _put(group, _LR, rate)
            _put(scheduler._last_lr, number, rate)


def _all_scaled(present: Sequence[Any], one: _Hyperparameter, old: Sequence[Any]) -> list[float]:
    """All of them before any is put: groups may share one tensor."""
    return [_scaled(*each) for each in zip(map(_plain, present), old, one.values, strict=True)]


def _scaled(present: float, then: float, now: float) -> float:
    """A rate of a schedule that began with ``then``, had it begun with ``now``."""
    return now if present == then or not then else present * now / then


def _put(container: Any, key: Any, value: Any) -> None:
    """Into the tensor that is there, if it is one."""
    live = container[key]
    if isinstance(live, torch.Tensor):
        with torch.no_grad():
            live.fill_(float(value))
    else:
        container[key] = copy.deepcopy(value)


# --- words ----------------------------------------------------------------------------------------


def _of_each(old: list[Any], one: _Hyperparameter) -> list[Any] | None:
    """The checkpoint's values, one for each group; None where it has none, or the same."""
    if len(old) == 1:
        old = old * len(one.values)
    is_there = len(old) == len(one.values)
    return None if not is_there or all(map(_is_same, old, one.values)) else old


def _difference(one: _Hyperparameter, old: Sequence[Any]) -> str:
    """As in "optimizer.lr is 0.1 in the checkpoint and 0.5 in the script"."""
    pairs = list(zip(old, one.values, strict=True))
    other = [number for number, pair in enumerate(pairs) if not _is_same(*pair)]
    first, count = other[0], len(pairs)
    if count == 1 or (len(other) == count and all(_is_same([*p], [*pairs[0]]) for p in pairs)):
        where = f" in all {count} groups" if count > 1 else ""
        return _sides(one.name, *pairs[0]) + where
    if count <= _GROUPS_SHOWN and all(len(repr(value)) <= _SHOWN for p in pairs for value in p):
        then, now = (", ".join(map(_short, side)) for side in zip(*pairs, strict=True))
        return (
            f"{one.name} of the {count} groups is {then} in the checkpoint and {now} in the script"
        )
    more = f", and it differs in {len(other) - 1} more" if len(other) > 1 else ""
    return f"{_sides(f'{one.name} of group {first}', *pairs[first])}{more} (of {count} groups)"


def _sides(name: str, then: Any, now: Any) -> str:
    """Both values; of two long ones the first part in which they differ."""
    path = ""
    while _is_mapping(then) or max(len(_short(then)), len(_short(now))) > _SHOWN:
        inner = _first_other(then, now)
        if inner is None:
            break
        part, then, now = inner
        path += part
    return f"{name}{path} is {_cut(then)} in the checkpoint and {_cut(now)} in the script"


def _first_other(then: Any, now: Any) -> tuple[str, Any, Any] | None:
    """The first part of two collections that differs, and how it is called."""
    if not isinstance(then, list) or not isinstance(now, list) or len(then) != len(now):
        return None
    for number, (one, other) in enumerate(zip(then, now, strict=True)):
        if not _is_same(one, other):
            if _is_named(one) and _is_named(other) and one[0] == other[0]:
                return f".{one[0]}", one[1], other[1]
            return f"[{number}]", one, other
    return None


def _is_named(value: Any) -> bool:
    """Whether this looks like an entry of a mapping, as ``_plain`` writes it."""
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_named, value))


def _short(value: Any) -> str:
    return f"({', '.join(map(_short, value))})" if isinstance(value, list) else repr(value)


def _cut(value: Any) -> str:
    text = _short(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
