"""Count what a reader of the source must hold in mind: lines, files, names, callbacks, circles.

    python tools/house.py [--json] [--names]

Each figure is counted from the syntax tree, so that it can be checked by hand:

- lines: all lines of all modules, blank ones and comments included;
- room: a directory of modules;
- importer: a module that imports another one anywhere, also inside a function;
- name twice: a class (or a module) whose name another class (or module) has too;
- callback: a parameter or field of a class that is annotated as a Callable;
- setting declared more than once: a field of ``Settings`` or ``Tier`` that other classes or tables
  of the same modules name again;
- circle: modules that import each other at their top, directly or around a corner.
"""

from __future__ import annotations

import argparse
import ast
import collections
import json
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).resolve().parents[1] / "src"
PACKAGE = "outlast"
SETTINGS = ("Settings", "Tier")
LIMITS = {
    "lines": 58_000,
    "files": 230,
    "largest room": 20,
    "class names twice": 0,
    "settings declared more than once": 0,
    "circles": 0,
}


class Module(NamedTuple):
    """One file of the package."""

    name: str
    path: Path
    lines: int
    tree: ast.Module


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="Count what a reader must hold in mind.")
    parser.add_argument("--json", action="store_true", help="one object and nothing else")
    parser.add_argument("--names", action="store_true", help="also list what is counted")
    options = parser.parse_args()
    modules = list(read())
    found, names = count(modules)
    if options.json:
        print(json.dumps(found | {"names": names} if options.names else found, indent=1))
        return
    width = max(map(len, found))
    for name, value in found.items():
        limit = LIMITS.get(name)
        mark = "" if limit is None else f"   (at most {limit:,})"
        print(f"{name:<{width}}  {value:>8,}{mark}")
    for name, listed in names.items() if options.names else ():
        print(f"\n{name}:")
        for one in listed:
            print(f"  {one}")


def read() -> Iterator[Module]:
    """All modules of the package."""
    for path in sorted((SOURCE / PACKAGE).rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text()
        yield Module(name, path, text.count("\n"), ast.parse(text))


def count(modules: list[Module]) -> tuple[dict[str, int], dict[str, list[str]]]:
    """The figures, and the names behind some of them."""
    rooms = collections.Counter(str(one.path.parent.relative_to(SOURCE)) for one in modules)
    sizes = [size for one in modules for size in functions(one)]
    importers = collections.defaultdict(set)
    tops = {}
    known = {one.name for one in modules}
    for one in modules:
        everywhere = imported(one, known, ast.walk(one.tree))
        for name in everywhere:
            importers[name].add(one.name)
        tops[one.name] = imported(one, known, at_the_top(one.tree.body))
    classes = collections.defaultdict(list)
    for one in modules:
        for node in one.tree.body:
            if isinstance(node, ast.ClassDef):
                classes[node.name.lstrip("_")].append(f"{one.name}.{node.name}")
    files = collections.defaultdict(list)
    for one in modules:
        if one.path.stem not in ("__init__", "__main__"):
            files[one.path.stem].append(one.name)
    taken = [one for module in modules for one in callbacks(module)]
    again = settings_again(modules)
    rings = circles(tops)
    single = sorted(name for name, by in importers.items() if len(by) == 1)
    names = {
        "rooms": [f"{number:3} {room}" for room, number in rooms.most_common()],
        "largest files": [
            f"{one.lines:5} {one.name}" for one in sorted(modules, key=lambda m: -m.lines)[:15]
        ],
        "one importer": [f"{name} ← {min(importers[name])}" for name in single],
        "class names twice": sorted(", ".join(all_) for all_ in classes.values() if all_[1:]),
        "file names twice": sorted(", ".join(all_) for all_ in files.values() if all_[1:]),
        "callbacks": taken,
        "settings declared more than once": again,
        "circles": [" → ".join(ring) for ring in rings],
    }
    found = {
        "lines": sum(one.lines for one in modules),
        "files": len(modules),
        "rooms": len(rooms),
        "largest room": max(rooms.values()),
        "lines of a file, median": round(statistics.median(one.lines for one in modules)),
        "lines of a file, p90": percentile([one.lines for one in modules], 90),
        "lines of a file, most": max(one.lines for one in modules),
        "lines of a function, median": round(statistics.median(sizes)),
        "lines of a function, p90": percentile(sizes, 90),
        "lines of a function, most": max(sizes),
        "modules with one importer": len(single),
        "class names twice": len(names["class names twice"]),
        "file names twice": len(names["file names twice"]),
        "callbacks of classes": len(taken),
        "settings declared more than once": len(again),
        "circles": len(rings),
    }
    return found, names


def functions(module: Module) -> Iterator[int]:
    """The lines of each function and method."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def percentile(values: list[int], share: int) -> int:
    """The value below which ``share`` per cent lie."""
    return sorted(values)[min(len(values) * share // 100, len(values) - 1)]


def at_the_top(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Statements that run as the module is imported, but for what type checkers alone read."""
    for node in body:
        yield node
        if isinstance(node, ast.Try | ast.If) and not is_for_types(node):
            yield from at_the_top([*node.body, *node.orelse])


def is_for_types(node: ast.Try | ast.If) -> bool:
    """Whether only type checkers read what is in it."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imported(module: Module, known: set[str], nodes: Iterator[ast.AST]) -> set[str]:
    """The package's modules that these statements import."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & known
        elif isinstance(node, ast.ImportFrom) and node.module:
            below = {f"{node.module}.{alias.name}" for alias in node.names} & known
            found |= below
            if len(below) < len(node.names):
                found |= {node.module} & known
    return found - {module.name}


def callbacks(module: Module) -> Iterator[str]:
    """Parameters of constructors, and fields, that are annotated as a Callable."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.ClassDef):
            continue
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
                given = [*inner.args.posonlyargs, *inner.args.args, *inner.args.kwonlyargs]
                for one in given:
                    if one.annotation is not None and "Callable" in ast.unparse(one.annotation):
                        yield f"{module.name}.{node.name}({one.arg})"
            elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                text = ast.unparse(inner.annotation)
                if "Callable" in text and "ClassVar" not in text:
                    yield f"{module.name}.{node.name}.{inner.target.id}"


def settings_again(modules: list[Module]) -> list[str]:
    """Fields of settings that are named again in the modules that declare them."""
    fields: collections.Counter[str] = collections.Counter()
    owners = {}
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and node.name in SETTINGS:
                for inner in node.body:
                    if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                        owners[inner.target.id] = module
    homes = {id(one): one for one in owners.values()}
    for module in homes.values():
        for part in ast.walk(module.tree):
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                fields[part.target.id] += part.target.id in owners
            elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                fields[part.value] += part.value in owners
    return sorted(name for name, number in fields.items() if number > 1)


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other (Tarjan's strongly connected components)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(imports.get(name, ())):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            ring = []
            while True:
                ring.append(stack.pop())
                if ring[-1] == name:
                    break
            if len(ring) > 1:
                found.append(sorted(ring))

    for name in sorted(imports):
        if name not in order:
            visit(name)
    return found


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has had enough, and make has nothing to say about it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
