"""Answer the questions of ``outlast plan``: one table, a row for each, in the order of its help.

A row has the question, its flags, and the function that answers it from :mod:`outlast.planner`: as
data, as a headline, and as the lines behind it. The interval and the price on spot have files of
their own. What can go wrong: flags that contradict each other or name what cannot be. The function
refuses them in one line, before anything is computed.
"""

from __future__ import annotations

import math
from typing import Any, Final

import click
import msgspec

from outlast import units
from outlast.cli.plan.answer import (
    RATE_FLAGS,
    FailureRate,
    PlanAnswer,
    PlanQuestion,
    chance,
    failure_rate,
    figure,
    lines,
    needed,
    number,
    own,
    percent,
    rated,
    span,
    table,
)
from outlast.cli.plan.interval import INTERVAL
from outlast.cli.plan.modes import MODES
from outlast.cli.plan.spot import DEADLINE, SPOT
from outlast.cli.quantities import (
    BANDWIDTH,
    COUNT0,
    DAYS,
    DURATION,
    GPUS,
    PARAMETERS,
    PRICE,
    RATE,
    SIZE,
    SPAN,
    Rate,
    flag,
)
from outlast.errors import ConfigError
from outlast.planner import formulas
from outlast.policy.hazard import poisson_quantile
from outlast.report.chart import Piece, Timeline


def failures(known: FailureRate, *, days: float) -> PlanAnswer:
    """How often a job is interrupted, and how many failures a run of some days meets."""
    gpus, count = known.num_gpus, known.per_h * days * 24
    low, high = poisson_quantile(0.05, count), poisson_quantile(0.95, count)
    data: dict[str, Any] = {
        "days": days,
        "num_gpus": gpus,
        **known.as_json(),
        "num_failures": count,
        "num_failures_p5": low,
        "num_failures_p95": high,
        "no_failure_log10": formulas.no_failure_log10(count),
    }
    fleet_words = ""
    if gpus is not None:
        per_gpu_day = known.per_h * 24 / gpus
        fleet = formulas.smallest_fleet(per_gpu_day, 1.0)
        data |= {"failures_per_gpu_day": per_gpu_day, "num_gpus_mtbf_below_1h": fleet}
        fleet_words = f"At this rate, from {fleet:,} GPUs on there is one within the hour."
    return PlanAnswer(
        data=data,
        headline=f"A failure every {span(1 / known.per_h)}{f' on {gpus:,} GPUs' if gpus else ''}: "
        f"{figure(count)} in {days:,g} days ({low:,} to {high:,} in nine of ten runs).\n"
        f"The rate: {known.source}; {figure(known.per_h)} per hour.",
        details=lines(
            f"Range: {figure(count / known.per_h * known.low_per_h)} to "
            f"{figure(count / known.per_h * known.high_per_h)} failures {known.range_is}.",
            fleet_words,
            "Model: Poisson, independent machines; valid where they do not fail together.",
        ),
        next=f"outlast plan interval --rate {known.per_h:.4g}/h --checkpoint 1min",
    )


