"""The job's key: 32 random bytes that everybody has who may read the job's storage.

In a directory it is a file for its owner alone (0600) below a directory for its owner alone (0700),
and a key that others could have read or replaced is refused rather than used. In a bucket, whoever
may read the bucket has it. It is made by whoever needs it first, and never changes while the job
lives. It is never shown, logged or passed on a command line.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from outlast.errors import StorageError
from outlast.storage.directory import Directory

if TYPE_CHECKING:
    from outlast.storage import Storage

KEY_BYTES: Final = 32
KEY_NAME: Final = "membership/key"


def job_key(storage: Storage) -> bytes:
    """The key of the job whose storage this is; made if there is none yet.

    Raises:
        StorageError: the storage fails, or holds a key that must not be trusted: of a wrong length,
            of another user, or open to others. One line that says what to do.
    """
    place = storage.describe(KEY_NAME)
    try:
        try:
            key = _read(storage)
        except FileNotFoundError:
            _make(storage)
            key = _read(storage)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"the job's key {place} cannot be had: {error.strerror or error}; every machine of a "
            "job needs to read and write the job's directory"
        ) from None
    if len(key) != KEY_BYTES:
        raise StorageError(
            f"the job's key {place} has {len(key)} bytes and not {KEY_BYTES}; remove it while no "
            "process of the job runs, and a new one is made"
        )
    return key


def _make(storage: Storage) -> None:
    if isinstance(storage, Directory):
        _close_directory(storage.root / KEY_NAME)
        storage.put_new(KEY_NAME, os.urandom(KEY_BYTES), private=True)
    else:
        storage.put_new(KEY_NAME, os.urandom(KEY_BYTES))


def _read(storage: Storage) -> bytes:
    if not isinstance(storage, Directory):
        return storage.read(KEY_NAME)
    path = storage.root / KEY_NAME
    # What is checked is what is read: a name could lead to another file the moment after.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise StorageError(f"the job's key {path} is not a file; remove it")
        _check_owner(path, found, shared=0o077)
        _close_directory(path)
        return os.read(fd, KEY_BYTES + 1)
    finally:
        os.close(fd)


def _close_directory(path: Path) -> None:
    """Refuse a directory in which others could put a key; close to readers what is ours."""
    try:
        found = path.parent.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(found.st_mode):
        raise StorageError(f"{path.parent} is not a directory; move it away")
    _check_owner(path.parent, found, shared=0o022)
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.parent.chmod(0o700)


def _check_owner(path: Path, found: os.stat_result, *, shared: int) -> None:
    """Refuse what another user owns, or has any of the permissions ``shared`` to."""
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.geteuid():
        raise StorageError(
            f"{path} belongs to user {found.st_uid}, and this process runs as user "
            f"{os.geteuid()}; run every machine of the job as one user"
        )
    if mode & shared:
        raise StorageError(
            f"{path} has permissions {mode:04o}: other users may have had a hand in it. Remove it "
            "while no process of the job runs, and it is made anew; if that does not help, the "
            "file system keeps no permissions: put the job's directory on one that does"
        )
