"""Starting a new job from weights that somebody has: ``session(…, init_from=…)``.

It applies where the job has no checkpoint of its own; one that has goes on from that. A path stands
for all models of the session. A mapping says which objects take their state, and from where: an
optimizer or a scheduler is taken only when it is named there. The step, the random states and the
position in the data are the new job's own, always.

Tensors are cast to the model's dtype, and cut as it is cut.

Guarantees: all workers start from the same, or none does: rank 0 chooses the save, digests are
compared, one rank's refusal is everybody's. Nothing is changed before all names and shapes fit.
What is not to be taken is named (``init_except``): a name that is missing, is not expected or has
another shape is refused otherwise, and an exception that matches nothing is refused too.

What can go wrong: a source that is damaged half-way leaves models filled in part; the job does not
start. What an optimizer made of the weights before the session (a copy of them) is older than they.
Rejected: ``strict=False``, which takes a file of another model without a word.

``Match`` puts the names of a model beside those that a file offers, whatever they are nested or
wrapped in. A name is found behind a prefix (``model.``, ``state_dict.``, the object's name in the
session, a Lightning module's attribute): the one behind which most of the model's names are. What
wrappers put into names (DDP's ``module.``, torch.compile's ``_orig_mod.``) is left out on both
sides, as far as names stay apart without it. Of names that are one tensor in the model one is
enough.

Nothing is guessed past that: names that are missing, not expected or of another shape are refused
together, with the patterns that would leave them out.
"""

from __future__ import annotations

import collections
import fnmatch
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import torch

from outlast.attempt.link import Link
from outlast.checkpoint.foreign import Ours, Target, Weights, open_weights
from outlast.checkpoint.reader import Leaf
from outlast.checkpoint.tensors import Parts, is_subclass, memories
from outlast.errors import ConfigError, OutlastError, StateMismatch, StorageError
from outlast.script import modules
from outlast.script.objects import Objects
from outlast.script.restore import READ_TIMEOUT_S, Restore

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