def budget(
    known: FailureRate,
    *,
    gpus: int,
    days: float,
    price: float | None,
    lost_h: float,
    local_lost_h: float | None = None,
) -> PlanAnswer:
    """What failures cost with checkpoints, and a run without any."""
    wall_h = days * 24
    with_them, low, high = (
        formulas.losses(per_h, wall_h=wall_h, lost_h=lost_h, num_gpus=gpus, price_per_gpu_h=price)
        for per_h in (known.per_h, known.low_per_h, known.high_per_h)
    )
    scratch = formulas.from_scratch(known.per_h, wall_h=wall_h, num_gpus=gpus)
    data: dict[str, Any] = {
        **known.as_json(),
        "num_gpus": gpus,
        "days": days,
        "lost_per_failure_h": lost_h,
        "price_per_gpu_h": price,
        "num_failures": with_them.num_failures,
        "lost_gpu_h": with_them.lost_gpu_h,
        "lost_low_gpu_h": low.lost_gpu_h,
        "lost_high_gpu_h": high.lost_gpu_h,
        "cost_lost": with_them.cost_lost,
        "cost_total": with_them.cost_total,
        "lost_fraction": with_them.fraction_lost,
        "scratch_lost_gpu_h": scratch.lost_gpu_h,
        "scratch_lost_fraction": scratch.fraction_lost,
        "scratch_lost_ratio": scratch.lost_gpu_h / with_them.lost_gpu_h,
        "scratch_wall_h": formulas.from_scratch_wall_h(known.per_h, wall_h),
        "no_failure_log10": with_them.no_failure_log10,
    }
    share = f"{number(100 * with_them.fraction_lost, 2)} % of the run"
    if with_them.cost_lost is not None and with_them.cost_total is not None:
        share += f", {figure(with_them.cost_lost)} of {figure(with_them.cost_total)} in money"
    log10 = scratch.no_failure_log10
    probability = f"10^{log10:.1f}" if log10 < -3 else chance(10**log10)
    local_words = ""
    if local_lost_h is not None:
        local_gpu_h = known.per_h * wall_h * local_lost_h * gpus
        data |= {"local_lost_per_failure_s": local_lost_h * 3600, "local_lost_gpu_h": local_gpu_h}
        local_words = (
            f"With local updates a preemption loses {figure(local_lost_h * 3600)} fleet-seconds, "
            f"not {figure(lost_h * 3600)}: {figure(local_gpu_h)} GPU-hours in all (what they do to "
            "the model is not here)."
        )
    return PlanAnswer(
        data=data,
        headline=f"{figure(with_them.num_failures)} failures cost {figure(with_them.lost_gpu_h)} "
        f"GPU-hours: {share}.",
        details=lines(
            known.words,
            f"Range: {figure(low.lost_gpu_h)} to {figure(high.lost_gpu_h)} GPU-hours "
            f"{known.range_is}.",
            f"Without checkpoints: {figure(scratch.lost_gpu_h)} GPU-hours, "
            f"{number(scratch.fraction_lost, 1)} times the run's budget; no failure at all has "
            f"probability {probability}"
            f"{': it cannot finish' if scratch.fraction_lost > 1 else ''}.",
            local_words,
            "Model: failures · time lost at each · GPUs · price, first order; above some 30 % the "
            "run itself becomes longer (see outlast plan interval).",
        ),
        next=f"outlast plan interval --rate {known.per_h:.4g}/h --checkpoint 1min",
    )


def _asked_budget(
    *,
    rate: Rate | None,
    gpus: int | None,
    gpus_per_node: int,
    local_steps: int | None,
    islands: int,
    step_h: float | None,
    whole_window: bool,
    **given: Any,
) -> PlanAnswer:
    """What failures cost in GPU-hours and money, with checkpoints and from scratch."""
    if gpus is None:
        raise ConfigError("the number of GPUs is missing; like --gpus 64")
    local_lost_h = None
    if local_steps is not None:
        if step_h is None:
            raise ConfigError("--local-steps needs a step's time; like --step 1s")
        local_lost_h = (
            formulas.lost_to_local_updates_s(
                local_steps, step_h * 3600, islands, whole_window=whole_window
            )
            / 3600
        )
    measured = own() if rate is None else None
    known = failure_rate(rate, gpus, gpus_per_node, measured=measured, step_h=step_h)
    return budget(known, gpus=gpus, local_lost_h=local_lost_h, **given)


_OF_A_FLUSH: Final = (
    *("before_s", "write_s", "total_s", "left_s", "fits"),
    *("needed_bytes_per_s", "needed_bare_bytes_per_s"),
)


