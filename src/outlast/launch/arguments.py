"""``outlast run`` understands all that torchrun does; the rest it refuses before importing torch.

**The parser is torchrun's own**, with its ``PET_*`` variables. Importing it would import torch,
which takes seconds: its function is taken out of torch's source and run by itself, so its options
are those of the torch that is installed. Where that cannot be done, torch is imported for it.

**Everything that a person can get wrong is said by** :func:`parse`, in one line, but for what only
torch knows (whether there is a GPU, the names of a plugin's devices). :class:`Launch` makes torch's
configuration of what was understood, and imports torch for that.

Two things differ from torchrun: more restarts by default (the policy ends those that lead nowhere),
and a job on one machine needs no rendezvous.

Rejected: a list of torchrun's options of our own. Each version of torch has others.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import click

from outlast.errors import ConfigError
from outlast.launch.first_look import BACKEND, place_of, threads_to_set
from outlast.ledger.command import JobCommand, module_command, program_command, script_command

MAX_RESTARTS: Final = 1000
JOIN_TIMEOUT_S: Final = 1800.0  # that machines wait for enough others
_WORKER: Final = ("-m", "outlast.launch.worker")
_SEE: Final = "All flags: outlast run --help-all"
_UNKNOWN: Final = "unrecognized arguments: "


class Launch:
    """A command line, as torch's agent and workers need it.

    Args:
        parsed: the command line, checked.

    Attributes:
        config: torch's launch configuration.
        entrypoint: program to start in each worker.
        args: its arguments.
        script: what is run, without the way to it.
        worker_options: those of them ahead of the script's name; empty for a program.
        one_machine: whether no other machine can take part.
        command: what is run, to be compared with what the job was begun with.
        preflight: whether the doctor looks first.
        keeps_logs: whether the workers' log directory is somebody's wish, not only ours.

    Raises:
        ConfigError: torch refuses it.
    """

    def __init__(self, parsed: argparse.Namespace) -> None:
        self.keeps_logs = bool(parsed.log_dir) or (parsed.redirects, parsed.tee) != ("0", "0")
        self.one_machine = _is_one_machine(parsed)
        self.preflight: bool = parsed.preflight
        self.config, self.entrypoint, self.args = _config(parsed)
        self.script = Path(parsed.training_script).name
        self.command = command_of(parsed)
        self.worker_options: list[str] = []
        if self.one_machine:
            self.config.run_id = "outlast"
        if parsed.no_python:
            # Not with what lies in the working directory: the program is no Python, and knows none.
            self.args = ["-P", *_WORKER, "--no-python", self.entrypoint, *self.args]
            self.entrypoint = sys.executable
        else:
            script = ["-m"] if parsed.module else []
            script += [parsed.training_script, *parsed.training_script_args]
            self.entrypoint = os.environ.get("PYTHON_EXEC") or sys.executable
            self.worker_options = ["-u", *_WORKER]
            self.args = [*self.worker_options, *script]


def command_of(parsed: argparse.Namespace) -> JobCommand:
    """What a parsed command line runs."""
    script, arguments = parsed.training_script, parsed.training_script_args
    if parsed.no_python and not parsed.run_path:
        return program_command(script, arguments)
    make = module_command if parsed.module else script_command
    return make(script, arguments)


def _config(parsed: argparse.Namespace) -> tuple[Any, Any, list[str]]:
    from torch.distributed import run as torchrun

    os.environ.update(threads_to_set(os.environ, parsed.nproc_per_node))
    # The agent's signals are ours: a notice, not the end. torch wants at least one name.
    parsed.signals_to_handle = "SIGQUIT"
    if parsed.rdzv_backend == BACKEND:
        del parsed.master_addr  # torch warns of a value that it set itself
    try:
        config, entrypoint, args = torchrun.config_from_args(parsed)
    except (AssertionError, ValueError, RuntimeError, NotADirectoryError) as error:
        raise ConfigError(f"{str(error).rstrip('.?!')}. {_SEE}") from None
    return config, entrypoint, list(args)


# --- reading --------------------------------------------------------------------------------------


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line after ``outlast run``.

    Returns:
        torchrun's namespace with ``dir``, ``resume`` and ``preflight``; all of it checked.

    Raises:
        ConfigError: says what is wrong, in one line.
        SystemExit: help was asked for, and is printed.
    """
    parser = _parser()

    def fail(message: str) -> NoReturn:
        if "training_script" in message:
            message = "no script is named; write: outlast run --nproc-per-node 2 train.py"
        elif message.startswith(_UNKNOWN):
            message += _close(message.removeprefix(_UNKNOWN).partition("=")[0], parser)
        raise ConfigError(f"{message.rstrip('?.')}{'?' if message.endswith('?') else '.'} {_SEE}")

    parser.error = fail  # type: ignore[method-assign]
    parsed = parser.parse_args(arguments)
    parsed.master_port_given = parsed.master_port is not None
    parsed.master_port = parsed.master_port or 29500
    _check(parsed)
    if not _is_one_machine(parsed) and _names_no_rendezvous(parsed):
        parsed.rdzv_backend = BACKEND
    if parsed.rdzv_backend == BACKEND and parsed.rdzv_endpoint and not parsed.standalone:
        place_of(parsed.rdzv_endpoint)
    return parsed


