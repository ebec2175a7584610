"""Write the reference pages of the documents from the source: docs/reference/.

    python tools/reference.py [--check]

Nothing is imported but the tables of settings and of metrics: signatures and docstrings are read as
text, so that frameworks need not be here. With ``--check`` nothing is written, and the exit code is
1 where a page is not what the source says. A name without a docstring, or a variable that nobody
has described, ends with one line.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, TypeAlias

from outlast.config import NOTICE_VARIABLES, PLATFORMS, SETTINGS, variable_name
from outlast.metrics.table import TABLE

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCE: Final = ROOT / "src"
PAGES: Final = ROOT / "docs/reference"
MADE: Final = "<!-- Made by tools/reference.py (make reference): change the source instead. -->\n"
Definition: TypeAlias = ast.FunctionDef | ast.ClassDef

# What a script may name, besides what the package's __all__ has: heading → (module, name).
FURTHER: Final = {
    "outlast.training.saving": ["PendingSave"],
    "outlast.integrations.transformers": ["OutlastCallback"],
    "outlast.integrations.lightning": ["LightningCallback"],
    "outlast.checkpoint.export": ["export"],
}

GIVEN: Final = {  # variables that a person may set and that are no settings
    "OUTLAST_CONFIG": "The settings file, in place of `outlast.toml` in the working directory.",
    "OUTLAST_RUNTIME_DIR": "Where the keeper's socket lies: a directory that only its user can "
    "enter. By default below the system's runtime or temporary directory.",
}
TOLD: Final = {  # variables that Outlast sets for the script or a command
    "OUTLAST_DIR": "The job's directory, under `outlast run`.",
    "OUTLAST_ATTEMPT": "Number of the attempt, from 1.",
    "OUTLAST_JOB_ID": "The job's id.",
    "OUTLAST_RUN_ID": "The run's name for trackers, the same in each attempt.",
    "OUTLAST_TENSORBOARD_DIR": "A directory of the job's own, for TensorBoard.",
    "OUTLAST_NOTICE_SOURCE": "For the command of `outlast watch`: which platform gave notice.",
    "OUTLAST_NOTICE_ACTION": "… what will happen to the machine.",
    "OUTLAST_NOTICE_DEADLINE_T": "… when, in seconds since the epoch; empty if it is not known.",
    "OUTLAST_NOTICE_DETAIL": "… what else the platform said.",
    "OUTLAST_NOTICE_EARLY": "… 1 for an early notice, which sets no deadline.",
}
OWN: Final = {  # between our own processes: not to be set, and no promise
    *("OUTLAST_AGENT_PID", "OUTLAST_BEATS", "OUTLAST_COLLECTIVE_TIMEOUT_S", "OUTLAST_DRILL"),
    *("OUTLAST_DRILL_CLOCKS", "OUTLAST_DRILL_MACHINE"),
    *("OUTLAST_EMPTY_PLACES", "OUTLAST_FORMED", "OUTLAST_KEEPER", "OUTLAST_LINE", "OUTLAST_MARK"),
    *("OUTLAST_MLFLOW_RUN_ID", "OUTLAST_NO_SPY", "OUTLAST_PAST", "OUTLAST_STANDBY"),
    *("OUTLAST_STORE", "OUTLAST_TORCH_IS_QUIET", "OUTLAST_TRACER"),
}


def main() -> int:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(description="Write docs/reference/ from the source.")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    is_check = parser.parse_args().check
    old = []
    for name, text in pages().items():
        path = PAGES / name
        if path.exists() and path.read_text() == text:
            continue
        old.append(name)
        if not is_check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    if old:
        words = "are not what the source says; run: make reference" if is_check else "written"
        print(f"{', '.join(old)}: {words}")
    return int(bool(old) and is_check)


def pages() -> dict[str, str]:
    """File's name → content."""
    made = {
        "api.md": api(),
        "settings.md": settings(),
        "environment.md": environment(),
        "exit-codes.md": exit_codes(),
        "errors.md": errors(),
        "events.md": events(),
        "metrics.md": metrics(),
    }
    return {name: f"{MADE}\n{text.rstrip()}\n" for name, text in made.items()}


def fail(words: str) -> SystemExit:
    """What ends the program with one line."""
    return SystemExit(f"tools/reference.py: {words}")


# --- reading the source ---------------------------------------------------------------------------


def parsed(module: str) -> ast.Module:
    """A module's syntax tree."""
    base = SOURCE / module.replace(".", "/")
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    return ast.parse(path.read_text())


