"""What people read of an examination: a line for each finding, and what to do below those that ask.

✔  storage local   ./job/checkpoints: 1.9 GB/s written and durable, 812 GB free
✘  clock           31 s (±0.2 ms) ahead of those of 2 others
                   → set it (chronyd or systemd-timesyncd): …
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from outlast.health.doctor.examination import Examined
from outlast.policy.fitness import CheckResult, failures

MARKS: Final = {"ok": "✔", "warning": "!", "failed": "✘", "skipped": "–"}
STYLES: Final = {"ok": "green", "warning": "yellow", "failed": "red", "skipped": "dim"}
WIDTH_LEAST: Final = 60


def lines(examined: Examined, width: int) -> Iterator[tuple[str, str]]:
    """The style of its mark, and the text, of each line."""
    room = max((len(one.name) for one in examined.findings), default=0)
    for one in examined.findings:
        yield from _finding(one, room, max(width, WIDTH_LEAST))
    for machine, why in sorted(examined.others_sick.items()):
        yield "yellow", f"!  {machine} is left out: {why}"
    yield "bold", textwrap.fill(conclusion(examined), width, break_long_words=False)


def conclusion(examined: Examined) -> str:
    """The last line."""
    failed = [one.name for one in failures(examined.findings)]
    warned = sum(one.status == "warning" for one in examined.findings)
    took = f"in {examined.seconds:.1f} s"
    if failed:
        return f"{examined.machine} should not start this job: {', '.join(failed)} ({took})"
    if not examined.enough:
        return f"{examined.machine} is fit, but too few machines are ({took})"
    more = f", {warned} warning{'s' * (warned != 1)}" if warned else ""
    return f"{examined.machine} is fit{more} ({took})"


def to_json(examined: Examined) -> dict[str, Any]:
    """One object for programs."""
    return {
        "machine": examined.machine,
        "fit": examined.fit,
        "enough": examined.enough,
        "exit_code": examined.exit_code,
        "seconds": examined.seconds,
        "findings": [msgspec.to_builtins(one) for one in examined.findings],
        "others_sick": examined.others_sick,
    }


def _finding(one: CheckResult, room: int, width: int) -> Iterator[tuple[str, str]]:
    head = f"{MARKS[one.status]}  {one.name:<{room}}  "
    rest = " " * len(head)
    yield (
        STYLES[one.status],
        textwrap.fill(
            one.seen,
            width,
            initial_indent=head,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        ),
    )
    if one.todo and one.status != "ok":
        yield (
            "",
            textwrap.fill(
                one.todo,
                width,
                initial_indent=f"{rest}→ ",
                subsequent_indent=f"{rest}  ",
                break_long_words=False,
                break_on_hyphens=False,
            ),
        )
