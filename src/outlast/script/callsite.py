"""From where a script calls ``steps``, what counts its loops and batches there, and its epochs.

**Loops.** A loop for each epoch is called from one line, again and again, with another value of the
script's own counter each time: the variable of a ``for`` around the call, or one that is added to.
A script that goes on behind the finished epochs by itself (``range(session.step // len(loader),
4)``) begins with the counter of a later loop, one that begins at 0 with that of the first: so the
counter tells which loop a call is, by construction. What can go wrong: no counter in the frames of
the call (``itertools.repeat``), or one that does not go by the same stride from call to call (an
inner one of two loops): then calls are counted.

**Batches.** ``for i, batch in enumerate(session.steps(loader))`` counts from 0 in each run: a loop
that is gone on in behind its sixth batch would decide by 0 where the undisturbed run decides by 6.
An ``enumerate`` object cannot be told where to begin, so it is said at the resume. Each such object
that is alive is asked whether it leads to the generator that is advanced just now.

Guarantees: only what is asked for the loop's batches counts: ``enumerate`` and ``zip``, also with a
progress bar or generators in between, on either side. One that begins at the loop's place
(``start=``) is not meant, nor is one whose variable nobody reads.

What can go wrong: a variable that the script adds to itself (``i += 1``) is not seen, nor is a
counter in an iterator of the script's own. What ``zip`` is given besides is taken to begin anew
where its place cannot be read. It does no harm that a counter is only shown: that is said too.

Rejected: to tell them from the bytecode alone, which shows no more than that something is unpacked:
``for x, y in tqdm(session.steps(loader))`` is that too.

**Epochs** of ``session.epochs()``: finished ones are passed over whole. The loops of ``steps()``
inside of an epoch are counted on, so a checkpoint has with the epoch the number of the loop before
its first one: a resumed run begins with that epoch and that number, and the code of finished epochs
does not run again.

An epoch is finished once the next one is asked for. A job that dies behind an epoch's last step and
before the first checkpoint of the next one goes through its body again, without a step: what stands
behind the loop there (an evaluation, a file) runs at least once.

A call of ``epochs()`` is known by its number: calls follow each other, as loops do. One that had
ended gives no epoch, unless nothing followed it: then it goes on where it is asked for more than
it had, and in the epoch in which it was left by ``break``. Why a script stops early is not known.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import gc
import inspect
import itertools
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from outlast.errors import ConfigError
from outlast.ledger.command import is_users

FRAMES_MAX: Final = 8
_STORES: Final = frozenset({"STORE_NAME", "STORE_FAST", "STORE_GLOBAL", "STORE_DEREF"})


class Site(msgspec.Struct, frozen=True):
    """One call of ``steps``: its line, and the counters around it.

    Attributes:
        line: where, as "train.py:12, in main".
        counted: variables of the ``for`` loops around it that are whole numbers.
        added: variables that are added to near it.
        roots: (name, object): what the calling functions refer to.
        reads_step: something in front of it computes with an attribute ``step``.
    """

    line: str = ""
    counted: dict[str, int] = {}
    added: dict[str, int] = {}
    roots: list[tuple[str, Any]] = []
    reads_step: bool = False


class Entry(msgspec.Struct, frozen=True):
    """Where a session was entered: loops around that are not loops of the session."""

    frame_id: int = 0
    at: int = 0


def entry_of(frame: types.FrameType | None) -> Entry:
    """The place of the script that ``frame``, or one that called it, is at."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return Entry() if frame is None else Entry(id(frame), frame.f_lasti)


