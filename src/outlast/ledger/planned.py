"""A plan that is kept, so that a report can say how far it was off.

``outlast plan --save`` writes it into the job's directory. Who writes ``job_started`` enters what
stands there into the ledger: ``outlast run``, or the session of rank 0 where torchrun or python
started the job. A plan that is changed afterwards changes no prediction that was made; the newest
entry counts.

What can go wrong: a file that is no plan, or that cannot be read, is as if there were none; the
run says so once, in a line, and starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from outlast.errors import ConfigError
from outlast.ledger.events import Event
from outlast.ledger.file import Ledger

FILE_NAME: Final = "plan.json"


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan says of a job.

    Attributes:
        planned_t: wall-clock time at which it was made.
        failures_per_h: of the whole job; between low and high, as ``rate_source`` explains.
        productive_fraction: useful over wall time, by the exact model, at ``interval_s``.
        checkpoint_s, restore_s, detect_s: what that rests on.
        price_per_machine_hour: as it was given, or None.
    """

    planned_t: float
    failures_per_h: float
    failures_low_per_h: float
    failures_high_per_h: float
    rate_source: str
    productive_fraction: float
    interval_s: float
    checkpoint_s: float
    restore_s: float = 0.0
    detect_s: float = 0.0
    price_per_machine_hour: float | None = None


def save(prediction: Prediction, directory: Path) -> Path:
    """Keep it for the job in ``directory``, which is made where it is not there yet.

    Raises:
        ConfigError: it cannot be written.
    """
    path = directory / FILE_NAME
    part = path.with_name(f".{FILE_NAME}.{os.getpid()}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        part.write_bytes(msgspec.json.format(msgspec.json.encode(prediction), indent=1) + b"\n")
        part.replace(path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}; give another directory with OUTLAST_DIR"
        ) from None
    return path


def read(directory: Path) -> Prediction | None:
    """The one that is kept; None where there is none.

    Raises:
        ConfigError: what is there is no plan.
    """
    path = directory / FILE_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=Prediction)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ConfigError(
            f"{path} is no plan; remove it, or write it anew: outlast plan --save"
        ) from None


def enter(ledger: Ledger, directory: Path, say: Callable[[str], object]) -> None:
    """Put the plan that is kept there into the ledger; what cannot be read is said, and no more."""
    try:
        prediction = read(directory)
    except ConfigError as error:
        say(str(error))  # a plan is no reason not to start
        return
    if prediction is not None:
        ledger.append("planned", durable=False, **fields_of(prediction))


def fields_of(prediction: Prediction) -> dict[str, Any]:
    """Of the event ``planned``."""
    return msgspec.structs.asdict(prediction)


def newest(events: Iterable[Event]) -> Prediction | None:
    """What the ledger says was planned; events in order."""
    found = None
    for event in events:
        if event.event == "planned":
            try:
                found = msgspec.convert(event.fields, Prediction)
            except msgspec.ValidationError:
                continue
    return found
