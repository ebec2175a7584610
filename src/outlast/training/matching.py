"""The names of a model beside those that a file offers, whatever they are nested or wrapped in.

A name is found behind a prefix (``model.``, ``state_dict.``, the object's name in the session, a
Lightning module's attribute): the one behind which most of the model's names are. What wrappers put
into names (DDP's ``module.``, torch.compile's ``_orig_mod.``) is left out on both sides, as far as
names stay apart without it. Of names that are one tensor in the model one is enough.

Nothing is guessed past that: names that are missing, not expected or of another shape are refused
together, with the patterns that would leave them out.
"""

from __future__ import annotations

import collections
import fnmatch
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from outlast.checkpoint.load import Leaf
from outlast.checkpoint.tensors import Parts, is_subclass, memories
from outlast.errors import StateMismatch
from outlast.training import modules

_WRAPPERS: Final = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
)
_NESTS: Final = ("", "model", "state_dict", "model_state_dict")  # where people put a model's state
_SHOWN: Final = 3
_PROPOSED: Final = 12


class Match:
    """One model beside what a source offers.

    Args:
        key: the model's name in the session.
        model: itself.
        where: the source, for messages.
        offered: path → a Leaf, the Parts of a subclass, or what is no tensor.
        patterns: of names that are to stay as they are.

    Attributes:
        paths: name in the model → the path it is taken from.
        kept: names that stay as they are.
        left: paths behind the prefix that are not taken, and are not to stay away.
        used: the patterns that matched something.

    Raises:
        StateMismatch: names are missing, or shapes or kinds of numbers differ.
    """

    def __init__(
        self,
        key: str,
        model: torch.nn.Module,
        where: str,
        offered: Mapping[str, Any],
        patterns: Sequence[str],
    ) -> None:
        self.key = key
        self.paths: dict[str, str] = {}
        self.kept: set[str] = set()
        self.left: list[str] = []
        self.used: set[str] = set()
        self._where = where
        self._patterns = patterns
        self._model = model
        self._live: Mapping[str, Any] = model.state_dict()
        self._offered = offered
        plain = {name: _bare(name) for name in self._live}
        self._bare = (
            plain if len(set(plain.values())) == len(plain) else {name: name for name in plain}
        )
        self._prefix, found = self._search()
        self._take(found)

    def outline(self, data: Any) -> dict[str, Any]:
        """Name in the model → what it is filled from; ``data(path)`` gives what is no tensor."""
        found: dict[str, Any] = {}
        for name, path in self.paths.items():
            one, now = self._offered[path], self._live.get(name)
            if isinstance(one, Leaf) and isinstance(now, torch.Tensor):
                one = one._replace(dtype=now.dtype)  # it is cast as it is read
            found[name] = one if isinstance(one, Leaf | Parts) else data(path)
        return found

    def refuse_left(self, others: Collection[str]) -> None:
        """What this model has no name for must be another worker's.

        Raises:
            StateMismatch: it is nobody's.
        """
        left = [path for path in self.left if path not in others]
        if left:
            self._refuse([], left, [])

    def remark(self) -> str:
        """What a person should know of how it was taken."""
        casts: collections.Counter[tuple[str, str]] = collections.Counter()
        for name, path in self.paths.items():
            then, now = self._offered[path], self._live.get(name)
            if isinstance(then, Leaf) and isinstance(now, torch.Tensor) and then.dtype != now.dtype:
                casts[_short(then.dtype), _short(now.dtype)] += 1
        said = [f"{count} cast from {a} to {b}" for (a, b), count in casts.items()]
        if self.kept:
            said.append(f"{len(self.kept)} left as they are ({_some(sorted(self.kept))})")
        count = sum(isinstance(self._live.get(name), torch.Tensor) for name in self.paths)
        behind = f" behind {self._prefix!r}" if self._prefix not in (*_NESTS, self.key) else ""
        return ", ".join([f"{self.key}: {count} tensors{behind}", *said])

    # --- inside ------------------------------------------------------------------------------

    def _search(self) -> tuple[str, dict[str, str]]:
        """The prefix behind which most names are, and bare name → path of all that is behind it."""
        wanted = set(self._bare.values())
        bare = {path: _bare(path) for path in self._offered}
        counts: collections.Counter[str] = collections.Counter()
        for name in set(bare.values()):
            parts = name.split(".")
            for at in range(len(parts)):
                if ".".join(parts[at:]) in wanted:
                    counts[".".join(parts[:at])] += 1
        if not counts:
            raise StateMismatch(
                f"{self._where} has none of the {len(wanted)} names of {self.key}: it has "
                f"{_some(sorted(self._tensors()))}, and {self.key} {_some(sorted(self._live))}"
            )
        best = max(counts.values())
        likely = [prefix for prefix, count in counts.items() if count == best]
        known = (self.key, f"{self.key}_state_dict", *_NESTS)
        prefix = next((one for one in known if one in likely), likely[0])
        if len(likely) > 1 and prefix not in known:
            raise StateMismatch(
                f"{self._where} has the names of {self.key} in several places "
                f"({_some(sorted(likely))}); name the object in outlast.session() as the one that "
                "is meant, or save that one in a file of its own"
            )
        start = f"{prefix}." if prefix else ""
        found: dict[str, str] = {}
        for path, name in bare.items():
            if name.startswith(start):
                inner = name.removeprefix(start)
                if inner not in found or path.endswith(inner):
                    found[inner] = path
        return prefix, found

    def _tensors(self) -> list[str]:
        """The paths at which tensors are offered."""
        return [path for path, one in self._offered.items() if isinstance(one, Leaf | Parts)]

    def _take(self, found: Mapping[str, str]) -> None:
        owners = modules.owners_of(self._model)
        missing, shapes = [], []
        tied: dict[Any, str] = {}
        for name, bare in self._bare.items():
            now, path = self._live[name], found.get(bare)
            if self._is_kept(name, bare):
                self.kept.add(name)
            elif path is None or not self._is_alike(path, now):
                missing.append(name)
            elif problem := self._difference(name, path, now, owners):
                shapes.append(f"{name} {problem}")
            else:
                self.paths[name] = path
                tied.setdefault(_memory(now), path)
        for name in list(missing):  # a name for what another name has taken
            if path := tied.get(_memory(self._live[name])):
                self.paths[name] = path
                missing.remove(name)
        known = set(self._bare.values())
        extra = [bare for bare in found if bare not in known and not self._is_kept(bare, bare)]
        for bare in extra:
            if not isinstance(self._offered[found[bare]], Leaf | Parts):
                continue
            is_owned = modules.owner_in(owners, bare)
            place = modules.place_for(self._model, bare)
            if is_owned or place is not None:  # its module takes it, or a buffer is made of it
                self.paths[bare] = found[bare]
            else:
                self.left.append(found[bare])
        if missing or shapes:
            self._refuse(missing, self.left, shapes)

    def _is_kept(self, name: str, bare: str) -> bool:
        found = [
            pattern
            for pattern in self._patterns
            if any(_fits(one, pattern) for one in (name, bare, f"{self.key}.{name}"))
        ]
        self.used.update(found)
        return bool(found)

    def _is_alike(self, path: str, now: Any) -> bool:
        """Whether what is offered is a tensor where the model has one."""
        is_tensor = isinstance(self._offered[path], Leaf | Parts)
        return is_tensor == (isinstance(now, torch.Tensor) or now is None)

    def _difference(
        self, name: str, path: str, now: Any, owners: Mapping[str, torch.nn.Module]
    ) -> str:
        """Why a tensor cannot be filled from what is offered; "" if it can."""
        then = self._offered[path]
        if not isinstance(then, Leaf) or not isinstance(now, torch.Tensor) or is_subclass(now):
            return ""  # compared when it is taken
        if modules.owner_in(owners, name) or modules.place_for(self._model, name) is not None:
            return ""
        if then.shape != tuple(now.shape):
            return f"is {tuple(then.shape)} there and {tuple(now.shape)} in the model"
        if not _holds(now.dtype, then.dtype):
            return f"is {_short(then.dtype)} there and {_short(now.dtype)} in the model"
        return ""

    def _inner(self, path: str) -> str:
        start = f"{self._prefix}." if self._prefix else ""
        return _bare(path).removeprefix(start)

    def _refuse(self, missing: list[str], left: list[str], shapes: list[str]) -> None:
        said, extra = [], sorted(self._inner(path) for path in left)
        if missing:
            said.append(f"lacks {len(missing)} of its {len(self._live)} names ({_some(missing)})")
        if extra:
            said.append(f"has {len(extra)} that {self.key} does not have ({_some(extra)})")
        if shapes:
            said.append(f"has {len(shapes)} that do not fit ({_some(shapes, '; ')})")
        bad = {*(self._bare[name] for name in missing), *extra}
        bad |= {self._bare[line.partition(" ")[0]] for line in shapes}
        good = {self._bare[name] for name in (*self.paths, *self.kept) if name in self._bare}
        proposed = _patterns_for(bad, good)
        patterns = _some((f'"{one}"' for one in proposed), most=_PROPOSED)
        raise StateMismatch(
            f"{self._where} is not for this {self.key}: it {', '.join(said)}. Build the model as "
            "it was; or, to leave these as the script has made them, "
            f"outlast.session(…, init_except=({patterns},))"
        )