def find(module: str, name: str) -> Definition:
    """The definition of a public name, followed through the modules that hand it on."""
    nodes = list(ast.walk(parsed(module)))
    for node in nodes:
        if isinstance(node, Definition) and node.name == name:
            return node
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and name in [one.name for one in node.names]:
            return find(str(node.module), name)
    raise fail(f"{module} has no {name}")


def all_of(module: str) -> list[str]:
    """What ``__all__`` names."""
    for node in parsed(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(one) for one in ast.literal_eval(node.value)]
    raise fail(f"{module} has no __all__")


def doc_of(node: ast.Module | Definition, name: str) -> str:
    """A docstring, which must be there."""
    text = ast.get_docstring(node)
    if not text:
        raise fail(f"{name} has no docstring")
    return text


def described(node: ast.ClassDef) -> dict[str, str]:
    """Field of a class → the string that stands below it."""
    found = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign):
            target: ast.expr = field.target
        elif isinstance(field, ast.Assign):
            target = field.targets[0]
        else:
            continue
        if isinstance(target, ast.Name) and isinstance(below, ast.Expr):
            value = below.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found[target.id] = inspect.cleandoc(value.value)
    return found


# --- docstrings as Markdown -----------------------------------------------------------------------

SECTIONS: Final = ("Args", "Attributes", "Raises", "Returns", "Yields")


def inline(text: str) -> str:
    """Docstrings' marks as Markdown's."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text)
    text = re.sub(r"``(.+?)``", r"`\1`", text)
    return re.sub(r"\bdocs/([\w-]+)\.md", r"[\1](../\1.md)", text)


def cell(text: str) -> str:
    """Text that stands in a table's cell."""
    return inline(" ".join(text.split())).replace("|", "\\|").replace("<", "&lt;")


def markdown(doc: str) -> str:
    """A docstring in Google's style as Markdown."""
    blocks = re.split(r"\n\n+", doc)
    return "\n\n".join(_block(block) for block in blocks)


def _block(block: str) -> str:
    head, _, rest = block.partition("\n")
    if head.rstrip(":") in SECTIONS and head.endswith(":"):
        return f"**{head[:-1]}**\n\n" + "\n".join(_items(head[:-1], inspect.cleandoc("\n" + rest)))
    if block.startswith("    "):
        return f"```python\n{inspect.cleandoc(block)}\n```"
    return inline(block)


def _items(section: str, text: str) -> Iterator[str]:
    if section in ("Returns", "Yields"):
        yield f"- {inline(' '.join(text.split()))}"
        return
    for item in re.split(r"\n(?=\S)", text):
        name, _, words = item.partition(": ")
        yield f"- `{name}`: {inline(' '.join(words.split()))}"


