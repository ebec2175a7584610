"""Behind a loop that had no step left: what fails there for want of what the loop would have set.

``print(loss)`` behind the loop is right in a run that trains. Started again, a finished job hands
out no batch, the name is not there, and that is no bug in the script: the job's end is committed,
and what follows its loop was done when it finished. So such an exception is said in one line, and
the exit code is 0.

It must be the loop's absence that is to blame. That is believed where a function in the traceback
has a loop that sets the missing name, or, where a value is empty or None, that has to do with a
name on the failing line. What has other causes (a file, a typing error, the network) stays what it
is.
"""

from __future__ import annotations

import dis
import functools
import re
import traceback
import types
from pathlib import Path
from typing import Final

from outlast.data.generators import is_users

_STORES: Final = ("STORE_NAME", "STORE_FAST", "STORE_GLOBAL", "STORE_DEREF")
_READS: Final = ("LOAD_NAME", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF")
_QUOTED: Final = re.compile(r"'(\w+)'")
_EMPTY: Final = ("NoneType", "empty", "at least one", "at least two")


def left_unset(error: BaseException | None) -> str:
    """What a loop that did not run would have set to keep ``error`` from being raised; or ""."""
    if not _may_be_for_want(error):
        return ""
    assert error is not None  # noqa: S101 - seen above
    missing = _missing(error)
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if not is_users(code.co_filename):
            continue
        found = _names(code)
        wanted = found.stored & {missing} if missing else found.looped & _on_line(code, line)
        if wanted:
            name = Path(code.co_filename).name
            return f"{', '.join(sorted(wanted))} at {name}:{line}"
    return ""


def _missing(error: BaseException) -> str:
    """The name that is not there; an UnboundLocalError has it in its words alone."""
    if not isinstance(error, NameError):
        return ""
    found = _QUOTED.search(str(error))
    return error.name or (found[1] if found else "")


def _may_be_for_want(error: BaseException | None) -> bool:
    if isinstance(error, NameError):
        return bool(_missing(error))
    if isinstance(error, IndexError | KeyError | ZeroDivisionError):
        return True
    is_of_value = isinstance(error, AttributeError | TypeError | ValueError | RuntimeError)
    return is_of_value and any(word in str(error) for word in _EMPTY)


class _Names:
    """Of one function: names that its loops set, and all that they have to do with."""

    def __init__(self, code: types.CodeType) -> None:
        self.stored: set[str] = set()
        self.looped: set[str] = set()
        known = list(dis.get_instructions(code))
        loops = [(int(one.argval), one.offset) for one in known if "JUMP_BACKWARD" in one.opname]
        for one in known:
            if any(begin <= one.offset <= end for begin, end in loops):
                if one.opname.startswith(_STORES):
                    self.stored |= _named(one)
                if one.opname.startswith((*_STORES, *_READS)):
                    self.looped |= _named(one)


_names = functools.lru_cache(maxsize=64)(_Names)


def _named(one: dis.Instruction) -> set[str]:
    """The names of an instruction; from Python 3.13 on it may have two."""
    return {str(name) for name in (one.argval if isinstance(one.argval, tuple) else (one.argval,))}


def _on_line(code: types.CodeType, line: int) -> set[str]:
    """The names that a line reads."""
    found: set[str] = set()
    at = 0
    for one in dis.get_instructions(code):
        at = (one.positions.lineno if one.positions else None) or at
        if at == line and one.opname.startswith(_READS):
            found |= _named(one)
    return found
