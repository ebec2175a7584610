"""What a command line is about, known before torch is imported: another job's is refused at once.

torch's parser is part of torch, and importing that takes seconds. Its options are read from the
source it is in, so they are those of the torch that is installed. Where they cannot be, or a
command line does not parse, nothing is said here: ``outlast run`` looks again with torch's own
parser.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from outlast import config
from outlast.errors import OutlastError
from outlast.ledger.command import (
    FILE_NAME,
    JobCommand,
    module_command,
    program_command,
    refuse_other,
    script_command,
)

_SOURCE: Final = Path("distributed", "run.py")  # in torch
_SWITCHES: Final = ("check_env", "store_true")  # actions of options without a value


def add_own(parser: argparse.ArgumentParser) -> None:
    """Add what ``outlast run`` takes besides torchrun's options."""
    parser.add_argument("--dir", default=None, help="The job's directory (default ./outlast-job).")
    parser.add_argument(
        "--resume",
        action="store_true",
        default=None,
        help="Go on with the job in that directory although it was begun with another script or "
        "other arguments; it has these from then on.",
    )
    parser.add_argument(
        "--preflight",
        action="store_true",
        help="Let outlast doctor look at every machine first, and leave out the sick.",
    )


def command_of(parsed: argparse.Namespace) -> JobCommand:
    """What a parsed command line runs."""
    script, arguments = parsed.training_script, parsed.training_script_args
    if parsed.no_python and not parsed.run_path:
        return program_command(script, arguments)
    make = module_command if parsed.module else script_command
    return make(script, arguments)


def refuse_other_job(arguments: Sequence[str]) -> None:
    """Refuse a command line whose directory has the job of another one.

    Raises:
        ConfigError: says what differs, and the two ways on.
    """
    parsed = _parse(arguments)
    if parsed is None:
        return
    try:
        settings = config.load({"dir": parsed.dir, "resume": parsed.resume})
    except OutlastError:
        return  # it will be said
    if (settings.dir / FILE_NAME).exists():
        refuse_other(settings, command_of(parsed))


class _NeedsTorchParserError(Exception):
    """A command line that torch's parser has to look at."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _NeedsTorchParserError(message)


def _parse(arguments: Sequence[str]) -> argparse.Namespace | None:
    parser = _Parser(add_help=False)
    parser.add_argument("-h", "--help", action="store_true")
    try:
        for names, is_switch in _options():
            action = "store_true" if is_switch else "store"
            parser.add_argument(*names, action=action)
        add_own(parser)
        parser.add_argument("training_script")
        parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
        parsed = parser.parse_args(arguments)
        for name in ("module", "no_python", "run_path"):
            word = os.environ.get(f"PET_{name.upper()}", "0")
            setattr(parsed, name, getattr(parsed, name) or bool(int(word)))
    except (_NeedsTorchParserError, argparse.ArgumentError, AttributeError, ValueError, OSError):
        return None
    return None if parsed.help else parsed


def _options() -> Iterator[tuple[list[str], bool]]:
    """The names of each option of torchrun's, and whether it takes no value."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return
    tree = ast.parse((Path(found.origin).parent / _SOURCE).read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            names = [str(one.value) for one in node.args if isinstance(one, ast.Constant)]
            if names and names[0].startswith("-"):
                action = next((one.value for one in node.keywords if one.arg == "action"), None)
                yield names, _name(action) in _SWITCHES


def _name(node: Any) -> str:
    return str(node.value if isinstance(node, ast.Constant) else getattr(node, "id", ""))
