"""Virtual environments for the libraries that Outlast is compared with.

Each gets one of its own under ``--peers-dir``, with exactly the torch that runs this; pip is held
to it by a constraint, and an environment in which torch was replaced all the same is refused. What
does not install or import is reported, not fatal.

    python benchmarks/bench/peers.py --peers-dir DIR
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

# Name → what pip is asked for, and the module that must import. DLRover's flash checkpoint needs
# grpc, which only its extra for Kubernetes brings; the launchers run a script that saves with
# safetensors.
PEERS: Final = {
    "torch_checkpointing": ("torch_checkpointing==0.1.1", "torch_checkpointing"),
    "dlrover": ("dlrover[k8s]==0.6.1", "dlrover.trainer.torch.flash_checkpoint.ddp"),
    "moonclip": ("moonclip==0.3.1", "moonclip.pytorch"),
    "torchft": ("torchft==0.2.0 safetensors", "torchft"),
    "nvidia-resiliency-ext": (
        "nvidia-resiliency-ext==0.4.1 safetensors",
        "nvidia_resiliency_ext.fault_tolerance.launcher",
    ),
}
CONSTRAINTS: Final = Path(__file__).resolve().parents[2] / "constraints.txt"


@dataclass(frozen=True)
class Peer:
    """An environment, or why there is none.

    Attributes:
        interpreter: its Python.
        problem: why it cannot be used; empty if it can.
    """

    interpreter: str
    problem: str = ""


def prepare(directory: Path, names: Iterable[str]) -> dict[str, Peer]:
    """The environments of these peers, made where they are not there yet."""
    return {name: _prepare(directory / name, name) for name in names}


def _prepare(path: Path, name: str) -> Peer:
    interpreter = path / "bin" / "python"
    requirement, module = PEERS[name]
    if not (path / "ready").exists():
        print(f"installing {requirement} into {path}", file=sys.stderr, flush=True)
        problem = _install(path, interpreter, requirement)
        if problem:
            return Peer(str(interpreter), f"did not install: {problem}")
        (path / "ready").touch()
    check = (
        f"import torch, importlib; importlib.import_module({module!r}); print(torch.__version__)"
    )
    done = subprocess.run([interpreter, "-c", check], capture_output=True, text=True, check=False)
    if done.returncode:
        return Peer(str(interpreter), f"does not import: {_last_line(done.stderr)}")
    if done.stdout.strip() != torch.__version__:
        return Peer(str(interpreter), f"has torch {done.stdout.strip()}, not {torch.__version__}")
    return Peer(str(interpreter))


def _install(path: Path, interpreter: Path, requirement: str) -> str:
    """Why it could not be installed; empty if it was."""
    venv.create(path, with_pip=True, clear=True)
    pip = [str(interpreter), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    # torch first and by its version alone: +cpu and the like are not a release that pip can be
    # asked for everywhere. The constraint keeps it from being replaced by what comes after.
    version = torch.__version__.partition("+")[0]
    for command in (
        [*pip, "-c", str(CONSTRAINTS), f"torch=={version}", "numpy"],
        [*pip, "-c", str(CONSTRAINTS), *requirement.split()],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return _last_line(done.stderr)
    return ""


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no message"


def main() -> None:
    """Prepare all of them and say which can be used."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers-dir", type=Path, required=True)
    for name, peer in prepare(parser.parse_args().peers_dir, PEERS).items():
        print(f"{name}: {peer.problem or 'ready'}")


if __name__ == "__main__":
    main()
