"""Directories keep the contract of a storage, however the file system below can be written."""

import errno
import os
import tempfile
from pathlib import Path

import pytest
from storage_contract import StorageContract

from outlast.storage import Directory, directory, open_storage


class TestDirectory(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path):
        return Directory(tmp_path / "root")


class TestInMemory(StorageContract):
    """/dev/shm, which takes O_DIRECT or not, by the age of the kernel."""

    @pytest.fixture
    def storage(self):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
            yield Directory(Path(path))


class TestWithoutDirect(StorageContract):
    """O_DIRECT is refused when a file is opened."""

    @pytest.fixture
    def storage(self, tmp_path, monkeypatch):
        opening = os.open

        def refusing(path, flags, *rest, **more):
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return opening(path, flags, *rest, **more)

        monkeypatch.setattr(os, "open", refusing)
        return Directory(tmp_path / "root")


class TestDirectRefusedLate(StorageContract):
    """O_DIRECT is taken when a file is opened, and refused when it is written or read."""

    @pytest.fixture
    def storage(self, tmp_path, monkeypatch):
        opening, closing, fds = os.open, os.close, set()

        def remembering(path, flags, *rest, **more):
            fd = opening(path, flags & ~os.O_DIRECT, *rest, **more)
            if flags & os.O_DIRECT:
                fds.add(fd)
            return fd

        def forgetting(fd):
            fds.discard(fd)
            closing(fd)

        def refusing(call):
            def refused(fd, *rest):
                if fd in fds:
                    raise OSError(errno.EINVAL, "Invalid argument")
                return call(fd, *rest)

            return refused

        monkeypatch.setattr(os, "open", remembering)
        monkeypatch.setattr(os, "close", forgetting)
        monkeypatch.setattr(os, "pwrite", refusing(os.pwrite))
        monkeypatch.setattr(os, "preadv", refusing(os.preadv))
        monkeypatch.setattr("outlast.storage.directory.mostly_cached", lambda fd, size: False)
        return Directory(tmp_path / "root")


class TestPartial(StorageContract):
    """Calls take and give fewer bytes than asked for, and not by pages."""

    @pytest.fixture
    def storage(self, tmp_path, monkeypatch):
        pwrite, preadv, write = os.pwrite, os.preadv, os.write
        # Whole pages most of the time, so that a direct transfer can go on; then an odd number.
        sizes = iter(range(10**9))

        def some(view):
            size = 1_000_001 if next(sizes) % 5 == 4 else 512 * directory.ALIGN
            return view[: size if len(view) > size else len(view)]

        def aligned(call, fd, view, offset):
            try:
                return call(fd, some(view), offset)
            except OSError as error:  # an odd number of bytes, directly: what the kernel says
                if error.errno != errno.EINVAL:
                    raise
                return call(fd, view[: directory.ALIGN], offset)

        monkeypatch.setattr(os, "pwrite", lambda fd, view, at: aligned(pwrite, fd, view, at))
        monkeypatch.setattr(
            os,
            "preadv",
            lambda fd, views, at: aligned(
                lambda fd, view, at: preadv(fd, [view], at), fd, views[0], at
            ),
        )
        monkeypatch.setattr(os, "write", lambda fd, view: write(fd, some(view)))
        monkeypatch.setattr("outlast.storage.directory.mostly_cached", lambda fd, size: False)
        return Directory(tmp_path / "root")


class TestWithSpares(StorageContract):
    """Every file is written over an older, larger one."""

    @pytest.fixture
    def storage(self, tmp_path, monkeypatch):
        monkeypatch.setattr(directory, "MIN_BYTES", 0)
        place = tmp_path / "root" / ".spare"
        place.mkdir(parents=True)
        for num in range(20):
            (place / f"{num}").write_bytes(b"old" * (10_000 * num))
        return open_storage(str(tmp_path / "root"), num_spares=30)