def flush(
    *,
    state_bytes: float | None,
    bandwidth: float,
    notice_h: float,
    nodes: int,
    **terms_h: float | None,
) -> PlanAnswer:
    """Whether the state can be written between a notice and the machine's end."""
    if state_bytes is None:
        measured = own()
        size = None if measured is None else measured.state_bytes
        state_bytes = needed(size, "--state", "640GB")
    it = formulas.FlushTimes(
        state_bytes=state_bytes / nodes,
        bandwidth_bytes_per_s=bandwidth,
        notice_s=notice_h * 3600,
        **{
            f"{name.removesuffix('_h')}_s": value * 3600
            for name, value in terms_h.items()
            if value is not None
        },
    )
    size_words = _plain(it.state_bytes)
    what = f"{size_words} at {_plain(bandwidth)}/s needs {it.write_s:,.0f} s"
    notice = f"the notice is {it.notice_s:,.0f} s"
    if it.fits:
        headline = (
            f"{what}, with {it.total_s - it.write_s:,.0f} s of all else {it.total_s:,.0f} s: it "
            f"fits, {it.left_s:,.0f} s are left; {notice}."
        )
    elif math.isinf(it.needed_bytes_per_s):
        headline = f"{what}, {notice}: it will not fit: waiting and agreeing alone take longer."
    else:
        enough = _enough(it.needed_bytes_per_s)
        headline = f"{what}, {notice}: it will not fit; {enough}/s per machine would."
    of_many = (
        f"Each of {nodes:,} machines writes its share, {size_words}; all of them at that "
        "bandwidth at the same time, which only a measurement shows."
    )
    return PlanAnswer(
        data={
            **msgspec.to_builtins(it),
            "num_nodes": nodes,
            **{name: getattr(it, name) for name in _OF_A_FLUSH},
        },
        headline=headline,
        details=lines(
            f"Before the first byte: poll {it.poll_s:g} s, answer {it.http_s:g} s, agreement "
            f"{it.agreement_s:g} s, the step's rest {it.step_s:g} s; after the last: fsync "
            f"{it.fsync_s:g} s, margin {it.margin_s:g} s.",
            f"If only writing took time, {_gigabytes(it.needed_bare_bytes_per_s)} or so "
            f"would do; with all of it {_gigabytes(it.needed_bytes_per_s)}.",
            of_many if nodes > 1 else "",
        ),
        charts=lambda: [_timeline(it)],
        next="outlast plan memory --params 7B",
    )


def _plain(value: float) -> str:
    """Bytes with no more digits than they have: ``640 GB``, ``1.5 GB``."""
    return units.size(value).replace(".0 ", " ")


def _enough(value: float) -> str:
    """Bytes rounded up to a digit behind the point, so that what is said is enough."""
    scale = 1000.0 ** max(math.floor(math.log(value, 1000)), 0)
    return _plain(math.ceil(value / scale * 10 - 1e-9) / 10 * scale)


def _gigabytes(value: float) -> str:
    if math.isinf(value):
        return "no bandwidth would"
    return f"{value / 1e9:.2f} GB/s" if value >= 1e8 else f"{units.size(value)}/s"


def _timeline(it: formulas.FlushTimes) -> Timeline:
    """Draw what happens between the notice and the end."""
    pieces = [
        Piece("poll", it.poll_s, "wait"),
        Piece("answer", it.http_s, "wait"),
        Piece("agreement", it.agreement_s, "wait"),
        Piece("step", it.step_s, "work"),
        Piece("write", it.write_s, "write"),
        Piece("fsync", it.fsync_s, "write"),
        Piece("margin", it.margin_s, "margin"),
    ]
    notice = f"{it.notice_s:,.0f} s"
    verdict = "fits" if it.fits else "does not fit"
    return Timeline(
        title=f"Flush: {it.total_s:,.0f} s within a notice of {notice} {verdict}",
        pieces=[piece for piece in pieces if piece.seconds > 0],
        limit_s=it.notice_s,
        limit_words=f"the machine goes: {notice}",
        fits=it.fits,
    )


