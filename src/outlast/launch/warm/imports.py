"""What a script will import, and what it sets before: found by reading it, never by running it.

The rule: an import is a candidate for being done ahead if it stands at the top level of the script
(or in a ``try`` there), or of a module of the script's own that is imported so, and if it names an
installed package, one in a site-packages directory. The script's own modules are read and never
imported: what they do when they are imported is part of the run. ``probe`` finds out whether a
candidate is safe.

A script that sets a variable ahead of an import means that import to read it. So the names that a
script sets, in its own files, are compared with those that were read (see ``server.EnvReads``).
``is_per_worker`` tells variables of a worker or an attempt from the job's.
"""

from __future__ import annotations

import ast
import importlib.machinery
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

MAX_FILES: Final = 200  # of the script's own, read for their imports
MAX_BYTES: Final = 4 << 20  # of each
_IMPORTING: Final = ("import_module", "__import__", "exec", "run_path", "run_module")
_SUFFIXES: Final = tuple(importlib.machinery.all_suffixes())


class WantedImport(msgspec.Struct, frozen=True):
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


class VariableAssignment(msgspec.Struct, frozen=True):
    """A place that sets (or unsets) a variable.

    Attributes:
        name: the variable's, or None where only running the script would tell.
        place: file and line.
        is_after_torch: whether torch is imported above it, in the same file.
    """

    name: str | None
    place: str
    is_after_torch: bool


class Reading(msgspec.Struct, frozen=True):
    """What reading a script has found.

    Attributes:
        wanted: the imports of installed packages, in the order of the statements.
        settings: where it sets variables.
        files: its own files that were read, with the time of their last change.
        is_light: whether it imports nothing but the standard library, so that starting it afresh
            takes no time.
    """

    wanted: list[WantedImport]
    settings: list[VariableAssignment]
    files: dict[Path, int]
    is_light: bool

    @property
    def is_current(self) -> bool:
        """Whether none of the files has changed since."""
        return all(_changed_ns(path) == changed for path, changed in self.files.items())


def read(arguments: Sequence[str]) -> Reading:
    """Read a script, and the modules of its own that it imports.

    Args:
        arguments: [-m] SCRIPT [ARGUMENT…].
    """
    script, directory = script_of(arguments)
    installed = _installed_directories()
    wanted: dict[WantedImport, None] = {}
    settings: list[VariableAssignment] = []
    queue = [script] if script is not None else []
    files = {path: _changed_ns(path) for path in queue}
    is_light = script is not None
    while queue:
        path = queue.pop(0)
        tree = _parsed(path)
        is_light = is_light and not any(_is_heavy(node, directory) for node in ast.walk(tree))
        statements = list(_statements(tree, path, directory))
        settings += _settings(tree, path)
        for one in statements:
            own = list(_own_files(directory, one))
            new = [file for file in own if file not in files]
            if len(files) + len(new) <= MAX_FILES:
                queue += new
                files |= {file: _changed_ns(file) for file in new}
            if not own and _is_installed(one.module, installed):
                wanted[one] = None
    return Reading(list(wanted), settings, files, is_light)


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


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _parsed(path: Path) -> ast.Module:
    try:
        if path.suffix == ".py" and path.stat().st_size <= MAX_BYTES:
            return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        pass  # running it will say what is wrong
    return ast.Module([], [])


def _statements(tree: ast.Module, path: Path, directory: Path) -> Iterator[WantedImport]:
    for node in _at_top(tree.body):
        if isinstance(node, ast.Import):
            yield from (WantedImport(one.name) for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(node, path, directory)
            if module:
                names = tuple(one.name for one in node.names if one.name != "*")
                yield WantedImport(module, names)


def _is_heavy(node: ast.AST, directory: Path) -> bool:
    """Whether this imports, wherever it stands, what is neither Python's nor the script's own."""
    if isinstance(node, ast.Import):
        modules = [one.name for one in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
        modules = [node.module or ""]
    else:
        return getattr(node, "attr", getattr(node, "id", "")) in _IMPORTING
    tops = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names
    return any(not list(_files_of(directory, top)) for top in tops)


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


def _settings(tree: ast.Module, path: Path) -> Iterator[VariableAssignment]:
    torch_line = min(
        (
            node.lineno
            for node in tree.body
            if (isinstance(node, ast.Import) and any(_is_torch(one.name) for one in node.names))
            or (isinstance(node, ast.ImportFrom) and _is_torch(node.module or ""))
        ),
        default=sys.maxsize,
    )
    later = {  # what a function does is not done before it is called
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        for name in _set_by(node):
            if name is not None or id(node) not in later:
                line = getattr(node, "lineno", 0)
                yield VariableAssignment(name, f"{path.name}:{line}", line > torch_line)


def _is_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def _set_by(node: ast.AST) -> Iterator[str | None]:
    """Names of variables that one piece of syntax sets; None for one that is not written out."""
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        if _is_environ(node.value):
            yield _text(node.slice)
    elif isinstance(node, ast.Call):
        called = node.func
        name = getattr(called, "attr", getattr(called, "id", ""))
        if isinstance(called, ast.Attribute) and _is_environ(called.value):
            if name in ("setdefault", "pop", "__setitem__"):
                yield _text(node.args[0]) if node.args else None
            elif name == "update":
                yield from _names_of_update(node)
        elif name in ("putenv", "unsetenv"):
            yield _text(node.args[0]) if node.args else None
        elif name == "load_dotenv":
            yield None


def _names_of_update(node: ast.Call) -> Iterator[str | None]:
    yield from (keyword.arg for keyword in node.keywords)
    for argument in node.args:
        if isinstance(argument, ast.Dict):
            yield from (_text(key) for key in argument.keys)
        else:
            yield None


def _is_environ(node: ast.AST) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")) in ("environ", "environb")


def _text(node: ast.AST | None) -> str | None:
    value = node.value if isinstance(node, ast.Constant) else None
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value if isinstance(value, str) else None


def _own_files(directory: Path, wanted: WantedImport) -> Iterator[Path]:
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


# What torch's agent and ours give each worker, anew at each attempt.
_NAMES: Final = frozenset(
    (
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "CUDA_VISIBLE_DEVICES"),
        "TORCH_ELASTIC_WORKER_IDENTICAL",  # for the agent alone
    )
)
_PREFIXES: Final = ("TORCHELASTIC_", "OUTLAST_")


def is_per_worker(name: str) -> bool:
    """Whether a variable may differ between workers, or between attempts."""
    return name in _NAMES or name.startswith(_PREFIXES)


def lasting(environ: Mapping[str, str]) -> dict[str, str]:
    """Those that are the same for all: what a process may have read for good when it started."""
    return {name: value for name, value in environ.items() if not is_per_worker(name)}