def site_of(frame: types.FrameType | None, entry: Entry | None = None) -> Site:
    """The call that ``frame`` is at, and those around it, in a session that ``entry`` began."""
    line, roots, reads_step = "", [], False
    counted: dict[str, int] = {}
    added: dict[str, int] = {}
    entry, is_inside = entry or Entry(), True
    for depth in range(FRAMES_MAX):
        if frame is None:
            break
        code = frame.f_code
        if is_users(code.co_filename):
            line = line or f"{Path(code.co_filename).name}:{frame.f_lineno}, in {code.co_name}"
            names = _counters(code) if is_inside else _NONE
            values = frame.f_locals
            is_entry = id(frame) == entry.frame_id
            for name, begin, end in names.targets:
                is_around = is_entry and begin < entry.at < end
                if begin < frame.f_lasti < end and not is_around:
                    _note(counted, f"{depth}:{name}", values.get(name))
            reads_step |= any(at < frame.f_lasti for at in names.reads)
            for name in names.added:
                _note(added, f"{depth}:{name}", values.get(name))
            for name in names.attributes:
                _note(added, f"{depth}:self.{name}", getattr(values.get("self"), name, None))
            is_inside &= not is_entry
            roots += [(name, one) for name, one in values.items() if not name.startswith("__")]
            if frame.f_locals is not frame.f_globals:
                shared = frame.f_globals
                roots += [(name, shared[name]) for name in code.co_names if name in shared]
        frame = frame.f_back
    return Site(line, counted, added, roots, reads_step)


def _note(into: dict[str, int], name: str, value: Any) -> None:
    if type(value) is int and abs(value) < 1 << 53:
        into[name] = value


class _Names(msgspec.Struct, frozen=True):
    targets: list[tuple[str, int, int]]  # name, and from where to where its loop reaches
    added: list[str]
    attributes: list[str]  # of ``self``
    reads: list[int]  # where an attribute ``step`` is read, but to be compared


_NONE: Final = _Names([], [], [], [])


@functools.lru_cache(maxsize=256)
def _counters(code: types.CodeType) -> _Names:
    found = _Names([], [], [], [])
    known = list(dis.get_instructions(code))
    for number, one in enumerate(known):
        if one.opname == "FOR_ITER":
            following = known[number + 1 : number + 2]
            if following and following[0].opname.startswith("UNPACK_SEQUENCE"):
                following = known[number + 2 : number + 2 + int(following[0].arg or 0)]
            for target in following:
                if target.opname in _STORES:
                    found.targets.append((str(target.argval), one.offset, int(one.argval)))
        elif one.opname == "LOAD_ATTR" and one.argval == "step":
            is_called = "NULL" in one.argrepr  # optimizer.step(), from Python 3.12 on
            following = known[number + 1 : number + 4]
            if not is_called and not any(two.opname == "COMPARE_OP" for two in following):
                found.reads.append(one.offset)
        elif one.opname == "BINARY_OP" and one.argrepr in ("+=", "-="):
            for target in known[number + 1 : number + 4]:
                if target.opname in _STORES:
                    found.added.append(str(target.argval))
                    break
                if target.opname == "STORE_ATTR":
                    found.attributes.append(str(target.argval))
                    break
    return found


class LoopLine(msgspec.Struct):
    """The loops that were called from one line.

    Attributes:
        first: the number of the first one.
        last: of the newest.
        passes: how many there were.
        every: how many loops of the job lie between two of them; 0 where that differs.
        counters: name → its first value, its newest, what it goes by (0 before it is known).
        firsts: name → value in the first loop, of the variables of ``for`` loops.
        varied: those of them that had another value in a later loop.
    """

    first: int
    last: int
    passes: int = 1
    every: int = 0
    counters: dict[str, tuple[int, int, int]] = {}
    firsts: dict[str, int] = {}
    varied: list[str] = []


