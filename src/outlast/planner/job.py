"""Simulate one job, checkpoint by checkpoint, with the objects that the runtime decides with.

When to save is asked of a :class:`~outlast.policy.cadence.Cadence`, which tiers take it of a
:class:`~outlast.policy.tier_cadence.TierCadence`, what to do with a notice of
:func:`~outlast.policy.drain.plan`, which checkpoints may go of
:func:`~outlast.policy.retention.removable`, who holds whose copies of
:func:`~outlast.policy.retention.holders`, whether survivors have all that is needed of
:func:`~outlast.policy.regain.decide`, whether it is worth another attempt of
:class:`~outlast.policy.restart.RestartPolicy`. Around them is a clock that costs nothing.

Failures strike while the job trains, saves and restores. While one is being noticed, others only
take machines away. A notice that is heard while the job does something else is answered as soon as
it trains; a machine that was drained has left, and its successor comes as after any loss. Copies in
others' memory are those that were made at the save: who has gone since then has them no more. Work
is measured in seconds of training on all machines.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
from collections.abc import Callable, Collection, Iterable
from typing import Final, Literal, NamedTuple, get_args

import msgspec

from outlast.ledger.goodput import PARTS, Part
from outlast.policy import drain, regain, retention
from outlast.policy.cadence import Cadence
from outlast.policy.failures import Failure
from outlast.policy.restart import RestartPolicy
from outlast.policy.tier_cadence import Cost, Scope, TierCadence, TierStop

Mode = Literal["rigid", "restart", "elastic", "replicas", "peer", "local"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
MODE_WORDS: Final[dict[Mode, str]] = {
    "rigid": "waits for all its machines, and goes on from a checkpoint",
    "restart": "goes on with the machines that are left, from a checkpoint",
    "peer": "goes on with those that are left, from snapshots in other machines' memory",
    "elastic": "goes on with what survivors have, at the step that was lost",
    "replicas": "goes on at the step that was lost: every machine that is left has all of it",
    "local": "trains in islands between syncs; one that goes loses its own work alone",
}
Phase = Literal["training", "saving", "flushing", "regrouping", "detecting", "waiting", "restoring"]
_PARTS: Final[dict[str, Part]] = {
    "saving": "stalled",
    "flushing": "stalled",
    "regrouping": "restarting",
    "detecting": "detecting",
    "waiting": "waiting",
    "restoring": "restarting",
}
_ALMOST: Final = 1e-9  # of a step: what rounding makes of a whole one
Holders = dict[str, tuple[str, ...]]  # machine → the others that keep its copies
_SURVIVES: Final = {"process": Scope.PROCESS, "holders": Scope.MACHINE, "all": Scope.ALL}


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """A place for checkpoints of a simulated job.

    Attributes:
        name: of the tier.
        cost_s: training is blocked for so long by one.
        lag_s: from then until it is durable there.
        restore_s: from the new start to the first step, when it is read from there.
        every: it takes every Nth checkpoint; None where that is decided as the runtime does.
        keep: how many stay.
        survives: a worker's process only; machines, as long as another that keeps a copy is
            there ("holders"); everything.
    """

    name: str = "shared"
    cost_s: float = 0.0
    lag_s: float = 0.0
    restore_s: float = 0.0
    every: int | None = 1
    keep: int = 3
    survives: Literal["process", "holders", "all"] = "all"


class JobSetup(msgspec.Struct, frozen=True, kw_only=True):
    """A job that is simulated.

    Attributes:
        machines: that it is made for; fewer make it proportionally slower.
        levels: where checkpoints go, the fastest first.
        mode: how it recovers, see ``MODE_WORDS``.
        work_s: useful time on all machines, to be done.
        horizon_s: wall time after which it is looked at.
        step_s: of a step on all machines; 0 where nothing waits for a step's end.
        detect_s: from a loss to the new start.
        rejoin_s: what survivors need to go on, or to take somebody in.
        spares: machines that stand by and take the place of lost ones.
        least: machines without which nothing goes on.
        notice_s: how long before its end a machine is told.
        flush_probability: share of notices that come at all, and in time.
        max_restarts: None for any number.
        damaged_probability: of a checkpoint that it cannot be read when it is needed.
        sync_steps: of local updates: steps between two syncs.
        price_per_h: of a machine.
    """

    machines: int = 1
    levels: tuple[Level, ...] = (Level(),)
    mode: Mode = "rigid"
    work_s: float = math.inf
    horizon_s: float = math.inf
    step_s: float = 0.0
    detect_s: float = 0.0
    rejoin_s: float = 0.0
    spares: int = 0
    least: int = 1
    notice_s: float = 0.0
    flush_probability: float = 0.0
    max_restarts: int | None = None
    damaged_probability: float = 0.0
    sync_steps: int = 500
    price_per_h: float | None = None


class MachineLoss(NamedTuple):
    """Machines that go together; ``back_s``: after how long they come back, or never."""

    at_s: float
    machines: tuple[int, ...]
    how: str  # "reset", "silent" or "notice"
    back_s: float = math.inf


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one run; the parts are wall time, named as in the ledger, and add up to it.

    Attributes:
        useful_s: training on all machines that was not lost, in the end.
        parts: part → seconds.
        failures: losses that stopped it, or that took work.
        saves: checkpoints taken.
        machine_s: machine-seconds that were held.
        finished: whether the work is done.
        ended: why it ended otherwise, in words.
    """

    useful_s: float
    parts: dict[Part, float]
    failures: int
    saves: int
    machine_s: float
    finished: bool
    ended: str = ""

    @property
    def wall_s(self) -> float:
        """All of it."""
        return math.fsum(self.parts.values())


