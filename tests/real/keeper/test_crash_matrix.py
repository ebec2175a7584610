"""Every system call of a save and of a prune: killed at, refused, delayed; nothing false is seen.

The calls are enumerated first, from a save that nobody disturbs (a spare is written over and
another kept, so that recycling is in it). A call that is not in the list below fails the test: it
would be one that nobody has broken yet.

By default a few cases of each fault, chosen by ``OUTLAST_TEST_SEED``; ``OUTLAST_TEST_ALL=1`` runs
them all.
"""

import collections
import contextlib
import re
import shutil
import signal
import subprocess

import psutil
import pytest
from floor import until
from lean import Place
from saved import saves_in

from thorough import ALL

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")

CASES_OF_FAULT = 3
KEEP = 2
# What changes something below the tier or in the ledger, in the order in which a save does it.
KNOWN = {
    ("rename", "spare -> part"),
    ("openat", "shard part for writing"),
    ("fcntl", "lease"),
    ("pwrite64", "shard part"),
    ("ftruncate", "shard part"),
    ("fsync", "shard part"),
    ("rename", "shard"),
    ("fsync", "step"),
    ("mkdir", "step"),
    ("fsync", "tier"),
    ("openat", "note part"),
    ("write", "note part"),
    ("fsync", "note part"),
    ("rename", "note"),
    ("openat", "small part"),
    ("write", "small part"),
    ("fsync", "small part"),
    ("rename", "small"),
    ("openat", "manifest part"),
    ("write", "manifest part"),
    ("fsync", "manifest part"),
    ("link", "manifest"),
    ("unlink", "manifest part"),
    ("write", "ledger"),
    ("fsync", "ledger"),
    ("unlink", "manifest"),
    ("mkdir", "spares"),
    ("rename", "shard -> spare"),
    ("unlink", "small"),
    ("unlinkat", "note"),
    ("rmdir", "step"),
}
HARMLESS = {
    *("read", "pread64", "close", "fstat", "newfstatat", "lstat", "stat", "statx", "lseek"),
    *("getdents64", "ioctl", "access", "faccessat2", "readlink", "openat for reading"),
}
FAULTS = {
    "kill": "signal=KILL",
    "EIO": "error=EIO",
    "ENOSPC": "error=ENOSPC",
    "delay": "delay_enter=60000",
    # The same, and each such call that comes after it: trying again does not help.
    "EIO for good": "error=EIO",
    "ENOSPC for good": "error=ENOSPC",
}
STEP = r"step-\d{12}\.a\d+\.s\d+\.[0-9a-f]{8}"


@contextlib.contextmanager
def traced(place, process, *options):
    """strace, attached to a running keeper; gives its log."""
    log = place.directory / "trace"
    log.unlink(missing_ok=True)
    command = ["strace", "-f", "-y", "-qq", "-s", "6", "-p", str(process.pid), "-o", str(log)]
    messages = place.directory / "strace.err"
    with messages.open("wb") as err:
        tracer = subprocess.Popen([*command[:3], *command[4:], *options], stderr=err)
    until(lambda: "attached" in messages.read_text(), "strace is attached")
    try:
        yield log
    finally:
        # One whose tracee was killed may wait for it for ever (strace 6.1 does, now and then).
        tracer.send_signal(signal.SIGKILL if is_dead(process) else signal.SIGINT)
        tracer.wait(60)


def is_dead(process):
    """Whether a process runs no more, be it that nobody has heard of its end."""
    try:
        return psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def path_kind(path, place):
    """A path below the place, as the table above calls it; None if it is none of ours."""
    root = str(place.directory)
    if path == f"{root}/ledger.jsonl":
        return "ledger"
    if not path.startswith(f"{root}/local"):
        return None
    name = path[len(root) + len("/local") :].strip("/")
    for pattern, kind in (
        (r"", "tier"),
        (r"\.spare", "spares"),
        (r"\.spare/[0-9a-f]+", "spare"),
        (STEP, "step"),
        (rf"{STEP}/rank-\d+\.safetensors", "shard"),
        (rf"{STEP}/rank-\d+\.json", "small"),
        (rf"{STEP}/save\.json", "note"),
        (rf"{STEP}/\.save\.json\.[0-9a-f]+\.part", "note part"),
        (rf"{STEP}/manifest\.json", "manifest"),
        (rf"{STEP}/\.rank-\d+\.safetensors\.[0-9a-f]+\.part", "shard part"),
        (rf"{STEP}/\.rank-\d+\.json\.[0-9a-f]+\.part", "small part"),
        (rf"{STEP}/\.manifest\.json\.[0-9a-f]+\.part", "manifest part"),
    ):
        if re.fullmatch(pattern, name):
            return kind
    return f"unknown {name}"


class Call:
    """One line of strace that concerns us."""

    def __init__(self, thread, name, kind, number):
        self.thread, self.name, self.kind, self.number = thread, name, kind, number


def calls(log, place):
    """The calls that touch the place, in order; ``number`` counts a thread's calls of one name."""
    counts = collections.Counter()
    found = []
    for line in log.read_text().splitlines():
        match = re.match(r"(\d+) +(\w+)\((.*)", line)
        if not match:
            continue
        thread, name, rest = match.groups()
        counts[thread, name] += 1
        if name in HARMLESS:
            continue
        kind = call_kind(name, rest, place)
        if kind is not None:
            found.append(Call(thread, name, kind, counts[thread, name]))
    return found


