"""Replay pipelines of machines that come and go: checkpoints, templates, layouts chosen anew.

==========  =====================================================================================
checkpoint  at a loss all restart from the last checkpoint, in whole pipelines of a fixed depth;
            machines that no pipeline uses stand idle (Varuna, EuroSys'22)
templates   plans for each number of machines are ready: the step that was being made is made
            again by those that are left, whose replicas hold all (Oobleck, SOSP'23)
layouts     each minute the fastest layout of data and pipeline parallelism for the machines that
            are there; a change moves the state and rebuilds all groups (Parcae, NSDI'24)
==========  =====================================================================================

A :class:`PipelineSpeed` says how fast a job is on a number of machines; it is measured, or
published. A machine that comes is used from the next regrouping on, as in the artifacts.

Shares of time are given twice. ``useful_share`` is the time of steps that count over the wall time.
``published_share`` counts as the simulators of Oobleck's artifact (7966556) do: steps that were
lost are in its numerator, for they were made; the denominator has them once more, as the time that
a loss costs, and the pauses that its clock leaves out.

What can go wrong: fewer machines than a layout needs, which makes nothing until one comes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Final

import msgspec

from outlast.planner.traces import FleetChange, Recording

READY_S: Final = 45.0  # until a machine that was added can be used, in both artifacts


class PipelineSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """How fast a job is on some machines.

    Attributes:
        samples_per_step: of all machines.
        samples_per_s: machines → samples per second; between them linear, outside as at the ends.
        depths: machines of a pipeline, any of these; what no depth can use is idle.
    """

    samples_per_step: float
    samples_per_s: dict[int, float]
    depths: tuple[int, ...] = (1,)

    def step_s(self, machines: int) -> float:
        """Seconds of a step."""
        known = sorted(self.samples_per_s.items())
        for (low, at_low), (high, at_high) in itertools.pairwise(known):
            if low <= machines <= high:
                share = (machines - low) / (high - low)
                return self.samples_per_step / (at_low + share * (at_high - at_low))
        nearest = known[0] if machines < known[0][0] else known[-1]
        return self.samples_per_step / nearest[1]

    def idle_share(self, machines: int) -> float:
        """Of the machines, those that stand idle."""
        return min(machines % depth for depth in self.depths) / machines


class PipelineRules(msgspec.Struct, frozen=True, kw_only=True):
    """What a loss costs.

    Attributes:
        regroup_s: from a loss to the first new step, once at the start too.
        save_s: of a checkpoint, which blocks.
        save_steps: between two; None where survivors hold all of the state.
        least: machines without which nothing goes on.
    """

    regroup_s: float
    save_s: float = 0.0
    save_steps: int | None = None
    least: int = 1


class PipelineOutcome(msgspec.Struct, kw_only=True):
    """What came of it; seconds.

    Attributes:
        steps: that count.
        losses: moments at which machines went.
        kept_s: of steps that count.
        begun_s: of all steps that were begun, each in full.
        saving_s, regrouping_s: see the rules.
        idle_s: wall time times the share of machines that stand idle.
        charged_s: what a loss costs as published, see the module.
        wall_s: from the first regrouping on.
    """

    steps: int = 0
    losses: int = 0
    kept_s: float = 0.0
    begun_s: float = 0.0
    saving_s: float = 0.0
    regrouping_s: float = 0.0
    idle_s: float = 0.0
    charged_s: float = 0.0
    wall_s: float = 0.0

    @property
    def useful_share(self) -> float:
        """Of the wall time."""
        return self.kept_s / self.wall_s if self.wall_s else 0.0

    @property
    def published_share(self) -> float:
        """As the artifact's simulators count."""
        parts = (self.saving_s, self.regrouping_s, self.idle_s, self.charged_s)
        whole = math.fsum((self.begun_s, *parts))
        return self.begun_s / whole if whole else 0.0


