"""Bytes and file descriptors through a socket of this machine."""

from __future__ import annotations

import array
import socket
from collections.abc import Sequence
from typing import Final

MAX_FDS: Final = 250  # the kernel takes 253 with one message
_FDS: Final = array.array("i")
_ROOM: Final = socket.CMSG_SPACE(MAX_FDS * _FDS.itemsize)
_READ_BYTES: Final = 1 << 18


def send(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send all of ``data``; descriptors go with its first byte.

    Raises:
        OSError: the other end is gone, or does not read.
    """
    if fds:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
        data = data[sock.sendmsg([data], [rights]) :]
    sock.sendall(data)


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Some bytes, b"" at the end, and the descriptors that came with them; they are the caller's.

    Raises:
        OSError: the other end is gone.
    """
    data, extras, _, _ = sock.recvmsg(_READ_BYTES, _ROOM, socket.MSG_CMSG_CLOEXEC)
    fds = _FDS[:]
    for level, kind, rights in extras:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(rights[: len(rights) - len(rights) % fds.itemsize])
    return data, fds.tolist()
