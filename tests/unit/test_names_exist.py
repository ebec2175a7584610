"""What tests, benchmarks and tools take from the package is there: also in those not run here."""

import ast
import builtins
import contextlib
import importlib
import importlib.util
import re
import textwrap
from pathlib import Path

import pytest

from project_files import project_files

ROOT = Path(__file__).parents[2]
FILES = sorted(
    file
    for place in ("tests", "benchmarks", "tools", "examples")
    for file in (ROOT / place).rglob("*.py")
    if file.name != "test_house.py"  # which counts in a package that it makes up
)


def taken(tree):
    """(module, name or None) of each import of the package's, within functions and strings too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "outlast":
            for alias in node.names:
                yield node.module, alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "outlast":
                    yield alias.name, None
        elif isinstance(node, ast.Constant) and "import " in str(node.value):
            with contextlib.suppress(SyntaxError, ValueError):  # no code
                yield from taken(ast.parse(textwrap.dedent(str(node.value))))


def is_there(module, name):
    try:
        found = importlib.import_module(module)
        if name is not None and not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")
    except ImportError as error:  # of a framework that is not here, nothing can be told
        return (error.name or "outlast").partition(".")[0] != "outlast"
    return True


def test_names_that_are_taken_from_the_package_exist():
    wanted = {one: file for file in FILES for one in taken(ast.parse(file.read_text()))}
    assert len(wanted) > 500
    absent = [
        f"{file.relative_to(ROOT)}: {module} has no {name}"
        for (module, name), file in wanted.items()
        if not is_there(module, name)
    ]
    assert not absent, "\n".join(absent)


def test_modules_that_the_package_names_in_strings_exist():
    """What is imported ahead by its name would else be left out in silence."""
    named = {
        (node.value, file)
        for file in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and re.fullmatch(r"outlast(\.\w+)+", str(node.value))
    }
    assert len(named) > 10
    absent = [
        f"{file.relative_to(ROOT)}: there is no {name}"
        for name, file in named
        if name != "outlast.toml" and not is_there(*name.rsplit(".", 1))
    ]
    assert not absent, "\n".join(absent)


@pytest.mark.parametrize("module", ["outlast.keeper.client", "outlast.no_such_module"])
def test_one_that_does_not_exist_is_found(module):
    assert not is_there(module, "NoSuchName")


# --- what the documents name ----------------------------------------------------------------------

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PAGE = ROOT / "docs/architecture.md"
ROOMS = ROOT / "docs/rooms.md"
# Files and names that are invented: those of worked examples and of other people's scripts.
INVENTED_FILES = {
    *("notice/nimbus.py", "test_notice_nimbus.py", "metadata_servers/nimbus.py"),
    *("storage/shelf.py", "test_shelf.py", "test_faults.py"),
    *("data.py", "other.py", "a.py", "b.py", "sympy.py", "queue.py", "train.py"),
    "read_checkpoint.py",
}
INVENTED = {"NimbusWatcher", "TestShelf", "StopWorker", "_Eviction"}
OTHERS = {"LocalElasticAgent", "outlast.session", "README.md", "server.inject"}
FILE_NAME = re.compile(r"[\w./-]+\.py\b|(?<=`)[\w-]+(?:/[\w-]+)*/(?=`)")
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.M | re.S)
ROW = re.compile(r"\| \(?\d+\)? \|(?: \w+ \|)? `([\w/]+\.py)` \|(.*)\|")
SYMBOL = re.compile(r"_?[A-Za-z][\w.]*\(.*\)|_?[A-Z]\w*(?:\.\w+)?|_[a-z]\w*")


def paths():
    found = set(map(Path, project_files()))
    return {str(path) for path in found | {parent for path in found for parent in path.parents}}


def names_file(token, known):
    """Whether a file or a folder is there whose path ends in ``token``."""
    token = token.removeprefix("../").rstrip("/")
    return any(path == token or path.endswith(f"/{token}") for path in known)


def test_files_that_documents_name_exist():
    known = paths()
    named = {
        (page.name, found[0]) for page in PAGES for found in FILE_NAME.finditer(page.read_text())
    }
    assert len(named) > 150
    absent = [
        f"{page}: {token}"
        for page, token in sorted(named)
        if not names_file(token, known)
        and not any(token.endswith(f"{'/' * (token != one)}{one}") for one in INVENTED_FILES)
    ]
    assert not absent, "\n".join(absent)


class Definitions:
    """What Python files define, read as text."""

    def __init__(self, files):
        self.members = {}  # of a class: its own names
        self.bases = {}
        self.names = {}  # of a file: its functions, classes, methods and constants
        for file in files:
            mine = self.names[file.relative_to(ROOT).as_posix()] = set()
            for node in ast.walk(ast.parse(file.read_text())):
                mine |= defined(node)
                if isinstance(node, ast.ClassDef):
                    own = {name for inner in ast.walk(node) for name in defined(inner)}
                    self.members.setdefault(node.name, set()).update(own)
                    self.bases[node.name] = [ast.unparse(one).split("[")[0] for one in node.bases]

    def has(self, symbol, file=None):
        """Whether it is defined: in ``file``, or anywhere."""
        owner, _, member = symbol.partition(".")
        if member:
            return self._has_member(owner, member)
        places = [self.names[file]] if file else self.names.values()
        return any(owner in names for names in places)

    def _has_member(self, owner, member):
        if owner not in self.members:
            return False
        return member in self.members[owner] or any(
            self._has_member(base, member) for base in self.bases[owner]
        )


def defined(node):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return {node.attr}
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return {node.id}
    return set()


def spans(line):
    """The symbols in a line of Markdown, without what is in their parentheses."""
    for span in re.findall(r"`([^`]+)`", line):
        symbol = span.partition("(")[0]
        if SYMBOL.fullmatch(span) and symbol not in INVENTED | OTHERS | set(dir(builtins)):
            yield symbol


def wrong_symbols(text, definitions):
    """What a page names and nobody defines; a table's row names its file's symbol first."""
    for line in FENCE.sub("", text).splitlines():
        row = ROW.fullmatch(line)
        file = f"src/outlast/{row[1]}" if row else None
        for symbol in spans(row[2] if row else line):
            owner = symbol.partition(".")[0]
            if not definitions.has(symbol) or (file and not definitions.has(owner, file)):
                yield f"{symbol}{f' in {file}' if file else ''}"
            file = None


def wrong_code(text, definitions):
    """What the code on a page takes and its room has not: the room that was named before it."""
    for fence in FENCE.finditer(text):
        if fence[1] != "python":
            continue
        room = re.findall(r"`(src/outlast/\w+/)", text[: fence.start()])[-1]
        known = {"Callable", "Final", *dir(builtins)} | set().union(
            *(names for file, names in definitions.names.items() if file.startswith(room))
        )
        tree = ast.parse(textwrap.dedent(fence[2]))
        own = {arg.arg for arg in ast.walk(tree) if isinstance(arg, ast.arg)}
        own |= {name for node in ast.walk(tree) for name in defined(node)}
        for node in ast.walk(tree):
            name = node.id if isinstance(node, ast.Name) else ""
            if name and name not in known | own and not importlib.util.find_spec(name):
                yield f"{name} in {room}"


def test_symbols_that_the_page_on_how_it_is_built_names_exist():
    definitions = Definitions(
        [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), ROOT / "tools/house.py"]
    )
    text = PAGE.read_text()
    wrong = [*wrong_symbols(text, definitions), *wrong_code(text, definitions)]
    wrong += wrong_symbols(ROOMS.read_text(), definitions)
    assert not wrong, "\n".join(wrong)
    row = "| 9 | `training/engine.py` | `Engine.capture()` |"
    assert not list(wrong_symbols(row, definitions))
    for doctored in ("Engine.no_such", "Directory.put", "no_such", "NoSuch"):
        assert list(wrong_symbols(row.replace("Engine.capture", doctored), definitions)), doctored
    code = "`src/outlast/notice/nimbus.py`\n```python\nfound: {} = 1\n```\n"
    assert not list(wrong_code(code.format("Notice"), definitions))
    assert list(wrong_code(code.format("NoSuchName"), definitions)) == [
        "NoSuchName in src/outlast/notice/"
    ]


# --- what docstrings name -------------------------------------------------------------------------

SOURCE = ROOT / "src/outlast"
# Rooms whose first lines are no list of all their modules.
UNLISTED = ["", "cli", "cli/plan", "integrations", "policy"]


def module_of(name):
    """The module that a dotted name begins with, and what of it is left."""
    for parts in range(len(split := name.split(".")), 0, -1):
        place = ROOT / "src" / "/".join(split[:parts])
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.exists():
                return file, split[parts:]
    return None, [name]


def test_modules_that_docstrings_name_exist():
    files, absent = sorted(SOURCE.rglob("*.py")), []
    names = {file.relative_to(SOURCE).as_posix() for file in files}
    for file in files:
        text = file.read_text()
        for kind, name in re.findall(r":(mod|class|func|meth|data):`~?(outlast[\w.]*)`", text):
            found, rest = module_of(name)
            if found is None or (rest and (kind == "mod" or rest[-1] not in found.read_text())):
                absent.append(f"{file.relative_to(ROOT)}: {name}")
        absent += [
            f"{file.relative_to(ROOT)}: {name}"
            for name in re.findall(r"``([\w/]+\.py)``", text)
            if not names_file(name, names) and name != "src/train_gpt.py"  # of a user
        ]
    assert not absent, "\n".join(absent)


@pytest.mark.parametrize("room", sorted(path.parent for path in SOURCE.rglob("__init__.py")))
def test_a_room_lists_the_modules_that_it_has(room):
    listed = re.findall(r"^``(\w+)``  ", (room / "__init__.py").read_text(), re.M)
    there = {one.stem for one in room.iterdir() if one.suffix == ".py" or any(one.glob("*.py"))}
    assert set(listed) <= there
    if str(room.relative_to(SOURCE)).strip(".") not in UNLISTED:
        assert sorted(listed) == sorted(there - {"__init__", "__main__"})


def test_each_room_is_explained_in_ten_short_lines():
    _, *parts = ROOMS.read_text().split("\n## ")
    explained = {part.partition("\n")[0]: part.strip().split("\n")[2:] for part in parts}
    there = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    there |= {path.name for path in SOURCE.glob("[a-z]*.py")}
    assert len(parts) == len(explained)
    assert explained.keys() == there
    for lines in explained.values():
        assert len(lines) == 10
        assert all(line.startswith("- **") and len(line) <= 110 for line in lines)


def test_the_ways_are_counted_as_they_are_numbered():
    text = PAGE.read_text()
    for way, counted in [
        ("tensor", r"\*\*(\d+) in all\*\*"),
        ("notice", r"Count: \*\*(\d+) files\*\*"),
    ]:
        part = text[text.index(f"## The way of one {way}") :].split("\n## ")[0]
        numbers = [int(found) for found in re.findall(r"^\| (\d+) \|", part, re.M)]
        assert numbers == list(range(1, int(re.search(counted, part)[1]) + 1)), way
