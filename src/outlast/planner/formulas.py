"""Answer the small questions before renting, each in a few lines of arithmetic.

Every formula says where it holds. Arguments are taken as checked (``outlast plan`` does that):
rates above 0, costs from 0. A job that cannot finish takes ``inf`` hours; that is an answer.

Rates
    A percentage per GPU and day is a probability p: of 1 - e^-λ, so λ = -ln(1-p) per day;
    independent machines' rates add up. Mixing the two up is 0.25 % at p = 0.5 %, and a factor of
    1.4 at 50 %. :func:`from_probability` is the one place where a percentage becomes a rate.
Budget
    First order: failures · hours lost at each · GPUs · price. Good while a small share of the run
    is lost; a run from scratch with many failures cannot finish, and how long it would take is not
    said. Islands that train by themselves and meet every H steps (DiLoCo, Douillard et al. 2023)
    lose half of what was done since the last meeting: scope · H·t_s/2 seconds of the fleet, where
    scope is 1/k if one of k islands drops out of this round, and 1 if the round is thrown away.
    What fewer meetings cost in quality of training is no matter of arithmetic, and not in here.
Flush
    The state leaves the machine within the notice if and only if poll + http + agreement + step
    tail + bytes/bandwidth + fsync + margin ≤ notice. Bytes and bandwidth are one machine's;
    bandwidths of machines that write to one place depend on each other, which only a measurement
    shows.
Memory
    Weights and optimizer are saved; gradients are not. Adam in mixed precision holds 14 bytes per
    parameter (bf16 weights 2, fp32 master weights 4, two fp32 moments 8): seven times the "2 bytes"
    of the weights alone.
Spares
    Machines under repair are Poisson with mean N·λ_node·t_repair (Palm's theorem: whatever the
    repair times' distribution), so the spares that suffice with probability 1-ε are its quantile.
    Holds while a spare fails no more often than a machine in use, and repairs do not wait for one
    another.
Restarts
    A launcher that gives up after ``max_restarts`` (torchrun's ``--max-restarts``) spends one at
    each failure, whoever's fault it was: P(given up by w hours) = P(Poisson(λw) > max_restarts).
Replicas
    Each machine of a pair holds the other's snapshot; the state survives unless both of a pair go.
    P(recover | k lost) = C(N/2, k)·2^k / C(N, k), for losses anywhere with equal chance (Wang et
    al., GEMINI, SOSP'23). The rest is read from storage, and the job rewinds to what stands there.
    Machines that fail together (a rack, a zone) must not be one another's pair: then this is what
    placement buys, and not less.
Zones
    Each zone is reclaimed as a whole with probability p per hour. The mean number of machines lost
    per hour is K·p for every number of zones z; its variance is K²p(1-p)/z. The effect on the job
    depends on how it recovers, and a verdict that does not name the mode is wrong for one of them:

    - rigid: every event stops the whole job until all K machines are there again. Events come z
      times as often with z zones: it gets slower with each.
    - restart: every event rewinds the job to its newest checkpoint; it goes on with those that are
      left. Rewinds come z times as often: slower with each zone, though never quite stopped.
    - peer: what a lost zone held is in the memory of another; nothing is rewound. Each event costs
      a pause and the lost zone's machines while they are away, which is the same for every z. Needs
      z ≥ 2: one zone takes all copies with it.

    A zone is there for 1/λ on average, λ = -ln(1-p), and then away until it is replaced; meanwhile
    it cannot be reclaimed. With one zone nobody is left to go on: all modes are rigid. First order
    otherwise: events that come while another is mended are counted as if they came after it.
"""

from __future__ import annotations

import math
from typing import Final, Literal, NamedTuple

import msgspec

from outlast.policy.hazard import poisson_quantile, poisson_tail

DAY_H: Final = 24.0
BYTES_PER_PARAMETER: Final = {
    "adam-mixed": 14.0,  # bf16 weights, fp32 master, m, v
    "adam-fp32": 12.0,  # fp32 weights, m, v
    "adam-bf16": 6.0,  # weights, m, v, all bf16
    "sgd-momentum": 8.0,  # fp32 weights and momentum
    "weights-bf16": 2.0,  # cannot restart Adam exactly
}
ZoneMode = Literal["rigid", "restart", "peer"]
ZONE_MODES: Final[tuple[ZoneMode, ...]] = ("rigid", "restart", "peer")