class Clock:
    """A virtual clock; ``now_s`` begins at 0."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        """Do ``what`` in ``delay_s`` from now; of two at one moment the first asked for."""
        heapq.heappush(self._due, (self.now_s + max(delay_s, 0.0), next(self._numbers), what))

    def step(self, until_s: float) -> bool:
        """Let the next thing happen if it is due until then; whether there was one."""
        if not self._due or self._due[0][0] > until_s or self._due[0][0] == math.inf:
            return False
        self.now_s, _, what = heapq.heappop(self._due)
        what()
        return True

    def run(self, until_s: float) -> None:
        """Let everything happen that is due until then."""
        while self.step(until_s):
            pass
        self.now_s = until_s


class SavedLevel:
    """What is in one level: work → when it is durable there."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self.durable_s: dict[float, float] = {}
        self._copies: dict[float, Holders] = {}  # who held whose, when it was taken
        self._gone: dict[float, set[str]] = {}  # since then

    def add(self, work_s: float, durable_s: float, holders: Holders) -> None:
        """One more; what retention lets go is gone."""
        self.durable_s[work_s] = durable_s
        self._copies[work_s], self._gone[work_s] = holders, set()
        order = sorted(self.durable_s)
        steps = dict(enumerate(order, 1))  # the policy knows whole steps
        for step in retention.removable(steps, (), keep=self.level.keep, invalid=()):
            self.remove(steps[step])

    def forget(self, now_s: float, gone: set[int]) -> None:
        """What went with these machines, and what had not arrived anywhere."""
        lost = {str(number) for number in gone}
        for work_s, at_s in list(self.durable_s.items()):
            away = self._gone[work_s]
            away |= lost
            is_gone = at_s > now_s
            if self.level.survives == "process":
                is_gone |= bool(lost)
            elif self.level.survives == "holders":
                copies = self._copies[work_s]
                is_gone |= any(away.issuperset(copies[one]) for one in away if one in copies)
            if is_gone:
                self.remove(work_s)

    def remove(self, work_s: float) -> None:
        """It cannot be read any more."""
        del self.durable_s[work_s], self._copies[work_s], self._gone[work_s]


