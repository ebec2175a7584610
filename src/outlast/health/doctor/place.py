"""Tries a place for checkpoints as a save uses it: small file, conditional put, much data, removal.

Through the storages that the keeper writes with, so that what works here works there. What was
written lies below ``doctor-…``, and is removed; so are directories that had to be made.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from outlast.checkpoint.manifest import parse
from outlast.errors import OutlastError
from outlast.policy.fitness import PlaceFacts
from outlast.storage import Directory, ObjectStore, Patience, Storage, open_storage
from outlast.storage.trust import distrust, doubt_of_mount, is_network

BLOCK_BYTES: Final = 16 << 20
ROUND_BYTES: Final = 1 << 20
LONG_S: Final = 1.0  # a file that took so long says enough
FILE_S: Final = 2.0  # that the largest one is meant to take
FREE_SHARE: Final = 4  # of the free space one in so many bytes is written at most
BIGGEST_BYTES: Final = {True: 1 << 30, False: 128 << 20}  # a directory's, a bucket's
WRITERS: Final = 2
TRIES: Final = 3
OLD_S: Final = 3600.0
PATIENCE: Final = Patience(connect_s=3, stall_s=8, request_s=20, retry_s=4)
_URL_FIRST: Final = re.compile(r"^\w+ [a-z0-9]+://\S+: ")
_OURS: Final = re.compile(r"doctor-[0-9a-f]{12}\Z")


def probe(url: str, *, writes: bool, locks: bool) -> PlaceFacts:
    """What the place at ``url`` can do.

    Args:
        url: a directory, or a bucket's.
        writes: whether its bandwidth is measured.
        locks: whether it must hold a lock.
    """
    facts = PlaceFacts()
    try:
        storage = open_storage(url)
    except OutlastError as error:
        return _failed(facts, "open", error)
    if isinstance(storage, ObjectStore):
        storage = ObjectStore(url, patience=PATIENCE)
    with _made_directories(url):
        _try(storage, facts, writes=writes, locks=locks)
    return facts


def _try(storage: Storage, facts: PlaceFacts, *, writes: bool, locks: bool) -> None:
    folder = f"doctor-{uuid.uuid4().hex[:12]}"
    root = storage.root if isinstance(storage, Directory) else None
    facts.outlasts = root is None or is_network(str(root))
    if root is not None:
        _space(root, facts)
    parts: list[tuple[str, Callable[[], None]]] = [
        ("small", lambda: _small(storage, folder, facts)),
        ("conditional", lambda: _conditional(storage, folder, facts)),
    ]
    if root is not None and locks:
        parts.append(("lock", lambda: _lock(root, folder, facts)))
    if writes:
        parts.append(("big", lambda: _write(storage, folder, facts)))
    parts.append(("remove", lambda: storage.remove_tree(folder)))
    doing = ""
    try:
        for stage, act in parts:
            doing = stage
            act()
        doing = ""
        _space(root, facts)
        with contextlib.suppress(OSError):
            _tidy(storage, root, facts)
    except OSError as error:
        _failed(facts, doing, error)
    finally:
        if doing:  # it failed, or was asked to end
            with contextlib.suppress(OSError):
                storage.remove_tree(folder)


def _failed(facts: PlaceFacts, stage: str, error: Exception) -> PlaceFacts:
    facts.stage = stage
    number = getattr(error, "errno", None)
    facts.number = number if isinstance(number, int) else 0
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    words = _URL_FIRST.sub("", words)  # where it was is said by whoever shows it
    facts.error = words[:1].lower() + words[1:] if words[1:2].islower() else words
    return facts


@contextlib.contextmanager
def _made_directories(url: str) -> Iterator[None]:
    """Directories of a place that is not there yet are gone again afterwards."""
    missing: list[Path] = []
    if "://" not in url:
        path = Path(url)
        while not path.exists() and path != path.parent:
            missing.append(path)
            path = path.parent
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the job has begun to use it meanwhile
            for path in missing:
                path.rmdir()


def _space(root: Path | None, facts: PlaceFacts) -> None:
    if root is None:
        return
    while not root.exists() and root != root.parent:
        root = root.parent
    with contextlib.suppress(OSError):
        found = os.statvfs(root)
        facts.free_bytes = found.f_bavail * found.f_frsize
        facts.total_bytes = found.f_blocks * found.f_frsize


def _small(storage: Storage, folder: str, facts: PlaceFacts) -> None:
    took_s = []
    for number in range(TRIES):
        data = os.urandom(512)
        begun_s, begun_t = time.monotonic(), time.time()
        storage.put(f"{folder}/small-{number}", data)
        took_s.append(time.monotonic() - begun_s)
        if storage.read(f"{folder}/small-{number}") != data:
            raise OSError("a file has other bytes than were written")
        if took_s[-1] == min(took_s):
            _clock(storage, f"{folder}/small-{number}", facts, begun_t, took_s[-1])
        if sum(took_s) > LONG_S:
            break
    facts.small_s = min(took_s)


def _clock(storage: Storage, name: str, facts: PlaceFacts, begun_t: float, took_s: float) -> None:
    """The place's own clock, from the time that it has given a file."""
    if isinstance(storage, Directory):
        if not facts.outlasts:
            return  # this machine's own
        written_t, step_s = (storage.root / name).stat().st_mtime, 0.01
    else:
        import obstore

        found = obstore.head(storage._store, name)["last_modified"]  # type: ignore[attr-defined]
        written_t, step_s = found.timestamp(), 1.0  # whole seconds
    facts.clock_offset_s = written_t + step_s / 2 - (begun_t + took_s / 2)
    facts.clock_bound_s = took_s / 2 + step_s / 2


