"""Behind a loop that had no step left: what fails there for want of what the loop would have set.

``print(loss)`` behind the loop is right in a run that trains. Started again, a finished job hands
out no batch, the name is not there, and that is no bug in the script: the job's end is committed,
and what follows its loop was done when it finished. So such an exception is said in one line, and
the exit code is 0.

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
import functools
import itertools
import linecache
import re
import sys
import types
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final

from outlast.data.generators import is_users

_QUOTED: Final = re.compile(r"'(\w+)'")
_EMPTY: Final = ("NoneType", "empty", "at least one", "at least two")
_FILLS: Final = ("append", "appendleft", "add", "extend", "insert", "put", "setdefault", "update")
_NO_RECORDS: Final = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
_SCOPES: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
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
        loops = _Loops(_scope(_tree(code.co_filename, trace.tb_frame), line))
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


# --- the source ----------------------------------------------------------------------------------


def _tree(file: str, frame: types.FrameType) -> ast.AST:
    return _parsed("".join(linecache.getlines(file, frame.f_globals)))


@functools.lru_cache(maxsize=8)
def _parsed(source: str) -> ast.AST:
    with contextlib.suppress(SyntaxError, ValueError):  # a notebook's cell may have magic
        return ast.parse(source)
    return ast.Module([], [])


def _scope(tree: ast.AST, line: int) -> ast.AST:
    """The innermost function around a line, or the module."""
    around = tree
    for node in ast.walk(tree):  # from the outside in
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.lineno <= line <= (node.end_lineno or node.lineno):
            around = node
    return around


class _Loops:
    """What the loops of one function set, and fill: names, and attributes as "self.losses"."""

    def __init__(self, scope: ast.AST) -> None:
        self.stored: set[str] = set()
        self.filled: set[str] = set()
        for loop in _walk(scope):
            if isinstance(loop, ast.For | ast.AsyncFor | ast.While):
                for node in _walk(loop):
                    self._see(node)

    @property
    def touched(self) -> set[str]:
        """Both."""
        return self.stored | self.filled

    def _see(self, node: ast.AST) -> None:
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in _FILLS:
                self.filled.add(_path(node.func.value))
        elif isinstance(getattr(node, "ctx", None), ast.Store):
            into = self.filled if isinstance(node, ast.Subscript) else self.stored
            into.add(_path(node))


def _walk(scope: ast.AST) -> Iterator[ast.AST]:
    """All that a scope runs itself: what is in a function within it is that one's."""
    for node in ast.iter_child_nodes(scope):
        if not isinstance(node, _SCOPES):
            yield node
            yield from _walk(node)


def _path(node: ast.AST) -> str:
    """``a.b`` of ``a.b`` and ``a.b["c"][0]``; "" of what has no name."""
    while isinstance(node, ast.Subscript | ast.Starred):
        node = node.value
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (path := _path(node.value)):
        return f"{path}.{node.attr}"
    return ""


def _in_failing(trace: types.TracebackType) -> set[str]:
    """The names and attributes that the failing expression reads.

    Not those on its line: ``print(typo[0], losses)`` has not failed because of its losses.
    """
    line, end_line, column, end_column = _place(trace)
    found: set[str] = set()
    for node in ast.walk(_tree(trace.tb_frame.f_code.co_filename, trace.tb_frame)):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            begin = node.lineno, node.col_offset
            end = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
            if (line, column) <= begin and end <= (end_line, end_column):
                found.add(_path(node))
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
