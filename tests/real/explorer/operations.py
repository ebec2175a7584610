"""The operations that are explored, each done by the processes that do it for a user.

``Site`` is a directory with a job and two tiers, and what it takes to work on them: a keeper and a
worker that saves (``Saver``), the launcher of ``member.py``, the commands ``outlast checkpoints
repair`` and ``prune``, the resume of ``mender.py``. Each can run under strace, whose log becomes a
recording, or with strace's faults.

The tree that is explored is ``root``: the job's directory in it is ``job``, with the fast tier
below; the slow tier is ``shared``. Sockets, logs and settings lie beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
import points
import protections
import recording
from lean import START, Place, Worker, shard
from saved import saves_in

from outlast.checkpoint.manifest import ABANDONED, MANIFEST, SaveName, shard_file
from outlast.keeper import wire
from outlast.keeper.process import TierSetup, encode_setup

HERE = Path(__file__).parent
MEMBER, MENDER = HERE / "member.py", HERE / "mender.py"
TIERS = {"local": "job/checkpoints", "shared": "shared"}
KEEP = {"local": 2, "shared": 2}
FIRST, AGAIN = 1, 2  # attempts
NOTHING = SaveName(-1)
COPIED_S = 60.0
_BEGIN = """
import sys; sys.path.append({here!r})
import points, protections; protections.off_as_told(); points.as_told()
"""
_COMMAND = _BEGIN + "import runpy; runpy.run_module('outlast', run_name='__main__')\n"


def size_of(attempt):
    """Of the tensor: saves of different attempts are told apart."""
    return 20_000 + 4_000 * (attempt % 3)


def nonce_of(attempt):
    """Of the attempt's session."""
    return f"{attempt:08x}"


def expected(save):
    """The bytes of a save's shard file."""
    return shard(save.step, size_of(save.attempt))


class NotDone(AssertionError):
    """What should have been done was refused, or failed."""


class Recorded(NamedTuple):
    """An operation that was recorded.

    Attributes:
        name: of the operation.
        recording: what it did.
        job: id of the job; "" where it was made by the operation.
        hurt: copies (tier, save) that were damaged before.
        keep: how many each tier keeps.
    """

    name: str
    recording: recording.Recording
    job: str = ""
    hurt: frozenset = frozenset()
    keep: dict[str, int] = KEEP


class Site:
    """A job's directory, two tiers, and what works on them.

    Args:
        floor: starts processes, with a clean environment.
        directory: where everything lies.
        without: the protection that processes here run without; "" for none.
    """

    def __init__(self, floor, directory, without=""):
        self.floor, self.directory, self.without = floor, directory, without
        self.root = directory / "root"
        self.root.mkdir(parents=True)
        self.job_directory = self.root / "job"
        self.tiers = {name: self.root / path for name, path in TIERS.items()}
        self.heard = directory / "heard"
        self.heard.touch()
        self.calls = directory / "calls"
        self._log = directory / "trace"
        tables = [
            f'[[tier]]\nname = "{name}"\nurl = "{path}"\nkeep = {KEEP[name]}\n'
            for name, path in self.tiers.items()
        ]
        (directory / "outlast.toml").write_text("\n".join(tables))

    @property
    def job(self):
        """The job's id."""
        return json.loads((self.job_directory / "job.json").read_text())["id"]

    def lines(self):
        """Those of the job's ledger, and what processes under test have said."""
        ledger = self.job_directory / "ledger.jsonl"
        found = ledger.read_bytes() if ledger.exists() else b""
        return [*found.splitlines(), *self.heard.read_bytes().splitlines()]

    def environ(self, **more):
        """What processes here are started with."""
        path = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
        return self.floor._environ(
            {
                "OUTLAST_CONFIG": str(self.directory / "outlast.toml"),
                "PYTHONPATH": os.pathsep.join(path),
                "PYTHONDONTWRITEBYTECODE": "1",
                protections.VARIABLE: self.without,
                **more,
            }
        )

    def start(self, *command, under=(), environ=None, **options):
        """Python with these arguments, ``under`` a tracer; its words go to ``heard``."""
        with self.heard.open("ab") as out, (self.directory / "stderr").open("ab") as err:
            return subprocess.Popen(
                [*under, sys.executable, *map(str, command)],
                env=self.environ(**(environ or {})),
                stdout=options.pop("stdout", out),
                stderr=err,
                **options,
            )

    def member(self, num_attempts=1, **options):
        """A launcher takes part in the job."""
        return self.start(MEMBER, self.job_directory, num_attempts, **options)

    def mender(self, **options):
        """A resume that mends."""
        tiers = [f"{name}={path}" for name, path in self.tiers.items()]
        return self.start(MENDER, self.job, *tiers, **options)

    def command(self, *words, **options):
        """``outlast checkpoints WORDS JOB``."""
        head = ["-c", _COMMAND.format(here=str(HERE)), "checkpoints", *words]
        return self.start(*head, self.job_directory, stdout=subprocess.DEVNULL, **options)

    def point(self, number, what):
        """What has a process do ``what`` to itself before that call of its (see ``points``)."""
        told = f"{number}:{what}:{self.root}:{self.calls}"
        return {points.VARIABLE: told}

    # --- recording ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def recorded(self, name, **more):
        """Within, what ``under`` starts is recorded; gives ``under`` and a place for the result."""
        self.heard.write_bytes(b"")
        before = recording.look(self.root)
        results = []
        yield recording.under_strace(self._log), results
        read = recording.read(self._log, self.root, before, self.heard)
        results.append(Recorded(name, read, **more))

    def record(self, name, start, codes=(0,), **more):
        """What the process does that ``start`` gives (it takes ``under``), until it ends."""
        with self.recorded(name, **more) as (under, results):
            code = start(under=under).wait(120)
            if code not in codes:
                words = (self.directory / "stderr").read_text()[-2000:]
                raise NotDone(f"{name} ended with {code}: {self.heard.read_text()}{words}")
        return results[0]