class LoopLines:
    """The lines of a job, with their loops; it goes into the checkpoints."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self._lines: dict[str, LoopLine] = {
            str(line["line"]): LoopLine(
                first=int(line["first"]),
                last=int(line["last"]),
                passes=int(line["passes"]),
                every=int(line["every"]),
                counters={
                    str(name): (int(first), int(newest), int(stride))
                    for name, first, newest, stride in line["counters"]
                },
                firsts={str(name): int(value) for name, value in line["firsts"]},
                varied=[str(name) for name in line["varied"]],
            )
            for line in (state or {}).get("lines", ())
        }

    def state(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "lines": [
                {
                    "line": name,
                    "first": line.first,
                    "last": line.last,
                    "passes": line.passes,
                    "every": line.every,
                    "counters": [[key, *value] for key, value in line.counters.items()],
                    "varied": line.varied,
                    "firsts": [list(pair) for pair in line.firsts.items()],
                }
                for name, line in self._lines.items()
            ]
        }

    def begins(self, site: Site, loop: int) -> None:
        """Loop number ``loop`` of the job is called from ``site``."""
        line, values = self._lines.get(site.line), {**site.counted, **site.added}
        if line is None:
            counters = {name: (value, value, 0) for name, value in values.items()}
            self._lines[site.line] = LoopLine(
                first=loop, last=loop, counters=counters, firsts=dict(site.counted)
            )
            return
        every = loop - line.last
        if every <= 0:
            return  # gone on in
        line.every = every if line.passes == 1 or line.every == every else 0
        now = site.counted
        line.varied = [
            name
            for name, value in line.firsts.items()
            if name in line.varied or now.get(name, value) != value
        ]
        kept = {}
        for name, (first, newest, stride) in line.counters.items():
            went = values[name] - newest if name in values else 0
            if went and stride in (0, went):
                kept[name] = (first, values[name], went)
        line.counters, line.last, line.passes = kept, loop, line.passes + 1

    def number_of(self, site: Site, near: set[int]) -> int | None:
        """Which loop of the job a call from ``site`` is, as far as its counters tell.

        Args:
            site: the call.
            near: loops that a script would go on in by itself; a variable that is merely added to
                is believed only if it tells one of them.
        """
        line = self._lines.get(site.line)
        if line is None:
            return None
        told = self._told(line, site.counted)
        told = self._without_first(line, told)
        if len(told) > 1:
            told &= near
        if not told:
            told = self._without_first(line, self._told(line, site.added) & near)
        return told.pop() if len(told) == 1 else None

    def _without_first(self, line: LoopLine, told: set[int]) -> set[int]:
        # One that is the same in all loops, or begins anew in each run, tells the first one.
        return told - {line.first} if len(told) > 1 else told

    def is_first(self, site: Site) -> bool:
        """Whether the ``for`` loops around ``site`` stand where they stood in its first loop."""
        line = self._lines.get(site.line)
        if line is None or not line.varied:
            return False
        return all(site.counted.get(name) == line.firsts[name] for name in line.varied)

    def _told(self, line: LoopLine, values: Mapping[str, int]) -> set[int]:
        # Between the first two loops of a line lie those of other lines, or none.
        strides = {line.every} if line.passes > 1 else {1, len(self._lines)}
        told = set()
        for name, value in values.items():
            if name not in line.counters or strides == {0}:
                continue
            first, _, by = line.counters[name]
            for stride in (by,) if by else (1, -1):
                went, rest = divmod(value - first, stride)
                if went >= 0 and not rest:
                    told |= {line.first + went * every for every in strides}
        return told


OBJECTS_MAX: Final = 256  # between a counter and the generator
_OPAQUE: Final = (type, types.ModuleType, types.FunctionType, types.CodeType, types.FrameType)
_RANGES: Final = (type(iter(range(0))), type(iter(range(1 << 80))))
_INDEXED: Final[tuple[type, ...]] = (type(iter([])), type(iter(())))


class Recount(msgspec.Struct, frozen=True):
    """A counter that begins anew.

    Attributes:
        name: the script's variable; "" where that is not known.
        line: of the loop, as "train.py:12, in main".
        wrapper: "enumerate" or "zip".
    """

    name: str
    line: str
    wrapper: str

    @property
    def twice(self) -> str:
        """In words, where the loop's process is given batches once more."""
        counter, zipped = self._names
        return (
            f"gradients are accumulated, and {counter} of {self.wrapper}({zipped}"
            f"session.steps(…)) at {self.line} would count batches twice. Decide by session.step"
        )

    @property
    def _names(self) -> tuple[str, str]:
        counter = f"`{self.name}`" if self.name else "a variable"
        return counter, "…, " if self.wrapper == "zip" else ""

    def doubt(self, num_had: int, *, may_wrap: bool) -> str:
        """In words, with what to write instead.

        Args:
            num_had: batches that the loop has had.
            may_wrap: whether the loop's loader is as exact inside of the wrapper.
        """
        counter, zipped = self._names
        batches = f"{num_had} batch{'es' if num_had > 1 else ''}"
        instead = "Decide by session.step, or end the loop by until="
        if may_wrap:
            inside = f"session.steps({self.wrapper}({zipped}loader))"
            instead = f"Write {inside}, where it goes on, or decide by session.step"
        return (
            f"{counter} of {self.wrapper}({zipped}session.steps(…)) at {self.line} begins anew, "
            f"though this loop has had {batches}: what the script decides by it comes out "
            f"otherwise. {instead}"
        )


