"""From what people write as a place to the storage that it means."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from outlast.errors import ConfigError
from outlast.storage.directory import Directory
from outlast.storage.object import SCHEMES, ObjectStore

if TYPE_CHECKING:
    from outlast.storage import Storage


def open_storage(url: str, *, num_spares: int = 0) -> Storage:
    """The storage at ``url``; nothing is read, written or connected to yet.

    Args:
        url: a directory's path, or ``s3://``, ``gs://``, ``az://`` and a bucket with a prefix.
        num_spares: how many big files a directory keeps to be written over.

    Raises:
        ConfigError: nothing here can be used as ``url`` says.
    """
    scheme, separator, _ = url.partition("://")
    if not separator:
        if not url:
            raise ConfigError(
                "the place of a storage is empty; write a directory or a bucket's URL"
            )
        return Directory(Path(url), num_spares)
    if scheme not in SCHEMES:
        known = ", ".join(f"{known}://" for known in SCHEMES)
        raise ConfigError(f"there is no storage for {scheme}://; write a directory or {known}")
    return ObjectStore(url)
