"""Membership at sizes that no test machine has: losses, attempts, the coordinator's work, storage.

The decisions are the runtime's own objects on a virtual clock (``tests/simulated_machines``);
messages, storage and the ends of workers are modelled, with the costs printed at the top. The
processor time of the decisions is real: of this machine.

- by size: one machine reset, one silent, a rack reset, a zone reset, a zone silent, the
  coordinator's machine reset, and the coordinator's whole rack silent;
- at published rates (Llama 3's stops per GPU-day, a share of them by racks and zones);
- traces of real fleets, where their folder is given: a spot fleet whose reclaims take a share of
  all machines at once (bamboo), node failures over years (LANL).

    python benchmarks/membership_simulated.py [--machines 10240] [--traces DIR] [--quick]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import bench  # noqa: F401 - stand-ins that tests have too
from outlast.planner.job import MachineLoss
from simulated_machines.losses import DAY_S, LLAMA_3, at_rates, of_bamboo, of_lanl
from simulated_machines.parts import Costs
from simulated_machines.runs import Figures, run

APART_S = 120.0  # between two losses, so that each is seen alone
BACK_S = 45.0
BAMBOO_S = 3 * 3600.0  # of the trace
PER_RACK, PER_ZONE = 16, 1280
HEADS = (
    f"{'machines':>8} {'losses':>7} {'attempts':>8} {'first s':>8} {'median s':>8} {'95 % s':>7} "
    f"{'largest s':>9} {'roster, µs: median':>18} {'largest':>9} {'in all, s':>9} "
    f"{'messages/s':>10} {'storage/s: largest':>18} {'median':>6}"
)


def kinds(machines: int) -> dict[str, MachineLoss]:
    """One loss of each kind, clear of each other, the coordinator's (rank 0) last."""

    def group(size: int, place: int) -> tuple[int, ...]:
        size = min(size, machines // 4)
        first = place * size % machines
        return tuple(range(first, min(first + size, machines)))

    return {
        "one machine, reset": MachineLoss(0, group(1, machines // 2), "reset", BACK_S),
        "one machine, silent": MachineLoss(0, group(1, machines // 3), "silent", BACK_S),
        "one machine, on notice": MachineLoss(0, group(1, machines // 3 + 1), "notice", BACK_S),
        "a rack, reset": MachineLoss(0, group(PER_RACK, 3), "reset", BACK_S),
        "a zone, reset": MachineLoss(0, group(PER_ZONE, 2), "reset", BACK_S),
        "a zone, silent": MachineLoss(0, group(PER_ZONE, 3), "silent", BACK_S),
    }


def by_kind(machines: int) -> None:
    """A table: each kind of loss, and its parts."""
    print(f"\n{machines} machines: from the loss until all have heard of the next attempt, seconds")
    print(f"{'loss':26} {'whole':>7} {'noticed':>8} {'workers':>8} {'claim':>7} {'told':>7}")
    for name, loss in kinds(machines).items():
        show(name, run(machines, [loss], duration_s=APART_S, seed=1))
    for name, size, how in (
        ("coordinator, reset", 1, "reset"),
        ("coordinator, silent", 1, "silent"),
        ("coordinator's rack, silent", PER_RACK, "silent"),
    ):
        figures = run(
            machines, [MachineLoss(0, (), how)], duration_s=APART_S, seed=1, with_role=size
        )
        show(name, figures)


def show(name: str, figures: Figures) -> None:
    if not figures.recovery_s:
        print(f"{name:26} {'never':>7}")
        return
    one, parts = figures.recovery_s[0], figures.parts_of_first
    cells = " ".join(
        f"{parts[part]:{width}.2f}"
        for part, width in (("noticed", 8), ("workers ended", 8), ("claimed", 7), ("told", 7))
    )
    print(f"{name:26} {one:7.2f} {cells}")


def load(sizes: Sequence[int]) -> None:
    """A table: what a start of all machines at once and a day of losses in an hour ask for."""
    print("\nfrom a start of all machines at once, through an hour with a day's losses (Llama 3)")
    print(HEADS)
    for machines in sizes:
        chance = random.Random(machines)
        losses = list(at_rates(machines, 3600.0, chance, speed_up=DAY_S / 3600))
        figures = run(machines, losses, duration_s=3600.0, seed=2)
        row(str(machines), figures)


def row(name: str, figures: Figures) -> None:
    recovery_s = sorted(figures.recovery_s) or [float("nan")]
    late = recovery_s[min(int(0.95 * len(recovery_s)), len(recovery_s) - 1)]
    typical_us, worst_us = figures.thought_us
    most, usual = figures.storage_per_s
    print(
        f"{name:>8} {figures.losses:7} {figures.attempts:8} {figures.first_s:8.1f} "
        f"{statistics.median(recovery_s):8.2f} {late:7.2f} {recovery_s[-1]:9.2f} "
        f"{typical_us:18.1f} {worst_us:9.0f} {figures.thought_s:9.2f} "
        f"{figures.messages_per_s:10} {most:18} {usual:6.0f}"
    )


def traces(folder: Path, machines: int) -> None:
    """The same table, for recorded fleets."""
    print(f"\nrecorded fleets, at {machines} machines")
    chance = random.Random(4)
    bamboo = list(of_bamboo(folder / "bamboo" / "p3-trace.csv", machines, chance))
    row("bamboo", run(machines, bamboo, duration_s=BAMBOO_S, min_share=0.1))
    lanl = list(of_lanl(folder / "lanl" / "failures_sys18.csv", machines, hours=24 * 14))
    fast = [loss._replace(at_s=loss.at_s / 84, back_s=loss.back_s / 84) for loss in lanl]
    row("LANL 18", run(machines, fast, duration_s=4 * 3600.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--machines", type=int, default=10_240)
    parser.add_argument("--traces", type=Path, help="folder with bamboo/ and lanl/")
    parser.add_argument(
        "--quick", action="store_true", help="a small job only, to see that it works"
    )
    options = parser.parse_args()
    began = time.perf_counter()
    machines = 256 if options.quick else options.machines
    print("costs:", ", ".join(f"{k} {v:g}" for k, v in vars_of(Costs()).items()))
    print(f"Llama 3: {LLAMA_3:.3g} stops per GPU-day, 8 GPUs a machine;", end=" ")
    print(f"racks of {PER_RACK}, zones of {PER_ZONE}")
    by_kind(machines)
    load([64, 256] if options.quick else [64, 1024, machines])
    if options.traces is not None:
        traces(options.traces, machines)
    print(f"\n{time.perf_counter() - began:.0f} s of real time")


def vars_of(costs: Costs) -> dict[str, float]:
    return {name: getattr(costs, name) for name in costs.__struct_fields__}


if __name__ == "__main__":
    main()
