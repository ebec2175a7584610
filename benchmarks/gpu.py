"""All that wants a GPU, in one command and under nine minutes: ``make gpu``.

For a machine with one GPU, torch 2.11 or newer with CUDA, and no network. In turn, each within its
own limit: the tests that want a GPU; lost workers of four that share it; kills and a hang of
workers with NCCL; saves of 10 GB, and their restores, beside DCP. What was found is printed, and
written to ``--out`` as Markdown. What cannot be run here is one line that says why; the exit code
is 0 unless what was run has failed.

What is missing besides torch is installed by ``make gpu`` from wheels that ``make gpu-wheels`` has
fetched on a machine with a network. This file needs nothing but Python.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
LIMIT_S: Final = 520.0
BEAT_S: Final = 15.0
END_S: Final = 10.0
MARK: Final = "pytest.mark.gpu"
IN_PROCESS: Final = "inprocess"  # the directory of tests in which others go on after a loss
SIZES_MB: Final = (10_000, 4_000, 1_000)
# Module → the distribution that has it, of what is needed besides torch and what comes with that.
NEEDED: Final = {
    "click": "click",
    "jinja2": "Jinja2",
    "markupsafe": "MarkupSafe",
    "msgspec": "msgspec",
    "numpy": "numpy",
    "prometheus_client": "prometheus_client",
    "psutil": "psutil",
    "rich": "rich",
    "markdown_it": "markdown-it-py",
    "mdurl": "mdurl",
    "pygments": "Pygments",
    "safetensors": "safetensors",
    "xxhash": "xxhash",
    "pynvml": "nvidia-ml-py",
    "pytest": "pytest",
    "iniconfig": "iniconfig",
    "packaging": "packaging",
    "pluggy": "pluggy",
    "pytest_timeout": "pytest-timeout",
    "hypothesis": "hypothesis",
    "sortedcontainers": "sortedcontainers",
}
LOOK: Final = """
import torch
print(torch.__version__)
print(torch.version.cuda or torch.version.hip or "")
print(torch.distributed.is_available() and torch.distributed.is_nccl_available())
if torch.cuda.is_available():
    torch.zeros(1, device="cuda")
    print(torch.cuda.get_device_name())
    print(*torch.cuda.mem_get_info())
"""


class Machine(NamedTuple):
    """What there is here; ``problem`` is why nothing that wants a GPU can be run."""

    problem: str
    words: str = ""
    has_nccl: bool = False
    gpu_bytes: int = 0


class Part(NamedTuple):
    """Something to be run: its command, its limit, and why it cannot be run, if so."""

    name: str
    command: Sequence[str]
    limit_s: float
    why_not: str = ""


class Done(NamedTuple):
    """What came of a part."""

    part: Part
    words: str
    seconds: float = 0.0
    failed: bool = False
    tables: tuple[str, ...] = ()


def main() -> int:
    """Run everything; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-figures.md"))
    parser.add_argument("--dir", type=Path, help="where to write: a directory on the disk meant")
    parser.add_argument("--missing", action="store_true", help="only list what is to be installed")
    parser.add_argument("--needed", action="store_true", help="only list what is needed")
    options = parser.parse_args()
    if options.missing or options.needed:
        print(*(NEEDED.values() if options.needed else missing()), sep="\n")
        return 0
    begun_s = time.monotonic()
    place = options.dir or Path(tempfile.gettempdir())
    machine = look()
    print(f"gpu: {machine.words or machine.problem}", flush=True)
    done: list[Done] = []
    parts = parts_for(machine, place)
    for number, part in enumerate(parts, 1):
        left_s = LIMIT_S - (time.monotonic() - begun_s)
        done.append(run(part, f"gpu {number}/{len(parts)}", left_s))
    options.out.write_text(report(machine, done))
    took_s = time.monotonic() - begun_s
    print(f"gpu: {took_s:.0f} s in all; written to {options.out}", flush=True)
    return int(any(one.failed for one in done))


# --- what there is -------------------------------------------------------------------------------


def missing() -> list[str]:
    """Distributions that this Python lacks."""
    return [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]


