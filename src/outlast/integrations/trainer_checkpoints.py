"""Checkpoints that a Trainer has written itself: which of them to go on from.

A Trainer that was ended while it saved leaves a directory with some of its files, or with parts of
them, and takes the one with the highest number. Here the newest whole one is taken; the others are
said. Newest is by the time at which ``trainer_state.json`` was written, which the Trainer writes
last: an older run may have left a higher number.

Guarantees: nothing is unpickled. Files of torch.save are read through and compared with their
checksums, those of safetensors with the sizes that their headers say.

What can go wrong: a safetensors file with other bytes in the right place is not seen: the format
has no checksum.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from outlast.ledger.narrator import say

STATE: Final = "trainer_state.json"
PREFIX: Final = "checkpoint-"
_HEADER_MAX: Final = 100 << 20  # what safetensors accepts
_DAMAGED: Final = (ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile)
_WEIGHTS: Final = ("model", "pytorch_model", "adapter_model")


def newest_whole(directory: str, world_size: int = 1) -> str | None:
    """The newest of ``directory``'s checkpoints that is whole; None where there is none.

    One that lacks a worker's random states is taken only if all do: the Trainer goes on from it
    without a word, and the run is another one then.

    Args:
        directory: the Trainer's ``output_dir``.
        world_size: how many workers there are.
    """
    found = [one for one in Path(directory).glob(f"{PREFIX}*") if one.is_dir()]
    found.sort(key=_written_t, reverse=True)
    without: list[tuple[Path, str]] = []
    for one in found:
        why_not = broken(one)
        lacking = "" if why_not else _lacking_states(one, world_size)
        if not why_not and not lacking:
            for passed, name in without:
                say(f"{passed} is not whole ({name} is missing): it is passed over")
            return str(one)
        if why_not:
            say(f"{one} is not whole ({why_not}): it is passed over")
        else:
            without.append((one, lacking))
    if not without:
        return None
    one, lacking = without[0]
    say(f"{one} has no {lacking}: what is random from there on is not as it would have been")
    return str(one)


def _lacking_states(checkpoint: Path, world_size: int) -> str:
    """The file with a worker's random states that is not there; "" if all are."""
    names = [f"rng_state_{rank}.pth" for rank in range(world_size)]
    wanted = ["rng_state.pth"] if world_size == 1 else names
    return next((name for name in wanted if not (checkpoint / name).exists()), "")


def broken(checkpoint: Path) -> str:
    """Why the Trainer could not go on from this; "" if it can."""
    try:
        state = json.loads((checkpoint / STATE).read_text())
        step = int(state["global_step"])
    except (OSError, ValueError, TypeError, KeyError):
        return f"{STATE} is missing or cannot be read"
    if checkpoint.name != f"{PREFIX}{step}":
        return f"{STATE} is of step {step}"
    names = {one.name for one in checkpoint.iterdir()}
    if not any(name.startswith(_WEIGHTS) for name in names):
        return "there are no weights"
    for wanted in ("optimizer", "scheduler"):
        if not any(name.startswith(wanted) for name in names):
            return f"{wanted}.pt is missing"
    return next(filter(None, map(broken_file, sorted(checkpoint.rglob("*")))), "")


def broken_file(path: Path) -> str:
    """Why this file is not whole; "" if it is, or if it is of a kind that does not tell."""
    looks: dict[str, Callable[[Path], bool]] = {
        ".safetensors": _is_whole_safetensors,
        **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), _is_whole_zip),
        ".json": _has_all_parts,
    }
    look = looks.get(path.suffix)
    try:
        is_whole = look is None or not path.is_file() or look(path)
    except (OSError, EOFError, RuntimeError, *_DAMAGED):
        is_whole = False
    return "" if is_whole else f"{path.name} is cut off, or names parts that are missing"


def _is_whole_safetensors(path: Path) -> bool:
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        if num_bytes > _HEADER_MAX:
            return False
        header: dict[str, Any] = json.loads(file.read(num_bytes))
    ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
    return path.stat().st_size == 8 + num_bytes + max(ends, default=0)


def _is_whole_zip(path: Path) -> bool:
    if path.name == "training_args.bin":  # of no use for going on
        return True
    with zipfile.ZipFile(path) as file:
        return file.testzip() is None


def _has_all_parts(path: Path) -> bool:
    content = json.loads(path.read_text())
    if not path.name.endswith(".index.json"):
        return True
    return all((path.parent / name).is_file() for name in set(content["weight_map"].values()))


def _written_t(checkpoint: Path) -> float:
    state = checkpoint / STATE
    return (state if state.exists() else checkpoint).stat().st_mtime