def recount(frame: types.FrameType, num_had: int) -> Recount | None:
    """What counts anew the batches that the generator of ``frame`` gives.

    Args:
        frame: of the generator, which is being asked for a batch.
        num_had: batches that its loop has had before.
    """
    if num_had < 1:
        return None
    chain = _chain(frame)
    wrappers = [one for one in gc.get_objects() if type(one) in (enumerate, zip)]
    for wrapper in wrappers:
        for number, counted in _counted(wrapper):
            level = _level(counted, chain)
            if level is None:
                continue
            for target in _targets_that_begin_anew(wrapper, number, num_had):
                name, line, is_read = _variable(chain[level + 1 :], target)
                if is_read:
                    return Recount(name, line, type(wrapper).__name__)
    return None


def _chain(frame: types.FrameType) -> list[types.FrameType]:
    """The frame, and those that wait for it."""
    chain: list[types.FrameType] = []
    at: types.FrameType | None = frame
    while at is not None and len(chain) < FRAMES_MAX:
        chain.append(at)
        at = at.f_back
    return chain


def _counted(wrapper: Any) -> list[tuple[int, Any]]:
    """What a counter goes over, with its place among the targets."""
    _, arguments, *_ = wrapper.__reduce__()
    return [(1, arguments[0])] if type(wrapper) is enumerate else list(enumerate(arguments))


def _level(value: Any, chain: list[types.FrameType]) -> int | None:
    """Which frame of the chain belongs to a generator that ``value`` is, or asks."""
    known, found = {id(value)}, [value]
    for one in found:
        if type(one) is types.GeneratorType:
            levels = [level for level, frame in enumerate(chain) if one.gi_frame is frame]
            if levels:
                return levels[0]
            continue  # one that is not being asked
        for inner in gc.get_referents(one):
            if len(found) == OBJECTS_MAX:
                return None
            if id(inner) not in known and not issubclass(type(inner), _OPAQUE):
                known.add(id(inner))
                found.append(inner)
    return None


def _targets_that_begin_anew(wrapper: Any, number: int, num_had: int) -> Iterator[int]:
    """Places of the loop's targets whose counter is not as far as the loop."""
    _, arguments, *_ = wrapper.__reduce__()
    if type(wrapper) is enumerate:
        if _is_behind(arguments[1], num_had):
            yield 0
        return
    for other, partner in enumerate(arguments):
        if other != number:
            value = _place(partner)
            value -= other < number  # it has given its value for this batch already
            if _is_behind(value, num_had):
                yield other


def _is_behind(value: int, num_had: int) -> bool:
    # A count that begins at 1 looks behind the first batch as one that goes on: it is said.
    return value <= max(1, num_had - 1)


def _place(iterator: Any) -> int:
    """What an iterator gives next, if these are numbers, else which of its values; 0 if unknown."""
    with contextlib.suppress(Exception):  # an iterator of anybody's
        if type(iterator) in _RANGES:
            return int(next(copy.copy(iterator)))
        if type(iterator) is itertools.count:  # cannot be copied from Python 3.14 on
            return int(repr(iterator).removeprefix("count(").rstrip(")").split(",")[0])
        if type(iterator) in _INDEXED:
            return int(iterator.__reduce__()[2])
    return 0


# --- the loop -------------------------------------------------------------------------------------


def _variable(frames: list[types.FrameType], target: int) -> tuple[str, str, bool]:
    """The name of a target of the loop that these frames are in, where, and whether it is read."""
    for frame in frames:
        code = frame.f_code
        known = list(dis.get_instructions(code))
        at = max((n for n, one in enumerate(known) if one.offset <= frame.f_lasti), default=0)
        line = f"{Path(code.co_filename).name}:{frame.f_lineno}, in {code.co_name}"
        if known[at].opname != "FOR_ITER":
            return "", line, True  # next(it), say
        if not known[at + 1].opname.startswith("UNPACK_SEQUENCE"):
            if code.co_flags & inspect.CO_GENERATOR:  # a generator that hands on what it is given
                continue
            return "", line, True
        name = _stored(known[at + 1 :], target)
        behind = known[at + 1 :]
        return name, line, not name or any(_reads(one, name) for one in behind)
    return "", "its line is not known", True