def _parser() -> argparse.ArgumentParser:
    try:
        parser: argparse.ArgumentParser = torch_parser()
    except ValueError as error:  # of a switch that is neither 0 nor 1
        raise ConfigError(f"a PET_… variable is no value for its option: {error}") from None
    add_own(parser)
    parser.format_help = lambda: f"{help_text()}\n"  # type: ignore[method-assign]
    if "PET_MAX_RESTARTS" not in os.environ:
        parser.set_defaults(max_restarts=MAX_RESTARTS)
    if "PET_MASTER_PORT" not in os.environ:
        parser.set_defaults(master_port=None)  # torch 2.11 has one, the same for all jobs
    return parser


def _close(name: str, parser: argparse.ArgumentParser) -> str:
    known = [option for action in parser._actions for option in action.option_strings]
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


class _HelpAll(argparse.Action):
    """Prints torchrun's options too."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        click.echo(help_text(everything=True))
        parser.exit()


def add_own(parser: argparse.ArgumentParser) -> None:
    """Add what ``outlast run`` takes besides torchrun's options."""
    parser.add_argument(
        "--dir", default=None, metavar="PATH", help="The job's directory [default: ./outlast-job]."
    )
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
    parser.add_argument(
        "--help-all",
        action=_HelpAll,
        default=argparse.SUPPRESS,
        help="Show torchrun's options too, all of which are taken.",
    )


_SOURCES: Final = {  # in torch → what is taken from it, and under which name it is used
    "numa/binding.py": {"AffinityMode": "_AffinityMode"},
    "distributed/argparse_util.py": {"env": "env", "check_env": "check_env"},
    "distributed/run.py": {"get_args_parser": "get_args_parser"},
}


def torch_parser() -> argparse.ArgumentParser:
    """Make torchrun's parser; torch is imported only where its source has another form.

    Raises:
        ValueError: a ``PET_*`` variable of a switch is no number.
    """
    try:
        make = _taken_parser()
        return make()
    except (SyntaxError, NameError, KeyError, AttributeError, TypeError, ImportError, OSError):
        from torch.distributed.run import get_args_parser

        return get_args_parser()  # type: ignore[no-any-return]


def _taken_parser() -> Callable[[], argparse.ArgumentParser]:
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise ImportError("torch")
    found: dict[str, Any] = {}
    for file, names in _SOURCES.items():
        tree = ast.parse((Path(torch.origin).parent / file).read_bytes())
        wanted = _needed(tree, names)
        tree.body = [node for node in tree.body if _is_wanted(node, wanted)]
        space: dict[str, Any] = {"__name__": f"outlast's part of {file}", **found}
        exec(compile(tree, file, "exec"), space)  # noqa: S102 - what an import of it would run
        found |= {called: space[name] for name, called in names.items()}
    make: Callable[[], argparse.ArgumentParser] = found["get_args_parser"]
    return make


