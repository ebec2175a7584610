"""Our own errors, uncaught, are one clear line and the right exit code, never a traceback.

So is what fails behind the loop of a job that had finished, for want of what the loop would have
set. One rank's excuse counts for all: it leaves, and ranks that wait for it fail by that. Such a
rank asks in the session's store whether another was excused. Under torchrun that store may have
gone with rank 0. Then nobody can be asked, and nobody has to: rank 0 has an exit code of its own,
which says it if it failed for another reason.

Where the script was cut off behind its loop before the job finished, what is there is still to be
done, and no further attempt could: the error is one of ours then, with a way on.

What such a want is (``left_unset``): ``print(loss)`` behind the loop is right in a run that trains.
Started again, a finished job hands out no batch, the name is not there, and that is no bug in the
script: the job's end is committed, and what follows its loop was done when it finished. So such an
exception is said in one line, and the exit code is 0.

It must be the loop's absence that is to blame. That is believed where a loop of the script sets the
missing name; or where the expression that failed has to do with something that a loop sets or fills
(``losses.append(loss)``, ``metrics["loss"] = loss``) and that is None, zero or empty now. What a
loop only reads (the model, a module, a function) excuses nothing, and neither does a script that
was changed since the job finished: what is new in it was never done. What has other causes (a
file, a typing error, the network) stays what it is.

Loops are read from the source. Where that is not there (``python -c``), nothing is excused.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import re
import sys
import time
import types
from collections.abc import Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeVar

import torch.distributed as dist

from outlast.attempt.link import Link
from outlast.errors import OutlastError, StillToDo
from outlast.ledger.command import is_users
from outlast.ledger.narrator import end_with, say
from outlast.policy.failures import reads_as_echo
from outlast.script.loop_names import LoopNames, path_of, scope_at, tree_of

_QUOTED: Final = re.compile(r"'(\w+)'")
_EMPTY: Final = ("NoneType", "empty", "at least one", "at least two")
_NO_RECORDS: Final = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
_MISSING: Final = object()
_DEPTH_MAX: Final = 4


def left_unset(error: BaseException | None, *, finished_t: float = 0.0) -> str:
    """What a loop that did not run would have set to keep ``error`` from being raised; or "".

    Args:
        error: what the script has raised, with its traceback.
        finished_t: when the job finished; a file that was changed later excuses nothing. 0 where
            it has not.
    """
    if not _may_be_for_want(error):
        return ""
    assert error is not None  # noqa: S101 - seen above
    missing = _missing(error)
    found = ""
    for trace in _of_users(error.__traceback__):
        code, line = trace.tb_frame.f_code, trace.tb_lineno
        if finished_t and _is_newer(code.co_filename, finished_t):
            return ""
        loops = LoopNames(scope_at(tree_of(code.co_filename, trace.tb_frame), line))
        if missing:
            wanted = loops.stored & {missing}
        else:
            wanted = {one for one in loops.touched & _in_failing(trace) if _is_want(trace, one)}
        if wanted and not found:
            found = f"{', '.join(sorted(wanted))} at {Path(code.co_filename).name}:{line}"
    return found


def _of_users(trace: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while trace is not None:
        if is_users(trace.tb_frame.f_code.co_filename):
            yield trace
        trace = trace.tb_next


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


def _is_newer(file: str, finished_t: float) -> bool:
    with contextlib.suppress(OSError):
        return Path(file).stat().st_mtime > finished_t
    return False


# --- the failing expression -----------------------------------------------------------------------


def _in_failing(trace: types.TracebackType) -> set[str]:
    """The names and attributes that the failing expression reads.

    Not those on its line: ``print(typo[0], losses)`` has not failed because of its losses.
    """
    line, end_line, column, end_column = _place(trace)
    found: set[str] = set()
    for node in ast.walk(tree_of(trace.tb_frame.f_code.co_filename, trace.tb_frame)):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            begin = node.lineno, node.col_offset
            end = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
            if (line, column) <= begin and end <= (end_line, end_column):
                found.add(path_of(node))
    return found


def _place(trace: types.TracebackType) -> tuple[int, int, int, int]:
    """Where the failing expression begins and ends: lines, then columns."""
    places = trace.tb_frame.f_code.co_positions()
    place = next(itertools.islice(places, trace.tb_lasti // 2, None), (None,) * 4)
    line, end_line, column, end_column = place
    if line is None or end_line is None or column is None or end_column is None:
        return trace.tb_lineno, trace.tb_lineno, 0, sys.maxsize  # -X no_debug_ranges: the line
    return line, end_line, column, end_column


# --- the values ----------------------------------------------------------------------------------


def _is_want(trace: types.TracebackType, path: str) -> bool:
    """Whether what a loop would have filled is there, and is as empty as if no loop had run."""
    first, *rest = path.split(".")
    frame = trace.tb_frame
    value = frame.f_locals.get(first, frame.f_globals.get(first, _MISSING))
    for name in rest:
        value = getattr(value, "__dict__", {}).get(name, _MISSING)
    return value is not _MISSING and _is_empty(value)


def _is_empty(value: Any, depth: int = _DEPTH_MAX) -> bool:
    """None, zero, a container of nothing else, or an object whose fields are (a meter)."""
    if value is None or isinstance(value, int | float | complex):
        return not value
    if isinstance(value, str | bytes):
        return not value
    if isinstance(value, _NO_RECORDS) or not depth:
        return False
    if isinstance(value, dict):
        return all(_is_empty(one, depth - 1) for one in value.values())
    if isinstance(value, Collection):
        try:
            return not len(value) or (
                isinstance(value, list | tuple) and all(_is_empty(one, depth - 1) for one in value)
            )
        except Exception:  # noqa: BLE001 - the script's own class
            return False
    fields = [one for one in getattr(value, "__dict__", {}).values() if not isinstance(one, str)]
    return bool(fields) and all(_is_empty(one, depth - 1) for one in fields)


_SAID: Final = "_outlast_has_said_it"
_FOUND: Final = "_outlast_has_found"
_EXCUSED: Final = "behind/excused"  # a rank was, in the session's store
_ASK_S: Final = 5.0  # it was said before that rank left
_OF_OTHERS: Final = (getattr(dist, "DistError", ConnectionError), ConnectionError)


class _Behind(NamedTuple):
    """A session of this process had no step left."""

    finished_t: float  # 0 where the script was cut off behind its loop before it finished
    link: Link


_behind: _Behind | None = None  # of the newest session of this process
Raised = TypeVar("Raised", bound=BaseException)


def quietly(error: Raised) -> Raised:
    """Mark an error of which all is said: uncaught, it ends the process without a traceback."""
    install()
    setattr(error, _SAID, True)
    return error


def no_step_was_left(
    error: BaseException | None, link: Link, *, finished_t: float, step: int, ends: bool
) -> bool:
    """Note that this process's loop had ended before, and say it if the whole script had.

    Args:
        error: with which the session is left.
        link: the other ranks.
        finished_t: when the script had finished; 0 if it has not.
        step: completed steps.
        ends: whether the script leaves the session as it means to.

    Returns:
        Whether it, or another rank's, failed for want of what its loop would have set.
    """
    global _behind  # noqa: PLW0603 - as the hook itself
    _behind = _Behind(finished_t, link)
    install()
    is_excused = error is not None and is_forgiven(error)
    if finished_t and (is_excused or ends) and link.rank == 0:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(finished_t))
        say(
            f"nothing is left to do: finished at step {step} on {when}; the code behind "
            "the loops runs again, without what they would have set or filled"
        )
    return is_excused


def begins() -> None:
    """Another session of this process begins."""
    global _behind  # noqa: PLW0603 - as the hook itself
    _behind = None


def is_forgiven(error: BaseException) -> bool:
    """Whether the script, or another rank's, failed only as a finished job had no step left."""
    return _found(error) is True


