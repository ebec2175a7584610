"""Find out whether a storage can decide who comes first, and whether it outlasts the machine.

What is relied on: of two conditional creates of one name exactly one wins, what was created is read
back, and it is listed at once. A server that ignores conditions fails the first, and shows it to a
single client. A listing that clients keep for a while shows only to the others; so what is mounted
is looked at as well.

What can go wrong: a storage that behaves for one probe and not later; nothing can be found then.

The kernel tells what a directory is mounted from: what a network serves outlasts the machine. A
disk that looks local may be one that the cloud attaches (EBS, Persistent Disk); nothing here can
tell, so it is taken for the machine's own. JuiceFS and others can be told to upload later as well
(``--writeback``), and do not show it in the table of mounts.
"""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from outlast.durable import NO_LINKS_TYPES, Mount, mount_of

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

# What is written there waits in a cache on this machine's disk, and is uploaded later. rclone needs
# one to append to files, as the ledger does; SkyPilot's MOUNT_CACHED is such a mount.
WRITE_BACK_TYPES: Final = frozenset({"fuse.rclone"})
MEMORY_TYPES: Final = frozenset({"tmpfs", "ramfs"})


def is_network(directory: str, mounts: str | None = None) -> bool:
    """Whether ``directory`` (see ``mount_of``) is on a network file system."""
    kind = mount_of(directory, mounts).kind
    return kind in NETWORK_TYPES or (kind.startswith("fuse.") and kind not in LOCAL_FUSE)


def outlasts(directory: str, mounts: str | None = None) -> bool:
    """Whether what is written to ``directory`` is there without this machine, and from then on."""
    kind = mount_of(directory, mounts).kind
    return is_network(directory, mounts) and kind not in WRITE_BACK_TYPES


def is_local(directory: str, mounts: str | None = None) -> bool:
    """Whether ``directory`` (see ``mount_of``) is surely seen by this machine's kernel alone."""
    return mount_of(directory, mounts).kind in LOCAL_TYPES


if TYPE_CHECKING:
    from outlast.storage import Storage

FRESH_S: Final = 3.0  # a listing that is kept for no longer does no harm
_ELSEWHERE: Final = "use a file system with hard links, or a store with conditional puts"
_ALONE: Final = "see to it that nobody else starts this job meanwhile"
# Seconds that a client keeps what it knows of a directory, where its options do not say.
_KEPT_S: Final = {"nfs": 60.0, "nfs4": 60.0, "cifs": 30.0, "smb3": 30.0, "smbfs": 30.0}


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
    root = getattr(storage, "root", None)
    if not isinstance(root, Path):  # a bucket's
        return None
    mount = mount_of(str(root))
    if mount.kind in NO_LINKS_TYPES:
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


def doubt_of_lasting(mount: Mount, *, in_pod: bool) -> Doubt | None:
    """Why what is written there is gone sooner than it seems; None if nothing tells.

    Args:
        mount: what the place lies on.
        in_pod: whether this is a container of Kubernetes, whose own layer goes with it.
    """
    if mount.kind in WRITE_BACK_TYPES:
        return Doubt(
            f"what is written waits in a cache on this machine's disk ({mount.kind}), and is "
            "uploaded later: what counts as committed may not be in the bucket yet",
            "add a [[tier]] with the bucket's own url, which is written directly",
        )
    if mount.kind in MEMORY_TYPES:
        return Doubt(
            f"it is in this machine's memory ({mount.kind}), and is lost with it",
            "name a disk, or a file system that all machines see",
        )
    if in_pod and mount.kind == "overlay":
        return Doubt(
            "it is in the container's own layer, and is lost with the container",
            "mount a volume there",
        )
    return None


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
