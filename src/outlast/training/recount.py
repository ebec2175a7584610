"""Counters around a loop over ``steps`` that begin anew when it goes on in its midst.

``for i, batch in enumerate(session.steps(loader))`` counts from 0 in each run: a loop that is gone
on in behind its sixth batch would decide by 0 where the undisturbed run decides by 6. An
``enumerate`` object cannot be told where to begin, so it is said at the resume.

Guarantees: only what is asked for the loop's batches counts: ``enumerate`` and ``zip``, also with a
progress bar or generators in between, on either side. One that begins at the loop's place
(``start=``) is not meant, nor is one whose variable nobody reads.

What can go wrong: a variable that the script adds to itself (``i += 1``) is not seen, nor is a
counter in an iterator of the script's own. What ``zip`` is given besides is taken to begin anew
where its place cannot be read. It does no harm that a counter is only shown: that is said too.

How: each such object that is alive is asked whether it leads to the generator that is advanced just
now. Rejected: to tell them from the bytecode alone, which shows no more than that something is
unpacked: ``for x, y in tqdm(session.steps(loader))`` is that too.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import gc
import inspect
import itertools
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

FRAMES_MAX: Final = 8
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
