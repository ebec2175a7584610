"""What tests, benchmarks and tools take from the package is there: also in those not run here."""

import ast
import contextlib
import importlib
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    file
    for place in ("tests", "benchmarks", "tools")
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
    except ImportError:
        return False
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


@pytest.mark.parametrize("module", ["outlast.training.line", "outlast.no_such_module"])
def test_one_that_does_not_exist_is_found(module):
    assert not is_there(module, "NoSuchName")
