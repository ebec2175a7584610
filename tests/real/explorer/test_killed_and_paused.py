"""Processes killed and stopped at each of their calls, while others go on with the same directory.

What ``tests/real/keeper/test_crash_matrix*.py`` do to saves, copies and the keeper's pruning is
done here to a repair, to a resume that mends, to ``outlast checkpoints prune``, and to a launcher
that takes part in a job. The calls are those that ``points`` counts.

- **killed** there: what was promised holds of what is left; the same is done again by a new
  process, and then all of it is done.
- **stopped** there: another process goes on meanwhile (a keeper saves and prunes, another repair, a
  launcher on another machine); what was promised holds; then the first goes on to its end, as a
  machine does that was paused, and it holds still.

By default some calls of each, chosen by ``OUTLAST_TEST_SEED``; ``OUTLAST_TEST_ALL=1`` takes all.
"""

import collections
import contextlib
import json
import shutil
import signal
from pathlib import Path
from typing import NamedTuple

import operations
import pytest
from explorer import promises
from floor import until
from operations import AGAIN, KEEP, TIERS, Saver, Site
from power_loss import lay, tree_of
from promises import Known

from thorough import some

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")

CASES = 2
STRANGER = {"MEMBER_STRANGER": "1"}


class Act(NamedTuple):
    """What is done to a site.

    Attributes:
        prepare: brings the site to where it can be done; gives the copies that it has damaged.
        start: starts the process, ``under`` a tracer.
        meanwhile: what others do while it is stopped.
        keep: how many saves it leaves in each tier.
        mends: whether nothing is damaged when it is done.
    """

    prepare: object
    start: object
    meanwhile: object
    keep: dict[str, int] = KEEP
    mends: bool = False


def nothing(site):
    """Nothing has to be prepared."""
    return frozenset()


def keeper_saves(site):
    """A keeper of the job saves, copies and prunes until nothing older is left."""
    saver = Saver(site)
    try:
        saver.start()
        saver.begin_attempt(AGAIN + 1)
        for step in (6, 7):
            saver.save_everywhere(step)
    finally:
        saver.stop()


def another_repair(site):
    """Somebody else repairs."""
    site.command("repair").wait(120)


def stranger(site, environ=None, **options):
    """A launcher that takes nobody's process for one of its machine."""
    return site.member(environ={**STRANGER, **(environ or {})}, **options)


def stranger_comes(site):
    """A launcher on another machine takes part; it may be refused."""
    stranger(site).wait(120)


def repairs(site, **options):
    """The command that is done in several companies."""
    return site.command("repair", **options)


ACTS = {
    "repair beside a keeper": Act(operations.hurt, repairs, keeper_saves, mends=True),
    "repair beside a repair": Act(operations.hurt, repairs, another_repair, mends=True),
    "mend beside a keeper": Act(operations.hurt, Site.mender, keeper_saves),
    "prune beside a repair": Act(
        nothing,
        lambda site, **options: site.command("prune", "--keep=1", "--yes", **options),
        another_repair,
        keep=dict.fromkeys(TIERS, 1),
    ),
    "launcher beside a stranger": Act(nothing, stranger, stranger_comes),
}


class Case:
    """A site that is brought back to where it was for each case."""

    def __init__(self, site, act, looks):
        self.site, self.act, self.looks = site, act, looks
        assert site.member(2).wait(60) == 0
        *_, _ = operations.saves(site)
        self.hurt = act.prepare(site)
        self.before = tree_of(site.root)
        assert self.start(0, "KILL").wait(120) == 0
        self.points = list(enumerate(site.calls.read_text().split(), 1))

    def again(self):
        """As it was before anything was done."""
        shutil.rmtree(self.site.root)
        lay(self.before, self.site.root)
        self.site.heard.write_bytes(b"")

    def start(self, number, what):
        """The process, with ``what`` done to it before that call of its."""
        self.site.calls.unlink(missing_ok=True)
        return self.act.start(self.site, environ=self.site.point(number, what))

    def check(self, *, keep=None, is_done=False):
        """What was promised holds of the tree as it is."""
        known = Known(hurt=self.hurt, keep=keep or self.least())
        known = known.after(self.site.lines())
        if is_done and self.act.mends:  # be it that whoever did it was killed before it said so
            known = known._replace(hurt=frozenset())
        self.looks.check(tree_of(self.site.root), known)

    def least(self):
        """How many saves each tier has at least, whatever was done so far."""
        return {name: min(KEEP[name], self.act.keep[name]) for name in TIERS}


@pytest.fixture(name="case")
def _case(floor, tmp_path):
    with promises() as looks:
        yield lambda act: Case(Site(floor, tmp_path / "site"), act, looks)


def each(case, act_at):
    """Do ``act_at`` at some calls; says how many of them were met."""
    counts, wrong = collections.Counter(), []
    for number, name in some(case.points, CASES):
        case.again()
        try:
            counts[act_at(case, number)] += 1
        except AssertionError as error:
            wrong.append(f"at call {number} ({name}): {error}")
    print(f"{sum(counts.values())} of {len(case.points)} calls: {dict(counts)}")
    assert not wrong, "\n".join(wrong)
    assert counts.total() - counts["not met"] >= 0.6 * counts.total()


@pytest.mark.parametrize("name", ACTS)
def test_killed_at_each_call(case, name):
    each(case(ACTS[name]), killed_at)


def killed_at(case, number):
    code = case.start(number, "KILL").wait(120)
    case.check()
    assert case.act.start(case.site).wait(120) == 0
    case.check(is_done=True)
    return "killed" if code == -signal.SIGKILL else "not met"


@pytest.mark.parametrize("name", ACTS)
def test_stopped_at_each_call(case, name):
    each(case(ACTS[name]), stopped_at)


def stopped_at(case, number):
    was_stopped = stop_and_go_on(case, number, case.check)
    case.check()
    claimed = numbers_of(case)
    assert len(claimed) == len(set(claimed)), f"two have one number: {claimed}"
    return "stopped" if was_stopped else "not met"


def stop_and_go_on(case, number, look):
    """Stop a process before that call, do what is done meanwhile, look, and let it go on."""
    process = case.start(number, "STOP")
    try:
        until(lambda: is_stopped(process) or process.poll() is not None, "it is stopped")
        was_stopped = process.poll() is None
        case.act.meanwhile(case.site)
        look()
        if was_stopped:
            process.send_signal(signal.SIGCONT)
        process.wait(120)
    finally:
        process.kill()
        process.wait(60)
    return was_stopped


def numbers_of(case):
    """The attempts that launchers were told are their own."""
    said = map(json.loads, case.site.heard.read_bytes().splitlines())
    return [one["claimed"] for one in said if "claimed" in one]


def is_stopped(process):
    """Whether all of its threads stand still."""
    states = set()
    for task in Path(f"/proc/{process.pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            states.add(task.read_text().rpartition(")")[2].split()[0])
    return states == {"T"}


def test_without_claims_two_launchers_have_one_number(floor, tmp_path):
    with promises() as looks:
        act = ACTS["launcher beside a stranger"]
        case = Case(Site(floor, tmp_path / "site", without="claim"), act, looks)
        renames = [number for number, name in case.points if name in ("rename", "replace")]
        # Two threads' calls may be in another order than when they were listed.
        for number in sorted({one + by for one in renames for by in (0, 1, -1, 2, -2)}):
            case.again()
            stop_and_go_on(case, number, lambda: None)
            numbers = numbers_of(case)
            if len(numbers) > len(set(numbers)):
                print(f"without claim, stopped at call {number}: {numbers}")
                return
    pytest.fail("nobody misses that a claim is made only once")