Path = str | os.PathLike[str]
_WAY_ON: Final = "leave it out of init_from"


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Where a job's first state came from; goes into the ledger and into each checkpoint.

    Attributes:
        source: as it was named.
        digest: of the source: a manifest's checksum, or see ``foreign.digest_of``.
        step: that it was saved at, where that is known.
        save: the name of the save, where it is one of ours.
        objects: what took its state from there.
        remarks: what a person should know of how they took it.
    """

    source: str
    digest: str
    step: int | None = None
    save: str = ""
    objects: list[str] = []
    remarks: list[str] = []


class Initial:
    """What a session was told to start from.

    Args:
        objects: the session's.
        init_from: a path for all models, or name of an object → path.
        init_except: patterns of names in the models that stay as they are; one that is the
            beginning of a name, up to a dot, stands for all of what follows.

    Raises:
        ConfigError: names that are no objects of the session, or nothing to take weights.
    """

    def __init__(
        self,
        objects: Objects,
        init_from: Path | Mapping[str, Path] | None = None,
        init_except: str | Sequence[str] = (),
    ) -> None:
        self._objects = objects
        self._patterns = (init_except,) if isinstance(init_except, str) else tuple(init_except)
        if init_from is None:
            self._sources: dict[str, str] = {}
        elif isinstance(init_from, Mapping):
            self._sources = {name: os.fspath(path) for name, path in init_from.items()}
        else:
            self._sources = dict.fromkeys(objects.models, os.fspath(init_from))
            if not self._sources:
                raise ConfigError(
                    "init_from is for models, and this session names none (a torch.nn.Module)"
                )
        for name, source in self._sources.items():
            if not source:  # a variable that was not set: it would be the working directory
                raise ConfigError(
                    "init_from is an empty path; give one, or None to start from nothing"
                )
            if name not in objects.stateful:
                there = ", ".join(objects.stateful)
                raise ConfigError(f"init_from names {name!r}, and the session {there}")
        if self._patterns and not self._sources:
            raise ConfigError("init_except says what init_from leaves out, and there is none")

    @property
    def paths(self) -> list[str]:
        """What was named, each once."""
        return list(dict.fromkeys(self._sources.values()))

    def start(self, link: Link) -> list[Origin]:
        """Give the objects their first state; all ranks call it.

        Returns:
            Where it came from.

        Raises:
            ConfigError, StorageError: on all ranks alike.
        """
        meeting = _OriginMeeting(link)
        takes = [
            _Take(self._objects, weights, keys, self._patterns)
            for weights, keys in self._open(meeting)
        ]
        reports = [
            msgspec.convert(one, _OriginReport) for one in meeting.meet(lambda: _plan(takes))
        ]
        self._compare(reports)
        if any(report.is_open for report in reports):
            claimed = meeting.meet(lambda: [name for one in takes for name in one.claims])
            names = {name for claims in claimed for name in claims}
            meeting.meet(lambda: _each(takes, lambda one: one.settle(names)))
        meeting.meet(lambda: _each(takes, _Take.apply))
        return [one.origin() for one in takes]

    # --- inside ------------------------------------------------------------------------------

    def _open(self, meeting: _OriginMeeting) -> list[tuple[Weights, list[str]]]:
        """Each source, and the objects that take from it.

        Rank 0 opens first: of a job that trains meanwhile the others take the save that it found.
        """
        rank, opened = meeting.link.rank, list[Weights]()

        def open_all(saves: Mapping[str, str]) -> dict[str, str]:
            opened.extend(open_weights(path, rank, saves.get(path, "")) for path in self.paths)
            return {weights.where: weights.save for weights in opened}

        (saves, *_) = meeting.meet(lambda: {} if rank else open_all({}))
        meeting.meet(lambda: open_all(saves) if rank else {})
        return [
            (weights, [key for key, path in self._sources.items() if path == weights.where])
            for weights in opened
        ]

    def _compare(self, reports: Sequence[_OriginReport]) -> None:
        for rank, report in enumerate(reports):
            if report.digests != reports[0].digests:
                raise ConfigError(
                    f"rank {rank} finds other weights in {', '.join(self.paths)} than rank 0: its "
                    "machine has a copy of its own; bring the same one to all machines"
                )
        used = {pattern for report in reports for pattern in report.used}
        for pattern in self._patterns:
            if pattern not in used:
                raise ConfigError(
                    f"init_except names {pattern!r}, and neither a model nor "
                    f"{', '.join(self.paths)} has such a name"
                )


def _each(takes: Iterable[_Take], act: Callable[[_Take], None]) -> None:
    for one in takes:
        act(one)


class _OriginReport(msgspec.Struct, frozen=True):
    """One rank's word: what it has opened, and whether names are left that may be others'."""

    digests: list[str]
    used: list[str]
    is_open: bool


def _plan(takes: Sequence[_Take]) -> _OriginReport:
    for one in takes:
        one.plan()
    return _OriginReport(
        [one.weights.digest for one in takes],
        sorted({pattern for one in takes for match in one.matches for pattern in match.used}),
        any(one.is_open for one in takes),
    )


class _Take:
    """What some objects take from one source.

    Args:
        objects: the session's.
        weights: the source.
        keys: which objects.
        patterns: of names in the models that stay as they are.
    """

    def __init__(
        self, objects: Objects, weights: Weights, keys: Sequence[str], patterns: Sequence[str]
    ) -> None:
        self.weights = weights
        self.matches: list[Match] = []
        self._objects = objects
        self._keys = keys
        self._patterns = patterns
        self._given = _SourceView(weights)
        self._restores = [Restore(self._given, weights.where, _WAY_ON)]
        self._states: dict[str, Any] = {}  # of what is no model, for its load_state_dict

    def plan(self) -> None:
        """Find everything, and see that it fits; nothing is changed.

        Raises:
            ConfigError, StateMismatch: it is not there, or does not fit.
        """
        weights, models = self.weights, self._objects.models
        for key in self._keys:
            if key in models:
                match = Match(key, models[key], weights.where, weights.offered, self._patterns)
                self.matches.append(match)
                self._given.outlines[key] = match.outline(weights.data)
                self._objects.take(self._restores[0], key, kept=match.kept)
        others = [key for key in self._keys if key not in models]
        if not others:
            return
        if not isinstance(weights, Ours):
            self._states = {key: weights.state_of(key) for key in others}
            return
        restore = Restore(weights.checkpoint, weights.where, _WAY_ON)
        for key in others:
            if key not in weights.checkpoint.data:
                there = ", ".join(sorted(weights.keys))
                raise ConfigError(f"{weights.where} holds no {key!r}; it has {there}")
            self._objects.take(restore, key)
        self._restores.append(restore)

    @property
    def is_open(self) -> bool:
        """Whether something is offered that this rank has no name for."""
        return any(match.left for match in self.matches) or any(
            restore.absent for restore in self._restores[1:]
        )

    @property
    def claims(self) -> list[str]:
        """What this rank has a name for."""
        paths = {path for match in self.matches for path in match.paths.values()}
        return sorted(paths.union(*(restore.claims for restore in self._restores[1:])))

    def settle(self, claimed: Collection[str]) -> None:
        """Once it is known what the other ranks have.

        Raises:
            StateMismatch: something is nobody's.
        """
        for match in self.matches:
            match.refuse_left(claimed)
        for restore in self._restores[1:]:
            restore.settle(claimed)

    def apply(self) -> None:
        """Read, and give the objects their state.

        Raises:
            ConfigError, StorageError: it cannot be read.
            StateMismatch: an object refused it.
        """
        for restore in self._restores:
            with self.weights.one_line():
                restore.apply()
        for key, state in self._states.items():
            try:
                self._objects.stateful[key].load_state_dict(state)
            except Exception as error:  # whatever a load_state_dict of the script's does
                raise StateMismatch(
                    f"{key} does not take its state of {self.weights.where}: "
                    f"{type(error).__name__}: {' '.join(str(error).split())}"
                ) from error

    def origin(self) -> Origin:
        """Where it came from."""
        said = [line for restore in self._restores for line in restore.remarks]
        return Origin(
            source=self.weights.where,
            digest=self.weights.digest,
            step=self.weights.step,
            save=self.weights.save,
            objects=list(self._keys),
            remarks=[*(match.remark() for match in self.matches), *said],
        )


class _SourceView:
    """A source as a restore sees it: one rank's, with the models' own names.

    Args:
        weights: the source.

    Attributes:
        outlines: name of a model → its names → what they are filled from.
    """

    source_rank = 0

    def __init__(self, weights: Weights) -> None:
        self.outlines: dict[str, dict[str, Any]] = {}
        self._weights = weights

    @property
    def inventory(self) -> Any:
        return self

    def ranks_with(self, name: str) -> Iterable[int]:
        """No other rank has more."""
        return ()

    def outline(self, key: str, rank: int | None = None) -> Any:
        """What one model is filled from."""
        return self.outlines[key]

    def read(self, wanted: Iterable[Target], *, share: tuple[int, int] | None = None) -> None:
        """Fill tensors.

        Raises:
            StateMismatch: two names of one tensor were saved with two values.
        """
        filled: dict[Any, str] = {}
        first, again = list[Target](), list[tuple[str, torch.Tensor, str]]()
        for path, tensor in wanted:
            at = tuple((one.data_ptr(), one.shape, one.stride()) for one in memories(tensor))
            known = filled.setdefault(at, path) if tensor.numel() else path
            if known != path:
                again.append((path, tensor, known))
            else:
                first.append((path, tensor))
        self._weights.read(first)
        others = [(path, torch.empty_like(tensor)) for path, tensor, _ in again]
        self._weights.read(others)
        for (path, tensor, known), (_, other) in zip(again, others, strict=True):
            if not all(map(torch.equal, memories(tensor), memories(other))):
                raise StateMismatch(
                    f"{path} and {known} are one tensor in the model, and two in "
                    f"{self._weights.where}; build the model as it was"
                )


class _OriginMeeting:
    """All ranks do something, and go on only if it worked on every one."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._number = 0

    def meet(self, act: Callable[[], Any]) -> list[Any]:
        """What ``act`` gave, on each rank.

        Raises:
            ConfigError, StorageError: what the first rank that failed has to say.
        """
        word, error = _OriginWord(), None
        try:
            word = _OriginWord(said=act())
        except Exception as problem:  # noqa: BLE001 - whatever it is, the others do not wait for it
            error = _refusal(problem)
            word = _OriginWord(problem=str(error), is_storage=isinstance(error, StorageError))
        self._number += 1
        key = f"initial/{self._number}"
        self.link.publish(f"{key}/{self.link.rank}", msgspec.json.encode(word))
        words = [
            msgspec.json.decode(self.link.fetch(f"{key}/{rank}", READ_TIMEOUT_S), type=_OriginWord)
            for rank in range(self.link.world_size)
        ]
        for each in words:
            if each.problem:
                kind = StorageError if each.is_storage else ConfigError
                raise kind(each.problem) from error
        return [each.said for each in words]


def _refusal(problem: Exception) -> OutlastError:
    if isinstance(problem, OutlastError):
        return problem
    if isinstance(problem, OSError):
        return StorageError(str(problem))
    return ConfigError(f"a start from init_from failed: {type(problem).__name__}: {problem}")


class _OriginWord(msgspec.Struct, frozen=True, kw_only=True):
    problem: str = ""
    is_storage: bool = False
    said: Any = None
