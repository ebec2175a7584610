"""One specimen's lives: undisturbed, killed in its fourth step, resumed; each in its own process.

The parent has imported everything and computes nothing; each life is a fork of it. The undisturbed
one runs without a session: what is compared with is torch alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch._dynamo  # by the first optimizer that is made
from specimens import Specimen

import outlast.training.session  # as outlast.session() imports it
from outlast.errors import OutlastError
from outlast.ledger.file import read_events

STEPS: Final = 6
KILLED_AFTER: Final = 3
SAVED_S: Final = 90.0
SOON_S: Final = 10.0
REFUSED: Final = 2
LIFE_S: Final = 180


class Outcome(NamedTuple):
    """What became of a specimen.

    Attributes:
        result: equal, refused, different, error, or skipped where it does not run at all.
        note: why.
    """

    result: str
    note: str = ""


def examine(specimen: Specimen, room: Path) -> Outcome:
    """Run its three lives in ``room`` and compare."""
    shutil.rmtree(room, ignore_errors=True)
    room.mkdir(parents=True)
    code, said = _fork(room / "undisturbed", lambda to: _undisturbed(specimen, to))
    if code:
        return Outcome("skipped", f"does not run by itself: {_last_line(said)}")
    job = room / "job"
    code, said = _fork(room / "killed", lambda to: _with_session(specimen, to, job, kill=True))
    if code == REFUSED:
        return _refused(said, job)
    if code != -signal.SIGKILL:
        return Outcome("error", f"first run ended with {code}: {_last_line(said)}")
    code, said = _fork(room / "resumed", lambda to: _with_session(specimen, to, job, kill=False))
    if code:
        kind = "refused at the resume" if code == REFUSED else f"resume ended with {code}"
        return Outcome("error", f"{kind}: {_last_line(said)}")
    alone = json.loads((room / "undisturbed.json").read_text())
    resumed = json.loads((room / "resumed.json").read_text())
    if not resumed.pop("resumed"):
        return Outcome("different", "it did not resume")
    alone["losses"] = alone["losses"][-len(resumed["losses"]) :]
    found = _different(alone, resumed, "")
    if found:
        return Outcome("different", "; ".join(found[:3]))
    return Outcome("equal")


def _refused(said: str, job: Path) -> Outcome:
    """A refusal in one line, before a second step was trained."""
    lines = [line for line in said.splitlines() if line.startswith("outlast: ")]
    if "Traceback" in said or not lines:
        return Outcome("error", f"a traceback: {_last_line(said)}")
    return Outcome("refused", lines[-1].removeprefix("outlast: "))


def _fork(to: Path, life: Callable[[Path], None]) -> tuple[int, str]:
    """Run ``life`` in a process of its own; its exit status and what it said."""
    said = to.with_suffix(".txt")
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            signal.alarm(LIFE_S)
            out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            life(to.with_suffix(".json"))
            code = 0
        except OutlastError as error:
            print(f"outlast: {error}", flush=True)
            code = REFUSED
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        except BaseException:  # noqa: BLE001 - this process ends here, whatever it was
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), said.read_text(errors="replace")


def _seed() -> None:
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)


def _undisturbed(specimen: Specimen, to: Path) -> None:
    _seed()
    model, optimizer = specimen.make()
    losses = [specimen.step(model, optimizer, number) for number in range(STEPS)]
    _write(to, model, optimizer, losses)


def _with_session(specimen: Specimen, to: Path, job: Path, *, kill: bool) -> None:
    _seed()
    model, optimizer = specimen.make()
    losses = []
    every = f"{KILLED_AFTER} steps"
    with outlast.session(model=model, optimizer=optimizer, dir=job, every=every) as session:
        resumed = session.resumed
        for number in session.steps(range(STEPS), until=STEPS):
            losses.append(specimen.step(model, optimizer, number))
            # One step more is trained, and lost. What changes parameters within the backward pass
            # may spoil the first snapshot; the next one is taken before.
            if kill and number >= KILLED_AFTER:
                if _has_committed(job, SAVED_S if number == STEPS - 1 else SOON_S):
                    os.kill(os.getpid(), signal.SIGKILL)
                assert number < STEPS - 1, "nothing was saved"
    _write(to, model, optimizer, losses, resumed=resumed)


def _has_committed(job: Path, within_s: float) -> bool:
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        if any(event.event == "commit" for event in read_events(job)):
            return True
        time.sleep(0.02)
    return False


def _write(
    to: Path, model: torch.nn.Module, optimizer: Any, losses: list[torch.Tensor], **more: Any
) -> None:
    names = {id(p): name for name, p in model.named_parameters()}
    seen = {
        "losses": [loss.double().item().hex() for loss in losses],
        "weights": told(dict(model.state_dict(keep_vars=False)), {}),
        "optimizer": told({"itself": optimizer}, names),
        **more,
    }
    to.write_text(json.dumps(seen))


# --- what something is, in words that are equal if it is ------------------------------------------

# The constructor's arguments, to which torch's load_state_dict adds one, and torch's own names.
NOT_COMPARED: Final = ("defaults", "hooks", "_zero_grad_profile_name", "_patched", "_compiled")


def told(value: Any, names: Mapping[int, str], seen: tuple[int, ...] = ()) -> Any:
    """``value`` as data, to the bit: types, dtypes, shapes, what objects hold.

    Args:
        value: anything.
        names: id of a parameter → its name.
        seen: the objects around it.
    """
    if id(value) in names:
        return f"parameter {names[id(value)]}"
    if isinstance(value, torch.Tensor):
        return _tensor(value, names)
    if value is None or isinstance(value, bool | int | str):
        return names.get(hash(value), f"{type(value).__name__} {value}")
    if isinstance(value, float):
        return f"float {value.hex()}"
    if id(value) in seen:
        return "itself"
    seen = (*seen, id(value))
    if isinstance(value, Mapping):
        inner = {_key(k, names): told(v, names, seen) for k, v in value.items()}
        return {"type": type(value).__name__, **inner}
    if isinstance(value, list | tuple | set | frozenset) or type(value).__name__ == "deque":
        items = [told(v, names, seen) for v in value]
        if isinstance(value, set | frozenset):
            items.sort(key=str)
        more = [f"of {value.maxlen}"] if hasattr(value, "maxlen") else []
        return [type(value).__name__, *more, *items]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), list(value.shape), value.tobytes().hex()]
    if isinstance(value, torch.Generator):
        return _tensor(value.get_state(), names)
    if isinstance(value, torch.nn.Module) or callable(value) or not hasattr(value, "__dict__"):
        return type(value).__name__
    kept = {k: v for k, v in vars(value).items() if not any(word in k for word in NOT_COMPARED)}
    return {"object": type(value).__name__, **told(kept, names, seen)}


def _key(key: Any, names: Mapping[int, str]) -> str:
    if id(key) in names:
        return names[id(key)]
    return names.get(key, str(key)) if isinstance(key, int) else str(key)


def _tensor(value: torch.Tensor, names: Mapping[int, str]) -> Any:
    kind = f"{type(value).__name__} {value.dtype} {tuple(value.shape)} {value.device}"
    if hasattr(value, "__tensor_flatten__"):
        parts, context = value.__tensor_flatten__()
        return [kind, str(context), *(told(getattr(value, part), names) for part in parts)]
    if value.is_sparse:
        value = value.coalesce()
        return [kind, told(value.indices(), names), told(value.values(), names)]
    raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{kind} {hashlib.sha256(raw).hexdigest()[:16]}"


def _different(alone: Any, resumed: Any, path: str) -> list[str]:
    if alone == resumed:
        return []
    if isinstance(alone, dict) and isinstance(resumed, dict):
        found = []
        for key in dict.fromkeys([*alone, *resumed]):
            here = f"{path}.{key}" if path else key
            if key not in alone or key not in resumed:
                where = "undisturbed" if key in alone else "resumed"
                found.append(f"{here} is only in the {where} run")
            else:
                found += _different(alone[key], resumed[key], here)
        return found
    if isinstance(alone, list) and isinstance(resumed, list) and len(alone) == len(resumed):
        return [
            line
            for index, (was, now) in enumerate(zip(alone, resumed, strict=True))
            for line in _different(was, now, f"{path}[{index}]")
        ]
    return [f"{path} is {str(resumed)[:80]}, not {str(alone)[:80]}"]


def _last_line(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing was said"
