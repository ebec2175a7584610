"""The figures of ``make house``, on a small package of which they are known."""

import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
FILES = {
    "__init__.py": "",
    "config.py": """
class Settings:
    dir: str
    every: int

class Given:
    every: int
""",
    "low.py": "import typing\n",
    "one/__init__.py": "",
    "one/a.py": """
from outlast.one import b
from outlast import low

class Plan:
    def __init__(self, tell: "Callable[[], None]", size: int) -> None:
        self.tell = tell
""",
    "one/b.py": """
if TYPE_CHECKING:
    from outlast.one.c import Plan as Other

def late():
    from outlast.one import c
    return c
""",
    "one/c.py": """
from outlast.one.a import Plan

class _Plan(Plan):
    seen: Callable[[], None]
""",
    "two/low.py": "import outlast.one.c\n",
}


@pytest.fixture(name="house")
def _house(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    sys.modules.pop("house", None)
    import house

    for name, text in FILES.items():
        path = tmp_path / "outlast" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(house, "SOURCE", tmp_path)
    yield house
    sys.modules.pop("house", None)


def test_a_small_package(house):
    found, names = house.count(list(house.read()))
    assert (found["files"], found["rooms"], found["largest room"]) == (8, 3, 4)
    assert found["lines"] == sum(text.count("\n") for text in FILES.values())
    assert names["class names twice"] == ["outlast.one.a.Plan, outlast.one.c._Plan"]
    assert names["file names twice"] == ["outlast.low, outlast.two.low"]
    assert names["callbacks"] == ["outlast.one.a.Plan(tell)", "outlast.one.c._Plan.seen"]
    assert names["settings declared more than once"] == ["every"]
    assert "outlast.low ← outlast.one.a" in names["one importer"]
    assert found["circles"] == 0  # what is imported late, or for type checkers alone, is none


def test_a_circle_around_a_corner(house, tmp_path):
    (tmp_path / "outlast" / "one" / "b.py").write_text("import outlast.one.c\n")
    _, names = house.count(list(house.read()))
    assert names["circles"] == ["outlast.one.a → outlast.one.b → outlast.one.c"]


def test_the_real_one_has_no_circle(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    sys.modules.pop("house", None)
    import house

    _, names = house.count(list(house.read()))
    assert names["circles"] == []
