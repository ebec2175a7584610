"""One job, checkpoint by checkpoint, deciding with the objects that the runtime decides with.

When to save is asked of a :class:`~outlast.policy.cadence.Cadence`, which tiers take it of a
:class:`~outlast.policy.tier_cadence.TierCadence`, what to do with a notice of
:func:`~outlast.policy.drain.plan`, which checkpoints may go of
:func:`~outlast.policy.retention.removable`, who holds whose copies of
:func:`~outlast.policy.replicas.holders`, whether survivors have all that is needed of
:func:`~outlast.policy.regain.decide`, whether it is worth another attempt of
:class:`~outlast.policy.restart.RestartPolicy`. Around them is a clock that costs nothing.

Failures strike while the job trains, saves and restores. While one is being noticed, others only
take machines away. Work is measured in seconds of training on all machines.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Collection, Iterable
from typing import Final, Literal

from outlast.ledger.goodput import PARTS, Part
from outlast.policy import drain, regain, replicas, retention
from outlast.policy.cadence import Cadence
from outlast.policy.failures import Failure
from outlast.policy.restart import RestartPolicy
from outlast.policy.tier_cadence import Cost, Scope, Stop, TierCadence
from outlast.simulate.clock import Clock
from outlast.simulate.failures import Loss
from outlast.simulate.setup import Level, Outcome, Setup

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


class Saved:
    """What is in one level: work → when it is durable there."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self.durable_s: dict[float, float] = {}

    def add(self, work_s: float, durable_s: float) -> None:
        """One more; what retention lets go is gone."""
        self.durable_s[work_s] = durable_s
        order = sorted(self.durable_s)
        steps = dict(enumerate(order, 1))  # the policy knows whole steps
        for step in retention.removable(steps, (), keep=self.level.keep, invalid=()):
            del self.durable_s[steps[step]]

    def forget(self, now_s: float, *, all_of_it: bool) -> None:
        """What was not durable went with its machine, or everything did."""
        self.durable_s = {
            work: at for work, at in self.durable_s.items() if at <= now_s and not all_of_it
        }