# --- rates --------------------------------------------------------------------------------------


class Published(NamedTuple):
    """A rate that somebody measured and published.

    Attributes:
        key: what a person writes for it.
        per_gpu_day: failures per GPU and day.
        source: what was counted, and where.
        primary: False when it was not read in the measurers' own publication.
    """

    key: str
    per_gpu_day: float
    source: str
    primary: bool = True


_LLAMA_3_GPU_DAYS: Final = 54 * 16_384
_LLAMA_3: Final = "Llama 3 405B on 16,384 GPUs over 54 days (arXiv:2407.21783, table 5)"
_RSC: Final = "over 11 months, per 1,000 node-days of 8 GPUs (Kokolis et al., arXiv:2410.21680)"

PUBLISHED: Final = (
    Published("llama-3", 419 / _LLAMA_3_GPU_DAYS, f"419 unexpected stops of {_LLAMA_3}"),
    Published("llama-3-all", 466 / _LLAMA_3_GPU_DAYS, f"all 466 stops of {_LLAMA_3}"),
    Published("rsc-1", 6.5 / 8000, f"Meta's RSC-1: 6.5 failures {_RSC}"),
    Published("rsc-2", 2.34 / 8000, f"Meta's RSC-2: 2.34 failures {_RSC}"),
    Published("opt-175b", 2e-3, "OPT-175B's log book, about"),
    Published("bloom", 5.6e-4, "BLOOM's training chronicles"),
    Published("h100", 5e-3, "one H100 fleet, read at second hand", primary=False),
)


def published(key: str) -> Published | None:
    """The published rate of this name, or None."""
    return next((rate for rate in PUBLISHED if rate.key == key), None)


def from_probability(probability: float) -> float:
    """λ per period from the probability of at least one failure in it: -ln(1-p).

    Args:
        probability: in [0, 1).
    """
    return -math.log1p(-probability)


def to_probability(rate: float) -> float:
    """Probability of at least one failure in a period with this rate: 1 - e^-λ."""
    return -math.expm1(-rate)


def smallest_fleet(per_gpu_day: float, mtbf_h: float) -> int:
    """The smallest number of GPUs whose mean time between failures is below ``mtbf_h`` hours."""
    return math.floor(DAY_H / (per_gpu_day * mtbf_h)) + 1


def no_failure_log10(num_failures: float) -> float:
    """Decimal logarithm of the probability that none comes where ``num_failures`` are expected.

    A logarithm, since e^-1203 is less than a double can hold.
    """
    return -num_failures / math.log(10)


# --- budget ---------------------------------------------------------------------------------------


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """What the failures of a run cost.

    Attributes:
        num_failures: expected.
        lost_gpu_h: GPU-hours lost to them.
        cost_lost: the same in money; None without a price.
        cost_total: of the run itself, all its GPU-hours; None without a price.
        fraction_lost: lost GPU-hours over the run's; above 1 it cannot finish.
        no_failure_log10: decimal logarithm of the probability that no failure comes at all.
    """

    num_failures: float
    lost_gpu_h: float
    cost_lost: float | None
    cost_total: float | None
    fraction_lost: float
    no_failure_log10: float


def losses(
    failures_per_h: float,
    *,
    wall_h: float,
    lost_h: float,
    num_gpus: int,
    price_per_gpu_h: float | None = None,
) -> Losses:
    """What failures cost when each loses ``lost_h`` hours of the whole job.

    Args:
        failures_per_h: λ of the whole job.
        wall_h: hours of the run.
        lost_h: hours that one failure costs: half an interval, detection, restore.
        num_gpus: that wait meanwhile, which is all.
        price_per_gpu_h: per GPU and hour.
    """
    num_failures = failures_per_h * wall_h
    lost_gpu_h = num_failures * lost_h * num_gpus
    return Losses(
        num_failures=num_failures,
        lost_gpu_h=lost_gpu_h,
        cost_lost=None if price_per_gpu_h is None else lost_gpu_h * price_per_gpu_h,
        cost_total=None if price_per_gpu_h is None else wall_h * num_gpus * price_per_gpu_h,
        fraction_lost=lost_gpu_h / (wall_h * num_gpus),
        no_failure_log10=no_failure_log10(num_failures),
    )


