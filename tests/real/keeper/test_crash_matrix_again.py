"""A step that is saved again, and two attempts on one step: at each system call, in each tier.

- again: a step is committed in two tiers and saved once more, by a later attempt; the keeper is
  killed at each call of that save, of its copy and of what retention then takes away;
- two: two keepers, as on two machines, save one step into the same tiers. One is stopped at each
  call of its save, as a paused machine is; the other commits and brings it everywhere; then the
  first goes on to its end. Either may be the older attempt. Nothing judges their commits here:
  names alone must be enough.

After each: the newest save of that step whose commit was acknowledged, in each tier, is there and
verifies, byte for byte, and so does whatever else is committed.

By default some cases, chosen by ``OUTLAST_TEST_SEED``; ``OUTLAST_TEST_ALL=1`` runs them all.
"""

import collections
import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from floor import until
from lean import JOB, Place, Worker, shard, small
from saved import saves_in
from test_crash_matrix import HARMLESS, is_dead

from outlast.checkpoint.manifest import ABANDONED, MANIFEST, NOTE, SaveName, shard_file, state_file
from outlast.errors import OutlastError
from outlast.keeper import wire
from outlast.storage import Directory
from thorough import some
from whole_reads import verify

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")

CASES = 6
PAUSE_S = 2.0  # for a call that is not made in some saves
TIERS = ("local", "shared")
KEEP = 2
OLDER, NEWER = 1, 2
NOTHING = SaveName(0)


class Machine:
    """A keeper with tiers that others write to as well, and a worker that saves one step."""

    def __init__(self, floor, directory, tiers):
        self.place = Place(floor, directory, tiers=[(name, KEEP) for name in TIERS])
        urls = {name: str(tiers / name) for name in TIERS}
        setups = [msgspec.structs.replace(t, url=urls[t.name]) for t in self.place.setup.tiers]
        self.place.setup = msgspec.structs.replace(self.place.setup, tiers=tuple(setups))
        self.tiers = {name: tiers / name for name in TIERS}
        self.process = self.worker = None
        self.acknowledged = {name: set() for name in TIERS}

    def start(self, attempt):
        if self.process is not None and is_dead(self.process):
            self.process.wait(60)
            self.process = None
        if self.process is None:
            self.process = self.place.keeper()
        if self.worker is not None:
            self.worker.close()
        hello = wire.Hello(job=JOB, attempt=attempt, nonce=nonce_of(attempt), rank=0)
        self.worker = Worker(self.place, hello, size_of(attempt))
        self.attempt = attempt

    def begin(self, step):
        self.serial = self.worker.begin(step)
        self.save = SaveName(step, self.attempt, self.serial, nonce_of(self.attempt))

    def is_everywhere(self):
        """Whether each tier has the save, or one that has superseded it."""
        step = self.save.step
        found = [max(committed(path, step), default=NOTHING) for path in self.tiers.values()]
        return min(found) >= self.save

    def finish(self):
        """How the save ended; notes that its commit was acknowledged."""
        error = self.worker.wait(self.serial)
        if error == "":
            self.acknowledged["local"].add(self.save)
        return error

    def save_everywhere(self, step):
        self.begin(step)
        assert self.finish() == ""
        until(self.is_everywhere, "its copy")
        if self.save in committed(self.tiers["shared"], step):
            self.acknowledged["shared"].add(self.save)
        until_still(self.tiers)

    def forget(self, step):
        """What follows is about other steps."""
        for saves in self.acknowledged.values():
            saves -= {one for one in saves if one.step <= step}

    def stop(self):
        if self.worker is not None:
            self.worker.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def size_of(attempt):
    """Of the tensor: saves of different attempts are told apart."""
    return 20_000 + 4_000 * (attempt % 3)


def nonce_of(attempt):
    return f"{attempt:08x}"


def committed(tier, step):
    """The saves of ``step`` that a tier has as committed, and not as given up."""
    found = []
    for save in saves_in(tier):
        with contextlib.suppress(FileNotFoundError):  # taken away at this moment
            is_whole = (tier / str(save) / MANIFEST).read_bytes() != ABANDONED
            if save.step == step and is_whole and (tier / str(save) / NOTE).exists():
                found.append(save)
    return found


