"""``command.json``: with what script and arguments a job was begun, and what differs from them now.

A job's directory is gone on from by whoever names it. So another script, or other arguments, there
is taken for a mistake as soon as there is a checkpoint to go on from: a sweep whose runs share a
directory would hand out the first one's result as each other one's. Before the first commit nothing
can be mistaken, and a command that was mistyped is simply replaced.

What is compared: the script and its arguments. Not what launches it (torchrun's flags, addresses,
the number of workers, Python's own options), not the script's content, since a mended script goes
on, and not the environment. A script that was moved is the same one: a scheduler may unpack the
code anew at each start.

The command that this process was started with is known for a script (``python train.py``,
torchrun, a console script), for a directory or zip file with a ``__main__.py``, and for the
script's own module (``python -m train``), also where Python's profilers, its tracer or its debugger
run the script. A notebook, ``python -c`` and an interactive session have none. Neither have other
programs of Python's or a library's own that call the script in their way: pytest, a notebook's
kernel and Ray's workers are given other arguments at each start.

Secrets are not written down. The value of a flag that sounds like one is kept as a salted digest
that is slow to compute (scrypt), which tells only whether it is the same.

A directory without this file, as older versions leave it, is any command's, the next one's from
then on. Rejected: a field of ``job.json``, which holds the job's lock and so is never replaced.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import mmap
import os
import re
import secrets
import shlex
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from outlast.config import Settings
from outlast.errors import ConfigError, StorageError, remedy, unusable
from outlast.ledger.file import FILE_NAME as LEDGER
from outlast.ledger.job import put_file

FILE_NAME: Final = "command.json"
HIDDEN: Final = "***"
_SECRET: Final = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
_PASSWORD: Final = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*(?=@)")  # in a URL
_OF_LAUNCHERS: Final = re.compile(r"--local[-_]rank(=|\Z)")  # what some give to each worker
_SHOWN_MAX: Final = 3  # differences
_WITH_RUN: Final = (
    "For a job of its own: outlast run --dir NEW …; to go on with that job all the same: "
    "outlast run --resume …"
)
_IN_SCRIPT: Final = (
    'For a job of its own: session(…, dir="NEW"); to go on with that job all the same: '
    "OUTLAST_RESUME=1, or session(…, resume=True)"
)
_COMMIT: Final = b'"event":"commit"'
_PATHS: Final = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
_LIBRARIES: Final = (*_PATHS, str(Path(__file__).parents[1]))  # and this package, installed or not
_INSTALLED: Final = ("/site-packages/", "/dist-packages/")  # of an environment beneath this one
# They stay the main module, and leave to the script the arguments that are its own.
_RUNNERS: Final = frozenset({"cProfile", "profile", "trace"})


class JobCommand(msgspec.Struct, frozen=True):
    """A script and its arguments.

    Attributes:
        kind: "script", "module" or "program".
        what: the script's absolute path, the module's name, or the program's path or name.
        arguments: what the script is given.
    """

    kind: str
    what: str
    arguments: list[str]


class _CommandRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A command as it is written down.

    Attributes:
        kind, what: as in :class:`JobCommand`.
        arguments: with secrets as ``HIDDEN``.
        salt: of ``digests``.
        digests: place among the arguments → digest of what is hidden there.
    """

    kind: str
    what: str
    arguments: list[str]
    salt: str = ""
    digests: dict[int, str] = {}


def script_command(path: str, arguments: Sequence[str]) -> JobCommand:
    """The command of a script that lies at ``path``, from the working directory."""
    return JobCommand("script", os.path.realpath(path), _without_launchers(arguments))


def module_command(name: str, arguments: Sequence[str]) -> JobCommand:
    """The command of ``python -m NAME``."""
    return JobCommand("module", name.removesuffix(".__main__"), _without_launchers(arguments))


def program_command(name: str, arguments: Sequence[str]) -> JobCommand:
    """The command of a program that is no Python."""
    what = os.path.realpath(name) if "/" in name else name
    return JobCommand("program", what, _without_launchers(arguments))