def replay(
    recording: Recording, speed: PipelineSpeed, rules: PipelineRules, *, as_published: bool = False
) -> PipelineOutcome:
    """What a job makes of a fleet until the recording's end.

    Args:
        recording: of a fleet.
        speed: of the job.
        rules: of its recovery.
        as_published: whether the old group trains on while the new one is formed, as the
            artifact's clock has it; then only ``published_share`` means something.
    """
    return _Replay(recording, speed, rules, as_published=as_published).run()


def one_by_one(machines: int, least: int, every_s: float) -> Recording:
    """A fleet that loses one machine after each ``every_s`` until ``least`` are left."""
    names = [f"machine {number}" for number in range(machines)]
    changes = [FleetChange(at_s=0.0, came=tuple(names))]
    changes += [
        FleetChange(at_s=(number + 1) * every_s, went=(names[number],))
        for number in range(machines - least)
    ]
    return Recording(
        name=f"one of {machines} every {every_s:g} s",
        kind="fleet",
        length_s=(machines - least) * every_s,
        changes=tuple(changes),
        machines=machines,
    )


class _Replay:
    """One replay: a group trains until a loss ends it, and another begins."""

    def __init__(
        self,
        recording: Recording,
        speed: PipelineSpeed,
        rules: PipelineRules,
        *,
        as_published: bool,
    ) -> None:
        self._recording, self._speed, self._rules = recording, speed, rules
        self._is_published = as_published
        self._out = PipelineOutcome()
        self._open = 0  # steps since the last checkpoint
        self._must_save = False  # after the first step behind a loss
        self._formed = 0  # checkpoints that were taken while a group formed

    def run(self) -> PipelineOutcome:
        end_s, changes = self._recording.length_s, self._recording.changes
        began_s = min(change.at_s for change in changes if change.came) + READY_S
        losses = [change.at_s for change in changes if change.went]
        losses = [at_s for at_s in losses if began_s < at_s < end_s]
        regroup_s, lasts_s = self._rules.regroup_s, 0.0
        if self._is_published:
            lasts_s = regroup_s
        for at_s, loss_s in zip([began_s, *losses], [*losses, None], strict=True):
            machines = _there(self._recording, at_s)
            stop_s = end_s if loss_s is None else min(loss_s + lasts_s, end_s)
            if machines < self._rules.least:
                continue
            self._out.regrouping_s += regroup_s
            is_first = at_s == began_s
            start_s = at_s if self._is_published and is_first else at_s + regroup_s
            self._train(start_s, stop_s, loss_s, machines)
        self._out.wall_s = end_s - began_s
        return self._out

    def _train(self, now_s: float, stop_s: float, loss_s: float | None, machines: int) -> None:
        """One group, until it stops; a loss may come before that."""
        out, rules = self._out, self._rules
        step_s, idle = self._speed.step_s(machines), self._speed.idle_share(machines)
        lost_s: float | None = None
        while now_s < stop_s:
            out.begun_s += step_s
            now_s += step_s
            if loss_s is not None and now_s > loss_s:
                self._lose(step_s)
                loss_s, lost_s = None, loss_s
            if now_s > stop_s:
                break
            out.idle_s += idle * step_s
            out.kept_s += step_s
            out.steps += 1
            self._open += 1
            if rules.save_steps and (self._must_save or out.steps % rules.save_steps == 0):
                out.saving_s += rules.save_s
                out.idle_s += idle * rules.save_s
                now_s += rules.save_s
                is_forming = lost_s is not None and now_s < lost_s + rules.regroup_s
                self._save(step_s, is_forming=self._is_published and is_forming)
        if loss_s is not None:
            self._lose(step_s)

    def _save(self, step_s: float, *, is_forming: bool) -> None:
        """A checkpoint; as published, every other one that is taken while a group forms fails.

        The artifact looks for a loss before the checkpoint in the order in which its heap holds
        events: behind a regrouping's end, that is as good as at random.
        """
        self._must_save = False
        self._formed += is_forming
        if not is_forming or self._formed % 2:
            self._open = 0
            return
        assert self._rules.save_steps is not None  # noqa: S101 - it saves
        self._out.charged_s += step_s * self._rules.save_steps
        self._out.steps = max(self._out.steps - self._rules.save_steps, 0)

    def _lose(self, step_s: float) -> None:
        out = self._out
        out.losses += 1
        if not self._rules.save_steps:
            out.charged_s += step_s
            return
        # The artifact counts a step's beginning and its end, from behind the checkpoint on.
        out.charged_s += step_s * max(2 * self._open - 1, 0)
        out.kept_s -= step_s * self._open
        out.steps -= self._open
        self._open, self._must_save = 0, True


