"""The tables of docs/plan-modes.md: what others published, and what the planner makes of it.

    python tests/unit/planner/fleet_tables.py    # writes them into the page

Published figures are facts of the papers and artifacts that the page names. Where an artifact has
measured a job at sixteen sizes, only the smallest and the largest are here.
"""

import os
import random
import re
import shlex
import tempfile
from pathlib import Path
from statistics import mean

import numpy as np
from click.testing import CliRunner

from outlast.cli import cli
from outlast.planner.backup import Redundancy, best_copies, best_redundancy
from outlast.planner.links import METHODS, LinkJob, utilisation
from outlast.planner.pipelines import (
    LayoutCosts,
    PipelineLayout,
    PipelineRules,
    PipelineSpeed,
    one_by_one,
    relaid_samples,
    replay,
)
from outlast.planner.redundancy import RedundantJob, hourly_fleet, simulate_redundant
from outlast.planner.traces import read
from outlast.policy.interval import Costs

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "plan-modes.md"
P3 = ROOT / "shared" / "traces" / "bamboo" / "p3-trace.csv"
_BLOCK = re.compile(r"(<!-- (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

# --- Streaming DiLoCo, table 4 --------------------------------------------------------------------

# 0.1 to 1,000 Gbit/s, and the share of the parameters' 16 bits that crosses the link. The paper
# gives neither. The first is read off its figures, all of which are points of this grid; the second
# is fitted, the only number that is.
PAPER_BITS_PER_S = 1e9 * np.logspace(-1, 3, 50)
PAPER_CROSSING = 0.85
SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)
AT_95 = SHARES.index(0.95)
# size → parameters, layers, seconds of a step, and for each method Gbit/s for each of these shares
LINKS = {
    "1B": (
        1e9,
        24,
        0.1,
        (
            (86.8, 152.6, 184.2, 222.3, 569.0),
            (1.4, 6.2, 13.3, 23.3, 86.8),
            (1.4, 5.2, 9.1, 16.0, 28.1),
            (1.4, 4.3, 6.2, 9.1, 11.0),
            (0.4, 0.9, 1.7, 2.0, 3.0),
        ),
    ),
    "10B": (
        1e10,
        48,
        0.8,
        (
            (104.8, 222.3, 222.3, 268.3, 471.5),
            (1.7, 7.5, 16.0, 33.9, 104.8),
            (1.7, 5.2, 9.1, 13.3, 19.3),
            (1.7, 3.6, 5.2, 6.2, 7.5),
            (0.4, 0.9, 1.4, 1.4, 1.7),
        ),
    ),
    "100B": (
        1e11,
        108,
        4.9,
        (
            (184.2, 323.8, 390.7, 390.7, 471.5),
            (3.0, 11.0, 23.3, 49.4, 184.2),
            (2.4, 6.2, 9.1, 11.0, 19.3),
            (1.7, 3.6, 4.3, 5.2, 5.2),
            (0.5, 0.9, 1.1, 1.1, 1.4),
        ),
    ),
}


def link_points():
    """(size, method, share, published Gbit/s, ours, points of the grid that lie between)."""
    for size, (parameters, layers, step_s, rows) in LINKS.items():
        job = LinkJob(parameters=parameters, layers=layers, step_s=step_s, crossing=PAPER_CROSSING)
        for method, row in zip(METHODS, rows, strict=True):
            used = utilisation(job, method, PAPER_BITS_PER_S)
            for share, published in zip(SHARES, row, strict=True):
                ours = int((used >= share).argmax())
                theirs = int(abs(PAPER_BITS_PER_S / 1e9 / published - 1).argmin())
                yield size, method, share, published, PAPER_BITS_PER_S[ours] / 1e9, ours - theirs


def links_table():
    points = list(link_points())
    lines = ["| model | " + " | ".join(METHODS) + " |", "| --- " * (1 + len(METHODS)) + "|"]
    for size in LINKS:
        cells = [
            f"{published:g} → {ours:.1f}"
            for one, _, share, published, ours, _ in points
            if one == size and share == SHARES[AT_95]
        ]
        lines.append(f"| {size} | " + " | ".join(cells) + " |")
    same = sum(not between for *_, between in points)
    lines.append("")
    lines.append(
        f"All of table 4 (50, 80, 90, 95 and 99 %): {same} of {len(points)} values on the same "
        "point of the paper's grid, the others one point beside it."
    )
    return "\n".join(lines)


# --- Oobleck's artifact: Varuna and Oobleck -------------------------------------------------------