def call_kind(name, rest, place):
    """What a call is done to, in the words of the table; None where it is not ours, or harmless."""
    arguments = rest.rpartition(") = ")[0] or rest
    strings = re.findall(r'"([^"]*)"', arguments)
    descriptors = re.findall(r"\d+<([^>]*)>", arguments)
    if name == "unlinkat" and not strings[0].startswith("/"):
        strings = [f"{descriptors[0]}/{strings[0]}"]
    paths = strings if strings and name not in ("write", "pwrite64") else descriptors[:1]
    kinds = [kind for path in paths if (kind := path_kind(path, place)) is not None]
    if not kinds:
        return None
    if name == "openat":
        if "O_WRONLY" not in rest and "O_RDWR" not in rest:
            return None
        return kinds[0] if "O_CREAT" in rest else "shard part for writing"
    if name == "fcntl":
        return "lease" if "F_SETLEASE" in rest else None
    if name == "rename" and "spare" in kinds:
        return "spare -> part" if kinds[0] == "spare" else "shard -> spare"
    return kinds[-1]


class Matrix:
    """A keeper in its usual course: each save writes over a spare and prunes one checkpoint."""

    def __init__(self, floor, directory):
        self.place = Place(floor, directory, tiers=(("local", KEEP),))
        self.step = 0
        self.process = self.worker = None

    def settle(self):
        """Bring a keeper, if there is none, and everything to where it is between two saves."""
        if self.process is None or self.process.poll() is not None:
            self.process = self.place.keeper()
            self.worker = self.place.worker()
            assert self.save() == ""
        for _ in range(4):
            if self.is_settled():
                return
            assert self.save() == ""
            with contextlib.suppress(AssertionError):
                until(self.is_settled, "pruned", limit_s=2)
        assert self.is_settled(), [p for p in self.place.storage.root.rglob("*") if p.is_file()]

    def is_settled(self):
        root = self.place.storage.root
        steps = {save.step for save in saves_in(root)}
        spares = list((root / ".spare").glob("*"))
        newest = set(range(self.step - KEEP + 1, self.step + 1))
        return steps == newest and len(spares) == 1

    def save(self):
        self.step += 1
        try:
            return self.worker.save(self.step)
        except OSError as error:  # the keeper was gone before all was said
            return str(error)

    def stop(self):
        self.worker.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture(name="matrix")
def _matrix(floor, tmp_path):
    matrix = Matrix(floor, tmp_path / "place")
    matrix.settle()
    yield matrix
    matrix.stop()


def undisturbed(matrix):
    """The calls of one save and its prune."""
    with traced(matrix.place, matrix.process, "-e", "trace=%file,%desc") as log:
        assert matrix.save() == ""
        until(matrix.is_settled, "pruned")
    return calls(log, matrix.place)


def check(matrix, fault):
    """Nothing false is listed, the older commits stand, and the next save is as good as ever."""
    before, new = matrix.step - 1, matrix.step
    committed = matrix.place.committed()
    assert before in committed
    assert set(committed) <= {before - 1, before, new}
    if fault == "kill":
        assert matrix.process.wait(60) == -signal.SIGKILL
    matrix.settle()
    assert matrix.place.committed() == [matrix.step - 1, matrix.step]


def test_no_call_is_unknown(matrix):
    found = {(call.name, call.kind) for call in undisturbed(matrix)}
    assert found == KNOWN, (found - KNOWN, KNOWN - found)


def test_nothing_false_is_ever_seen(matrix, rng):
    save = undisturbed(matrix)
    numbers = {(call.name, call.number): call.kind for call in save}
    first, *others = sorted(numbers, key=lambda where: numbers[where] != "shard part")
    cases = [
        (fault, *where)
        for fault in FAULTS
        for where in (first, *(others if ALL else rng.sample(others, CASES_OF_FAULT - 1)))
    ]
    counts = collections.Counter()
    for fault, name, number in cases:
        what = f"{fault} at {name} {number} ({numbers[name, number]})"
        inject = f"inject={name}:{FAULTS[fault]}:when={number}"
        inject += "+" * fault.endswith("for good")
        with traced(matrix.place, matrix.process, "-e", f"trace={name}", "-e", inject) as log:
            error = matrix.save()
            if fault != "kill":
                until(lambda: quiet(log), "the keeper has nothing to do")
            else:
                until(lambda: matrix.worker.lost, "the keeper's end")
                until(lambda: is_dead(matrix.process), "the keeper's end")
        hit = "INJECTED" in log.read_text() or "DELAYED" in log.read_text()
        assert hit or fault == "kill", what
        outcome = "killed" if error == "lost" else "failed" if error else "committed"
        counts[fault, outcome] += 1
        try:
            check(matrix, fault)
        except AssertionError as failure:
            raise AssertionError(f"{what}, {outcome} ({error}): {failure}") from failure
    print(f"{len(cases)} of {len(FAULTS) * len(numbers)} cases: {dict(counts)}")
    assert {fault for fault, _ in counts} == set(FAULTS)
    assert not any(counts[fault, "failed"] for fault in ("delay", "EIO", "ENOSPC"))
    assert counts["EIO for good", "failed"]


def quiet(log):
    """Whether the tracer's log does not grow any more."""
    size = log.stat().st_size
    with contextlib.suppress(AssertionError):
        until(lambda: log.stat().st_size != size, "more", limit_s=0.1)
        return False
    return True
