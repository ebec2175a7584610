"""Make names durable, of files and of directories, and give a name only if it is not taken.

The fsync of a file does neither. What a file system can do of it depends on how it is mounted, so
the kernel's table of mounts is read here too.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Collection
from pathlib import Path
from typing import Final, NamedTuple

# Mounts of an object store: without links, and without a renaming that does not replace.
NO_LINKS_TYPES: Final = frozenset(
    {
        *("fuse.s3fs", "fuse.gcsfuse", "fuse.goofys", "fuse.rclone", "fuse.blobfuse"),
        *("fuse.blobfuse2", "fuse.mountpoint-s3", "fuse.mount-s3", "fuse.sshfs", "fuse.geesefs"),
    }
)
_TRIES: Final = 10  # against others who remove what is made
_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
_AT_FDCWD: Final = -100
_RENAME_NOREPLACE: Final = 1


def sync_directory(path: Path) -> None:
    """Make the names in ``path`` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directories(path: Path, mode: int = 0o777, durable: Collection[Path] = ()) -> list[Path]:
    """Have ``path`` there, with the names of all directories that are made on the way durable.

    The first that is there already may be of a process that was killed between making it and making
    it durable; that is made up for. One above ``path`` that somebody removes meanwhile, as a doctor
    does who finds it empty, is made again.

    Args:
        path: a directory.
        mode: of ``path``, if it is made here; those above it have the usual one.
        durable: directories whose names are known to be durable.

    Returns:
        Those that are known to be from now on.

    Raises:
        OSError: one cannot be made, or not made durable.
    """
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):
            return _make_directories(path, mode, durable)
    return _make_directories(path, mode, durable)


def _make_directories(path: Path, mode: int, durable: Collection[Path]) -> list[Path]:
    missing, there = [], path
    while not there.is_dir():
        missing.append(there)
        there = there.parent
    if there not in durable:
        with contextlib.suppress(OSError):  # above it all may be other people's, and not for us
            sync_directory(there.parent)
    for directory in reversed(missing):
        directory.mkdir(mode if directory == path else 0o777, exist_ok=True)
        sync_directory(directory.parent)
    return [there, *missing]


class Mount(NamedTuple):
    """A file system as it is mounted.

    Attributes:
        kind: its type, as the kernel calls it; "" where that is not known.
        options: of the mount and of the file system.
    """

    kind: str
    options: tuple[str, ...]


def mount_of(directory: str, mounts: str | None = None) -> Mount:
    """What ``directory`` (or the nearest parent that is there) lies on.

    Args:
        directory: an absolute path.
        mounts: text of /proc/self/mountinfo; read if not given.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text(errors="replace")
        except OSError:
            return Mount("", ())
    found, best = Mount("", ()), -1
    path = os.path.realpath(directory)
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) < 5 or not kinds:
            continue
        place = _unescaped(fields[4])
        # The last mount on a place is the one that is seen.
        if (path == place or path.startswith(place.rstrip("/") + "/")) and len(place) >= best:
            options = ",".join([*fields[5:6], *kinds[2:3]]).split(",")
            found, best = Mount(kinds[0], tuple(options)), len(place)
    return found


def _unescaped(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def name_new(part: Path, path: Path) -> bool:
    """Give a whole file its name unless that is taken: True if it was done.

    Linking is what every POSIX file system makes atomic, NFS too. Where there are no links (FAT,
    SMB) there may be a renaming that does not replace. Mounts of an object store have neither.
    There the processes of this machine take turns. Two machines could both win; claims of attempts
    and the doctor say so. Where the kind is not known, nothing is atomic and it is refused.
    """
    try:
        os.link(part, path)
    except FileExistsError:
        # An NFS client repeats a call whose answer was lost: the name may be there through us.
        return part.stat().st_nlink == 2
    except OSError as error:
        if mount_of(str(path.parent)).kind in NO_LINKS_TYPES:  # of which some say EIO
            return _rename_in_turn(part, path)
        if error.errno not in _NO_LINKS:
            raise
        return _rename_new(part, path)
    return True


def _rename_in_turn(part: Path, path: Path) -> bool:
    """Rename unless the name is taken, alone on this machine while at it.

    The kernel keeps the lock itself where the file system has none, and drops it with the process.
    """
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        import fcntl  # here: what is said on another system than Linux imports this module, too

        fcntl.flock(fd, fcntl.LOCK_EX)
        if path.exists():
            return False
        part.rename(path)
    finally:
        os.close(fd)
    return True


def _rename_new(part: Path, path: Path) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    if not libc.renameat2(
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(os.fsencode(part)),
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(os.fsencode(path)),
        ctypes.c_uint(_RENAME_NOREPLACE),
    ):
        return True
    number = ctypes.get_errno()
    if number == errno.EEXIST:
        return False
    if number in {errno.EINVAL, *_NO_LINKS}:
        what = "neither hard links nor renaming without replacing work on this file system"
        raise OSError(number, what, str(path))
    raise OSError(number, os.strerror(number), str(path))
