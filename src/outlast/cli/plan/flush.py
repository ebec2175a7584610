"""``outlast plan flush``: does the state leave the machine within the notice?"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from outlast.cli.plan.answer import Answer, drawn
from outlast.cli.plan.facts import needed, own
from outlast.cli.quantities import BANDWIDTH, DURATION, GPUS, SIZE, SPAN
from outlast.plan.flush import Flush
from outlast.report import humanise

if TYPE_CHECKING:
    from outlast.report.chart import Picture

_DEFAULTS: Final = Flush(state_bytes=1, bandwidth_bytes_per_s=1, notice_s=1)


def answer(flush: Flush, num_nodes: int) -> Answer:
    """Whether it fits, and what would."""
    data: dict[str, Any] = {
        **msgspec.to_builtins(flush),
        "num_nodes": num_nodes,
        "before_s": flush.before_s,
        "write_s": flush.write_s,
        "total_s": flush.total_s,
        "left_s": flush.notice_s - flush.total_s,
        "fits": flush.fits,
        "needed_bytes_per_s": flush.needed_bytes_per_s,
        "needed_bare_bytes_per_s": flush.needed_bare_bytes_per_s,
    }
    size = _plain(flush.state_bytes)
    what = f"{size} at {_plain(flush.bandwidth_bytes_per_s)}/s needs {flush.write_s:,.0f} s"
    if flush.fits:
        verdict = (
            f"with {flush.total_s - flush.write_s:,.0f} s of all else {flush.total_s:,.0f} s: it "
            f"fits, {flush.notice_s - flush.total_s:,.0f} s are left"
        )
    elif math.isinf(flush.needed_bytes_per_s):
        verdict = "it will not fit: waiting and agreeing alone take longer"
    else:
        verdict = f"it will not fit; {_enough(flush.needed_bytes_per_s)}/s per machine would"
    headline = [f"{what}, the notice is {flush.notice_s:,.0f} s: {verdict}."]
    if flush.fits:
        headline = [f"{what}, {verdict}; the notice is {flush.notice_s:,.0f} s."]
    lines = [
        *headline,
        (
            f"Before the first byte: poll {flush.poll_s:g} s, answer {flush.http_s:g} s, agreement "
            f"{flush.agreement_s:g} s, the step's rest {flush.step_s:g} s; after the last: fsync "
            f"{flush.fsync_s:g} s, margin {flush.margin_s:g} s."
        ),
        (
            f"If only writing took time, {_gigabytes(flush.needed_bare_bytes_per_s)} or so "
            f"would do; with all of it {_gigabytes(flush.needed_bytes_per_s)}."
        ),
    ]
    if num_nodes > 1:
        lines.append(
            f"Each of {num_nodes:,} machines writes its share, {size}; all of them at that "
            "bandwidth at the same time, which only a measurement shows."
        )
    return Answer(
        question="can I flush within the notice?",
        data=data,
        headline=headline,
        lines=lines,
        charts=lambda: [_chart(flush)],
        next="outlast plan memory --params 7B",
    )


def _plain(value: float) -> str:
    """Bytes with no more digits than they have: ``640 GB``, ``1.5 GB``."""
    return humanise.size(value).replace(".0 ", " ")


def _enough(value: float) -> str:
    """Bytes rounded up to a digit behind the point, so that what is said is enough."""
    scale = 1000.0 ** max(math.floor(math.log(value, 1000)), 0)
    return _plain(math.ceil(value / scale * 10 - 1e-9) / 10 * scale)


def _gigabytes(value: float) -> str:
    if math.isinf(value):
        return "no bandwidth would"
    return f"{value / 1e9:.2f} GB/s" if value >= 1e8 else f"{humanise.size(value)}/s"


def _chart(flush: Flush) -> Picture:
    from outlast.cli.plan.charts import flush_timeline

    return flush_timeline(flush)


@click.command(name="flush")
@click.option(
    "--state", "state_bytes", type=SIZE, help="Of the whole job; without it, as measured here."
)
@click.option(
    "--bandwidth", "bandwidth", type=BANDWIDTH, required=True, help="Of each machine, to storage."
)
@click.option("--notice", "notice_h", type=SPAN, required=True, help="From the word to the end.")
@click.option(
    "--nodes", type=GPUS, default=1, show_default=True, help="Machines that share the state."
)
@click.option("--poll", "poll_h", type=DURATION, help="Until we ask again: 5 s.")
@click.option("--http", "http_h", type=DURATION, help="Until it answers: 2 s.")
@click.option("--agreement", "agreement_h", type=DURATION, help="Until all ranks agree: 0 s.")
@click.option("--step", "step_h", type=DURATION, help="Until the step is over: 10 s.")
@click.option("--fsync", "fsync_h", type=DURATION, help="Until it is durable: 0 s.")
@click.option("--margin", "margin_h", type=DURATION, help="Kept for the rest: 10 s.")
@drawn
def command(
    *,
    state_bytes: float | None,
    bandwidth: float,
    notice_h: float,
    nodes: int,
    **terms_h: float | None,
) -> Answer:
    """Whether the state can be written between a notice and the machine's end."""
    if state_bytes is None:
        measured = own()
        size = None if measured is None else measured.state_bytes
        state_bytes = needed(size, "--state", "640GB")
    given = {
        f"{name.removesuffix('_h')}_s": value * 3600
        for name, value in terms_h.items()
        if value is not None
    }
    flush = msgspec.structs.replace(
        _DEFAULTS,
        state_bytes=state_bytes / nodes,
        bandwidth_bytes_per_s=bandwidth,
        notice_s=notice_h * 3600,
        **given,
    )
    return answer(flush, nodes)
