"""Where every millisecond of one of Outlast's saves goes.

The loop of ``saving.py``, saved by Outlast alone. The parts are those that the engine itself writes
into its ledger: ``timings`` in the ``snapshot`` event (at the boundary, while the loop waits) and
in the ``commit`` event (behind the loop, until the manifest is durable); whatever keys are there
are shown. Parts of the background run at the same time in several threads, and are counted as the
work of all of them: their shares may add up to more than the whole. The share is that of the
event's own time, ``blocked_s`` or ``durable_s``; "not accounted for" is only shown where the parts
add up to less. Beside them stands what the loop saw from the outside.

    python benchmarks/save_cost.py [--threads 2] [--quick]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.rotation import Turns
from bench.tables import cell, column, emit, machine, markdown
from bench.training import width_for

WHOLE: Final = {"snapshot": "blocked_s", "commit": "durable_s"}
SEEN: Final = {
    "blocked_call_s": "in the call and at boundaries",
    "blocked_optimizer_s": "before the optimizer's step",
    "durable_s": "from the boundary until durable",
    "lost_s": "training time lost",
}


def main() -> None:
    """Measure, print one JSON object and the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=2128.0, help="size of the state, MB")
    parser.add_argument("--tokens", type=int, default=16, help="per step: the length of a step")
    parser.add_argument("--threads", type=int, default=1, help="torch's, for training")
    parser.add_argument("--saves", type=int, default=8)
    parser.add_argument("--dir", type=Path, help="where to write: a directory on the disk meant")
    parser.add_argument("--quick", action="store_true", help="a small smoke run")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="the worker's output")
    options = parser.parse_args()
    if options.quick:
        options.mb, options.saves = 64.0, 2
    place = options.dir or Path(tempfile.gettempdir())
    description = machine(place)
    with options.log.open("a") as log:
        turns = Turns(
            place=place,
            options={
                "width": width_for(options.mb),
                "tokens": options.tokens,
                "threads": options.threads,
                "undisturbed": 6,
            },
            saves=options.saves,
            memory=False,
            log=log,
        )
        found = turns.run(["outlast"], 1)["outlast"]
    if found["failed"]:
        sys.exit(f"nothing was measured: {found['failed']}")
    samples = found["samples"]
    parts = {event: timings(samples, event) for event in WHOLE}
    result = {"benchmark": "save_cost", "machine": description, "parts": parts, "saves": samples}
    seen = markdown(
        ["seen by the loop", "s"],
        ([text, cell(column(samples, key), 4)] for key, text in SEEN.items()),
    )
    emit(result, [seen, *(table(event, part) for event, part in parts.items())])


def timings(samples: Sequence[Mapping[str, Any]], event: str) -> dict[str, list[float]]:
    """Part → seconds in each save, as the engine tells it, and the event's whole."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        fields = sample["details"].get(event) or {}
        whole = fields.get(WHOLE[event])
        parts = fields.get("timings") or {}
        for name, seconds in {WHOLE[event]: whole, **parts}.items():
            if seconds is not None:
                found.setdefault(name, []).append(float(seconds))
    return found


def table(event: str, parts: Mapping[str, Sequence[float]]) -> str:
    """The parts with their shares."""
    name = WHOLE[event]
    own = {part: values for part, values in parts.items() if part != name}
    if not own:
        return f"The `{event}` event carries no timings: not measured."
    whole = statistics.median(parts[name]) if parts.get(name) else None

    def share(seconds: float) -> str:
        return "–" if not whole else f"{100 * seconds / whole:.1f} %"

    rows = [
        [part, cell(values, 4), share(statistics.median(values))] for part, values in own.items()
    ]
    left = (whole or 0.0) - sum(statistics.median(values) for values in own.values())
    if left > 0:
        rows.append(["not accounted for", f"{left:.4f}", share(left)])
    rows.append([f"whole ({name})", cell(parts.get(name, []), 4), share(whole or 0.0)])
    return markdown([f"part of a `{event}`", "s", "share"], rows)


if __name__ == "__main__":
    main()