def check(tiers, step, *acknowledged):
    """What was acknowledged stands, its newest, and all that is listed is what it says it is."""
    for name, path in tiers.items():
        found = [save for save in committed(path, step) if is_right(path, save)]
        newest = max((save for known in acknowledged for save in known[name]), default=None)
        # Or one that has superseded it, before anybody was told.
        assert newest is None or max(found, default=NOTHING) >= newest, (
            f"{name}: {newest} is gone, of {found}"
        )


def is_right(tier, save):
    """Whether a save is what it says it is; False for one that was just taken away."""
    folder = tier / str(save)
    try:
        size = verify(Directory(tier), save).tensors["x"].shape[0]
        assert size == size_of(save.attempt), (tier.name, save)
        assert (folder / shard_file(0)).read_bytes() == shard(save.step, size), (tier.name, save)
        assert (folder / state_file(0)).read_bytes() == small(save.step, 0), (tier.name, save)
    except (OSError, OutlastError):
        if save in committed(tier, save.step):
            raise
        return False
    return True


def until_still(tiers):
    """Wait until nothing changes there."""
    seen, same = None, 0
    while same < 3:
        now = [
            sorted(os.walk(path)) for path in tiers.values()
        ]  # what vanishes meanwhile is no error
        seen, same = now, same + 1 if now == seen else 0
        time.sleep(0.06)


class Where(NamedTuple):
    """A call that a keeper's thread makes.

    Attributes:
        tier: that the thread is at work in.
        writes: whether it writes there, or takes away only.
        name: of the call.
        number: of the thread's calls of that name, since a save began.
    """

    tier: str
    writes: bool
    name: str
    number: int


@contextlib.contextmanager
def traced(machine, thread, *options):
    """strace, attached to one thread of a keeper, or to all; gives its log."""
    place = machine.place
    log, messages = place.directory / "trace", place.directory / "strace.err"
    log.unlink(missing_ok=True)
    whom = ["-f", "-p", str(machine.process.pid)] if thread is None else ["-p", str(thread)]
    command = ["strace", *whom, "-y", "-s", "6", "-o", str(log), *options]
    with messages.open("wb") as err:
        tracer = subprocess.Popen(command, stderr=err)
    until(lambda: "attached" in messages.read_text(), "strace is attached")
    try:
        yield log
    finally:
        tracer.send_signal(signal.SIGKILL if is_dead(machine.process) else signal.SIGINT)
        tracer.wait(60)


def calls(machine, step):
    """What changes something in a tier, in a save that nobody disturbs.

    Returns where it is done (and to what), and the thread of each kind.
    """
    with traced(machine, None, "-e", "trace=%file,%desc") as log:
        machine.save_everywhere(step)
        until_still(machine.tiers)
    counts, made = collections.Counter(), collections.defaultdict(list)
    for line in log.read_text().splitlines():
        match = re.match(r"(\d+) +(\w+)\((.*)", line)
        if not match:
            continue
        thread, name, rest = int(match[1]), match[2], match[3]
        counts[thread, name] += 1
        tiers = [tier for tier, path in machine.tiers.items() if str(path) in rest]
        reads = name == "openat" and "O_WRONLY" not in rest and "O_RDWR" not in rest
        if tiers and name not in HARMLESS and not reads:
            made[thread].append((tiers[0], name, counts[thread, name], rest[:90]))
    found, kinds = {}, {}
    for thread, its in made.items():
        tier = max(tier for tier, *_ in its)  # what it reads to copy is elsewhere
        writes = any(name == "link" for _, name, *_ in its)
        kinds[tier, writes] = thread
        found |= {Where(tier, writes, name, number): what for _, name, number, what in its}
    return found, kinds


def hit(log):
    return "SIGSTOP" in log.read_text() or "SIGKILL" in log.read_text()