EVERY_S = {"6 h": 21_600.0, "1 h": 3600.0, "10 min": 601.2}
# job → samples a step; samples per second of 15 and of 30 machines, depths, regrouping and saving
# of Varuna; samples per second and regrouping of Oobleck
JOBS = {
    "BERT-large": (8192, (193.4, 343.1), (1,), 85.7, 15.8, (192.3, 368.2), 2.0),
    "GPT-2": (1024, (64.3, 125.8), (3, 4), 83.0, 11.5, (55.9, 110.0), 2.0),
    "GPT-3 2.7B": (512, (4.864, 9.768), (4,), 515.0, 50.0, (5.131, 9.214), 6.0),
}
PIPELINES = {
    "BERT-large": ((0.936, 0.999), (0.843, 0.992), (0.544, 0.955)),
    "GPT-2": ((0.873, 0.999), (0.837, 0.996), (0.670, 0.979)),
    "GPT-3 2.7B": ((0.827, 0.997), (0.671, 0.981), (0.285, 0.898)),
}
SAVE_STEPS = 10


def pipelines(job, every_s):
    """(Varuna, Oobleck) of a fleet that shrinks from 30 to 15, each as published and as it is."""
    samples, varuna, depths, restart_s, save_s, oobleck, regroup_s = JOBS[job]
    fleet = one_by_one(30, 15, every_s)
    saving = PipelineRules(regroup_s=restart_s - save_s, save_s=save_s, save_steps=SAVE_STEPS)
    pairs = (
        (varuna, depths, saving),
        (oobleck, (1,), PipelineRules(regroup_s=regroup_s)),
    )
    for (slow, fast), deep, rules in pairs:
        speed = PipelineSpeed(
            samples_per_step=samples, samples_per_s={15: slow, 30: fast}, depths=deep
        )
        published = replay(fleet, speed, rules, as_published=True).published_share
        yield published, replay(fleet, speed, rules).useful_share


