"""``job.json``: who a job is. Written once, by whoever comes first; the id outlives restarts."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import platform
import time
import uuid
from pathlib import Path

import msgspec

from outlast._version import __version__
from outlast.config import Settings, as_rows
from outlast.errors import ConfigError, StorageError

FILE_NAME = "job.json"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job's identity.

    Attributes:
        id: twelve hexadecimal digits.
        created_t: wall-clock time in seconds since the epoch.
        settings: setting → value, as they were when the job was made.
        versions: outlast, torch and python, as they were then.
    """

    id: str
    created_t: float
    settings: dict[str, str]
    versions: dict[str, str]


def versions() -> dict[str, str]:
    """What is running here."""
    return {
        "outlast": __version__,
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
    }


def open_job(directory: Path, settings: Settings) -> Job:
    """The job in ``directory``, made now if there is none.

    Raises:
        ConfigError: the directory cannot be made or written, or job.json is not one.
        StorageError: job.json cannot be read.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be made: {error.strerror}; give another with --dir"
        ) from None
    path = directory / FILE_NAME
    if not path.exists():
        _create(path, settings)
    job = read_job(directory)
    if not os.access(directory, os.W_OK):
        raise ConfigError(f"{directory} cannot be written; give another with --dir")
    return job


def read_job(directory: Path) -> Job:
    """The job in ``directory``.

    Raises:
        ConfigError: there is none, or job.json is not one.
        StorageError: it cannot be read.
    """
    path = directory / FILE_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=Job)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"{directory} is not a job's directory: it has no {FILE_NAME}. "
            "Give the one that was used with --dir, as in outlast report JOB, or set OUTLAST_DIR"
        ) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a job's record: {error}") from None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from None


def _create(path: Path, settings: Settings) -> None:
    job = Job(
        id=uuid.uuid4().hex[:12],
        created_t=time.time(),
        settings={key: value for key, value, _ in as_rows(settings)},
        versions=versions(),
    )
    # By the id, not by the process's number: two containers' processes often have the same.
    part = path.with_name(f".{path.name}.{job.id}")
    try:
        with part.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(job), indent=1) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        # A link, not a rename: of two that start at once, the second finds the first one's id.
        os.link(part, path)
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(
            f"{path.parent} cannot be written: {error.strerror}; give another with --dir"
        ) from None
    finally:
        part.unlink(missing_ok=True)


class JobLock:
    """Keeps a second launcher from running the same job at the same time.

    On this machine, and on others where the file system's locks reach them.

    Args:
        directory: the job's.
        shared: with others that share it: the machines of one job settle by themselves who takes
            part. Nobody runs the job alone meanwhile.

    Raises:
        ConfigError: the job runs already, in a way that does not go together with this.
    """

    def __init__(self, directory: Path, *, shared: bool = False) -> None:
        self._fd = os.open(directory / FILE_NAME, os.O_RDWR | os.O_CLOEXEC)
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise ConfigError(
                f"the job in {directory} is running already"
                f"{', on one machine alone' * shared}; wait for it, or give another --dir"
            ) from None
        except OSError:
            pass  # a file system without locks: two launchers are then the owner's to avoid

    def release(self) -> None:
        """Let the next one in."""
        os.close(self._fd)