class JobRun:
    """One simulated run of a job.

    Args:
        setup: the job.
        cadence: when it saves; the runtime's own object.
        losses: what goes wrong.
        chance: which notices come, which checkpoints are damaged.
        absent: machines that are not there at the start.
        comes: when machines come that do not follow a loss.
    """

    def __init__(
        self,
        setup: JobSetup,
        cadence: Cadence,
        losses: Iterable[MachineLoss],
        chance: random.Random,
        *,
        absent: Collection[int] = (),
        comes: Iterable[tuple[float, tuple[int, ...]]] = (),
    ) -> None:
        self.setup, self.cadence = setup, cadence
        self._chance = chance
        self._clock = Clock()
        self._here = set(range(setup.machines)) - set(absent)
        self._spares = setup.spares
        self._phase: Phase = "waiting"
        self._turn = 0  # what is scheduled for another one is void
        self._since_s = 0.0
        self._work_s = self._mark_s = 0.0
        self._parts: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._machine_s = 0.0
        self._failures = self._saves = self._saves_due = 0
        self._ended: str | None = None
        self._saved = [SavedLevel(level) for level in setup.levels]
        self._home: Holders = {}  # who keeps whose copies, as it last began to train
        self._tiers = _tier_cadence(setup)
        self._has_failed = False
        self._restarts = None if setup.max_restarts is None else RestartPolicy(setup.max_restarts)
        self._attempt_s = 0.0
        self._gone: set[int] = set()  # since it last trained
        self._is_held = False  # whether survivors have the state that it stands at
        self._has_joined = False  # somebody, while it saved
        self._notices: list[MachineLoss] = []  # that were heard and not answered yet
        self._left: set[MachineLoss] = (
            set()
        )  # that were answered: who was told has left before its time
        self._drain_turn = -1  # in which a drain waits for its step's end
        self._has_copies = setup.mode in ("peer", "elastic") or any(
            level.survives == "holders" for level in setup.levels
        )
        self._order: tuple[frozenset[int], Holders] = (frozenset(), {})
        for at_s, numbers in comes:
            self._clock.after(at_s, functools.partial(self._back, numbers))
        # Drawn here, and not when they come: the same notices come whatever the policy does.
        for loss in losses:
            if loss.how == "notice" and chance.random() < setup.flush_probability:
                self._clock.after(loss.at_s - setup.notice_s, functools.partial(self._told, loss))
            self._clock.after(loss.at_s, functools.partial(self._strike, loss))

    def run(self) -> JobOutcome:
        """To the end of the work, of the horizon, or of the job's patience."""
        self._start(0.0)
        horizon_s = self.setup.horizon_s
        while self._ended is None and self._clock.step(horizon_s):
            pass
        if self._ended is None:
            if math.isinf(horizon_s):
                self._ended = "no machine comes any more"
            else:
                self._clock.now_s = horizon_s
            self._account()
        is_done = self._work_s >= self.setup.work_s * (1 - 1e-12)
        useful_s = self.setup.work_s if is_done else self._work_s
        return JobOutcome(
            useful_s=useful_s,
            parts=self._parts,
            failures=self._failures,
            saves=self._saves,
            machine_s=self._machine_s,
            finished=is_done,
            ended=self._ended or "",
        )

    # --- the line of time -----------------------------------------------------------------------

    def _account(self) -> None:
        """The time since the last look goes to the phase that it was spent in."""
        passed_s = self._clock.now_s - self._since_s
        self._since_s = self._clock.now_s
        self._machine_s += passed_s * (len(self._here) + self._spares)
        if self._phase != "training":
            self._parts[_PARTS[self._phase]] += passed_s
            return
        done_s = passed_s * self._speed
        again_s = min(max(self._mark_s - self._work_s, 0.0), done_s)
        share = again_s / done_s if done_s else 0.0
        self._parts["replayed"] += passed_s * share
        self._parts["productive"] += passed_s * (1 - share)
        self._work_s += done_s
        self._mark_s = max(self._mark_s, self._work_s)

    def _enter(self, phase: Phase, lasts_s: float, then: Callable[[], None]) -> None:
        self._account()
        self._phase = phase
        self._turn += 1
        turn = self._turn
        self._clock.after(lasts_s, lambda: then() if turn == self._turn else None)

    @property
    def _speed(self) -> float:
        return min(len(self._here) / self.setup.machines, 1.0)

    @property
    def _step(self) -> int:
        """Complete steps; without steps, seconds of work."""
        return int(self._work_s / (self.setup.step_s or 1.0) + _ALMOST)

    @property
    def _holders(self) -> Holders:
        """Who of those that are here keeps whose copies."""
        if not self._has_copies:
            return {}
        here = frozenset(self._here)
        if self._order[0] != here:
            machines = [retention.PlacedMachine(node=str(number)) for number in here]
            self._order = (here, retention.holders(machines, 1))
        return self._order[1]

    # --- training and saving --------------------------------------------------------------------

    def _start(self, restore_s: float) -> None:
        """From wherever it stands, with whoever is there."""
        needed = self.setup.machines if self.setup.mode == "rigid" else self.setup.least
        if len(self._here) < needed:
            self._enter("waiting", math.inf, lambda: None)
            return
        self._enter("restoring", restore_s, self._begin)

    def _begin(self) -> None:
        self._account()
        self._attempt_s = self._clock.now_s
        self._gone.clear()
        self._is_held, self._has_joined = True, False
        self._home = self._holders
        self.cadence.begun(self._clock.now_s)
        self._tiers.begun(self._clock.now_s)
        self._has_failed = False
        self._train()

    def _train(self) -> None:
        if self._drains():
            return
        if self._has_joined:
            self._take_in()
            return
        setup, now_s, speed = self.setup, self._clock.now_s, self._speed
        due_s = self.cadence.due_s(self._step, now_s, (setup.step_s or 1.0) / speed)
        work_s = max(due_s - now_s, 0.0) * speed
        if setup.step_s and math.isfinite(work_s):
            step = math.ceil((self._work_s + work_s) / setup.step_s - _ALMOST)
            work_s = max(step, self._step + 1) * setup.step_s - self._work_s
        work_s = min(work_s, setup.work_s - self._work_s)
        self._enter("training", work_s / speed, self._save)

    def _save(self) -> None:
        turn, self._saves_due = self._saves_due, self._saves_due + 1
        self._account()
        names = self._tiers.due(turn, self._clock.now_s)
        due = [saved for saved in self._saved if saved.level.name in names]
        cost_s = sum(saved.level.cost_s for saved in due)
        self._enter("saving", cost_s, lambda: self._has_saved(due, cost_s))

    def _has_saved(self, due: list[SavedLevel], cost_s: float) -> None:
        self._account()
        now_s = self._clock.now_s
        self._saves += 1
        for saved in due:
            saved.add(self._work_s, now_s + saved.level.lag_s, self._holders)
        each = [saved.level for saved in due if self._tiers.takes_each(saved.level.name)]
        self.cadence.taken(self._step, now_s, sum(level.cost_s for level in each))
        if not self._tiers.is_fixed:
            for saved in due:
                cost = Cost(copy_s=saved.level.lag_s, slowed=0.0, blocked_s=saved.level.cost_s)
                self._tiers.measured(saved.level.name, cost)
            speed = (self.setup.step_s or 1.0) / self._speed
            next_s = self.cadence.due_s(self._step, now_s, speed) - now_s
            self._tiers.taken(now_s, next_s, [saved.level.name for saved in due])
        if self._work_s >= self.setup.work_s * (1 - 1e-12):
            self._ended = "finished"
            return
        self._train()

    # --- what goes wrong ------------------------------------------------------------------------

    def _strike(self, loss: MachineLoss) -> None:
        if loss in self._notices:
            self._notices.remove(loss)
        gone = self._here & set(loss.machines)
        if loss in self._left or (loss.machines and not gone):
            return  # nobody there, or they have left already
        self._account()
        self._take_away(gone, loss.back_s)
        if self._phase in ("detecting", "waiting"):
            return
        self._failures += 1
        is_local = self.setup.mode == "local" and gone and self._here - self._gone
        if is_local and self._phase in ("training", "saving", "flushing", "regrouping"):
            self._lose_island(len(gone))
            return
        self.cadence.lost(self._clock.now_s)
        self._has_failed = True
        self._tiers.lost(self._clock.now_s, Scope(min(len(loss.machines), Scope.ALL)))
        if self._gives_up():
            self._ended = f"gave up after {self._failures} failures"
            return
        if not gone:
            self._is_held = False  # the whole job
        self._enter("detecting", self.setup.detect_s, self._recover)

    def _take_away(self, gone: set[int], back_s: float) -> None:
        self._here -= gone
        self._gone |= gone
        for saved in self._saved:
            saved.forget(self._clock.now_s, gone)
        for number in sorted(gone):
            if self._spares:
                self._spares -= 1
                self._here.add(number)  # another machine in its place
        if math.isfinite(back_s) and gone:
            self._clock.after(back_s, functools.partial(self._back, tuple(sorted(gone))))

    def _recover(self) -> None:
        """Survivors go on where they are, if the mode has it so and they can."""
        if not self._survivors_have_it():
            self._resume()
            return
        if self.setup.step_s:
            self._work_s = self._step * self.setup.step_s
        self._start(self.setup.rejoin_s)

    def _resume(self) -> None:
        """From the furthest that is durable and can be read; from nothing where nothing is."""
        self._is_held = False
        found = sorted(
            (
                (work, -number)
                for number, saved in enumerate(self._saved)
                for work in saved.durable_s
            ),
            reverse=True,
        )
        for work_s, number in found:
            if self._chance.random() >= self.setup.damaged_probability:
                self._account()
                self._work_s = work_s
                if self._has_failed:
                    self._tiers.back_from([self._saved[-number].level.name])
                self._start(self._saved[-number].level.restore_s)
                return
            self._saved[-number].remove(work_s)
        self._account()
        self._work_s = 0.0
        self._start(self._saved[-1].level.restore_s)

    def _gives_up(self) -> bool:
        if self._restarts is None:
            return False
        failure = Failure(rank=0, exit_code=-9, message="connection reset by peer", step=self._step)
        lasted_s = self._clock.now_s - self._attempt_s
        return not self._restarts.judge([failure], lasted_s=lasted_s).restart

    def _survivors_have_it(self) -> bool:
        """What the runtime decides from the offers of those that are left."""
        left = self._here - self._gone
        holding = ("elastic", "replicas", "local")
        if self.setup.mode not in holding or not self._is_held or not left:
            return False
        if self.setup.mode != "elastic":
            return True  # each of them has all of it
        world, step = self.setup.machines, self._step
        held: dict[str, list[int]] = {}
        for node, keepers in self._home.items():
            for keeper in (*keepers, node):
                held.setdefault(keeper, []).append(int(node))
        offers = [
            regain.StateOffer(
                step=step,
                timeline=1,
                world_size=world,
                digest="same",
                is_grouped=True,
                known=[
                    regain.OwnState(timeline=1, rank=rank, world_size=world, step=step)
                    for rank in held.get(str(number), [])
                ],
            )
            for number in sorted(left)
        ]
        # Machines that went before are not missed any more: their ranks are others' by now.
        offers[0].known.extend(
            regain.OwnState(timeline=1, rank=rank, world_size=world, step=step)
            for rank in range(world)
            if str(rank) not in self._home
        )
        return bool(step) and regain.decide(offers, ()).step is not None

    def _lose_island(self, count: int) -> None:
        """Local updates: those that went lose what they did since the last sync; others go on."""
        scope = count / self.setup.machines
        lost_s = min(scope * self.setup.sync_steps * self.setup.step_s / 2, self._work_s)
        self._work_s -= lost_s
        self._gone.clear()  # nobody needs what they held
        if len(self._here) < self.setup.least:
            self._start(0.0)
        else:
            self._train()

    # --- notices, and machines that come --------------------------------------------------------

    def _told(self, loss: MachineLoss) -> None:
        if not self._here & set(loss.machines):
            return
        self._notices.append(loss)
        if self._phase == "training" and self._drain_turn != self._turn:
            self._account()
            self._drains()

    def _drains(self) -> bool:
        """Whether there is a notice that the runtime would answer; then it does."""
        setup = self.setup
        step_s = setup.step_s / self._speed
        rest_s = step_s - (self._work_s % setup.step_s) / self._speed if setup.step_s else 0.0
        if any(self._work_s in saved.durable_s for saved in self._saved):
            rest_s = 0.0  # it has just saved, and goes with that
        for loss in sorted(self._notices):
            left_s = loss.at_s - self._clock.now_s
            name = flushed_to(setup.levels, left_s, rest_s)
            if name is not None:
                target = next(saved for saved in self._saved if saved.level.name == name)
                self._enter("training", rest_s, functools.partial(self._flush, target))
                self._drain_turn = self._turn
                return True
            self._notices.remove(loss)  # there will not be more time than there is now
        return False

    def _flush(self, target: SavedLevel) -> None:
        self._account()
        self._enter("flushing", self._flush_s(target), lambda: self._leave(target))

    def _flush_s(self, target: SavedLevel) -> float:
        durable_s = target.durable_s.get(self._work_s)
        if durable_s is not None:  # it has just been saved
            return max(durable_s - self._clock.now_s, 0.0)
        return target.level.cost_s + target.level.lag_s

    def _leave(self, target: SavedLevel) -> None:
        """Everybody who was told by now."""
        self._account()
        target.add(self._work_s, self._clock.now_s, self._holders)
        for loss in self._notices:
            gone = self._here & set(loss.machines)
            self._failures += bool(gone)
            self._take_away(gone, loss.back_s)
        self._left.update(self._notices)
        self._notices.clear()
        self._recover()

    def _back(self, numbers: tuple[int, ...]) -> None:
        new = set(numbers) - self._here
        self._account()
        if self._spares < self.setup.spares and len(new) < len(numbers):
            self._spares = min(self._spares + len(numbers) - len(new), self.setup.spares)
        if not new:
            return
        self._here |= new
        if self._phase == "waiting":
            self._recover()
        elif self._phase == "training":
            self._take_in()
        elif self._phase == "saving":
            self._has_joined = True

    def _take_in(self) -> None:
        """Somebody comes while it trains: a planned stop, in which nothing is lost."""
        if self.setup.mode == "restart":
            self._account()
            self._enter("flushing", self._flush_s(self._saved[0]), self._has_drained)
        else:
            self._enter("regrouping", self.setup.rejoin_s, self._begin)

    def _has_drained(self) -> None:
        self._account()
        self._saved[0].add(self._work_s, self._clock.now_s, self._holders)
        self._start(self._saved[0].level.restore_s)


def flushed_to(levels: Iterable[Level], left_s: float, rest_s: float) -> str | None:
    """The level to which the runtime flushes in these seconds, after the step's rest; or none."""
    tiers = [
        drain.DrainTier(
            name=level.name,
            outlasts=True,
            slow_s=level.cost_s + level.lag_s,
            fast_s=level.cost_s + level.lag_s,
        )
        for level in levels
        if level.survives == "all"
    ]
    plan = drain.plan(left_s, tiers, step_slow_s=rest_s, step_fast_s=rest_s)
    return plan.tiers[0] if plan.choice != "keep" and plan.tiers else None


def _tier_cadence(setup: JobSetup) -> TierCadence:
    stops = [
        TierStop(
            name=level.name,
            survives=_SURVIVES[level.survives],
            every=level.every if position else level.every or 1,
        )
        for position, level in enumerate(setup.levels)
    ]
    return TierCadence(stops, 0.0)
