"""What a script will import, what it sets before, and whether an import may be done ahead.

**Read, never run.** An import is a candidate for being done ahead if it stands at the top level of
the script (or in a ``try`` there), or of a module of the script's own that is imported so, and if
it names an installed package, one in a site-packages directory. The script's own modules are read
and never imported: what they do when they are imported is part of the run. A script that sets a
variable ahead of an import means that import to read it. So the names that a script sets, in its
own files, are compared with those that were read (see ``server.EnvReads``). ``is_per_worker`` tells
variables of a worker or an attempt from the job's.

**Tried in a fork**, which is then thrown away. An import is declined when it leaves something
behind that a fork would not have right: threads, a device driver, processes, open descriptors,
handlers, other random numbers; and when it looks at what is different in each worker: its rank, its
process id, the environment as a whole, fresh randomness. What C code reads by itself is not seen.

**Whether this process may be forked from** (``unfit``). A fork copies one thread: locks that others
held stay locked for ever. A device driver that was started does not work in a fork. So both are
looked for each time, by what the kernel shows and not by what a library says of itself.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.machinery
import os
import random
import resource
import signal
import site
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from outlast.health.processes import die_with

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
    """The variables that are the same for all workers: a process may read them once for good."""
    return {name: value for name, value in environ.items() if not is_per_worker(name)}


_TASKS: Final = Path("/proc/self/task")
_DESCRIPTORS: Final = Path("/proc/self/fd")
_DEVICES: Final = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/infiniband")


def unfit() -> str:
    """Why this process cannot be forked from; empty if it can."""
    if _num_threads() > 1:
        # OpenBLAS's pool, which numpy brings, puts its threads away at each fork.
        _fork_nothing()
    if (num_threads := _num_threads()) > 1:
        return f"an import has started {num_threads - 1} thread{'s'[: num_threads > 2]}"
    if device := _device():
        return f"an import has opened {device}"
    return ""


def has_children() -> bool:
    """Whether an import has started processes."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def visible() -> dict[str, Any]:
    """What an import is not expected to change, by name: what a script draws, or the kernel's."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    return {
        "Python's random numbers": random.getstate(),
        "NumPy's random numbers": repr(numpy.random.get_state()) if numpy else None,
        "torch's random numbers": bytes(torch.get_rng_state().tolist()) if torch else None,
        "torch's number of threads": torch.get_num_threads() if torch else None,
        "torch's default type": str(torch.get_default_dtype()) if torch else None,
        "the working directory": os.getcwd(),  # noqa: PTH109 - no more than a comparison
        "a signal's handler": [signal.getsignal(one) for one in signal.valid_signals()],
        "the mask of signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "a limit": [resource.getrlimit(one) for one in _LIMITS],
        "the processors to run on": os.sched_getaffinity(0),
        "the umask": _umask(),
        "an open descriptor": _open(),
    }


_LIMITS: Final = tuple(
    getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")
)


def _num_threads() -> int:
    return len(os.listdir(_TASKS))  # noqa: PTH208 - asked before each fork


def _fork_nothing() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _device() -> str:
    for _, target in _open():
        if target.startswith(_DEVICES):
            return target
    return ""


def _open() -> list[tuple[int, str]]:
    found = []
    for entry in _DESCRIPTORS.iterdir():
        try:
            found.append((int(entry.name), str(entry.readlink())))
        except OSError:  # the listing's own
            continue
    return sorted(found)


def _umask() -> int:
    now = os.umask(0o77)
    os.umask(now)
    return now


PROBE_TIMEOUT_S: Final = 60.0  # of all imports of a script
_NICENESS: Final = 10  # training goes on meanwhile


class ImportVerdict(msgspec.Struct, frozen=True):
    """One import's: ``problem`` is empty if it is safe."""

    wanted: WantedImport
    problem: str


def load(wanted: WantedImport) -> None:
    """Do what the import statement would do."""
    if wanted.names:
        __import__(wanted.module, fromlist=wanted.names)
    else:
        importlib.import_module(wanted.module)


def is_loaded(wanted: WantedImport) -> bool:
    """Whether there is nothing left to import; without looking, where looking imports."""
    module = sys.modules.get(wanted.module)
    return module is not None and all(name in vars(module) for name in wanted.names)


