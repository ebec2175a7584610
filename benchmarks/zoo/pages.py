"""The zoo's table, as a page of the documentation."""

from __future__ import annotations

import collections
import importlib.metadata
from collections.abc import Mapping
from typing import Final

from lives import Outcome

HEAD: Final = """# The zoo

Optimizers and models that nobody here wrote. Each trains six steps; its process is killed (SIGKILL)
in the fourth, when a checkpoint of the third is committed; a fresh process resumes.

- **equal**: losses, weights, the optimizer's state and its attributes are, bit for bit, those of
  six steps without a session.
- **refused**: the job ended with this one line, at the latest after its first step.
- **skipped**: it does not run by itself here.

Anything else makes the command exit with 1. `make zoo` makes this page, in an environment of its
own (`.venv-zoo`). A tenth of the optimizers is among the tests, each day another one:
`pytest tests/real/test_zoo.py`.
"""
TITLES: Final = {
    "torch": "Optimizers of torch.optim",
    "pytorch-optimizer": "Optimizers of pytorch-optimizer",
    "torchao": "Optimizers of torchao",
    "models": "Models",
}
PACKAGES: Final = ("torch", "pytorch-optimizer", "torchao", "transformers", "timm")


def page(found: Mapping[str, Mapping[str, Outcome]]) -> str:
    """The page in Markdown."""
    counts = collections.Counter(one.result for rows in found.values() for one in rows.values())
    total = ", ".join(f"{number} {result}" for result, number in counts.most_common())
    versions = ", ".join(f"{name} {version}" for name in PACKAGES if (version := _version(name)))
    lines = [HEAD, f"This page: {total}. With {versions}, on a CPU.", ""]
    for kind, rows in found.items():
        lines += [f"## {TITLES[kind]}", ""]
        equal = [name for name, one in rows.items() if one.result == "equal"]
        lines += [f"Equal ({len(equal)} of {len(rows)}): {', '.join(equal)}.", ""]
        others = {name: one for name, one in rows.items() if one.result != "equal"}
        if others:
            lines += ["| name | result | why |", "| --- | --- | --- |"]
            lines += [
                f"| {name} | {one.result} | {one.note.replace('|', '/')} |"
                for name, one in others.items()
            ]
            lines.append("")
    return "\n".join(lines)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""