def signature(node: ast.FunctionDef, name: str, is_method: bool) -> str:
    """A call as it is written, an argument a line where one line is too long."""
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults))
    defaults += arguments.defaults
    shown = [_argument(one, value) for one, value in zip(plain, defaults, strict=True)]
    shown = shown[1:] if is_method else shown
    if arguments.vararg:
        shown.append(f"*{_argument(arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        shown.append("*")
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    shown += [_argument(one, value) for one, value in named]
    if arguments.kwarg:
        shown.append(f"**{_argument(arguments.kwarg, None)}")
    result = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    line = f"{name}({', '.join(shown)}){result}"
    if len(line) <= 96:
        return line
    return f"{name}(\n    " + ",\n    ".join(shown) + f",\n){result}"


def _argument(node: ast.arg, default: ast.expr | None) -> str:
    words = node.arg + (f": {ast.unparse(node.annotation)}" if node.annotation else "")
    if default is None:
        return words
    return f"{words} = {ast.unparse(default)}"


# --- the pages ------------------------------------------------------------------------------------


def api() -> str:
    """The public names."""
    names = [one for one in all_of("outlast") if one[0] != "_" and one != "data"]
    module = parsed("outlast.errors")
    failing = {node.name for node in module.body if isinstance(node, ast.ClassDef)}
    parts = [
        "# Python",
        (
            "What a script may use. Everything else in the package may change without a word. "
            "Errors have [a page of their own](errors.md)."
        ),
        *(entry("outlast", one) for one in sorted(set(names) - failing, key=_by_name)),
        *(entry("outlast.data", one) for one in all_of("outlast.data") if one not in INSIDE),
        *(entry(module, one) for module, those in FURTHER.items() for one in those),
    ]
    return "\n\n".join(parts)


def _by_name(name: str) -> tuple[str, str]:
    return name.lower(), name


INSIDE: Final = {  # of outlast.data: between our own rooms
    *("Feed", "open_feed", "kind", "drawn", "order", "slice_of_batch", "pin_memory"),
}


def entry(module: str, name: str) -> str:
    """One public name: how it is called, and what its docstring says."""
    node = find(module, name)
    full = f"{module}.{name}"
    if isinstance(node, ast.FunctionDef):
        parts = [f"## {full}()", f"```python\n{signature(node, full, is_method=False)}\n```"]
        return "\n\n".join([*parts, markdown(doc_of(node, full))])
    parts = [f"## class {full}"]  # one of them differs from a function's by a capital letter only
    methods = {
        one.name: one
        for one in node.body
        if isinstance(one, ast.FunctionDef)
        and not any(ast.unparse(each).endswith(".setter") for each in one.decorator_list)
    }
    if "__init__" in methods and name not in ("Session", "PendingSave"):  # given, not made
        parts.append(f"```python\n{signature(methods['__init__'], full, is_method=True)}\n```")
    parts.append(markdown(doc_of(node, full)))
    for method in methods.values():
        if method.name.startswith("_") or method.name in INSIDE or name in CALLBACKS:
            continue
        if "property" in [ast.unparse(one) for one in method.decorator_list]:
            parts.append(f"### {name}.{method.name}")
        else:
            shown = signature(method, f"{name}.{method.name}", is_method=True)
            parts += [f"### {name}.{method.name}()", f"```python\n{shown}\n```"]
        parts.append(markdown(doc_of(method, f"{full}.{method.name}")))
    return "\n\n".join(parts)


# Their methods are what the framework calls, not what a script does.
CALLBACKS: Final = {"OutlastCallback", "LightningCallback"}


def settings() -> str:
    """Every setting with its default, variable and meaning."""
    meanings = described(find("outlast.config", "Settings"))  # type: ignore[arg-type]
    rows = []
    for key, (attribute, setting) in SETTINGS.items():
        if attribute not in meanings:
            raise fail(f"the setting {key} has no docstring")
        default = "" if setting.default in (None, "") else f"`{setting.default}`"
        default = default.replace("True", "true").replace("False", "false")
        meaning = meanings[attribute].replace("``PLATFORMS``", ", ".join(PLATFORMS))
        # What stands for it in Python, as the file has it.
        word = "auto" if "auto" in default else "empty"
        meaning = re.sub(r"(?<=\. )None\b", word.capitalize(), meaning)
        meaning = re.sub(r"\bNone\b", word, meaning)
        rows.append((f"`{key}`", default, cell(meaning)))
    return "\n\n".join(
        [
            "# All settings in one table",
            (
                "What each is for, with examples: [Settings](../settings.md). `outlast config "
                "--explain` prints those in force. Of a key with a dot, the part before it is the "
                "table in `outlast.toml`."
            ),
            table(("key", "default", "meaning"), rows),
            (
                "The places where checkpoints go, `[[tier]]`, are set in the file alone: "
                "[tiers](../settings.md#tiers)."
            ),
        ]
    )


def metrics() -> str:
    """Every metric with its type, labels and meaning."""
    rows = []
    for row in TABLE:
        labels = ", ".join(f"`{label}`" for label in row.labels)
        fixed = "; ".join(
            f"`{label}` is one of {', '.join(values)}" for label, values in row.values.items()
        )
        what = f"{row.what} {fixed}." if fixed else row.what
        where = "machine" if row.is_local else "job"
        rows.append((f"`{row.exported}`", row.form, where, labels, cell(what)))
    return "\n\n".join(
        [
            "# All metrics in one table",
            (
                "How they are read, and what to do with them: [Metrics and alerts](../metrics.md). "
                "Each has the label `job_id` besides. A metric *of the job* is the same on each of "
                "its machines."
            ),
            table(("name", "type", "of the", "labels", "meaning"), rows),
        ]
    )


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table of Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def environment() -> str:
    """The variables, by who sets them."""
    found = {
        name
        for path in (SOURCE / "outlast").rglob("*.py")
        for name in re.findall(r'"(OUTLAST_[A-Z_]*[A-Z])"', path.read_text())
    }
    ours = {variable_name(key) for key in SETTINGS}
    known = GIVEN.keys() | TOLD.keys() | OWN | ours
    if found - known or (known - ours) - found - set(NOTICE_VARIABLES):
        odd = sorted((found - known) | ((known - ours) - found - set(NOTICE_VARIABLES)))
        raise fail(f"described and not there, or there and not described: {', '.join(odd)}")
    return "\n\n".join(
        [
            "# Environment variables",
            (
                "Every setting has one, `OUTLAST_` and its key in capitals: "
                "[all settings](settings.md). A variable whose name is nearly one of those is "
                "refused."
            ),
            "## Not settings",
            table(("variable", "meaning"), [(f"`{a}`", b) for a, b in GIVEN.items()]),
            "## Set by Outlast, for scripts and commands to read",
            table(("variable", "meaning"), [(f"`{a}`", b) for a, b in TOLD.items()]),
            "## Settings",
            table(
                ("variable", "key in `outlast.toml`"),
                [(f"`{variable_name(key)}`", f"`{key}`") for key in SETTINGS],
            ),
            "## Between our own processes",
            "Do not set them; they may change without a word: "
            + ", ".join(f"`{one}`" for one in sorted(OWN))
            + ".",
        ]
    )


def exit_codes() -> str:
    """The codes of ``outlast run`` and what to do about each."""
    node = find("outlast.errors", "Exit")
    assert isinstance(node, ast.ClassDef)
    words, rows = described(node), []
    for field in node.body:
        if isinstance(field, ast.Assign):
            name = ast.unparse(field.targets[0])
            if name not in words:
                raise fail(f"the exit code {name} has no docstring")
            meaning, _, todo = words[name].partition("\n\n")
            rows.append((ast.unparse(field.value), cell(meaning), cell(todo) or "–"))
    return "\n\n".join(
        [
            "# Exit codes",
            "Of `outlast run`, and of a script with a session under plain Python:",
            table(("code", "meaning", "what to do"), rows),
            (
                "`outlast run --preflight` exits with 1 on a machine that is not fit. `outlast "
                "demo`, `outlast doctor` and `outlast checkpoints verify` exit with 0 (passed) or "
                "1 (failed). "
                "Every command exits with 2 for wrong usage. `outlast watch` has "
                "[codes of its own](../watch.md), and so has [`outlast top`]"
                "(../top.md#in-scripts). What the codes mean to Slurm, Kubernetes and SkyPilot: "
                "[running it](../running.md#what-each-exit-code-means-to-them)."
            ),
        ]
    )


def errors() -> str:
    """The tree of errors, and each one's meaning."""
    module = parsed("outlast.errors")
    tree = re.search(r"(?m)^    OutlastError.*?(?=\n\n)", doc_of(module, "errors"), re.DOTALL)
    if tree is None:
        raise fail("outlast.errors draws no tree")
    parts = [
        "# Errors",
        (
            "Each error derives from the builtin that a caller would catch. Its message says what "
            "happened, which value was seen, and what to do next. The words of single messages: "
            "[when something goes wrong](../troubleshooting.md)."
        ),
        f"```\n{inspect.cleandoc(tree[0])}\n```",
    ]
    for node in module.body:
        bases = [ast.unparse(one) for one in node.bases] if isinstance(node, ast.ClassDef) else []
        if isinstance(node, ast.ClassDef) and not {"enum.IntEnum", "SystemExit"} & set(bases):
            parts += [f"## {node.name}", markdown(doc_of(node, node.name))]
    return "\n\n".join(parts)


def events() -> str:
    """What a line of the ledger says."""
    doc = doc_of(parsed("outlast.ledger.events"), "events")
    intro, _, rows = doc.partition("=================  ")
    lines = rows.split("\n")[3:]
    found: list[tuple[str, str]] = []
    for line in lines[: next(i for i, one in enumerate(lines) if one.startswith("=="))]:
        if line[:1] != " ":
            name, fields = line.split(maxsplit=1)
            found.append((f"`{name}`", fields))
        else:
            found[-1] = (found[-1][0], f"{found[-1][1]} {line.strip()}")
    head = markdown(doc_of(find("outlast.ledger.events", "Event"), "Event")).partition("\n\n")[2]
    after = rows.rpartition("\n\n")[2]
    return "\n\n".join(
        [
            "# Events of the ledger",
            "`JOB/ledger.jsonl` has one event a line, as a JSON object. "
            + inline(" ".join(intro.partition("\n\n")[2].split())),
            "Each line begins with",
            re.sub(r"\*\*Attributes\*\*\n\n|\n- `fields`.*", "", head),
            "and its further fields stand beside these.",
            table(("event", "fields besides the head"), [(a, cell(b)) for a, b in found]),
            inline(" ".join(after.split())),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