class Run:
    """One run.

    Args:
        setup: the job.
        cadence: when it saves; the runtime's own object.
        losses: what goes wrong, in order.
        chance: which notices come, which checkpoints are damaged.
        absent: machines that are not there at the start.
        comes: when machines come that do not follow a loss, in order.
    """

    def __init__(
        self,
        setup: Setup,
        cadence: Cadence,
        losses: Iterable[Loss],
        chance: random.Random,
        *,
        absent: Collection[int] = (),
        comes: Iterable[tuple[float, tuple[int, ...]]] = (),
    ) -> None:
        self.setup, self.cadence = setup, cadence
        self._losses, self._chance = iter(losses), chance
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
        self._saved = [Saved(level) for level in setup.levels]
        self._tiers = _tier_cadence(setup)
        self._has_failed = False
        self._restarts = None if setup.max_restarts is None else RestartPolicy(setup.max_restarts)
        self._attempt_s = 0.0
        self._going: set[int] = set()  # that were told, and have left before their time
        order = [replicas.Machine(node=str(number)) for number in range(setup.machines)]
        self._holders = replicas.holders(order, 1) if setup.mode in ("peer", "elastic") else {}
        for at_s, numbers in comes:
            self._clock.after(at_s, functools.partial(self._back, numbers))

    def run(self) -> Outcome:
        """To the end of the work, of the horizon, or of the job's patience."""
        self._next_loss()
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
        return Outcome(
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
        self.cadence.begun(self._clock.now_s)
        self._tiers.begun(self._clock.now_s)
        self._has_failed = False
        self._train()

    def _train(self) -> None:
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
        names = self._tiers.due(turn)
        due = [saved for saved in self._saved if saved.level.name in names]
        cost_s = sum(saved.level.cost_s for saved in due)
        self._enter("saving", cost_s, lambda: self._has_saved(due, cost_s))

    def _has_saved(self, due: list[Saved], cost_s: float) -> None:
        self._account()
        now_s = self._clock.now_s
        self._saves += 1
        for saved in due:
            saved.add(self._work_s, now_s + saved.level.lag_s)
        each = [saved.level for saved in due if self._tiers.every(saved.level.name) == 1]
        self.cadence.taken(self._step, now_s, sum(level.cost_s for level in each))
        if not self._tiers.is_fixed:
            for saved in due:
                cost = Cost(copy_s=saved.level.lag_s, slowed=0.0, blocked_s=saved.level.cost_s)
                self._tiers.measured(saved.level.name, cost)
            speed = (self.setup.step_s or 1.0) / self._speed
            self._tiers.taken(now_s, self.cadence.due_s(self._step, now_s, speed) - now_s)
        if self._work_s >= self.setup.work_s * (1 - 1e-12):
            self._ended = "finished"
            return
        self._train()

    # --- what goes wrong ------------------------------------------------------------------------

    def _next_loss(self) -> None:
        loss = next(self._losses, None)
        if loss is None:
            return
        now_s, setup = self._clock.now_s, self.setup
        if loss.how == "notice" and self._chance.random() < setup.flush_probability:
            told_s = max(loss.at_s - setup.notice_s - now_s, 0.0)
            self._clock.after(told_s, lambda: self._told(loss))
        self._clock.after(loss.at_s - now_s, lambda: self._strike(loss))

    def _strike(self, loss: Loss) -> None:
        self._next_loss()
        gone = self._here & set(loss.machines)
        if loss.machines and not gone:
            return  # nobody there, or they have left already
        self._account()
        self._take_away(gone, loss)
        if self._phase in ("detecting", "waiting"):
            if self._phase == "detecting":
                self._forget(gone)
            return
        self._failures += 1
        if self.setup.mode == "local" and gone and self._here and self._phase == "training":
            self._lose_island(len(gone))
            return
        self.cadence.lost(self._clock.now_s)
        self._has_failed = True
        self._tiers.lost(self._clock.now_s, Scope(min(len(loss.machines), Scope.ALL)))
        if self._gives_up():
            self._ended = f"gave up after {self._failures} failures"
            return
        self._forget(gone)
        goes_on = self.setup.mode == "elastic" and self._survivors_have_it(gone)
        if goes_on:
            self._work_s -= self._work_s % self.setup.step_s if self.setup.step_s else 0.0
        then = self._go_on if goes_on else self._resume
        self._enter("detecting", self.setup.detect_s, then)

    def _take_away(self, gone: set[int], loss: Loss) -> None:
        self._here -= gone
        for number in sorted(gone):
            if self._spares:
                self._spares -= 1
                self._here.add(number)  # another machine in its place
        if math.isfinite(loss.back_s) and gone:
            back = tuple(sorted(gone))
            self._clock.after(loss.back_s, lambda: self._back(back))

    def _forget(self, gone: set[int]) -> None:
        """What went with the machines, and what had not arrived anywhere."""
        now_s = self._clock.now_s
        for saved in self._saved:
            kind = saved.level.survives
            lost = {str(number) for number in gone}
            is_gone = bool(gone) and kind == "process"
            if kind == "holders":
                is_gone = any(set(self._holders.get(node, ())) <= lost for node in lost)
            saved.forget(now_s, all_of_it=is_gone)

    def _go_on(self) -> None:
        self._start(self.setup.rejoin_s)

    def _resume(self) -> None:
        """From the furthest that is durable and can be read; from nothing where nothing is."""
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
            del self._saved[-number].durable_s[work_s]
        self._account()
        self._work_s = 0.0
        self._start(self._saved[-1].level.restore_s)

    def _gives_up(self) -> bool:
        if self._restarts is None:
            return False
        failure = Failure(rank=0, exit_code=-9, message="connection reset by peer", step=self._step)
        lasted_s = self._clock.now_s - self._attempt_s
        return not self._restarts.judge([failure], lasted_s=lasted_s).restart

    def _survivors_have_it(self, gone: set[int]) -> bool:
        """What the runtime decides from the offers of those that are left."""
        world, step = self.setup.machines, self._step
        lost = {str(number) for number in gone}
        held: dict[str, list[int]] = {}
        for node, keepers in self._holders.items():
            for keeper in (*keepers, node):
                held.setdefault(keeper, []).append(int(node))
        offers = [
            regain.Offer(
                step=step,
                timeline=1,
                world_size=world,
                digest="same",
                is_grouped=True,
                known=[
                    regain.Known(timeline=1, rank=rank, world_size=world, step=step)
                    for rank in held.get(str(number), [])
                ],
            )
            for number in sorted(self._here)
            if str(number) not in lost
        ]
        # Machines that went before are not missed any more: their ranks are others' by now.
        known = {one.rank for offer in offers for one in offer.known}
        away = set(range(world)) - self._here - gone
        if offers and away - known:
            offers[0].known.extend(
                regain.Known(timeline=1, rank=rank, world_size=world, step=step)
                for rank in sorted(away - known)
            )
        return bool(step) and regain.decide(offers, ()).step is not None

    def _lose_island(self, count: int) -> None:
        """Local updates: those that went lose what they did since the last sync; others go on."""
        scope = count / self.setup.machines
        lost_s = min(scope * self.setup.sync_steps * self.setup.step_s / 2, self._work_s)
        self._work_s -= lost_s
        self._train()

    # --- notices, and machines that come --------------------------------------------------------

    def _told(self, loss: Loss) -> None:
        """A notice: drain, if the runtime would."""
        if self._phase != "training" or not self._here & set(loss.machines):
            return
        self._account()
        setup = self.setup
        left_s = loss.at_s - self._clock.now_s
        step_s = setup.step_s / self._speed
        rest_s = step_s - (self._work_s % setup.step_s) / self._speed if setup.step_s else 0.0
        lanes = [
            drain.Lane(
                name=saved.level.name,
                outlasts=True,
                slow_s=saved.level.cost_s + saved.level.lag_s,
                fast_s=saved.level.cost_s + saved.level.lag_s,
            )
            for saved in self._saved
            if saved.level.survives == "all"
        ]
        plan = drain.plan(left_s, lanes, step_slow_s=rest_s, step_fast_s=rest_s)
        if plan.choice == "keep" or not plan.tiers:
            return
        target = next(saved for saved in self._saved if saved.level.name == plan.tiers[0])
        flush_s = target.level.cost_s + target.level.lag_s
        self._enter("training", rest_s, lambda: self._flush(target, flush_s, loss))

    def _flush(self, target: Saved, flush_s: float, loss: Loss) -> None:
        self._enter("flushing", flush_s, lambda: self._leave(target, loss))

    def _leave(self, target: Saved, loss: Loss) -> None:
        self._account()
        self._failures += 1
        target.add(self._work_s, self._clock.now_s)
        gone = self._here & set(loss.machines)
        later_s = max(loss.at_s - self._clock.now_s, 0.0)
        self._take_away(gone, loss._replace(back_s=loss.back_s + later_s))
        self._resume()

    def _back(self, numbers: tuple[int, ...]) -> None:
        new = set(numbers) - self._here
        self._account()
        if self._spares < self.setup.spares and len(new) < len(numbers):
            self._spares = min(self._spares + len(numbers) - len(new), self.setup.spares)
        if not new:
            return
        self._here |= new
        if self._phase == "waiting":
            self._resume()
        elif self._phase == "training":
            self._take_in()

    def _take_in(self) -> None:
        """Somebody comes while it trains: a planned stop, in which nothing is lost."""
        if self.setup.mode == "restart":
            level = self._saved[0].level
            self._enter("flushing", level.cost_s + level.lag_s, self._has_drained)
        else:
            self._enter("regrouping", self.setup.rejoin_s, self._begin)

    def _has_drained(self) -> None:
        self._account()
        self._saved[0].add(self._work_s, self._clock.now_s)
        self._start(self._saved[0].level.restore_s)


_SURVIVES: Final = {"process": Scope.PROCESS, "holders": Scope.MACHINE, "all": Scope.ALL}


def _tier_cadence(setup: Setup) -> TierCadence:
    stops = [
        Stop(
            name=level.name,
            survives=_SURVIVES[level.survives],
            every=level.every if position else level.every or 1,
        )
        for position, level in enumerate(setup.levels)
    ]
    return TierCadence(stops, 0.0)
