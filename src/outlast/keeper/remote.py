"""A tier that only the keeper may touch, as a worker reads it.

The library behind object stores runs threads of its own that a forked child hangs on, and training
processes fork (data loaders). So the keeper asks, and hands the answer over.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

import msgspec

from outlast.keeper.client import Client
from outlast.storage import Blob


class Remote:
    """A tier behind the keeper; for reading.

    Args:
        client: the connection to the keeper.
        tier: its name.
        place: how people call it.
    """

    def __init__(self, client: Client, tier: str, place: str) -> None:
        self._client = client
        self._tier = tier
        self._place = place

    def describe(self, name: str = "") -> str:
        """The address of ``name``."""
        return f"{self._place.rstrip('/')}/{name}" if name else self._place

    def children(self, name: str = "") -> list[str]:
        """Names directly below ``name``."""
        raw = self._client.fetch(self._tier, "children", name)
        return msgspec.json.decode(raw, type=list[str])

    def exists(self, name: str) -> bool:
        """Whether there is a file ``name``."""
        return msgspec.json.decode(self._client.fetch(self._tier, "exists", name), type=bool)

    def size(self, name: str) -> int:
        """Size of the file ``name`` in bytes."""
        return msgspec.json.decode(self._client.fetch(self._tier, "size", name), type=int)

    def read(self, name: str) -> bytes:
        """The whole (small) file ``name``."""
        return self._client.fetch(self._tier, "read", name)

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        """Fill ``buffer`` from byte ``offset`` of ``name``."""
        data = self._client.fetch(self._tier, "read_into", name, offset, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def open(self, name: str) -> _RemoteReader:
        """Open ``name``."""
        return _RemoteReader(self, name, self.size(name))

    def put(self, name: str, data: bytes) -> None:
        """Only the keeper writes."""
        raise self._read_only(name)

    def put_new(self, name: str, data: bytes) -> bool:
        """Only the keeper writes."""
        raise self._read_only(name)

    def create(self, name: str, size: int | None = None) -> Blob:
        """Only the keeper writes."""
        raise self._read_only(name)

    def remove(self, name: str) -> None:
        """Only the keeper writes."""
        raise self._read_only(name)

    def remove_tree(self, name: str, last: Sequence[str] = ()) -> None:
        """Only the keeper writes."""
        raise self._read_only(name)

    def _read_only(self, name: str) -> OSError:
        text = "mended by outlast checkpoints repair, not by a worker"
        return OSError(errno.EROFS, text, self.describe(name))


class _RemoteReader:
    def __init__(self, remote: Remote, name: str, size: int) -> None:
        self._remote = remote
        self._name = name
        self.size = size

    def read_into(self, buffer: memoryview, offset: int) -> int:
        return self._remote.read_into(self._name, buffer, offset)

    def close(self) -> None:
        pass
