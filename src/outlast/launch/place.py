"""Where machines meet, and what address they are reached at; known without importing torch."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from typing import Final

from outlast.errors import ConfigError

BACKEND: Final = "outlast"
_ADDRESS: Final = re.compile(r"[^/]*:\d+")


def place_of(endpoint: str) -> str:
    """The directory or bucket that an endpoint names.

    Raises:
        ConfigError: it is a machine's address, as other rendezvous want one.
    """
    if "://" in endpoint:
        return endpoint
    if _ADDRESS.fullmatch(endpoint):
        raise ConfigError(
            f"--rdzv-endpoint {endpoint} is an address; for --rdzv-backend {BACKEND} name a "
            "directory or bucket that all machines share"
        )
    return os.path.abspath(endpoint)  # noqa: PTH100 - as given, for every machine


def own_address() -> str:
    """An address of this machine that others may reach: that of its default route, or loopback."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # a documentation address; nothing is sent
        return str(probe.getsockname()[0])
    return "127.0.0.1"