def stands(machine):
    """Whether all threads of a keeper stand still."""
    states = set()
    for task in Path(f"/proc/{machine.process.pid}/task").iterdir():
        with contextlib.suppress(OSError):
            states.add((task / "stat").read_text().rpartition(")")[2].split()[0])
    return states <= {"T", "t"}


# --- two attempts --------------------------------------------------------------------------------


@pytest.fixture(name="machine")
def _machine(floor, tmp_path):
    made = []

    def machine(attempt):
        made.append(Machine(floor, tmp_path / f"machine-{attempt}", tmp_path / "tiers"))
        made[-1].start(attempt)
        return made[-1]

    yield machine
    for one in made:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.process.pid, signal.SIGCONT)
        one.stop()


@pytest.mark.parametrize("paused", [OLDER, NEWER], ids=["the-older", "the-newer"])
def test_two_attempts_on_one_step_each_pausing_at_each_call(machine, paused):
    one, other = machine(paused), machine(OLDER + NEWER - paused)
    for step in (1, 2, 3):  # until there is a spare, and something to take away
        one.save_everywhere(step)
    found, kinds = calls(one, 4)
    assert len(kinds) == 3, kinds
    counts = collections.Counter()
    for step, where in enumerate(some(found, CASES), 5):
        try:
            counts[pause_at(one, other, step, where, kinds)] += 1
        except AssertionError as error:
            raise AssertionError(f"{where} ({found[where]}): {error}") from error
    print(f"{sum(counts.values())} of {len(found)} calls: {dict(counts)}")
    assert counts["paused"] >= 0.8 * sum(counts.values())


def pause_at(one, other, step, where, kinds):
    inject = f"inject={where.name}:signal=STOP:when={where.number}"
    thread = kinds[where.tier, where.writes]
    with traced(one, thread, "-e", f"trace={where.name}", "-e", inject) as log:
        one.begin(step)
        with contextlib.suppress(AssertionError):
            until(lambda: hit(log) and stands(one), "it is stopped", limit_s=PAUSE_S)
        was_stopped = hit(log)
        other.save_everywhere(step)
        check(one.tiers, step, other.acknowledged)
    os.kill(one.process.pid, signal.SIGCONT)
    error = one.finish()
    # What an older attempt had not finished may be taken away; what a newer one has, by nobody.
    assert error == "" or one.attempt == OLDER, error
    until_still(one.tiers)
    check(one.tiers, step, one.acknowledged, other.acknowledged)
    other.forget(step)
    one.forget(step)
    return "paused" if was_stopped else "not met"


# --- a step saved again --------------------------------------------------------------------------


def test_a_step_saved_again_killed_at_each_call(machine):
    one = machine(OLDER)
    for step in (1, 2, 3):
        one.save_everywhere(step)
    one.start(NEWER)
    found, _ = calls(one, 3)
    counts = collections.Counter()
    for step, where in enumerate(some(found, CASES), 4):
        try:
            counts[kill_at(one, step, where)] += 1
        except AssertionError as error:
            raise AssertionError(f"{where} ({found[where]}): {error}") from error
    print(f"{sum(counts.values())} of {len(found)} calls: {dict(counts)}")
    assert sum(counts.values()) - counts["not met"] >= 0.8 * sum(counts.values())


def kill_at(one, step, where):
    one.start(one.attempt + 1)
    _, kinds = calls(one, step)
    one.start(one.attempt + 1)
    inject = f"inject={where.name}:signal=KILL:when={where.number}"
    thread = kinds.get((where.tier, where.writes), one.process.pid)
    with traced(one, thread, "-e", f"trace={where.name}", "-e", inject):
        one.begin(step)
        error = one.finish()
        if error == "lost":
            until(lambda: is_dead(one.process), "the keeper's end")
        else:
            with contextlib.suppress(AssertionError):
                until(lambda: is_dead(one.process), "the keeper's end", limit_s=PAUSE_S)
        was_hit = is_dead(one.process)
    check(one.tiers, step, one.acknowledged)
    one.start(one.attempt + 1)
    one.save_everywhere(step)
    check(one.tiers, step, one.acknowledged)
    one.forget(step)
    return ("before it was acknowledged" if error else "after") if was_hit else "not met"
