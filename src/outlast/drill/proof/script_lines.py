"""Where in a script something is written: the line to change.

Read from the source alone, without running it: where a name is first given a value, where a session
is opened, where a set is gone through. What the script imports is not read.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

from outlast.drill.workplace import JobScript


class ScriptLines:
    """The source of one script.

    Args:
        script: as it was given.
    """

    def __init__(self, script: JobScript) -> None:
        path = Path(script.name)
        if script.is_module:
            spec = None
            with contextlib.suppress(ImportError, ValueError):
                spec = importlib.util.find_spec(script.name)
            path = Path(spec.origin) if spec is not None and spec.origin else path
        self.name = path.name
        self._tree = ast.Module([], [])
        self._lines: list[str] = []
        with contextlib.suppress(OSError, SyntaxError, UnicodeDecodeError):
            text = path.read_text()
            self._tree, self._lines = ast.parse(text), text.splitlines()

    def text(self, where: str) -> str:
        """What stands at a line that was told as "train.py:12"; "" if it is another file's."""
        name, _, number = where.rpartition(":")
        if name != self.name or not number.isdigit() or int(number) > len(self._lines):
            return ""
        return self._lines[int(number) - 1].strip()

    def assigned(self, name: str, function: str = "") -> str:
        """The line that first gives ``name`` (or ``.name`` of anything) a value; "" for none."""
        scope: ast.AST = self._tree
        for node in ast.walk(self._tree) if function else ():
            if isinstance(node, ast.FunctionDef) and node.name == function:
                scope = node
        return self._first(lambda node: _gives(node, name), scope) or self._first(
            lambda node: _gives(node, name)
        )

    def called(self, *names: str) -> str:
        """The first line that calls a function or a class of one of these names."""
        return self._first(lambda node: isinstance(node, ast.Call) and _named(node.func) in names)

    def uses(self, *names: str) -> bool:
        """Whether one of these is called anywhere."""
        return bool(self.called(*names))

    def set_gone_through(self) -> str:
        """The first line that takes a set's elements one by one, or hashes."""

        def is_set(node: ast.AST) -> bool:
            if isinstance(node, ast.Set | ast.SetComp):
                return True
            return isinstance(node, ast.Call) and _named(node.func) in ("set", "frozenset")

        sets = {
            target.id
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Assign) and is_set(node.value)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

        def goes_through(node: ast.AST) -> bool:
            if isinstance(node, ast.Call) and _named(node.func) == "hash":
                return True
            through: list[ast.AST] = []
            if isinstance(node, ast.For | ast.comprehension):
                through = [node.iter]
            elif isinstance(node, ast.Call) and _named(node.func) in ("list", "tuple", "enumerate"):
                through = list(node.args[:1])
            return any(is_set(one) or getattr(one, "id", None) in sets for one in through)

        return self._first(goes_through)

    def _first(self, is_it: Callable[[ast.AST], bool], scope: ast.AST | None = None) -> str:
        lines = [_line(node) for node in ast.walk(scope or self._tree) if is_it(node)]
        return f"{self.name}:{min(lines)}" if lines else ""


def _line(node: ast.AST) -> int:
    place = node.iter if isinstance(node, ast.comprehension) else node
    return int(getattr(place, "lineno", 0))


def _named(function: ast.AST) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _gives(node: ast.AST, name: str) -> bool:
    return any(
        (isinstance(target, ast.Name) and target.id == name)
        or (isinstance(target, ast.Attribute) and target.attr == name)
        for target in _targets(node)
    )


def _targets(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from target.elts if isinstance(target, ast.Tuple) else [target]
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For):
        yield from node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
