"""``outlast run`` understands all that torchrun does, and says in one line what is wrong.

torch's own parser is used, with its ``PET_*`` variables; two things are different: more restarts by
default (the policy ends those that lead nowhere), and a job on one machine needs no rendezvous.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any, Final, NoReturn

from torch.distributed import run as torchrun
from torch.distributed.launcher.api import LaunchConfig

from outlast.errors import ConfigError
from outlast.launch.first_look import BACKEND, add_own, command_of, threads_to_set

MAX_RESTARTS: Final = 1000
_WORKER: Final = ("-m", "outlast.launch.worker")


class Launch:
    """A checked command line.

    Attributes:
        config: torch's launch configuration.
        entrypoint: program to start in each worker.
        args: its arguments.
        script: what is run, without the way to it.
        worker_options: those of them ahead of the script's name; empty for a program.
        one_machine: whether no other machine can take part.
        directory: the value of --dir, or None.
        resume: True where --resume is given, else None.
        command: what is run, to be compared with what the job was begun with.
        preflight: whether the doctor looks first.
        keeps_logs: whether the workers' log directory is somebody's wish, not only ours.
    """

    def __init__(self, arguments: list[str]) -> None:
        parsed = _parse(arguments)
        self.directory: str | None = parsed.dir
        self.resume: bool | None = parsed.resume
        self.keeps_logs = bool(parsed.log_dir) or (parsed.redirects, parsed.tee) != ("0", "0")
        self.one_machine = _is_one_machine(parsed)
        self.preflight: bool = parsed.preflight
        if not parsed.no_python:
            _check_script(parsed)
        elif shutil.which(parsed.training_script) is None:
            raise ConfigError(f"there is no program {parsed.training_script}; check the path")
        self.config, self.entrypoint, self.args = _config(parsed)
        self.script = Path(parsed.training_script).name
        self.command = command_of(parsed)
        self.worker_options: list[str] = []
        if self.one_machine:
            self.config.run_id = "outlast"
        if parsed.no_python:
            # Not with what lies in the working directory: the program is no Python, and knows none.
            self.args = ["-P", *_WORKER, "--no-python", self.entrypoint, *self.args]
            self.entrypoint = _python()
        else:
            script = ["-m"] if parsed.module else []
            script += [parsed.training_script, *parsed.training_script_args]
            self.entrypoint = os.environ.get("PYTHON_EXEC") or _python()
            self.worker_options = ["-u", *_WORKER]
            self.args = [*self.worker_options, *script]


def _python() -> str:
    import sys

    return sys.executable


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = torchrun.get_args_parser()
    parser.prog = "outlast run"
    parser.description = "torchrun's flags, and:"
    add_own(parser)
    if "PET_MAX_RESTARTS" not in os.environ:
        parser.set_defaults(max_restarts=MAX_RESTARTS)
    if "PET_MASTER_PORT" not in os.environ:
        parser.set_defaults(master_port=None)  # torch 2.11 has one, the same for all jobs

    def fail(message: str) -> NoReturn:
        if "training_script" in message:
            message = "no script is named; write: outlast run --nproc-per-node 2 train.py"
        raise ConfigError(f"{message}. All flags: outlast run --help")

    parser.error = fail
    parsed = parser.parse_args(arguments)
    return _fill_in(parsed)


def _fill_in(parsed: argparse.Namespace) -> argparse.Namespace:
    if parsed.master_port is None:
        parsed.master_port_given = False
        parsed.master_port = 29500
    else:
        parsed.master_port_given = True
    shutdown_s = getattr(parsed, "shutdown_timeout", None)  # torch 2.11 has no such flag
    if shutdown_s is not None and shutdown_s < 0:
        raise ConfigError(f"--shutdown-timeout {shutdown_s} is below 0")
    return parsed


def _is_one_machine(parsed: argparse.Namespace) -> bool:
    if parsed.standalone:
        return True
    try:
        _, most = torchrun.parse_min_max_nnodes(parsed.nnodes)
    except (RuntimeError, ValueError):
        raise ConfigError(f"--nnodes {parsed.nnodes} is neither N nor MIN:MAX") from None
    return bool(
        most == 1
        and parsed.rdzv_backend == "static"
        and not parsed.rdzv_endpoint
        and not parsed.master_port_given
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


def _config(parsed: argparse.Namespace) -> tuple[LaunchConfig, Any, list[str]]:
    os.environ.update(threads_to_set(os.environ, parsed.nproc_per_node))
    # The agent's signals are ours: a notice, not the end. torch wants at least one name.
    parsed.signals_to_handle = "SIGQUIT"
    if not _is_one_machine(parsed) and _names_no_rendezvous(parsed):
        parsed.rdzv_backend = BACKEND
    if parsed.rdzv_backend == BACKEND:
        del parsed.master_addr  # torch warns of a value that it set itself
    try:
        config, entrypoint, args = torchrun.config_from_args(parsed)
    except (AssertionError, ValueError, RuntimeError, NotADirectoryError) as error:
        raise ConfigError(f"{str(error).rstrip('.?!')}. All flags: outlast run --help") from None
    if config.nproc_per_node < 1:
        raise ConfigError(f"--nproc-per-node {parsed.nproc_per_node}: there must be a worker")
    return config, entrypoint, list(args)
