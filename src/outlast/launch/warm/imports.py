"""What a script will import, found by reading it and never by running it.

The rule: an import is a candidate for being done ahead if it stands at the top level of the script
(or in a ``try`` there), or of a module of the script's own that is imported so, and if it names an
installed package, one in a site-packages directory. The script's own modules are read and never
imported: what they do when they are imported is part of the run. Whether a candidate is safe is
for ``probe`` to find out.
"""

from __future__ import annotations

import ast
import importlib.machinery
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

MAX_FILES: Final = 200  # of the script's own, read for their imports
MAX_BYTES: Final = 4 << 20  # of each
_SUFFIXES: Final = tuple(importlib.machinery.all_suffixes())


class Wanted(msgspec.Struct, frozen=True):
    """An import statement: of ``module``, and ``names`` from it."""

    module: str
    names: tuple[str, ...] = ()


def script_of(arguments: Sequence[str]) -> tuple[Path | None, Path]:
    """The file that is run, and the directory that comes first on its search path.

    Args:
        arguments: [-m] SCRIPT [ARGUMENT…].
    """
    if arguments[0] != "-m":
        path = Path(arguments[0]).resolve()
        return path, path.parent
    found = list(_files_of(Path.cwd(), arguments[1]))
    main = Path.cwd().joinpath(*arguments[1].split("."), "__main__.py")
    return (main if main.is_file() else found[-1] if found else None), Path.cwd()


def imports_of(arguments: Sequence[str]) -> list[Wanted]:
    """The installed packages that a script will import, in the order of the statements."""
    script, directory = script_of(arguments)
    installed = _installed_directories()
    found: dict[Wanted, None] = {}
    queue = [script] if script is not None else []
    seen = set(queue)
    while queue and len(seen) <= MAX_FILES:
        path = queue.pop(0)
        for wanted in _statements(path, directory):
            own = list(_own_files(directory, wanted))
            if own:
                queue += [file for file in own if file not in seen]
                seen.update(own)
            elif _is_installed(wanted.module, installed):
                found[wanted] = None
    return list(found)


def own_modules(directory: Path) -> Iterator[Path]:
    """What can be imported from a directory: modules, and packages that are no namespaces."""
    try:
        entries = list(directory.iterdir())
    except OSError:
        return
    for path in entries:
        if path.name.endswith(_SUFFIXES) or any(
            (path / f"__init__{suffix}").is_file() for suffix in _SUFFIXES
        ):
            yield path


def is_at(name: str, path: Path) -> bool:
    """Whether the loaded module ``name`` is the one at ``path``."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and Path(file).resolve().is_relative_to(path.resolve())


def _statements(path: Path, directory: Path) -> Iterator[Wanted]:
    try:
        if path.suffix != ".py" or path.stat().st_size > MAX_BYTES:
            return
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # running it will say what is wrong
    for node in _at_top(tree.body):
        if isinstance(node, ast.Import):
            yield from (Wanted(one.name) for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(node, path, directory)
            if module:
                names = tuple(one.name for one in node.names if one.name != "*")
                yield Wanted(module, names)


def _at_top(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.Try):
            yield from _at_top(node.body)


def _absolute(node: ast.ImportFrom, path: Path, directory: Path) -> str:
    if not node.level:
        return node.module or ""
    package = path.parent
    for _ in range(node.level - 1):
        package = package.parent
    if not package.is_relative_to(directory):
        return ""
    parts = [*package.relative_to(directory).parts, *((node.module or "").split("."))]
    return ".".join(part for part in parts if part)


def _own_files(directory: Path, wanted: Wanted) -> Iterator[Path]:
    yield from _files_of(directory, wanted.module)
    for name in wanted.names:
        yield from list(_files_of(directory, f"{wanted.module}.{name}"))


def _files_of(directory: Path, module: str) -> Iterator[Path]:
    """The files that importing ``module`` from a directory would run."""
    place = directory
    for part in module.split("."):
        place = place / part
        if (place / "__init__.py").is_file():
            yield place / "__init__.py"
        elif place.with_name(f"{place.name}.py").is_file():
            yield place.with_name(f"{place.name}.py")
        elif not place.is_dir():
            return


def _installed_directories() -> tuple[Path, ...]:
    names = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    names.update(site.getsitepackages())
    if site.ENABLE_USER_SITE:
        names.add(site.getusersitepackages())
    return tuple(Path(name).resolve() for name in names)


def _is_installed(module: str, directories: tuple[Path, ...]) -> bool:
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return False  # quick to import, and not worth a thought
    try:
        spec = importlib.machinery.PathFinder.find_spec(top)
    except (ImportError, ValueError):
        return False
    if spec is None or spec.origin is None:
        return False
    origin = Path(spec.origin).resolve()
    return any(origin.is_relative_to(directory) for directory in directories)