def from_scratch(failures_per_h: float, *, wall_h: float, num_gpus: int) -> Losses:
    """The losses without checkpoints: each failure costs half of the run, on average."""
    return losses(failures_per_h, wall_h=wall_h, lost_h=wall_h / 2, num_gpus=num_gpus)


def from_scratch_wall_h(failures_per_h: float, wall_h: float) -> float:
    """Expected hours of a run that begins anew at each failure: (e^{λH} - 1)/λ; inf when huge."""
    try:
        return math.expm1(failures_per_h * wall_h) / failures_per_h
    except OverflowError:
        return math.inf


def lost_to_local_updates_s(
    inner_steps: float, step_s: float, num_islands: int, *, whole_window: bool
) -> float:
    """Fleet-seconds that one preemption loses.

    Args:
        inner_steps: H, steps between two meetings.
        step_s: t_s, seconds of a step.
        num_islands: k.
        whole_window: whether the round is thrown away, or only the island's part.
    """
    scope = 1.0 if whole_window else 1 / num_islands
    return scope * inner_steps * step_s / 2


# --- flush and memory -----------------------------------------------------------------------------


class FlushTimes(msgspec.Struct, frozen=True, kw_only=True):
    """An emergency save, in seconds, one machine's bytes and bytes per second.

    Attributes:
        state_bytes: what this machine has to write.
        bandwidth_bytes_per_s: to a place that outlives the machine.
        notice_s: from the platform's word until the machine is gone.
        poll_s: until we ask the platform again, at worst.
        http_s: until it has answered.
        agreement_s: until all ranks know at which step they stop.
        step_s: until that step is over.
        fsync_s: until what was written is durable.
        margin_s: kept for what was not thought of.
    """

    state_bytes: float
    bandwidth_bytes_per_s: float
    notice_s: float
    poll_s: float = 5.0
    http_s: float = 2.0
    agreement_s: float = 0.0
    step_s: float = 10.0
    fsync_s: float = 0.0
    margin_s: float = 10.0

    @property
    def before_s(self) -> float:
        """Seconds that pass before the first byte is written."""
        return self.poll_s + self.http_s + self.agreement_s + self.step_s

    @property
    def write_s(self) -> float:
        """Seconds of writing: bytes over bandwidth."""
        return self.state_bytes / self.bandwidth_bytes_per_s

    @property
    def total_s(self) -> float:
        """Everything, with the margin."""
        return self.before_s + self.write_s + self.fsync_s + self.margin_s

    @property
    def fits(self) -> bool:
        """Whether everything is over when the machine goes."""
        return self.total_s <= self.notice_s

    @property
    def left_s(self) -> float:
        """Seconds from the end of all until the machine goes; below 0 when it does not fit."""
        return self.notice_s - self.total_s

    @property
    def room_s(self) -> float:
        """Seconds that there are for writing."""
        return self.notice_s - self.before_s - self.fsync_s - self.margin_s

    @property
    def needed_bytes_per_s(self) -> float:
        """Bandwidth at which it just fits; inf when nothing is left for writing."""
        return self.state_bytes / self.room_s if self.room_s > 0 else math.inf

    @property
    def needed_bare_bytes_per_s(self) -> float:
        """The same if nothing but writing took any time."""
        return self.state_bytes / self.notice_s


def state_bytes(num_parameters: float, bytes_per_parameter: float = 14.0) -> float:
    """Bytes of the whole job's state."""
    return num_parameters * bytes_per_parameter


def staged_bytes(state_bytes: float, *, num_nodes: int = 1, num_buffers: int = 1) -> float:
    """Bytes of memory that each machine needs for snapshots: buffers · state / machines."""
    return num_buffers * state_bytes / num_nodes


# --- spares, restarts, replicas -------------------------------------------------------------------


def num_spares(failures_per_h: float, repair_h: float, *, sufficing: float) -> int:
    """The fewest spares that suffice with probability ``sufficing``.

    Args:
        failures_per_h: of all machines together, N·λ_node.
        repair_h: mean hours until a failed machine is back.
        sufficing: 1-ε, in [0, 1).
    """
    return poisson_quantile(sufficing, failures_per_h * repair_h)


