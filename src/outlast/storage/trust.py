"""Find out whether a storage can decide who comes first, and whether it outlasts the machine.

What is relied on: of two conditional creates of one name exactly one wins, what was created is read
back, and it is listed at once. A server that ignores conditions fails the first, and shows it to a
single client. A listing that clients keep for a while shows only to the others; so what is mounted
is looked at as well.

What can go wrong: a storage that behaves for one probe and not later; nothing can be found then.

The kernel tells what a directory is mounted from: what a network serves outlasts the machine. A
disk that looks local may be one that the cloud attaches (EBS, Persistent Disk); nothing here can
tell, so it is taken for the machine's own.
"""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from outlast.storage.directory import Directory

# Types in /proc/self/mountinfo, without what follows "fuse." where any FUSE file system is meant.
NETWORK_TYPES: Final = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "afs"),
        *("orangefs", "pvfs2", "wekafs", "9p", "ocfs2", "gfs2", "panfs", "quobyte", "vastnfs"),
    }
)
# FUSE over a disk of this machine's.
LOCAL_FUSE: Final = frozenset(
    {"fuse.fuse-overlayfs", "fuse.mergerfs", "fuse.unionfs", "fuse.lxcfs"}
)


# Of one kernel alone: all that use them are under its locks.
LOCAL_TYPES: Final = frozenset(
    {
        *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs"),
        *("tmpfs", "ramfs", "overlay", "vfat", "exfat", "ntfs3"),
    }
)


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


def is_network(directory: str, mounts: str | None = None) -> bool:
    """Whether ``directory`` (see ``mount_of``) is on a network file system."""
    kind = mount_of(directory, mounts).kind
    return kind in NETWORK_TYPES or (kind.startswith("fuse.") and kind not in LOCAL_FUSE)


def is_local(directory: str, mounts: str | None = None) -> bool:
    """Whether ``directory`` (see ``mount_of``) is surely seen by this machine's kernel alone."""
    return mount_of(directory, mounts).kind in LOCAL_TYPES


def _unescaped(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


if TYPE_CHECKING:
    from outlast.storage import Storage

FRESH_S: Final = 3.0  # a listing that is kept for no longer does no harm
_ELSEWHERE: Final = "use a file system with hard links, or a store with conditional puts"
_ALONE: Final = "see to it that nobody else starts this job meanwhile"
# Seconds that a client keeps what it knows of a directory, where its options do not say.
_KEPT_S: Final = {"nfs": 60.0, "nfs4": 60.0, "cifs": 30.0, "smb3": 30.0, "smbfs": 30.0}
_NO_LINKS: Final = frozenset(
    {
        *("fuse.s3fs", "fuse.gcsfuse", "fuse.goofys", "fuse.rclone", "fuse.blobfuse"),
        *("fuse.blobfuse2", "fuse.mountpoint-s3", "fuse.mount-s3", "fuse.sshfs", "fuse.geesefs"),
    }
)


class Doubt(NamedTuple):
    """Why claims cannot be trusted somewhere.

    Attributes:
        seen: what was found.
        todo: what to do about it.
    """

    seen: str
    todo: str

    def __str__(self) -> str:
        return f"{self.seen}; {self.todo}"


def distrust(storage: Storage, folder: str) -> Doubt | None:
    """Why ``storage`` cannot say who comes first below ``folder``; None if it can.

    Raises:
        OSError: storage cannot be asked.
    """
    name = f"{folder}/probe-{uuid.uuid4().hex[:12]}"
    try:
        seen = _seen(storage, folder, name)
    finally:
        storage.remove(name)
    return Doubt(seen, f"{_ELSEWHERE}, or {_ALONE}") if seen else None


def _seen(storage: Storage, folder: str, name: str) -> str:
    wins = (storage.put_new(name, b"first"), storage.put_new(name, b"second"))
    if wins != (True, False):
        how = "both were" if all(wins) else "the second was" if wins[1] else "none was"
        return f"of two creates of one new name {how} taken"
    if storage.read(name) != b"first":
        return "what was created is not what is read back"
    if name.rpartition("/")[2] not in storage.children(folder):
        return "what was created is not listed at once"
    return ""


def doubt_of_mount(storage: Storage) -> Doubt | None:
    """What a directory's mount says against it."""
    if not isinstance(storage, Directory):
        return None
    mount = mount_of(str(storage.root))
    if mount.kind in _NO_LINKS:
        seen = f"it is mounted as {mount.kind}, where two may create one name"
        return Doubt(seen, f"{_ELSEWHERE}, or {_ALONE}")
    kept_s = kept_for_s(mount)
    if kept_s <= FRESH_S:
        return None
    options = "acdirmax=3" if mount.kind.startswith("nfs") else "actimeo=1"
    return Doubt(
        f"its clients keep directory listings for up to {kept_s:.0f} s ({mount.kind}), and a "
        "machine may see a newer attempt that late",
        f"mount it with {options}, or {_ALONE}",
    )


def kept_for_s(mount: Mount) -> float:
    """How long a client may go by what it knows of a directory, in seconds."""
    usual_s = _KEPT_S.get(mount.kind, 0.0)
    if not usual_s or "noac" in mount.options:
        return 0.0
    for option in ("acdirmax", "actimeo"):
        for text in mount.options:
            if match := re.fullmatch(rf"{option}=(\d+)", text):
                return float(match[1])
    return usual_s
