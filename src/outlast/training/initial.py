"""Starting a new job from weights that somebody has: ``session(…, init_from=…)``.

It applies where the job has no checkpoint of its own; one that has goes on from that. A path stands
for all models of the session. A mapping says which objects take their state, and from where: an
optimizer or a scheduler is taken only when it is named there. The step, the random states and the
position in the data are the new job's own, always.

How a model's names are found is ``matching``'s. Tensors are cast to the model's dtype, and cut as
it is cut.

Guarantees: all workers start from the same, or none does: rank 0 chooses the save, digests are
compared, one rank's refusal is everybody's. Nothing is changed before all names and shapes fit.
What is not to be taken is named (``init_except``): a name that is missing, is not expected or has
another shape is refused otherwise, and an exception that matches nothing is refused too.

What can go wrong: a source that is damaged half-way leaves models filled in part; the job does not
start. What an optimizer made of the weights before the session (a copy of them) is older than they.
Rejected: ``strict=False``, which takes a file of another model without a word.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import torch

from outlast.attempt.link import Link
from outlast.checkpoint.foreign import Ours, Target, Weights, open_weights
from outlast.checkpoint.tensors import memories
from outlast.errors import ConfigError, OutlastError, StateMismatch, StorageError
from outlast.training.matching import Match
from outlast.training.objects import Objects
from outlast.training.restore import Restore
from outlast.training.resume import READ_TIMEOUT_S

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
        meeting = _Meeting(link)
        takes = [
            _Take(self._objects, weights, keys, self._patterns)
            for weights, keys in self._open(meeting)
        ]
        reports = [msgspec.convert(one, _Report) for one in meeting.meet(lambda: _plan(takes))]
        self._compare(reports)
        if any(report.is_open for report in reports):
            claimed = meeting.meet(lambda: [name for one in takes for name in one.claims])
            names = {name for claims in claimed for name in claims}
            meeting.meet(lambda: _each(takes, lambda one: one.settle(names)))
        meeting.meet(lambda: _each(takes, _Take.apply))
        return [one.origin() for one in takes]

    # --- inside ------------------------------------------------------------------------------

    def _open(self, meeting: _Meeting) -> list[tuple[Weights, list[str]]]:
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

    def _compare(self, reports: Sequence[_Report]) -> None:
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


class _Report(msgspec.Struct, frozen=True):
    """One rank's word: what it has opened, and whether names are left that may be others'."""

    digests: list[str]
    used: list[str]
    is_open: bool


def _plan(takes: Sequence[_Take]) -> _Report:
    for one in takes:
        one.plan()
    return _Report(
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
        self._given = _Given(weights)
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


class _Given:
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


class _Meeting:
    """All ranks do something, and go on only if it worked on every one."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._number = 0

    def meet(self, act: Callable[[], Any]) -> list[Any]:
        """What ``act`` gave, on each rank.

        Raises:
            ConfigError, StorageError: what the first rank that failed has to say.
        """
        word, error = _Word(), None
        try:
            word = _Word(said=act())
        except Exception as problem:  # noqa: BLE001 - whatever it is, the others do not wait for it
            error = _refusal(problem)
            word = _Word(problem=str(error), is_storage=isinstance(error, StorageError))
        self._number += 1
        key = f"initial/{self._number}"
        self.link.publish(f"{key}/{self.link.rank}", msgspec.json.encode(word))
        words = [
            msgspec.json.decode(self.link.fetch(f"{key}/{rank}", READ_TIMEOUT_S), type=_Word)
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


class _Word(msgspec.Struct, frozen=True, kw_only=True):
    problem: str = ""
    is_storage: bool = False
    said: Any = None
