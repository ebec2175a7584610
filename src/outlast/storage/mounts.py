"""What a directory is mounted from, and what follows from that: as far as the kernel can tell.

What a network serves outlasts the machine. A disk that looks local may be one that the cloud
attaches (EBS, Persistent Disk); nothing here can tell, so it is taken for the machine's own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

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
