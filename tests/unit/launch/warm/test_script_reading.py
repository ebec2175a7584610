"""What reading a script finds, without running it."""

import sys

import pytest

from outlast.launch.warm import imports
from outlast.launch.warm.imports import WantedImport, own_modules, read, script_of
from outlast.launch.warm.server import EnvReads


@pytest.fixture
def _here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def wanted(path):
    return [(one.module, one.names) for one in read([str(path)]).wanted]


def test_installed_packages_at_the_top_level(tmp_path):
    script = write(
        tmp_path / "train.py",
        "import os, json, numpy\n"
        "import torch.nn as nn\n"
        "from rich import console, print as p\n"
        "from click import *\n"
        "try:\n    import psutil\nexcept ImportError:\n    import jinja2\n"
        "if True:\n    import msgspec\n"
        "def main():\n    import xxhash\n"
        "import not_installed_anywhere\n",
    )
    assert wanted(script) == [
        ("numpy", ()),
        ("torch.nn", ()),
        ("rich", ("console", "print")),
        ("click", ()),
        ("psutil", ()),
    ]


def test_own_modules_are_read_and_never_wanted(tmp_path):
    script = write(
        tmp_path / "train.py", "import model\nfrom package import part\nimport package.deep.er\n"
    )
    write(tmp_path / "model.py", "import rich\nimport train\nraise SystemExit('run')\n")
    write(tmp_path / "package" / "__init__.py", "from . import sibling\n")
    write(tmp_path / "package" / "part.py", "from .sibling import x\nimport click\n")
    write(tmp_path / "package" / "sibling.py", "import psutil\n")
    write(tmp_path / "package" / "deep" / "er.py", "from ..sibling import y\nimport jinja2\n")
    assert {name for name, _ in wanted(script)} == {"rich", "click", "psutil", "jinja2"}
    assert len(read([str(script)]).files) == 6


@pytest.mark.usefixtures("_here")
def test_modules_are_found_from_the_working_directory(tmp_path):
    write(tmp_path / "package" / "__init__.py", "import rich\n")
    main = write(tmp_path / "package" / "__main__.py", "import click\n")
    run = write(tmp_path / "package" / "run.py", "import click\n")
    assert script_of(["-m", "package"]) == (main, tmp_path)
    assert script_of(["-m", "package.run", "x"]) == (run, tmp_path)
    assert script_of(["-m", "json.tool"]) == (None, tmp_path)
    assert [one.module for one in read(["-m", "package"]).wanted] == ["click"]


@pytest.mark.parametrize("text", ["import (", "\0", "x = " + "(" * 5000 + ")" * 5000, ""])
def test_what_cannot_be_read_wants_nothing(tmp_path, text):
    script = write(tmp_path / "train.py", text)
    found = read([str(script)])
    assert (found.wanted, found.settings) == ([], [])


def test_a_missing_script(tmp_path):
    assert read([str(tmp_path / "none.py")]).wanted == []


def test_it_is_current_until_a_file_changes(tmp_path):
    script = write(tmp_path / "train.py", "import model\n")
    model = write(tmp_path / "model.py", "")
    found = read([str(script)])
    assert found.is_current
    model.unlink()
    assert not found.is_current


def test_there_is_an_end_to_reading(tmp_path, monkeypatch):
    monkeypatch.setattr(imports, "MAX_FILES", 5)
    script = write(tmp_path / "m0.py", "import m1\n")
    for number in range(1, 20):
        write(tmp_path / f"m{number}.py", f"import m{number + 1}\n")
    assert len(read([str(script)]).files) == 5


def test_what_a_directory_can_shadow(tmp_path):
    for name in ("a.py", "b/__init__.py", "c/inner.py", "d.txt", f"e{imports._SUFFIXES[0]}"):
        write(tmp_path / name, "")
    assert {path.name.partition(".")[0] for path in own_modules(tmp_path)} == {"a", "b", "e"}
    assert list(own_modules(tmp_path / "none")) == []
    assert imports.is_at("outlast", imports.Path(sys.modules["outlast"].__file__).parent)
    assert not imports.is_at("outlast", tmp_path)


