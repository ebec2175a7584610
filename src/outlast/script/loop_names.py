"""What the loops of a script set and fill, read from its source; and whether other code needs it.

Guarantees: the same source gives the same answer, on every rank. Where the source or the loop is
not found (``python -c``, ``list(session.steps(…))``) the answer is that it is needed, each time.

What can go wrong: names that are reached in other ways (``globals()``, ``getattr``, an object that
the loop has handed itself to) are not seen.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import types
from collections.abc import Iterator
from typing import Final, NamedTuple

_FILLS: Final = ("append", "appendleft", "add", "extend", "insert", "put", "setdefault", "update")
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SCOPES: Final = (*_FUNCTIONS, ast.ClassDef)
_LOOPS: Final = (ast.For, ast.AsyncFor, ast.While)


def tree_of(file: str, frame: types.FrameType) -> ast.AST:
    """The source of a file; an empty module where it is not there."""
    return _parsed("".join(linecache.getlines(file, frame.f_globals)))


@functools.lru_cache(maxsize=8)
def _parsed(source: str) -> ast.AST:
    with contextlib.suppress(SyntaxError, ValueError):  # a notebook's cell may have magic
        return ast.parse(source)
    return ast.Module([], [])


def scope_at(tree: ast.AST, line: int) -> ast.AST:
    """The innermost function around a line, or the module."""
    around = tree
    for node in ast.walk(tree):  # from the outside in
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_around(node, line):
            around = node
    return around


def _is_around(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


class LoopNames:
    """What the loops of one function set, and fill: names, and attributes as "self.losses"."""

    def __init__(self, scope: ast.AST) -> None:
        self.stored: set[str] = set()
        self.filled: set[str] = set()
        for loop in walk(scope):
            if isinstance(loop, _LOOPS):
                self.see(loop)

    @property
    def touched(self) -> set[str]:
        """Both."""
        return self.stored | self.filled

    def see(self, part: ast.AST) -> None:
        """Note what a part of the source sets and fills."""
        for node in walk(part):
            self.note(node)

    def note(self, node: ast.AST) -> None:
        """Note what one node sets or fills."""
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in _FILLS:
                self.filled.add(path_of(node.func.value))
        elif isinstance(getattr(node, "ctx", None), ast.Store):
            into = self.filled if isinstance(node, ast.Subscript) else self.stored
            into.add(path_of(node))


def walk(scope: ast.AST) -> Iterator[ast.AST]:
    """All that a scope runs itself: what is in a function within it is that one's."""
    for node in ast.iter_child_nodes(scope):
        if not isinstance(node, _SCOPES):
            yield node
            yield from walk(node)


def path_of(node: ast.AST) -> str:
    """``a.b`` of ``a.b`` and ``a.b["c"][0]``; "" of what has no name."""
    while isinstance(node, ast.Subscript | ast.Starred):
        node = node.value
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (path := path_of(node.value)):
        return f"{path}.{node.attr}"
    return ""


class Need(NamedTuple):
    """Whether the code around a loop reads what the loop sets or fills.

    Attributes:
        is_there: it does.
        is_lasting: once set it stays set: nothing else sets it, adds to it, or empties it.
    """

    is_there: bool
    is_lasting: bool


def need_behind(frame: types.FrameType) -> Need:
    """Of the loop that ``frame`` is at."""
    tree = tree_of(frame.f_code.co_filename, frame)
    scope, line = scope_at(tree, frame.f_lineno), frame.f_lineno
    around = [one for one in walk(scope) if isinstance(one, _LOOPS) and _is_around(one, line)]
    if not around:
        return Need(is_there=True, is_lasting=False)
    loop = max(around, key=lambda one: one.lineno)
    inside, outside = LoopNames(ast.Module([], [])), LoopNames(ast.Module([], []))
    inside.see(loop)
    own = set(ast.walk(loop))
    for node in walk(scope):
        if node not in own:
            outside.note(node)
    read = set(_read(scope, own))
    read |= {name for name in _read(tree, own) if "." in name}  # another method's of the same class
    needed = inside.touched & read - {""}
    added = {path_of(node.target) for node in own if isinstance(node, ast.AugAssign)}
    is_lasting = not needed & (inside.filled | outside.touched | added)
    return Need(bool(needed), is_lasting)


def _read(node: ast.AST, but: set[ast.AST]) -> Iterator[str]:
    """The names and attributes that are read in it, and are not a function's own within it."""
    for child in ast.iter_child_nodes(node):
        if child in but:
            continue
        if isinstance(child, ast.Name | ast.Attribute) and isinstance(child.ctx, ast.Load):
            yield path_of(child)
        found = _read(child, but)
        if isinstance(child, _FUNCTIONS):
            bound = {one.arg for one in ast.walk(child.args) if isinstance(one, ast.arg)}
            bound |= {
                one.id
                for one in ast.walk(child)
                if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
            }
            found = (name for name in found if name not in bound)
        yield from found