def look() -> Machine:
    """Ask torch, in a process of its own: a driver that is not well may hang."""
    if importlib.util.find_spec("torch") is None:
        return Machine(f"torch is not installed for {sys.executable}")
    try:
        answer = subprocess.run(
            [sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired:
        return Machine("torch does not answer within 60 s: is the driver well?")
    said = answer.stdout.splitlines()
    if answer.returncode:
        last = (answer.stderr.splitlines() or ["it says nothing"])[-1]
        return Machine(f"torch cannot use the GPU: {last}")
    version, toolkit, has_nccl, *gpu = said
    if not gpu:
        kind = f"built for {toolkit}" if toolkit else "a build without CUDA"
        return Machine(f"there is no GPU here (torch {version}, {kind})")
    if tuple(map(int, version.split(".")[:2])) < (2, 11):
        return Machine(f"torch is {version}; 2.11 or newer is needed")
    absent = missing()
    if absent:
        return Machine(
            f"not installed: {', '.join(absent)}. Run make gpu-wheels on a machine with a network, "
            "bring .gpu-wheels here, and run make gpu again"
        )
    name, free = gpu[0], int(gpu[1].split()[0])
    words = f"{name}, torch {version}, CUDA {toolkit}, Python {platform.python_version()}"
    return Machine("", words, has_nccl == "True", free)


def parts_for(machine: Machine, place: Path) -> list[Part]:
    """All parts, in the order of what would be missed most."""
    here = str(Path(__file__).parent)
    python = sys.executable
    size = None if machine.problem else size_for(machine, place)
    too_small = machine.problem or (
        "" if size else f"less than {SIZES_MB[-1]} MB of state fit: {rooms(machine, place)}"
    )
    no_nccl = machine.problem or ("" if machine.has_nccl else "torch has no NCCL here")
    what = f"{size or SIZES_MB[0]} MB"
    saving = [python, f"{here}/saving_gpu.py", "--mb", str(size), "--rotations", "1"]
    saving += ["--saves", "1", "--dir", str(place)]
    saves = ["--parts", "saves", "--modes", "outlast;dcp.async_save pinned"]
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if MARK in file.read_text()]
    alone, shared = (
        sorted(str(file) for file in files if (file.parent.name == IN_PROCESS) == is_shared)
        for is_shared in (False, True)
    )
    tests = [python, "-m", "pytest", "-m", "gpu", "-q"]
    return [
        Part("tests that want a GPU", [*tests, *alone], 80.0, machine.problem),
        Part("lost workers of four that share it, with NCCL", [*tests, *shared], 140.0, no_nccl),
        Part("kills and a hang with NCCL", [python, f"{here}/gpu_recovery.py"], 115.0, no_nccl),
        Part(f"saves of {what} beside DCP", [*saving, *saves], 110.0, too_small),
        Part(
            f"restores of {what} beside DCP",
            [*saving, "--parts", "restores", "--restores", "outlast;dcp.load"],
            75.0,
            too_small,
        ),
    ]


def size_for(machine: Machine, place: Path) -> int | None:
    """MB of state: weights and moments, and a third of it for gradients; three saves on disk."""
    gpu, memory, disk = rooms(machine, place)
    fits = (
        size for size in SIZES_MB if gpu > 1.6 * size and memory > 2.5 * size and disk > 3.2 * size
    )
    return next(fits, None)


def rooms(machine: Machine, place: Path) -> tuple[int, int, int]:
    """MB free on the GPU, in memory and on the disk."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return machine.gpu_bytes // 10**6, free // 1000, shutil.disk_usage(place).free // 10**6


# --- running it ----------------------------------------------------------------------------------


def run(part: Part, label: str, left_s: float) -> Done:
    """One part, within its limit and what is left of the whole."""
    limit_s = min(part.limit_s, left_s)
    why_not = part.why_not or ("" if limit_s > 1 else f"the {LIMIT_S:.0f} s are over")
    if why_not:
        print(f"{label} {part.name}: not run: {why_not}", flush=True)
        return Done(part, f"not run: {why_not}")
    print(f"{label} {part.name}: at most {limit_s:.0f} s, {left_s:.0f} s are left", flush=True)
    begun_s = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            part.command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            is_over = wait(process, label, limit_s)
        finally:
            end(process)
        took_s = time.monotonic() - begun_s
        output.seek(0)
        text = output.read()
    tables = tuple(tables_of(text))
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    if not is_over:
        words, failed = f"not over within {limit_s:.0f} s; last said: {last}", True
    elif process.returncode:
        words, failed = f"failed ({process.returncode}): {last}", True
    else:
        words, failed = "done" if tables else last, False
    print("\n\n".join(tables) if not failed else text[-4000:], flush=True)
    print(f"{label} {part.name}: {words} ({took_s:.0f} s)", flush=True)
    return Done(part, words, took_s, failed, tables)


def wait(process: subprocess.Popen[bytes], label: str, limit_s: float) -> bool:
    """Whether it ended in time; says now and then how much is left."""
    begun_s = time.monotonic()
    while (left_s := limit_s - (time.monotonic() - begun_s)) > 0:
        try:
            process.wait(min(BEAT_S, left_s))
        except subprocess.TimeoutExpired:
            print(f"{label}   … at most {max(left_s - BEAT_S, 0):.0f} s more", flush=True)
        else:
            return True
    return False


def end(process: subprocess.Popen[bytes]) -> None:
    """It, and what it has started, is gone: by SIGTERM, which lets it tidy up, or else SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(END_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def environment() -> dict[str, str]:
    """This tree's sources first, then what was installed for this command."""
    found = [
        str(ROOT / "src"),
        str(ROOT / "benchmarks"),
        *os.environ.get("PYTHONPATH", "").split(":"),
    ]
    return {**os.environ, "PYTHONPATH": ":".join(filter(None, found))}


# --- what came of it -----------------------------------------------------------------------------


def tables_of(text: str) -> list[str]:
    """The Markdown tables in what a part has printed."""
    blocks = (block.strip() for block in text.split("\n\n"))
    return [block for block in blocks if block.startswith("|")]


def report(machine: Machine, done: Sequence[Done]) -> str:
    """All of it as Markdown."""
    rows = [f"| {one.part.name} | {one.words} | {one.seconds:.0f} |" for one in done]
    head = ["| part | | s |", "| --- | --- | --- |"]
    about = machine.words or f"Nothing was measured: {machine.problem}."
    sections = [f"### {one.part.name}\n\n" + "\n\n".join(one.tables) for one in done if one.tables]
    return (
        "\n\n".join([f"# Figures of one GPU\n\n{about}", "\n".join([*head, *rows]), *sections])
        + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