def own_command() -> JobCommand | None:
    """The script of this process and its arguments; None where it has none."""
    main = sys.modules.get("__main__")
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if spec is not None and spec.name in _RUNNERS:
        file, spec = sys.argv[0], None
        if not Path(file).is_file():  # a module that the runner was told to run
            return None
    if not isinstance(file, str) or not is_users(file):
        return None
    if spec is not None and spec.loader is None:  # a script that a newer profiler runs
        spec = None
    if spec is not None and spec.name == "__main__":  # of a directory, or of a zip file
        return script_command(file, _arguments(str(Path(file).parent)))
    if spec is not None:
        return module_command(spec.name, _arguments(spec.name.removesuffix(".__main__")))
    return script_command(file, _arguments(file))


def _arguments(what: str) -> list[str]:
    """What the interpreter was given behind ``what``: scripts take from ``sys.argv``.

    Where it was given something else (in a child of ``multiprocessing``) ``sys.argv`` tells.
    """
    name = Path(what).name
    for at, given in enumerate(sys.orig_argv[1:], 2):
        if given == what or Path(given).name == name:
            return sys.orig_argv[at:]
    return sys.argv[1:]


def is_users(file: str) -> bool:
    """Whether a source file is the script's, or of its kind: not of Python or a library."""
    is_library = file.startswith(("<frozen", *_LIBRARIES))
    return not is_library and not any(name in file for name in _INSTALLED)


def _without_launchers(arguments: Sequence[str]) -> list[str]:
    kept: list[str] = []
    is_value = False
    for argument in arguments:
        found = _OF_LAUNCHERS.match(argument)
        if not found and not is_value:
            kept.append(argument)
        is_value = found is not None and not found[1]
    return kept


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """The arguments without what sounds like a secret: a flag's value, a password in a URL."""
    kept: list[str] = []
    hide_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_flag = argument.startswith("-")
        is_secret = (is_flag or equals) and _SECRET.search(name) is not None
        if hide_next and not is_flag:
            kept.append(HIDDEN)
        elif is_secret and equals:
            kept.append(f"{name}={HIDDEN}")
        else:
            kept.append(_PASSWORD.sub(HIDDEN, argument))
        hide_next = bool(is_secret and is_flag and not equals)
    return kept


# --- comparing -----------------------------------------------------------------------------------


def refuse_other(settings: Settings, command: JobCommand) -> None:
    """Refuse another command than the job was begun with, if there is something to go on from.

    Writes nothing: it is called before anything is started.

    Raises:
        ConfigError: says what differs, and the two ways on.
        StorageError: the record, or the ledger, cannot be read.
    """
    if settings.resume:
        return
    record = _read(settings.dir)
    difference = "" if record is None else _difference(record, command)
    if difference and has_commits(settings):
        raise _refusal(settings, difference)


def settle(
    settings: Settings,
    command: JobCommand,
    *,
    is_alone: Callable[[], bool],
    in_script: bool = False,
) -> None:
    """Compare a command with the job's, and write it down where it is the job's from now on.

    Args:
        settings: the job's.
        command: what is run now; its job is locked.
        is_alone: tells whether nobody else runs the job: what was mistyped may be replaced.
        in_script: whether it is the script itself that asks, and no launcher of ours.

    Raises:
        ConfigError: it is another one; says what differs, and the two ways on.
        StorageError: the record cannot be read or written.
    """
    record = _read(settings.dir)
    if record is None:
        if _write(settings.dir, command, anew=True):
            return
        record = _read(settings.dir)  # another machine of the job was quicker
    difference = "" if record is None else _difference(record, command)
    if not difference:
        return
    if not settings.resume and (has_commits(settings) or not is_alone()):
        raise _refusal(settings, difference, in_script=in_script)
    _write(settings.dir, command, anew=False)


def has_commits(settings: Settings) -> bool:
    """Whether the job has a checkpoint to go on from, as its ledger or its directory says."""
    with contextlib.suppress(OSError):
        if any(settings.checkpoints_dir.iterdir()):
            return True
    path = settings.dir / LEDGER
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            return data.find(_COMMIT) >= 0
    except (FileNotFoundError, NotADirectoryError, ValueError):  # an empty file cannot be mapped
        return False
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}; {remedy(error)}") from None


def _refusal(settings: Settings, difference: str, *, in_script: bool = False) -> ConfigError:
    from outlast.ledger.narrator import place  # not for each start, which looks here first

    ways = _IN_SCRIPT if in_script else _WITH_RUN
    return ConfigError(
        f"the job in {place(settings.dir)} was begun with another command: {difference}. {ways}"
    )


