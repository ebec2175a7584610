"""``job.json``: who a job is; ``plan.json``: what was planned of it.

``job.json`` is written once, by whoever comes first; the id outlives restarts. Where it is lost
(removed by hand, or torn by a crash of the machine) the ledger beside it still says whose it is:
each of its lines does. What else can tell, and what is done where nobody can, is
:mod:`outlast.checkpoint.catalog`'s, which opens a job.

``outlast plan --save`` writes ``plan.json``, so that a report can say how far a plan was off. Who
writes ``job_started`` enters what stands there into the ledger: ``outlast run``, or the session of
rank 0 where torchrun or python started the job. A plan that is changed afterwards changes no
prediction that was made; the newest entry counts.

What can go wrong: a file that is no plan, or that cannot be read, is as if there were none; the
run says so once, in a line, and starts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.metadata
import os
import platform
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec

from outlast._version import __version__
from outlast.config import Settings, as_rows, load
from outlast.durable import make_directories, name_new, sync_directory
from outlast.errors import ConfigError, StorageError, remedy, unusable
from outlast.ledger.events import Event
from outlast.ledger.file import FILE_NAME as LEDGER
from outlast.ledger.file import Ledger, read_events

FILE_NAME = "job.json"
_LOOK_TRIES: Final = 10
_LOOK_S: Final = 0.02  # a look whether a lock is held alone takes microseconds


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job's identity.

    Attributes:
        id: twelve hexadecimal digits.
        created_t: wall-clock time in seconds since the epoch; 0 if that is not known.
        settings: setting → value, as they were when the record was made.
        versions: outlast, torch and python, as they were then.
    """

    id: Annotated[str, msgspec.Meta(min_length=1)]
    created_t: float = 0.0
    settings: dict[str, str] = {}
    versions: dict[str, str] = {}


class NoRecord(NamedTuple):
    """There is no job.json that says who the job is: ``why``, in words; ``there``: a file is."""

    why: str
    there: bool


def versions() -> dict[str, str]:
    """What is running here."""
    return {
        "outlast": __version__,
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
    }


def process_age_s() -> float | None:
    """Seconds since this process was started, whatever the clock did; None where nobody knows."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return round(max(age_s, 0.0), 6)


def boot() -> str | None:
    """Which boot of this machine it is, in eight digits; None where the kernel does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return None


def new_job(settings: Settings, id: str = "", created_t: float = 0.0) -> Job:  # noqa: A002
    """A record of a job as it is here and now; without an ``id`` of one that there was not."""
    return Job(
        id=id or uuid.uuid4().hex[:12],
        created_t=created_t or time.time(),
        settings={row.key: row.value for row in as_rows(settings)},
        versions=versions(),
    )


# --- reading -------------------------------------------------------------------------------------


def read_job(directory: Path) -> Job:
    """The job in ``directory``: as job.json says, and where that is lost, as the ledger does.

    Raises:
        ConfigError: neither says which it is.
        StorageError: they cannot be read.
    """
    found = read_record(directory)
    if isinstance(found, Job):
        return found
    ids = ids_in_ledger(directory)
    if len(ids) == 1:
        ((name, created_t),) = ids.items()
        return Job(id=name, created_t=created_t)
    if not found.there and not ids:
        raise ConfigError(
            f"{directory} is not a job's directory: it has no {FILE_NAME}. "
            "Give the one that was used with --dir, as in outlast report JOB, or set OUTLAST_DIR"
        )
    raise ConfigError(
        f"{directory / FILE_NAME} is not a job's record: {found.why}; bring it back from a copy, "
        "or start the job there: it is found again if its checkpoints say which it is"
    )


def read_record(directory: Path) -> Job | NoRecord:
    """What job.json says, and nothing else.

    Raises:
        StorageError: it cannot be read.
    """
    path = directory / FILE_NAME
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return NoRecord("it is missing", there=False)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be read: {error.strerror}; {remedy(error)}, or bring it back from a "
            "copy"
        ) from None
    try:
        return msgspec.json.decode(data, type=Job)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        is_empty = not data.strip(b"\0 \n")  # zeros: its name was durable before its bytes
        return NoRecord("it is empty" if is_empty else f"it is damaged ({error})", there=True)