def _stored(behind: list[dis.Instruction], target: int) -> str:
    """The name that the ``target``-th value goes to, behind what unpacks it; "" for none."""
    names: list[str] = []
    depth = [int(behind[0].arg or 0)]  # values to come, of each sequence that is being unpacked
    for one in behind[1:]:
        if one.opname.startswith("UNPACK_SEQUENCE"):
            if len(depth) == 1:
                names.append("")
            depth[-1] -= 1
            depth.append(int(one.arg or 0))
        elif one.opname.startswith("STORE_") and "_LOAD" not in one.opname:
            stored = one.argval if isinstance(one.argval, tuple) else (one.argval,)
            for name in stored:
                if len(depth) == 1:
                    names.append(str(name))
                depth[-1] -= 1
                while depth and not depth[-1]:
                    depth.pop()
                if not depth:
                    return names[target] if target < len(names) else ""
        elif one.opname == "STORE_FAST_LOAD_FAST":
            if len(depth) == 1:
                names.append(str(one.argval[0]))
            break  # the last one
        else:
            break
    return names[target] if target < len(names) else ""


def _reads(one: dis.Instruction, name: str) -> bool:
    if one.opname == "STORE_FAST_LOAD_FAST":
        return bool(one.argval[1] == name)
    if not one.opname.startswith("LOAD_"):
        return False
    return name in one.argval if isinstance(one.argval, tuple) else bool(one.argval == name)


KEY: Final = "epochs"


class _EndedEpochs(msgspec.Struct, array_like=True):
    """A call that has ended: where it would go on, and the loop after which it did end."""

    next: int
    before: int  # the loop before the first one of that epoch
    loop: int


class _Now(msgspec.Struct, array_like=True):
    """The epoch that is under way, and the loop after which it has begun."""

    epoch: int
    loop: int


class _EpochsState(msgspec.Struct):
    ended: list[_EndedEpochs] = []
    now: _Now | None = None


class Epochs:
    """Of one worker; it goes into its checkpoints.

    Args:
        saved: the position in a checkpoint, which may be of a script without ``epochs()``.

    Attributes:
        is_known: the loops of the epoch under way are counted on from what a checkpoint says.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        self._state = msgspec.convert((saved or {}).get(KEY) or {}, _EpochsState)
        self._num_calls = 0
        self._is_open = self.is_known = False

    def state(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "ended": [[one.next, one.before, one.loop] for one in self._state.ended],
            "now": [self._state.now.epoch, self._state.now.loop] if self._state.now else None,
        }

    def begin(self, num: int, loop: int, saved_loop: int) -> tuple[int, int]:
        """``epochs(num)`` begins; the first epoch to go through, and the loop before its first one.

        Args:
            num: the number of epochs.
            loop: the number of the newest loop of this run.
            saved_loop: that of the checkpoint.

        Raises:
            ConfigError: one is under way.
        """
        if self._is_open:
            raise ConfigError(
                "epochs() begins while another one is under way; for an inner loop write range(), "
                "and close() the outer one if it was left by break and is held in a variable"
            )
        self._is_open = True
        self._num_calls += 1
        ended, now = self._state.ended, self._state.now
        if self._num_calls <= len(ended):
            self.is_known = True
            last = ended[self._num_calls - 1]
            is_newest = self._num_calls == len(ended) and now is None and last.loop >= saved_loop
            if is_newest and last.next < num:
                ended.pop()
                return last.next, last.before
            return max(num, last.next), last.loop
        self.is_known = now is not None
        return (now.epoch, now.loop) if now is not None else (0, loop)

    def enter(self, epoch: int, loop: int) -> None:
        """An epoch begins, behind loop number ``loop``."""
        self._state.now = _Now(epoch, loop)

    def end(self, epochs: int, loop: int, *, is_left: bool) -> None:
        """The call ends behind ``loop``, after so many epochs or by ``break``."""
        self._is_open = self.is_known = False
        now = self._state.now
        if self._num_calls > len(self._state.ended):
            at = now if is_left and now is not None else _Now(epochs, loop)
            self._state.ended.append(_EndedEpochs(at.epoch, at.loop, loop))
            self._state.now = None