def _conditional(storage: Storage, folder: str, facts: PlaceFacts) -> None:
    found = distrust(storage, folder)
    facts.put_new = found is None
    facts.doubt, facts.todo = found or doubt_of_mount(storage) or ("", "")


def _lock(root: Path, folder: str, facts: PlaceFacts) -> None:
    fd = os.open(root / folder / "small-0", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        facts.locks = True
    except OSError:
        facts.locks = False
    finally:
        os.close(fd)


def _write(storage: Storage, folder: str, facts: PlaceFacts) -> None:
    """Files of growing size, until one says enough."""
    is_directory = isinstance(storage, Directory)
    most = BIGGEST_BYTES[is_directory]
    if facts.free_bytes is not None:
        most = min(most, facts.free_bytes // FREE_SHARE)
    size = ROUND_BYTES
    # Of no use to a file system that packs, and aligned for direct writing.
    block = mmap.mmap(-1, BLOCK_BYTES)
    block.write(os.urandom(BLOCK_BYTES))
    with memoryview(block) as data:
        while True:
            begun_s = time.monotonic()
            _one_file(storage, f"{folder}/big", size, data)
            took_s = max(time.monotonic() - begun_s, 1e-6)
            facts.written_bytes, facts.written_s = size, took_s
            storage.remove(f"{folder}/big")
            wanted = min(int(size / took_s * FILE_S), 16 * size, most)
            wanted -= wanted % ROUND_BYTES
            if took_s >= LONG_S or wanted <= size:
                return
            size = wanted


def _one_file(storage: Storage, name: str, size: int, data: memoryview) -> None:
    blob = storage.create(name, size)
    offsets = range(0, size, BLOCK_BYTES)

    def write(offset: int) -> None:
        blob.write_at(data[: min(BLOCK_BYTES, size - offset)], offset)

    try:
        if blob.positional:
            with ThreadPoolExecutor(WRITERS, "outlast-doctor-write") as pool:
                for _ in pool.map(write, offsets):
                    pass
        else:
            for offset in offsets:
                write(offset)
        blob.finish()
    except BaseException:
        blob.abandon()
        raise


def _tidy(storage: Storage, root: Path | None, facts: PlaceFacts) -> None:
    """Count what is there, and remove what an earlier doctor had to leave behind."""
    names = storage.children()
    facts.held_steps = len({save.step for save in map(parse, names) if save is not None})
    for name in filter(_OURS.match, names):
        is_old = root is None or time.time() - (root / name).stat().st_mtime > OLD_S
        if root is not None and is_old:
            storage.remove_tree(name)