def ids_in_ledger(directory: Path) -> dict[str, float]:
    """The jobs whose events are in the ledger: id → time of the first one.

    Raises:
        StorageError: it cannot be read.
    """
    found: dict[str, float] = {}
    try:
        for event in read_events(directory):
            found.setdefault(event.job, event.t)
    except NotADirectoryError:
        return {}
    except OSError as error:
        path = directory / LEDGER
        raise StorageError(f"{path} cannot be read: {error.strerror}; {remedy(error)}") from None
    return found


OF_THE_JOB: Final = ("checkpoint.every", "price.spot", "price.on_demand", "price.currency")


def settings_of(directory: str | Path | None, read: Settings, job: Job) -> Settings:
    """The settings here; where they are at their defaults, the job's own of when it was begun.

    Args:
        directory: the job's, as it was given.
        read: the settings here.
        job: whose cadence and prices count.
    """
    own = {
        key: job.settings[key]
        for key in OF_THE_JOB
        if read.origin[key] == "default" and job.settings.get(key)
    }
    try:
        return load({"dir": directory, **own})
    except ConfigError:  # of another version, which has written it in another way
        return read


# --- writing -------------------------------------------------------------------------------------


def make_directory(directory: Path) -> None:
    """Have the job's directory there, durably: all that is promised later lies in it.

    Raises:
        ConfigError: it cannot be one.
        StorageError: the storage does not let it be made.
    """
    try:
        make_directories(directory)
    except OSError as error:
        done = "written" if directory.is_dir() else "made"
        raise unusable(f"{directory} cannot be {done}", error) from None