class ImportProbe:
    """A fork that tries imports, one after the other.

    Attributes:
        fd: readable when there is a verdict, or when the fork has ended.
        safe: what has been found safe.
        declined: module → why not.
        is_over: whether all is known.
    """

    def __init__(self, wanted: list[WantedImport]) -> None:
        self.safe: list[WantedImport] = []
        self.declined: dict[str, str] = {}
        self.is_over = not wanted
        self.fd = -1
        self._left = list(wanted)
        self._pid = 0
        self._text = b""
        self._said_problem = False
        self._until_s = time.monotonic() + PROBE_TIMEOUT_S
        if wanted:
            self._fork()

    @property
    def left_s(self) -> float:
        """Seconds until it is given up."""
        return max(self._until_s - time.monotonic(), 0.0)

    def look(self) -> None:
        """Take in what the fork has said; to be called when ``fd`` is readable or time is over."""
        if not self.left_s:
            self._ended(f"it takes longer than {PROBE_TIMEOUT_S:.0f} s")
            self._finish()
            return
        data = os.read(self.fd, 1 << 16)
        self._text += data
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            self._take(msgspec.json.decode(line, type=ImportVerdict))
        if not data:
            self._ended("it ends the process")
        if not self._left:
            self._finish()
        elif self.fd < 0:
            self._fork()  # for those after the one that failed

    def _take(self, verdict: ImportVerdict) -> None:
        self._left.remove(verdict.wanted)
        if verdict.problem:
            self.declined[verdict.wanted.module] = verdict.problem
            self._said_problem = True
        else:
            self.safe.append(verdict.wanted)

    def _ended(self, otherwise: str) -> None:
        """The fork is done, because of its last verdict or without one."""
        assert self._pid > 0  # noqa: S101 - 0 would be our own group
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)  # with what it has started
        os.waitpid(self._pid, 0)
        os.close(self.fd)
        self.fd, self._pid = -1, 0
        if self._left and not self._said_problem:
            self.declined[self._left.pop(0).module] = otherwise
        self._said_problem = False

    def _finish(self) -> None:
        if self.fd >= 0:
            self._ended("")
        self.is_over = True

    def _fork(self) -> None:
        ours, theirs = os.pipe()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                die_with(server)
                _let_go_of_all_but(theirs)
                _try(self._left, theirs)
            finally:
                os._exit(0)
        os.close(theirs)
        with contextlib.suppress(OSError):  # it has ended already
            os.setpgid(pid, pid)
        self.fd, self._pid = ours, pid


def _let_go_of_all_but(said: int) -> None:
    """What an import starts here must not hold the server's connection."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        if int(name) not in (0, 1, 2, said):
            with contextlib.suppress(OSError):
                os.close(int(name))


def _try(wanted: list[WantedImport], said: int) -> None:
    """In the fork: import, compare, tell; ends with the first problem."""
    os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    os.close(nowhere)
    for one in wanted:
        problem = _problem(one)
        os.write(said, msgspec.json.encode(ImportVerdict(one, problem)) + b"\n")
        if problem:
            return


def _problem(one: WantedImport) -> str:
    before = visible()
    with _taps() as looked_at:
        try:
            load(one)
        except BaseException as error:  # noqa: BLE001 - sys.exit at import, too
            return f"it fails: {type(error).__name__}"
    after = visible()
    if looked_at:
        return f"it looks at {looked_at[0]}"
    changed = [name for name in before if before[name] not in (None, after[name])]
    if changed:
        return f"it changes {changed[0]}"
    if has_children():
        return "it starts processes"
    return unfit()


@contextlib.contextmanager
def _taps() -> Iterator[list[str]]:
    """Notes what an import looks at that is another thing in each worker."""
    looked_at: list[str] = []
    environ = type(os.environ)
    numpy = sys.modules.get("numpy")

    def read(self: Any, key: Any) -> Any:
        if is_per_worker(os.fsdecode(key)):
            looked_at.append(os.fsdecode(key))
        return read_before(self, key)

    def tap(call: Callable[..., Any], what: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def tapped(*args: Any, **kwargs: Any) -> Any:
            looked_at.append(what)
            return call(*args, **kwargs)

        return tapped

    read_before = environ.__getitem__
    places = [
        (environ, "__iter__", "the whole environment"),
        (os, "getpid", "the process id"),
        (os, "urandom", "fresh randomness"),
        (random.Random, "seed", "fresh randomness"),
        *([(numpy.random, "default_rng", "fresh randomness")] if numpy else []),
    ]
    originals = [(place, name, getattr(place, name)) for place, name, _ in places]
    for place, name, what in places:
        setattr(place, name, tap(getattr(place, name), what))
    environ.__getitem__ = read  # type: ignore[method-assign]
    try:
        yield looked_at
    finally:
        environ.__getitem__ = read_before  # type: ignore[method-assign]
        for place, name, original in originals:
            setattr(place, name, original)