def memory(
    *,
    params: float | None,
    state_bytes: float | None,
    optimizer: str = "adam-mixed",
    nodes: int,
    buffers: int = 1,
    memory_bytes: float | None = None,
) -> PlanAnswer:
    """Bytes of training state, and of the snapshots that each machine holds."""
    if (params is None) == (state_bytes is None):
        raise ConfigError("give one of --params 7B and --state 98GB")
    size, of = state_bytes or 0.0, "as given"
    if params is not None:
        each = formulas.BYTES_PER_PARAMETER[optimizer]
        size = formulas.state_bytes(params, each)
        of = f"{params:,.0f} parameters, {each:g} bytes each ({optimizer})"
    staged = formulas.staged_bytes(size, num_nodes=nodes, num_buffers=buffers)
    data: dict[str, Any] = {
        "state_bytes": size,
        "num_nodes": nodes,
        "num_buffers": buffers,
        "staged_bytes": staged,
        "memory_bytes": memory_bytes,
        "fits": None if memory_bytes is None else staged <= memory_bytes,
    }
    machines = f"{nodes:,} machines: each of them" if nodes > 1 else "1 machine: the machine"
    many = f"{buffers:,} snapshots" if buffers > 1 else "one snapshot"
    room = ""
    if memory_bytes is not None:
        verdict = "it fits"
        if staged > memory_bytes:
            would_do = -(-buffers * size // memory_bytes)
            verdict = f"it will not fit; {would_do:,.0f} machines would do"
            data["needed_nodes"] = int(would_do)
        room = f", and has {units.size(memory_bytes)}: {verdict}"
    return PlanAnswer(
        data=data,
        headline=f"{units.size(size)} of state on {machines} holds {units.size(staged)} for "
        f"{many}{room}.",
        details=lines(f"State: {of}. Gradients are not saved; activations are not either."),
        next=f"outlast plan flush --state {size / 1e9:.4g}GB --bandwidth 1.5GB/s --notice 120s "
        f"--nodes {nodes}",
    )


_ZONES_TRIED: Final = (1, 2, 4, 8)
_RECLAIMS_MOST_PER_H: Final = 10.0  # of a zone


def zones(*, machines: int, rate: Rate, given: tuple[int, ...], **costs_h: float) -> PlanAnswer:
    """Spreading over zones, by how the job recovers."""
    if rate.of not in ("job", "node"):
        raise ConfigError("--reclaim is of a whole zone; write 5%/h or 0.05/h")
    if rate.per_h > _RECLAIMS_MOST_PER_H:
        raise ConfigError(f"zones that are reclaimed {rate.per_h:.3g} times an hour are no place")
    if given and max(given) > machines:
        raise ConfigError(
            f"--zones {max(given):,}: {machines:,} machines do not stand in more zones than there "
            f"are of them; write --zones {machines} or fewer"
        )
    tried = tuple(sorted(set(given))) or tuple(z for z in _ZONES_TRIED if z <= machines)
    recovery = formulas.ZoneRecovery(**costs_h)
    p = formulas.to_probability(rate.per_h)
    spreads = [
        formulas.ZoneSpread(num_machines=machines, num_zones=z, reclaimed_per_h=p) for z in tried
    ]
    by_mode = {
        mode: [formulas.zone_throughput(spread, recovery, mode) for spread in spreads]
        for mode in formulas.ZONE_MODES
    }
    best = {mode: tried[found.index(max(found))] for mode, found in by_mode.items()}

    def words(count: int) -> str:
        return f"{count:,} zones" if count > 1 else "1 zone"

    rows = [
        (
            words(spread.num_zones),
            number(spread.mean_lost_per_h, 1),
            number(spread.variance_lost, 2),
            *(percent(found[i]) for found in by_mode.values()),
        )
        for i, spread in enumerate(spreads)
    ]
    return PlanAnswer(
        data={
            "num_machines": machines,
            "reclaimed_probability_per_h": p,
            "rate_source": rate.source,
            **msgspec.to_builtins(recovery),
            "zones": [
                {
                    "num_zones": spread.num_zones,
                    "mean_lost_machines_per_h": spread.mean_lost_per_h,
                    "variance_lost_machines_squared": spread.variance_lost,
                    "events_per_h": spread.events_per_h,
                    "all_lost_probability_per_h": spread.all_lost_per_h,
                    **{f"{mode}_throughput_fraction": found[i] for mode, found in by_mode.items()},
                }
                for i, spread in enumerate(spreads)
            ],
            **{f"best_num_zones_{mode}": count for mode, count in best.items()},
        },
        headline=f"With copies in other zones' memory take {words(best['peer'])}; a job that "
        f"rewinds or stops at each reclaim is fastest with {best['restart']:,}.",
        details=lines(
            table(
                ("", "lost per hour", "variance", *formulas.ZONE_MODES),
                rows,
                [spread.num_zones == best["peer"] for spread in spreads],
            ),
            "The last three: useful work, of that without reclaims, by how the job recovers. "
            "rigid: it waits for all machines; restart: it rewinds and goes on with the rest; "
            "peer: nothing is rewound (outlast run with replicas). Marked: the best for peer.",
            f"The rate: each zone is reclaimed with {percent(p)} an hour; {rate.source}. "
            "First order.",
        ),
        next=f"outlast plan replicas --nodes {machines + machines % 2} --lost 2",
    )


_SUFFICING: Final = (0.9, 0.99, 0.999)


def spares(known: FailureRate, *, repair_h: float) -> PlanAnswer:
    """How many machines to hold in reserve while others are repaired."""
    counts = [formulas.num_spares(known.per_h, repair_h, sufficing=share) for share in _SUFFICING]
    low, high = (
        formulas.num_spares(per_h, repair_h, sufficing=0.99)
        for per_h in (known.low_per_h, known.high_per_h)
    )
    rows = [
        (
            f"{100 * share:g} %",
            f"{count:,}",
            f"{100 * formulas.shortage(count, known.per_h, repair_h):.2g} %",
        )
        for share, count in zip(_SUFFICING, counts, strict=True)
    ]
    return PlanAnswer(
        data={
            **known.as_json(),
            "repair_h": repair_h,
            "mean_away_machines": known.per_h * repair_h,
            "num_spares_90_percent": counts[0],
            "num_spares_99_percent": counts[1],
            "num_spares_99_9_percent": counts[2],
            "num_spares_99_percent_low": low,
            "num_spares_99_percent_high": high,
        },
        headline=f"Hold {units.count(counts[1], 'machine')} in reserve: "
        f"{'they suffice' if counts[1] > 1 else 'that suffices'} 99 % of the time, where a "
        f"repair takes {span(repair_h)}.",
        details=lines(
            f"The rate: {figure(known.per_h * 24)} per day; {known.source}; "
            f"{figure(known.per_h * repair_h)} machines are away on average.",
            table(("suffice", "spares", "too few"), rows, [False, True, False]),
            f"Range: {low:,} to {high:,} for 99 % {known.range_is}.",
            "Model: Poisson (Palm); valid while repairs do not wait for one another.",
        ),
        next=f"outlast plan restarts --rate {known.per_h:.4g}/h --max-restarts 50",
    )


_SURE: Final = 1 - 1e-9  # that failures are over by then: nothing is said to be more certain


def restarts(known: FailureRate, *, max_restarts: int, days: float) -> PlanAnswer:
    """When a launcher with a fixed number of restarts gives up."""
    end_h, low, high = (
        formulas.restarts_end_h(per_h, max_restarts)
        for per_h in (known.per_h, known.high_per_h, known.low_per_h)
    )
    probability = formulas.gives_up(known.per_h, days * 24, max_restarts)
    enough = formulas.restarts_needed(known.per_h, days * 24, sufficing=0.99)
    return PlanAnswer(
        data={
            **known.as_json(),
            "max_restarts": max_restarts,
            "days": days,
            "spent_after_h": end_h,
            "spent_after_low_h": low,
            "spent_after_high_h": high,
            "spent_after_days": end_h / 24,
            "gives_up_probability": probability,
            "needed_restarts_99_percent": enough,
        },
        headline=f"{max_restarts:,} restarts are spent after {span(end_h)} on average; "
        f"within {days:,g} days with probability {chance(min(probability, _SURE))}.",
        details=lines(
            f"The rate: {figure(known.per_h * 24)} per day; {known.source}.",
            f"{enough:,} restarts last {days:,g} days with probability 99 %. Every failed "
            "round spends one, whoever's fault it was (--max-restarts).",
            f"Range: spent after {span(low)} to {span(high)} {known.range_is}.",
            "Model: P(Poisson(λ·wall) > max restarts).",
        ),
        next=f"outlast plan spares --rate {known.per_h:.4g}/h --repair 24h",
    )


_OFTEN: Final = 0.5  # of such losses that are recovered, for a yes


def replicas(
    *,
    rate: Rate | None = None,
    gpus: int | None = None,
    gpus_per_node: int = 1,
    nodes: int,
    lost: int = 2,
    interval_h: float = 20 / 60,
    restore_h: float = 3 / 60,
    pause_h: float = 1 / 3600,
) -> PlanAnswer:
    """Whether copies in pairs pay: what they recover, and the time that they save.

    --rate is of such losses; without it the answer is for one of them.
    """
    if nodes % 2:
        raise ConfigError(f"--nodes {nodes:,}: pairs need an even number of machines")
    if lost > nodes:
        raise ConfigError(f"--lost {lost:,}: there are only {nodes:,} machines")
    known = None if rate is None and gpus is None else failure_rate(rate, gpus, gpus_per_node)
    storage_h = restore_h + interval_h / 2
    several = sorted(k for k in {1, 2, 3, 4, 8, lost} if k <= nodes)
    recovers = {k: formulas.recovers_in_pairs(nodes, k) for k in several}
    with_copies_h = {
        k: formulas.lost_with_copies_h(share, pause_h=pause_h, from_storage_h=storage_h)
        for k, share in recovers.items()
    }
    probability, copies_h = recovers[lost], with_copies_h[lost]
    saved_h = storage_h - copies_h
    machines = "a machine goes" if lost == 1 else f"{lost:,} machines go at once"
    against = f"against {span(storage_h)} from storage"
    if not probability:
        verdict = (
            f"No: when {machines} some pair is lost whole, and the job rewinds to storage anyway."
        )
    elif saved_h <= 0:
        verdict = f"No: when {machines} copies save no time, {span(copies_h)} {against}."
    else:
        verdict = (
            f"{'Yes' if probability >= _OFTEN else 'Hardly'}: when {machines} copies lose "
            f"{span(copies_h)} on average, {against}."
        )
    worth = None if known is None else known.per_h * saved_h
    if saved_h <= 0:
        worth_words = "Keep the memory for something else."
    elif known is None or worth is None:
        worth_words = (
            f"That is {span(saved_h)} less for each such loss; with --rate, how much copying may "
            "slow training for that."
        )
    else:
        worth_words = (
            f"At one every {span(1 / known.per_h)} it pays while copying slows training by less "
            f"than {number(100 * worth, 2)} %. The rate: {known.source}."
        )
    return PlanAnswer(
        data={
            "num_nodes": nodes,
            "num_lost": lost,
            "recovers_probability": probability,
            "interval_h": interval_h,
            "restore_h": restore_h,
            "pause_h": pause_h,
            "lost_with_copies_h": copies_h,
            "lost_from_storage_h": storage_h,
            "saved_per_loss_h": saved_h,
            "pays": saved_h > 0,
            **({} if known is None else known.as_json()),
            "worth_slowdown_fraction": worth,
            "by_num_lost": [
                {"num_lost": k, "recovers_probability": share} for k, share in recovers.items()
            ],
        },
        headline=f"{verdict}\nIn pairs, {nodes:,} machines recover from memory with probability "
        f"{chance(probability)} when {machines}; else from storage.",
        details=lines(
            worth_words,
            table(
                ("at once", "recovered", "lost with copies", "from storage"),
                [
                    (f"{k:,} lost", chance(recovers[k]), span(with_copies_h[k]), span(storage_h))
                    for k in several
                ],
                [k == lost for k in several],
            ),
            f"Compared: going on from copies after {span(pause_h)} (--pause) against "
            f"storage, where a restore takes {span(restore_h)} (--restore) and half of "
            f"{span(interval_h)} (--every) is done again.",
            "Model: losses anywhere with equal chance. Machines that fail together (a rack, a "
            "zone) must not be one another's pair: set membership.labels, and outlast run keeps "
            "them apart.",
            "A copy costs one snapshot's memory and traffic (outlast plan memory --buffers 2).",
        ),
        next="outlast plan memory --params 7B --buffers 2",
    )


# --- the table ----------------------------------------------------------------------------------

_DAYS: Final = flag("--days", DAYS, "How long it runs.", "30")
_NODES: Final = flag("--nodes", GPUS, "Machines that share the state.", 1)

QUESTIONS: Final = {
    "failures": PlanQuestion(
        "how often will I be interrupted?", rated(failures), [*RATE_FLAGS, _DAYS]
    ),
    "interval": INTERVAL,
    "spot": SPOT,
    "budget": PlanQuestion(
        "what do failures cost?",
        _asked_budget,
        [
            *RATE_FLAGS,
            flag("--days", DAYS, "How long it runs.", required=True),
            flag("--price", PRICE, "Per GPU and hour."),
            flag("--lost", SPAN, "Lost at each failure.", required=True),
            flag("--local-steps", GPUS, "Steps between meetings of islands (DiLoCo)."),
            flag("--islands", GPUS, "How many there are.", 8),
            flag("--step", SPAN, "Of a step, for --local-steps."),
            click.Option(
                ["--whole-window"], is_flag=True, help="A preemption throws the whole round away."
            ),
        ],
    ),
    "flush": PlanQuestion(
        "can I flush within the notice?",
        flush,
        [
            flag("--state", SIZE, "Of the whole job; without it, as measured here."),
            flag("--bandwidth", BANDWIDTH, "Of each machine, to storage.", required=True),
            flag("--notice", SPAN, "From the word to the end.", required=True),
            _NODES,
            flag("--poll", DURATION, "Until we ask again: 5 s."),
            flag("--http", DURATION, "Until it answers: 2 s."),
            flag("--agreement", DURATION, "Until all ranks agree: 0 s."),
            flag("--step", DURATION, "Until the step is over: 10 s."),
            flag("--fsync", DURATION, "Until it is durable: 0 s."),
            flag("--margin", DURATION, "Kept for the rest: 10 s."),
        ],
        draws=True,
    ),
    "memory": PlanQuestion(
        "does staging fit in memory?",
        memory,
        [
            flag("--params", PARAMETERS, "Of the model: 7B."),
            flag("--state", SIZE, "In place of --params: 640GB."),
            flag(
                "--optimizer",
                click.Choice(list(formulas.BYTES_PER_PARAMETER)),
                "What stands beside the weights.",
                "adam-mixed",
            ),
            _NODES,
            flag("--buffers", GPUS, "Snapshots held at once.", 1),
            flag("--memory", SIZE, "That a machine has to spare: 512GB."),
        ],
    ),
    "zones": PlanQuestion(
        "over how many zones?",
        zones,
        [
            flag("--machines", GPUS, "In all.", required=True),
            flag("--reclaim", RATE, "Of one zone: 5%/h.", to="rate", required=True),
            flag("--zones", GPUS, "How many; 1, 2, 4, 8 if none.", to="given", multiple=True),
            flag("--back", SPAN, "Until replaced.", "30min"),
            flag("--restore", DURATION, "Restore and rejoin, where the job rewinds.", "3min"),
            flag("--every", SPAN, "Useful time between two checkpoints.", "20min", to="interval_h"),
            flag("--pause", DURATION, "Of the others, where copies are in memory.", "1s"),
        ],
    ),
    "spares": PlanQuestion(
        "how many spares?",
        rated(spares),
        [*RATE_FLAGS, flag("--repair", SPAN, "Until a machine is back.", required=True)],
    ),
    "restarts": PlanQuestion(
        "how many restarts?",
        rated(restarts),
        [*RATE_FLAGS, flag("--max-restarts", COUNT0, "Of the launcher.", 3), _DAYS],
    ),
    "replicas": PlanQuestion(
        "should the state be replicated?",
        replicas,
        [
            *RATE_FLAGS,
            flag("--nodes", GPUS, "Machines, in pairs.", required=True),
            flag("--lost", GPUS, "That go at once.", 2),
            flag("--every", SPAN, "To storage.", "20min", to="interval_h"),
            flag("--restore", DURATION, "Restore and rejoin from storage.", "3min"),
            flag("--pause", DURATION, "From copies.", "1s"),
        ],
    ),
    "modes": MODES,
    "deadline": DEADLINE,
}