class Saver:
    """A keeper of a site's job, and a worker of one attempt."""

    def __init__(self, site):
        self.site = site
        tiers = tuple(TierSetup(name=n, url=str(p), keep=KEEP[n]) for n, p in site.tiers.items())
        self._place = Place(site.floor, site.directory / "keeper")
        self._place.setup = msgspec.structs.replace(
            self._place.setup, directory=str(site.job_directory), tiers=tiers, job=site.job
        )
        self.process = self.worker = None
        self.attempt = 0

    def start(self, under=(), environ=None):
        """Start the keeper, ``under`` a tracer where that is given."""
        start = _BEGIN.format(here=str(HERE)) + START.format(writers=1)
        with (self.site.directory / "keeper.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*under, sys.executable, "-P", "-c", start],
                env=self.site.environ(**(environ or {})),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
        with self.process.stdin:
            self.process.stdin.write(encode_setup(self._place.setup))

    def begin_attempt(self, attempt):
        """A worker of this attempt in the place of the one before."""
        if self.worker is not None:
            self.worker.close()
        self.attempt = attempt
        hello = wire.Hello(job=self.site.job, attempt=attempt, nonce=nonce_of(attempt), rank=0)
        self.worker = Worker(self._place, hello, size_of(attempt))

    def save(self, step):
        """Save; gives the save's name and its error."""
        serial = self.worker.begin(step)
        save = SaveName(step, self.attempt, serial, nonce_of(self.attempt))
        return save, self.worker.wait(serial)

    def save_everywhere(self, step):
        """Save, and wait until it is in every tier and what may go has gone."""
        save, error = self.save(step)
        if error:
            raise NotDone(f"step {step} cannot be saved: {error}")
        deadline_s = time.monotonic() + COPIED_S
        while not all(is_there(tier, save) for tier in self.site.tiers.values()):
            if time.monotonic() > deadline_s:
                raise NotDone(f"{save} is not in every tier")
            time.sleep(0.003)
        until_still(self.site.root)
        return save

    def stop(self):
        """End both."""
        if self.worker is not None:
            self.worker.close()
        if self.process is not None:
            recording.end(self.process)
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait(60)


def committed(tier):
    """The saves that a tier's directory has as committed, oldest first."""
    found = []
    for save in saves_in(tier):
        with contextlib.suppress(OSError):  # taken away at this moment
            if (tier / str(save) / MANIFEST).read_bytes() != ABANDONED:
                found.append(save)
    return found


def is_there(tier, save):
    """Whether a tier has a save or a newer one; one that has no name of its own is its step's."""
    return any(one >= save or (one.step == save.step and not one.nonce) for one in committed(tier))


def until_still(root):
    """Wait until nothing changes below ``root``."""
    seen, same = None, 0
    while same < 3:
        now = sorted((path, tuple(names)) for path, _, names in os.walk(root))
        seen, same = now, same + 1 if now == seen else 0
        time.sleep(0.05)


# --- recordings ----------------------------------------------------------------------------------


def membership(site):
    """A job begins: its record, its key, its claims; some attempts later old claims are forgotten.

    Two recordings: the first launcher, in a directory where nothing is; and the next one.
    """
    yield site.record("first launcher", lambda under: site.member(2, under=under))
    yield site.record("next launcher", lambda under: site.member(3, under=under), job=site.job)


def saves(site, steps=4):
    """Saves until some are pruned in both tiers, then one again and one more, by a new attempt."""
    saver = Saver(site)
    (site.job_directory / "rollbacks").unlink(missing_ok=True)  # a rollback has more kept
    try:
        with site.recorded("saves and copies", job=site.job) as (under, results):
            saver.start(under)
            saver.begin_attempt(FIRST)
            for step in range(1, steps + 1):
                saver.save_everywhere(step)
            saver.begin_attempt(AGAIN)
            for step in (steps, steps + 1):
                saver.save_everywhere(step)
            saver.stop()
    finally:
        saver.stop()
    yield results[0]


def membership_killed(site, number):
    """The first launcher is killed before that call of its; the next one has the job to itself."""
    with site.recorded(f"launcher killed at {number}") as (under, results):
        site.member(under=under, environ=site.point(number, "KILL")).wait(120)
        if site.member(under=recording.onward(under)).wait(120):
            raise NotDone(f"after a kill: {site.heard.read_text()}")
    yield results[0]


def saves_killed(site, number):
    """A keeper is killed before that call of its, and another one goes on."""
    saver = Saver(site)
    try:
        with site.recorded(f"keeper killed at {number}", job=site.job) as (under, results):
            saver.start(under, site.point(number, "KILL"))
            saver.begin_attempt(FIRST)
            with contextlib.suppress(OSError):
                for step in (1, 2, 3):
                    if saver.save(step)[1]:
                        break
                    until_still(site.root)
            saver.stop()
            saver.start(recording.onward(under))
            saver.begin_attempt(AGAIN)
            for step in (3, 4):
                saver.save_everywhere(step)
            saver.stop()
    finally:
        saver.stop()
    yield results[0]


def hurt(site):
    """Damage copies so that each tier can be mended from the other; gives which were damaged."""
    older, newer = committed(site.tiers["local"])[-2:]
    local, shared = site.tiers["local"], site.tiers["shared"]
    flipped = local / str(newer) / shard_file(0)
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 1
    flipped.write_bytes(data)
    (local / str(older) / MANIFEST).unlink()
    (shared / str(older) / shard_file(0)).write_bytes(b"short")
    (shared / str(newer) / "rank-00000.json").unlink()
    return frozenset({("local", newer), ("local", older), ("shared", older), ("shared", newer)})


def repair(site):
    """``outlast checkpoints repair``."""
    hurt_ones = hurt(site)
    run = lambda under: site.command("repair", under=under)  # noqa: E731
    yield site.record("repair", run, job=site.job, hurt=hurt_ones)


def mend(site):
    """A resume that mends what it finds."""
    hurt_ones = hurt(site)
    yield site.record("mend", site.mender, job=site.job, hurt=hurt_ones)


def prune(site):
    """``outlast checkpoints prune --keep 1``, where all copies are whole."""
    assert site.command("repair").wait(120) == 0
    run = lambda under: site.command("prune", "--keep=1", "--yes", under=under)  # noqa: E731
    yield site.record("prune", run, job=site.job, keep=dict.fromkeys(TIERS, 1))


EVERYTHING = (membership, saves, repair, mend, prune)