def shortage(num_spares: int, failures_per_h: float, repair_h: float) -> float:
    """Probability that more machines are away than there are spares."""
    return poisson_tail(num_spares, failures_per_h * repair_h)


def gives_up(failures_per_h: float, wall_h: float, max_restarts: int) -> float:
    """Probability that the budget is spent before ``wall_h`` hours are over."""
    return poisson_tail(max_restarts, failures_per_h * wall_h)


def restarts_end_h(failures_per_h: float, max_restarts: int) -> float:
    """Mean hours until the failure that finds no restart left: (max_restarts + 1)/λ."""
    return (max_restarts + 1) / failures_per_h


def restarts_needed(failures_per_h: float, wall_h: float, *, sufficing: float) -> int:
    """The smallest budget that lasts ``wall_h`` hours with probability ``sufficing``."""
    return poisson_quantile(sufficing, failures_per_h * wall_h)


def recovers_in_pairs(num_nodes: int, num_lost: int) -> float:
    """Probability that no pair is lost whole.

    Args:
        num_nodes: N, even.
        num_lost: k, at most N.
    """
    pairs = num_nodes // 2
    if num_lost > pairs:
        return 0.0
    chance = 1.0
    for i in range(num_lost):  # the next one must not be the other half of one that is lost
        chance *= 2 * (pairs - i) / (num_nodes - i)
        if chance == 0:
            break
    return chance


def lost_with_copies_h(recovers: float, *, pause_h: float, from_storage_h: float) -> float:
    """Hours of the whole job that a loss takes on average.

    Args:
        recovers: probability that the copies are enough.
        pause_h: until the job goes on from them.
        from_storage_h: restore, and half of what lies between two checkpoints there.
    """
    return recovers * pause_h + (1 - recovers) * from_storage_h


# --- zones ----------------------------------------------------------------------------------------


class ZoneSpread(msgspec.Struct, frozen=True, kw_only=True):
    """Machines that are spread over zones.

    Attributes:
        num_machines: K in all.
        num_zones: z, each with K/z.
        reclaimed_per_h: p, probability that one zone is reclaimed within an hour.
    """

    num_machines: int
    num_zones: int
    reclaimed_per_h: float

    @property
    def mean_lost_per_h(self) -> float:
        """K·p machines, whatever z is."""
        return self.num_machines * self.reclaimed_per_h

    @property
    def variance_lost(self) -> float:
        """K²p(1-p)/z machines²."""
        p = self.reclaimed_per_h
        return self.num_machines**2 * p * (1 - p) / self.num_zones

    @property
    def events_per_h(self) -> float:
        """Reclaims of any zone per hour: z·(-ln(1-p))."""
        return self.num_zones * from_probability(self.reclaimed_per_h)

    @property
    def all_lost_per_h(self) -> float:
        """Probability that all zones are reclaimed in the same hour: p^z."""
        return float(self.reclaimed_per_h**self.num_zones)


class ZoneRecovery(msgspec.Struct, frozen=True, kw_only=True):
    """What the loss of a zone costs.

    Attributes:
        back_h: until a reclaimed zone's machines are replaced.
        restore_h: restore and rejoin, in the modes that rewind.
        interval_h: useful hours between two checkpoints.
        pause_h: of the survivors, with copies in peers' memory.
    """

    back_h: float
    restore_h: float
    interval_h: float
    pause_h: float


def zone_throughput(spread: ZoneSpread, recovery: ZoneRecovery, mode: ZoneMode) -> float:
    """Useful work per hour over that of K machines which are never reclaimed, in [0, 1].

    A rewind is paid by all machines, a replacement only by those that are away.
    """
    rewound_h = recovery.restore_h + recovery.interval_h / 2
    if mode == "rigid":
        return 1 / (1 + spread.events_per_h * (recovery.back_h + rewound_h))
    alone = spread.num_zones == 1  # nobody is left to go on, and no copy
    stopped_h = recovery.pause_h if mode == "peer" and not alone else rewound_h
    there = 1 / (1 + spread.events_per_h / spread.num_zones * recovery.back_h)  # share of machines
    return there / (1 + there * spread.events_per_h * stopped_h)