def _bare(name: str) -> str:
    """A name without what wrappers put into it."""
    parts = name.split(".")
    return ".".join(part for part in parts if part not in _WRAPPERS) or name


def _fits(name: str, pattern: str) -> bool:
    """Whether a pattern stands for a name, or for its beginning up to a dot."""
    beginnings = itertools.accumulate(name.split("."), lambda a, b: f"{a}.{b}")
    return any(fnmatch.fnmatchcase(one, pattern) for one in beginnings)


def _patterns_for(bad: Collection[str], good: Collection[str]) -> list[str]:
    """The shortest beginnings that stand for all of ``bad`` and for none of ``good``."""
    taken = {
        one
        for name in good
        for one in itertools.accumulate(name.split("."), lambda a, b: f"{a}.{b}")
    }
    found = {
        next(
            (
                one
                for one in itertools.accumulate(name.split("."), lambda a, b: f"{a}.{b}")
                if one not in taken
            ),
            name,
        )
        for name in bad
    }
    return sorted(found)


def _memory(value: Any) -> Any:
    """What two names of one tensor have in common."""
    if not isinstance(value, torch.Tensor) or is_subclass(value) or not value.numel():
        return id(value)
    (local,) = memories(value)
    at = local.untyped_storage().data_ptr(), local.storage_offset()
    return *at, tuple(local.shape), local.stride()


def _holds(now: torch.dtype, then: torch.dtype) -> bool:
    """Whether numbers of one dtype become those of another without being other numbers."""
    if (now.is_floating_point, now.is_complex) != (then.is_floating_point, then.is_complex):
        return False
    is_whole = not (now.is_floating_point or now.is_complex)
    return not is_whole or bool(torch.promote_types(now, then) == now)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _some(names: Iterable[str], between: str = ", ", most: int = _SHOWN) -> str:
    shown = list(names)
    more = f"{between}…" if len(shown) > most else ""
    return between.join(shown[:most]) + more
