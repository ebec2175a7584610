"""Write examples/README.md: each example, and what Outlast changes in it: ``[--check]``.

With --check nothing is written; the exit code is 1 if the page is not up to date.
"""

import ast
import difflib
import json
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
PLAIN = EXAMPLES / "without_outlast"
PAGE = EXAMPLES / "README.md"
ORDER = [
    *("plain.py", "ddp.py", "fsdp2.py", "tensor_parallel.py", "local_updates.py", "trainer.py"),
    *("lightning_fit.py", "accelerate_loop.py", "stream.py", "sweep.py", "notebook.ipynb"),
]
HEAD = """# Examples

Whole scripts of at most 80 lines, each of which trains something small on a CPU in a minute or
so. Each stands here with Outlast, and in `without_outlast/` as it was before. Below is the
difference between the two, without the docstring. Data and models come with Python and the
libraries: nothing is downloaded. The first lines of each script say how to start it and what to
try. This page is written by `python tools/examples.py`.
"""


def code(path: Path) -> list[str]:
    """The code of a script or a notebook, without a docstring."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        return "\n\n".join("".join(cell["source"]) for cell in cells).splitlines()
    return text.splitlines()[ast.parse(text).body[0].end_lineno :]


def title(path: Path) -> str:
    """The first line of what an example says about itself."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        heading: str = json.loads(text)["cells"][0]["source"][0]
        return heading.strip().removeprefix("# ")
    return (ast.get_docstring(ast.parse(text)) or "").splitlines()[0].rstrip(".")


def page() -> str:
    """The text of the page."""
    parts = [HEAD, "| example | what it does |\n| --- | --- |"]
    parts += [f"| [{name}]({name}) | {title(EXAMPLES / name)} |" for name in ORDER]
    for name in ORDER:
        sides = (code(PLAIN / name), code(EXAMPLES / name))
        lines = list(difflib.unified_diff(*sides, n=1, lineterm=""))[2:]
        lines = ["@@" if line.startswith("@@") else line.rstrip() for line in lines]
        shown = "\n".join(lines[1:])
        parts += [f"\n## {name}\n", f"```diff\n{shown}\n```"]
    return "\n".join(parts) + "\n"


def main() -> None:
    if "--check" not in sys.argv:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        sys.exit("examples/README.md is not up to date: python tools/examples.py")


if __name__ == "__main__":
    main()