def raise_unless_writable(directory: Path) -> None:
    """See whether a job whose record is there can go on there.

    Raises:
        StorageError: it cannot; says why.
    """
    try:
        os.close(os.open(directory / FILE_NAME, os.O_RDWR | os.O_CLOEXEC))
        if not os.access(directory, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise unusable(f"{directory} cannot be written", error) from None


def write_record(directory: Path, job: Job, instead_of: NoRecord) -> bool:
    """Write job.json, atomically and durably; whether it was done, and not by somebody else.

    What is in the way is replaced only while nobody holds it: a job that runs has its lock there.

    Raises:
        ConfigError, StorageError: it cannot be written.
    """
    path = directory / FILE_NAME
    data = msgspec.json.format(msgspec.json.encode(job), indent=1) + b"\n"
    try:
        if not instead_of.there:
            return put_file(path, data, anew=True)
        with _written_beside(path, data) as part:
            return _replace(part, path)
    except OSError as error:
        raise unusable(f"{path.parent} cannot be written", error) from None


def put_file(path: Path, data: bytes, *, anew: bool) -> bool:
    """Write a file of a job's directory, atomically and durably; whether it was done.

    Args:
        path: the file.
        data: its content.
        anew: only if there is none.

    Raises:
        OSError: it cannot be written.
    """
    with _written_beside(path, data) as part:
        if anew:
            return name_new(part, path)  # of two that start at once, one's id is everybody's
        part.replace(path)
        return True


@contextlib.contextmanager
def _written_beside(path: Path, data: bytes) -> Iterator[Path]:
    """The data in a file that is to be given the name ``path``; durable with its name, or gone."""
    # By random digits, not by the process's number: two containers' processes often have the same.
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield part
        sync_directory(path.parent)  # a crash would leave a ledger without a record
    finally:
        with contextlib.suppress(OSError):  # what was wrong is said
            part.unlink()


def _replace(part: Path, path: Path) -> bool:
    """Of two that find a damaged record, one replaces it, and the other finds that it has."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        if isinstance(read_record(path.parent), Job):
            return False
        part.replace(path)
    finally:
        os.close(fd)
    return True


class JobLock:
    """Keeps a second launcher from running the same job at the same time.

    On this machine, and on others where the file system's locks reach them; where they do not, the
    claims of attempts do (:mod:`outlast.peer.claims`).

    Args:
        directory: the job's.
        shared: with others that share it: the machines of one job settle by themselves who takes
            part. Nobody runs the job alone meanwhile.

    Attributes:
        is_held: whether the file system has locks at all.

    Raises:
        ConfigError: the job runs already, in a way that does not go together with this.
        StorageError: its record cannot be opened.
    """

    def __init__(self, directory: Path, *, shared: bool = False) -> None:
        self.is_held = True
        try:
            self._fd = os.open(directory / FILE_NAME, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            words = f"{directory / FILE_NAME} cannot be opened: {error.strerror}; {remedy(error)}"
            raise StorageError(f"{words}, and run the same command again") from None
        self._kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        tries = _LOOK_TRIES if shared else 1  # one of those that share it may be in is_alone()
        try:
            while not self._take():
                tries -= 1
                if not tries:
                    os.close(self._fd)
                    raise ConfigError(
                        f"the job in {directory} is running already"
                        f"{', on one machine alone' * shared}; wait for it, or give another --dir"
                    )
                time.sleep(_LOOK_S)
        except OSError:
            self.is_held = False  # the claims of attempts decide alone

    def _take(self) -> bool:
        try:
            fcntl.flock(self._fd, self._kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def is_alone(self) -> bool:
        """Whether nobody else has it; the lock stays what it was."""
        if self._kind == fcntl.LOCK_EX or not self.is_held:
            return self.is_held
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:  # a change that fails may have cost the lock
            fcntl.flock(self._fd, self._kind)
        return True

    def release(self) -> None:
        """Let the next one in."""
        os.close(self._fd)


# --- what was planned -----------------------------------------------------------------------------

PLAN_NAME: Final = "plan.json"


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan says of a job.

    Attributes:
        planned_t: wall-clock time at which it was made.
        failures_per_h: of the whole job; between low and high, as ``rate_source`` explains.
        productive_fraction: useful over wall time, by the exact model, at ``interval_s``.
        checkpoint_s, restore_s, detect_s: what that rests on.
        price_per_machine_hour: as it was given, or None.
    """

    planned_t: float
    failures_per_h: float
    failures_low_per_h: float
    failures_high_per_h: float
    rate_source: str
    productive_fraction: float
    interval_s: float
    checkpoint_s: float
    restore_s: float = 0.0
    detect_s: float = 0.0
    price_per_machine_hour: float | None = None


def keep_plan(prediction: Prediction, directory: Path) -> Path:
    """Keep it for the job in ``directory``, which is made where it is not there yet.

    Raises:
        ConfigError: it cannot be written.
    """
    path = directory / PLAN_NAME
    try:
        make_directories(directory)
        data = msgspec.json.format(msgspec.json.encode(prediction), indent=1) + b"\n"
        put_file(path, data, anew=False)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}; give another directory with OUTLAST_DIR"
        ) from None
    return path


def read_plan(directory: Path) -> Prediction | None:
    """The one that is kept; None where there is none.

    Raises:
        ConfigError: what is there is no plan.
    """
    path = directory / PLAN_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=Prediction)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ConfigError(
            f"{path} is no plan; remove it, or write it anew: outlast plan --save"
        ) from None


def enter_plan(ledger: Ledger, directory: Path, say: Callable[[str], object]) -> None:
    """Put the plan that is kept there into the ledger; what cannot be read is said, and no more."""
    try:
        prediction = read_plan(directory)
    except ConfigError as error:
        say(str(error))  # a plan is no reason not to start
        return
    if prediction is not None:
        ledger.append("planned", durable=False, **msgspec.structs.asdict(prediction))


def newest_plan(events: Iterable[Event]) -> Prediction | None:
    """What the ledger says was planned; events in order."""
    found = None
    for event in events:
        if event.event == "planned":
            try:
                found = msgspec.convert(event.fields, Prediction)
            except msgspec.ValidationError:
                continue
    return found
