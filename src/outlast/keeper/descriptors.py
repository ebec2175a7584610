"""Bytes and file descriptors through a socket of this machine."""

from __future__ import annotations

import array
import errno
import os
import socket
from collections.abc import Sequence
from typing import Final

MAX_FDS: Final = 250  # the kernel takes 253 with one message
_FDS: Final = array.array("i")
_ROOM: Final = socket.CMSG_SPACE(MAX_FDS * _FDS.itemsize)
_READ_BYTES: Final = 1 << 18


def send(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send all of ``data``; descriptors go with its first bytes, at least one for ``MAX_FDS``.

    Raises:
        OSError: the other end is gone, or does not read.
    """
    for start in range(0, len(fds), MAX_FDS):
        some = array.array("i", fds[start : start + MAX_FDS])
        is_last = start + MAX_FDS >= len(fds)
        part = data if is_last else data[:1]
        data = data[sock.sendmsg([part], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, some)]) :]
    sock.sendall(data)


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Some bytes, b"" at the end, and the descriptors that came with them; they are the caller's.

    Raises:
        OSError: the other end is gone, or this process may not have so many open.
    """
    data, extras, flags, _ = sock.recvmsg(_READ_BYTES, _ROOM, socket.MSG_CMSG_CLOEXEC)
    fds = _FDS[:]
    for level, kind, rights in extras:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(rights[: len(rights) - len(rights) % fds.itemsize])
    if flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        raise OSError(errno.EMFILE, "not all descriptors that were sent could be taken")
    return data, fds.tolist()