def _difference(record: _CommandRecord, now: JobCommand) -> str:
    """What is another one, in words; "" where it is the same command."""
    if not _is_same_script(record, now):
        was, here = record.what, now.what
        if record.kind == now.kind and Path(was).name != Path(here).name:
            was, here = Path(was).name, Path(here).name
        return f"it ran {_in_words(record.kind, was)}, and this is {_in_words(now.kind, here)}"
    shown = without_secrets(now.arguments)
    digests = _digests(now.arguments, shown, record.salt) if record.salt else {}
    before = [(text, record.digests.get(at, "")) for at, text in enumerate(record.arguments)]
    after = [(text, digests.get(at, "")) for at, text in enumerate(shown)]
    if before == after:
        return ""
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    found = [_in_short(before, after, one) for one in matcher.get_opcodes() if one[0] != "equal"]
    more = f", and {len(found) - _SHOWN_MAX} more" if len(found) > _SHOWN_MAX else ""
    name = Path(now.what).name if now.kind != "module" else now.what
    return f"{name} was given {', '.join(found[:_SHOWN_MAX])}{more}"


def _in_words(kind: str, what: str) -> str:
    return f"-m {what}" if kind == "module" else what


def _is_same_script(record: _CommandRecord, now: JobCommand) -> bool:
    """By its place; one that has moved by its name, and by its content where both are there."""
    if (record.kind, record.what) == (now.kind, now.what):
        return True
    before, here = Path(record.what), Path(now.what)
    if record.kind != now.kind or now.kind == "module" or before.name != here.name:
        return False
    try:
        return before.samefile(here) or before.read_bytes() == here.read_bytes()
    except OSError:  # it is not there any more, or not on this machine
        return True


def _in_short(
    before: list[tuple[str, str]],
    after: list[tuple[str, str]],
    where: tuple[str, int, int, int, int],
) -> str:
    """One difference, as ``difflib`` has it, with the flag that it is the value of."""
    _, i, j, k, m = where
    flag = before[i - 1][0] if i and k else ""
    lead = [flag] if flag.startswith("-") and "=" not in flag else []
    if any(text.startswith("-") for text, _ in (*before[i : i + 1], *after[k : k + 1])):
        lead = []  # they are flags themselves
    was = shlex.join([*lead, *(text for text, _ in before[i:j])])
    now = shlex.join([*lead, *(text for text, _ in after[k:m])])
    if was == now:
        return f"another value of {was.removesuffix(HIDDEN).strip('= ') or 'a secret'}"
    if i == j:
        return f"no {now}, which it is given now"
    return f"{was} and is not now" if k == m else f"{was} and is now given {now}"


# --- reading and writing -------------------------------------------------------------------------


def _read(directory: Path) -> _CommandRecord | None:
    """The record; None where there is none that can be understood."""
    path = directory / FILE_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=_CommandRecord)
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}; {remedy(error)}") from None


def _write(directory: Path, command: JobCommand, *, anew: bool) -> bool:
    shown = without_secrets(command.arguments)
    salt = secrets.token_hex(16) if shown != command.arguments else ""
    record = _CommandRecord(
        kind=command.kind,
        what=command.what,
        arguments=shown,
        salt=salt,
        digests=_digests(command.arguments, shown, salt),
    )
    path = directory / FILE_NAME
    if anew and path.exists():  # it cannot be understood
        anew = False
    try:
        return put_file(path, _encoded(record), anew=anew)
    except OSError as error:
        raise unusable(f"{directory} cannot be written", error) from None


def _encoded(record: _CommandRecord) -> bytes:
    fields: Mapping[str, Any] = msgspec.to_builtins(record)
    return msgspec.json.format(msgspec.json.encode(fields), indent=1) + b"\n"


def _digests(arguments: Sequence[str], shown: Sequence[str], salt: str) -> dict[int, str]:
    return {
        at: hashlib.scrypt(
            given.encode(errors="surrogateescape"), salt=bytes.fromhex(salt), n=2**14, r=8, p=1
        ).hex()
        for at, (given, text) in enumerate(zip(arguments, shown, strict=True))
        if given != text
    }