@pytest.mark.parametrize(
    ("text", "is_light"),
    [
        ("import os, json\nfrom pathlib import Path", True),
        ("import own", True),
        ("import os, torch", False),
        ("def f():\n    from torch import nn", False),
        ("import outlast", False),
        ("import own_that_is_not", False),
        ("import importlib\nimportlib.import_module(name)", False),
        ("exec(text)", False),
    ],
)
def test_what_is_quick_to_start_afresh(tmp_path, text, is_light):
    write(tmp_path / "own.py", "import json\n")
    script = write(tmp_path / "train.py", text + "\n")
    assert read([str(script)]).is_light is is_light
    assert not read(["-m", "json.tool"]).is_light  # it is not read


def test_an_own_module_that_is_not_light(tmp_path):
    write(tmp_path / "own.py", "import numpy\n")
    script = write(tmp_path / "train.py", "import own\n")
    assert not read([str(script)]).is_light


# --- variables -----------------------------------------------------------------------------------

SETTINGS = [
    ("os.environ['A'] = '1'", "A"),
    ("environ['A'] += '1'", "A"),
    ("del os.environ['A']", "A"),
    ("os.environ.setdefault('A', '1')", "A"),
    ("os.environ.pop('A')", "A"),
    ("os.environ.update(A='1')", "A"),
    ("os.environ.update({'A': '1'})", "A"),
    ("os.environ.update(other)", None),
    ("os.environb[b'A'] = b'1'", "A"),
    ("os.putenv('A', '1')", "A"),
    ("if x:\n    os.environ['A'] = '1'", "A"),
    ("def f():\n    os.environ['A'] = '1'", "A"),
    ("for k in x: os.environ[k] = '1'", None),
    ("dotenv.load_dotenv()", None),
]


@pytest.mark.parametrize(("text", "name"), SETTINGS)
def test_places_that_set_a_variable(tmp_path, text, name):
    script = write(tmp_path / "train.py", f"import os\n{text}\nimport torch\n")
    (found,) = read([str(script)]).settings
    assert (found.name, found.is_after_torch) == (name, False)
    assert found.place.startswith("train.py:")


@pytest.mark.parametrize(
    "text",
    [
        "x = os.environ['A']",
        "os.environ.get('A')",
        "'A' in os.environ",
        "def f(k): os.environ[k] = 1",
    ],
)
def test_places_that_do_not(tmp_path, text):
    script = write(tmp_path / "train.py", f"import os\n{text}\n")
    assert read([str(script)]).settings == []


@pytest.mark.parametrize(
    ("text", "objects"),
    [
        ("os.environ['OMP_NUM_THREADS'] = '1'\nimport torch", True),
        ("os.environ['BY_TORCH'] = '1'\nimport torch", True),
        ("os.environ['LATER'] = '1'\nfrom torch import nn", True),
        ("os.environ['NOBODY'] = '1'\nimport torch", False),
        ("os.environ['TORCH_NCCL_TRACE_BUFFER_SIZE'] = '1'\nimport torch", False),
        ("import torch\nos.environ['OMP_NUM_THREADS'] = '1'", False),
        ("import torch.nn\nos.environ['BY_TORCH'] = '1'", False),
        ("import torch\nos.environ['LATER'] = '1'", True),
        ("import torch\nfor k in x: os.environ[k] = '1'", False),
        ("for k in x: os.environ[k] = '1'\nimport torch", True),
    ],
)
def test_which_of_them_ask_for_a_fresh_interpreter(tmp_path, text, objects):
    env_reads = EnvReads()
    env_reads.by_torch.add("BY_TORCH")
    env_reads.after_torch.add("LATER")
    script = write(tmp_path / "train.py", text + "\n")
    assert bool(env_reads.objection(read([str(script)]))) is objects


def test_what_is_read_is_noted(monkeypatch):
    import os

    env_reads = EnvReads()
    with env_reads.noting(after_torch=False):
        os.environ.get("ONE_THAT_IS_NOT_SET")
    with env_reads.noting(after_torch=True):
        assert "ANOTHER" not in os.environ
    os.environ.get("NOT_NOTED")
    assert "ONE_THAT_IS_NOT_SET" in env_reads.by_torch
    assert env_reads.after_torch == {"ANOTHER"}


def test_a_wanted_import_is_a_value():
    assert WantedImport("a", ("b",)) == WantedImport("a", ("b",))