def still_to_do(error: BaseException) -> StillToDo | None:
    """The error in place of one that only says that there was no step left, in a job cut off."""
    found = _found(error)
    return found if isinstance(found, StillToDo) else None


def _found(error: BaseException) -> StillToDo | bool:
    """What is behind an error; asked and said once."""
    if not hasattr(error, _FOUND):
        setattr(error, _FOUND, _look(error, _behind) if _behind is not None else False)
    found: StillToDo | bool = getattr(error, _FOUND)
    return found


def _look(error: BaseException, behind: _Behind) -> StillToDo | bool:
    what = left_unset(error, finished_t=behind.finished_t)
    why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if what and not behind.finished_t:
        return StillToDo(
            f"no step was left, so the loop has not set {what} ({why}); what is behind the loop "
            "was cut off before and is still to be done: set that ahead of the loop or compute it "
            "behind, or train further (a larger until), and run the same command again"
        )
    if what:
        _excuse(behind.link)
        unset = f"the loop has not set {what}; what follows is not done again ({why})"
        say(f"no step was left, so {unset}")
        return True
    if behind.finished_t and _is_of_others(error) and _is_excused(behind.link):
        how = type(error).__name__  # its words say which socket was closed, and nothing more
        say(f"another rank had no step left and has left; what follows is not done again ({how})")
        return True
    return False


def _is_of_others(error: BaseException) -> bool:
    """Whether it may be what torch raises when another rank has gone."""
    return isinstance(error, _OF_OTHERS) or reads_as_echo(str(error))


def _excuse(link: Link) -> None:
    with contextlib.suppress(OSError, RuntimeError):  # the store has gone: others see that
        link.publish(_EXCUSED, b"%d" % link.rank)


def _is_excused(link: Link) -> bool:
    """Whether any rank was; also where rank 0 has gone, and the store with it."""
    if link.world_size == 1:
        return False
    try:
        link.fetch(_EXCUSED, _ASK_S)
    except TimeoutError:
        return False
    except (OSError, RuntimeError):
        return link.rank != 0
    return True


def install() -> None:
    """Replace the hook, once; other errors go to the hook that was there."""
    previous = sys.excepthook
    if getattr(previous, "of_outlast", False):
        return

    def hook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        if getattr(error, _SAID, False):
            return
        ours = error if isinstance(error, OutlastError) else still_to_do(error)
        if ours is not error and not is_forgiven(error):
            previous(kind, error, tb)
            if ours is None:
                return
        end_with(ours)

    hook.of_outlast = hook.shows_errors = True  # type: ignore[attr-defined]
    sys.excepthook = hook