def pipelines_table():
    lines = [
        "| job | a loss every | Varuna | its useful share | Oobleck | its useful share |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for job, rows in PIPELINES.items():
        for (words, every_s), published in zip(EVERY_S.items(), rows, strict=True):
            cells = [
                f"{theirs:.3f} → {ours:.3f} | {useful:.3f}"
                for theirs, (ours, useful) in zip(published, pipelines(job, every_s), strict=True)
            ]
            lines.append(f"| {job} | {words} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# --- Bamboo ---------------------------------------------------------------------------------------

BAMBOO_JOB = RedundantJob(
    machines=48,
    stages=12,
    step_s={1: 4.31, 2: 2.39, 3: 1.805, 4: 1.45},
    samples_per_step=264,
    steps=22_194,
    price_per_h=0.91,
)
BAMBOO_FIELDS = ("losses", "machines", "samples_per_s", "cost_per_h", "samples_per_cost")
BAMBOO = {
    0.01: (4.78, 43.87, 147.8, 39.92, 3.67),
    0.10: (56.77, 40.57, 131.3, 36.92, 3.54),
    0.50: (348.1, 27.13, 83.2, 24.69, 3.31),
}
SEEDS = range(1, 41)


def bamboo(taken_per_h):
    """The means of ``BAMBOO_FIELDS``."""
    runs = [
        simulate_redundant(
            BAMBOO_JOB, hourly_fleet(random.Random(seed), BAMBOO_JOB.machines, taken_per_h)
        )
        for seed in SEEDS
    ]
    return [mean(getattr(run, field) for run in runs) for field in BAMBOO_FIELDS]


def bamboo_table():
    lines = [
        "| taken within an hour | interruptions | machines | samples/s | $/h | value |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for taken, published in BAMBOO.items():
        cells = [
            f"{theirs:g} → {ours:.4g}"
            for theirs, ours in zip(published, bamboo(taken), strict=True)
        ]
        lines.append(f"| {taken:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# --- Parcae ---------------------------------------------------------------------------------------

PARCAE_SPEED = {
    PipelineLayout(*layout): samples_per_s
    for layout, samples_per_s in {
        (1, 6): 14.485,
        (1, 7): 17.225,
        (1, 8): 17.307,
        (1, 9): 19.327,
        (1, 10): 21.605,
        (1, 11): 21.830,
        (2, 6): 24.236,
        (1, 13): 25.058,
        (2, 7): 28.316,
        (2, 8): 29.484,
        (2, 9): 32.053,
        (2, 10): 35.133,
        (3, 7): 35.698,
        (2, 11): 35.980,
        (3, 8): 36.827,
        (2, 13): 40.732,
        (3, 10): 41.499,
        (4, 8): 43.468,
    }.items()
}
PARCAE_MOVING = {"save_s": 14.0, "move_s": 21.96}
PARCAE = {
    "changes are free": (None, 1_506_024),
    "restarts as measured": (
        LayoutCosts(
            rendezvous_s=6.6,
            group_s=0.5,
            shrunk_group_s=0.0393,
            process_s=0.275,
            layer_s=0.43,
            layers=48,
            build_s=0.23,
            **PARCAE_MOVING,
        ),
        1_171_346,
    ),
    "30 s a restart": (LayoutCosts(restart_s=30.0, **PARCAE_MOVING), 1_086_099),
}


def parcae(costs):
    return relaid_samples(read(P3), PARCAE_SPEED, costs)


def parcae_table():
    lines = ["| GPT 1.5B, p3 fleet, 683 minutes | samples |", "| --- | --- |"]
    lines += [
        f"| {words} | {published:,} → {parcae(costs):,.0f} |"
        for words, (costs, published) in PARCAE.items()
    ]
    return "\n".join(lines)


# --- CheckFree ------------------------------------------------------------------------------------

# method → (published hours, iterations until the loss is 2.85, seconds of one), at 5, 10, 16 %/h
CHECKFREE = {
    "checkpoints": ((558, 22_000, 91.35), (622, 24_500, 91.35), (634, 25_000, 91.35)),
    "redundant": ((420, 10_000, 151.04),) * 3,
    "CheckFree": ((368, 14_500, 91.32), (406, 16_000, 91.32), (563, 22_000, 92.12)),
    "CheckFree+": ((355, 14_000, 91.32), (368, 14_500, 91.32), (461, 18_000, 92.12)),
}


def checkfree_table():
    lines = ["| hours at | 5 %/h | 10 %/h | 16 %/h |", "| --- | --- | --- | --- |"]
    for method, row in CHECKFREE.items():
        cells = [
            f"{published} = {iterations:,} · {step_s:g} s" for published, iterations, step_s in row
        ]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# --- SPARe ----------------------------------------------------------------------------------------

SPARE_COSTS = Costs(checkpoint_h=1 / 60, restore_h=1.0)
SPARE_LOSS_H = 5 / 60
SPARE = {200: (8, 6.07, 2.92), 600: (10, 4.27, 2.49), 1000: (10, 3.88, 2.34)}


def spare(groups, *, is_stacked):
    return best_redundancy(groups, SPARE_COSTS, SPARE_LOSS_H, is_stacked=is_stacked)


def spare_table():
    lines = [
        "| N | r* | losses masked at r* | replication | SPARe |",
        "| --- | --- | --- | --- | --- |",
    ]
    for groups, (_, replicated, stacked) in SPARE.items():
        copies = best_copies(groups)
        masked = Redundancy(groups=groups, copies=copies).masked
        cells = [
            f"{published} → {one.time_ratio(SPARE_COSTS, SPARE_LOSS_H):.2f} (r = {one.copies})"
            for published, one in (
                (replicated, spare(groups, is_stacked=False)),
                (stacked, spare(groups, is_stacked=True)),
            )
        ]
        lines.append(f"| {groups} | {copies} | {masked:.0f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# --- the page -------------------------------------------------------------------------------------

EXAMPLE = (
    "plan modes --params 1B --layers 24 --step 1s --link 10Gbit/s --replicas 8 --rate 0.5/h "
    "--checkpoint 20s --restore 2min --detect 30s --price 20"
)


def example():
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        try:
            said = CliRunner().invoke(cli, shlex.split(EXAMPLE), catch_exceptions=False).output
        finally:
            os.chdir(before)
    return f"```\n$ outlast {EXAMPLE}\n{said.rstrip()}\n```"


TABLES = {
    "example": example,
    "links": links_table,
    "pipelines": pipelines_table,
    "bamboo": bamboo_table,
    "parcae": parcae_table,
    "checkfree": checkfree_table,
    "spare": spare_table,
}


def on_the_page():
    """name → the block that the page has."""
    return {match[2]: match[3].removesuffix("\n") for match in _BLOCK.finditer(PAGE.read_text())}


def write_page():
    """Write all tables; that of a recording stays where the recording is not here."""

    def block(match):
        if match[2] == "parcae" and not P3.is_file():
            return match[0]
        return f"{match[1]}{TABLES[match[2]]()}\n{match[4]}"

    PAGE.write_text(_BLOCK.sub(block, PAGE.read_text()))


if __name__ == "__main__":
    write_page()