def _needed(tree: ast.Module, names: Mapping[str, str]) -> set[str]:
    """These, and the classes of the same file that they name."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    needed, left = set(names), list(names)
    while left:
        node = (functions | classes).get(left.pop())
        for one in ast.walk(node) if node is not None else ():
            if isinstance(one, ast.Name) and one.id in classes and one.id not in needed:
                needed.add(one.id)
                left.append(one.id)
    return needed


def _is_wanted(node: ast.stmt, names: Collection[str]) -> bool:
    if isinstance(node, ast.Import):
        return all(one.name.partition(".")[0] != "torch" for one in node.names)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").partition(".")[0] != "torch"
    return isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in names


# --- checking -------------------------------------------------------------------------------------

_STREAMS: Final = re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", re.ASCII)
_RANKS: Final = re.compile(r"\s*\d+\s*(,\s*\d+\s*)*", re.ASCII)
_COUNTED: Final = ("auto", "cpu", "gpu", "xpu")  # ways to say "as many as there are"
_WHOLE: Final = re.compile(r"\s*[-+]?\d+\s*", re.ASCII)


def _check(parsed: argparse.Namespace) -> None:
    if not parsed.no_python:
        _check_script(parsed)
    elif parsed.module:
        raise ConfigError("--no-python and --module: a program is no Python module; give one")
    elif shutil.which(parsed.training_script) is None:
        raise ConfigError(f"there is no program {parsed.training_script}; check the path")
    fewest, most = _machines(parsed.nnodes)
    if not 0 < fewest <= most:
        raise ConfigError(f"--nnodes {parsed.nnodes}: at least one machine, and MIN is at most MAX")
    _check_workers(parsed.nproc_per_node)
    for name in ("max_restarts", "shutdown_timeout"):  # torch 2.11 does not have the second
        if (getattr(parsed, name, None) or 0) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(parsed, name)} is below 0")
    for name in ("redirects", "tee"):
        if not _STREAMS.fullmatch(getattr(parsed, name)):
            raise ConfigError(
                f"--{name} {getattr(parsed, name)}: write 1 (standard output), 2 (standard "
                "error), 3 (both), or RANK:N,… for each rank"
            )
    if parsed.local_ranks_filter and not _RANKS.fullmatch(parsed.local_ranks_filter):
        raise ConfigError(f"--local-ranks-filter {parsed.local_ranks_filter}: write 0,2,3")
    if parsed.log_dir and Path(parsed.log_dir).exists() and not Path(parsed.log_dir).is_dir():
        raise ConfigError(f"--log-dir {parsed.log_dir} is not a directory; name another")
    words = [word.partition("=") for word in parsed.rdzv_conf.strip().split(",") if word]
    if not all(key.strip() and value.strip() for key, _, value in words):
        raise ConfigError(f"--rdzv-conf {parsed.rdzv_conf}: write KEY=VALUE,…")
    wait_s_of({key.strip(): value.strip() for key, _, value in words})


def wait_s_of(rdzv_configs: Mapping[str, Any]) -> float:
    """How long machines wait for enough others.

    Raises:
        ConfigError: what was set is no such time.
    """
    try:
        wait_s = float(rdzv_configs.get("join_timeout", JOIN_TIMEOUT_S))
    except ValueError:
        wait_s = 0.0
    if not wait_s > 0:
        raise ConfigError("--rdzv-conf join_timeout is not a number of seconds above 0")
    return wait_s


def _check_workers(text: str) -> None:
    if _WHOLE.fullmatch(text):
        if int(text) < 1:
            raise ConfigError(f"--nproc-per-node {text}: there must be a worker")
        return
    # A plugin may give its devices a name of their own; which, torch knows.
    if text not in _COUNTED and not importlib.metadata.entry_points(group="torch.backends"):
        raise ConfigError(
            f"--nproc-per-node {text} is no number of workers; write a number, or "
            f"{', '.join(_COUNTED[:-1])} or {_COUNTED[-1]} for as many as there are"
        )


def _machines(text: str) -> tuple[int, int]:
    """The fewest and the most: ``2`` or ``1:4``."""
    parts = text.split(":")
    if len(parts) > 2 or not all(map(_WHOLE.fullmatch, parts)):
        raise ConfigError(f"--nnodes {text} is neither N nor MIN:MAX")
    return int(parts[0]), int(parts[-1])


def _is_one_machine(parsed: argparse.Namespace) -> bool:
    return bool(
        parsed.standalone
        or (
            _machines(parsed.nnodes)[1] == 1
            and parsed.rdzv_backend == "static"
            and not parsed.rdzv_endpoint
            and not parsed.master_port_given
        )
    )


def _names_no_rendezvous(parsed: argparse.Namespace) -> bool:
    """Whether several machines are asked for and nothing says how they find each other."""
    return bool(
        parsed.rdzv_backend == "static"
        and not parsed.rdzv_endpoint
        and not parsed.master_port_given
        and parsed.master_addr == "127.0.0.1"
        and not parsed.node_rank
    )


def _check_script(parsed: argparse.Namespace) -> None:
    script = parsed.training_script
    if parsed.module:
        top = script.partition(".")[0]
        try:
            found = importlib.util.find_spec(top) is not None
        except (ImportError, ValueError):
            found = False
        # The working directory is on a worker's path, and not on that of a console script.
        here = bool(top) and (Path(f"{top}.py").is_file() or Path(top).is_dir())
        if not found and not here:
            raise ConfigError(f"there is no module {script}; name one that python -m would run")
        return
    path = Path(script)
    if path.is_file():
        return
    if path.is_dir():
        raise ConfigError(f"{script} is a directory; name the script in it")
    others = [found.name for found in path.parent.glob("*.py")] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, others, n=1)
    hint = f"; did you mean {path.with_name(close[0])}?" if close else "; check the path"
    raise ConfigError(f"there is no script {script}{hint}")


# --- help -----------------------------------------------------------------------------------------

_FIRST: Final = {  # of torchrun's, in our words: without these nobody starts a job
    "--nproc-per-node": ("N", "Workers on this machine, or auto, gpu, cpu [default: 1]."),
    "--nnodes": ("N|MIN:MAX", "Machines of the job [default: 1]."),
    "--max-restarts": ("N", f"Restarts in all [default: {MAX_RESTARTS}]."),
    "-m, --module": ("", "What is run is a module, as with python -m."),
}


def help_text(*, everything: bool = False) -> str:
    """Say how the command is used: our options, the first of torchrun's, or ``everything``."""
    formatter = click.Context(click.Command("run")).make_formatter()
    formatter.write_usage("outlast run", "[OPTIONS] train.py [ARGUMENTS]...")
    formatter.write_paragraph()
    with formatter.indentation():
        formatter.write_text(
            "Run a script under outlast, in place of torchrun. What stands behind the script is "
            "the script's. Settings are in outlast.toml: see outlast config --explain."
        )
    own = argparse.ArgumentParser()
    add_own(own)
    first = [(f"{name} {of}".rstrip(), words) for name, (of, words) in _FIRST.items()]
    help_first, *ours, help_last = _listed(own._actions)
    with formatter.section("Options"):
        formatter.write_dl([*ours, *([] if everything else first), help_first, help_last])
    if everything:
        with formatter.section("torchrun's options"):
            actions = torch_parser()._actions
            formatter.write_dl(
                _listed(one for one in actions if "--help" not in one.option_strings)
            )
    return formatter.getvalue().rstrip()


def options() -> Iterator[tuple[str, str]]:
    """Each long option's name and what it is for, for a shell to complete."""
    for one in _parser()._actions:
        for name in one.option_strings:
            if name.startswith("--") and "_" not in name:
                yield name, one.help or ""


def _listed(actions: Iterable[argparse.Action]) -> list[tuple[str, str]]:
    """Their names, once each (``--rdzv_id`` is ``--rdzv-id``), and what they are for."""
    rows = []
    for one in actions:
        names = [name for name in one.option_strings if "_" not in name]
        choices = "|".join(map(str, one.choices)) if one.choices else one.dest.upper()
        of = "" if one.nargs == 0 else f" {one.metavar or choices}"
        if names:
            words = (one.help or "").replace("%%", "%")
            rows.append((", ".join(names) + of, words[:1].upper() + words[1:]))
    return rows