def _there(recording: Recording, at_s: float) -> int:
    """Machines that can be used at a moment: added ``READY_S`` before it, and not gone."""
    usable: set[str] = set()
    for change in recording.changes:
        if change.at_s + READY_S <= at_s:
            usable.update(change.came)
    for change in recording.changes:
        if change.at_s <= at_s:
            usable.difference_update(change.went)
    return len(usable)


# --- layouts ------------------------------------------------------------------------------------


class PipelineLayout(msgspec.Struct, frozen=True):
    """Replicas of the model, and machines over which each is spread."""

    replicas: int
    stages: int

    @property
    def machines(self) -> int:
        """That it uses."""
        return self.replicas * self.stages


class LayoutCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What it takes to change to another layout; seconds.

    Attributes:
        restart_s: of the processes; None where it is made of what follows.
        rendezvous_s: where machines have come.
        group_s, shrunk_group_s: a communication group, where machines have come or only gone.
        process_s: of all processes, side by side.
        layer_s: to build one layer, of ``layers`` in all, in each stage its share.
        build_s: whatever else building takes.
        save_s: to save the state and load it, not at the first start.
        move_s: to send the state of all stages, one after the other.
    """

    restart_s: float | None = None
    rendezvous_s: float = 0.0
    group_s: float = 0.0
    shrunk_group_s: float = 0.0
    process_s: float = 0.0
    layer_s: float = 0.0
    layers: int = 1
    build_s: float = 0.0
    save_s: float = 0.0
    move_s: float = 0.0

    def restarted_s(self, layout: PipelineLayout, *, came: bool) -> float:
        """Of the processes alone."""
        if self.restart_s is not None:
            return self.restart_s
        groups = layout.replicas + layout.stages + 1 + layout.machines
        grouping_s = groups * (self.group_s if came else self.shrunk_group_s)
        building_s = self.layer_s * math.ceil(self.layers / layout.stages) + self.build_s
        return self.rendezvous_s * came + grouping_s + self.process_s + building_s


def fastest(machines: int, samples_per_s: Mapping[PipelineLayout, float]) -> PipelineLayout | None:
    """The layout that makes the most of some machines; None where none fits."""
    fits = [layout for layout in samples_per_s if layout.machines <= machines]
    return max(fits, key=lambda layout: samples_per_s[layout], default=None)


def relaid_samples(
    recording: Recording,
    samples_per_s: Mapping[PipelineLayout, float],
    costs: LayoutCosts | None = None,
    slot_s: float = 60.0,
) -> float:
    """Samples that a fleet makes when each change of it is followed by the fastest layout.

    Args:
        recording: of a fleet; it is looked at every ``slot_s``.
        samples_per_s: of each layout.
        costs: of a change; None where they are free, which is the most that can be had.
        slot_s: seconds.

    A change that comes before the one before it is over begins again, and pays a restart besides.
    """
    made, paying_s, here, done = 0.0, 0.0, 0, 0
    changes = recording.changes
    for slot in range(int(recording.length_s // slot_s) + 1):
        came = went = 0
        while done < len(changes) and changes[done].at_s <= slot * slot_s:
            came += len(changes[done].came)
            went += len(changes[done].went)
            done += 1
        here += came - went
        layout = fastest(here, samples_per_s)
        if layout is None:
            continue
        if costs is not None and (came or went or not slot):
            restart_s = costs.restarted_s(layout, came=bool(came))
            change_s = restart_s + costs.save_s * bool(slot) + costs.move_s
            paying_s = change_s + restart_s if paying_s > 0 else change_s
        made += samples_per_s[layout] * max(slot_s - paying_s, 0.0)
        paying_s = max(paying_s - slot_s, 0.0)
    return made
