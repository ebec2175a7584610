"""Somebody between two machines: passes on what comes, and reads it."""

import contextlib
import select
import socket
import threading


class Relay:
    """Takes connections in place of ``target``.

    Args:
        target: host and port of who is meant.
        tls: opens each connection with its own certificate, and joins the two; None passes on
            bytes as they are.

    Attributes:
        address: host and port.
        seen: all that it could read.
    """

    def __init__(self, target, tls=None):
        self.seen = bytearray()
        self._target = target
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        threading.Thread(target=self._run, daemon=True).start()

    def close(self):
        self._listener.close()

    def _run(self):
        while True:
            try:
                sock = self._listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._join, args=(sock,), daemon=True).start()

    def _join(self, one):
        """Both ways in one thread: two threads must not use one TLS connection."""
        other = socket.create_connection(self._target)
        with contextlib.suppress(OSError):
            if self._tls is not None:
                one = self._tls.server().wrap_socket(one, server_side=True)
                other = self._tls.client().wrap_socket(other)
            ways = {one: other, other: one}
            while ways:  # until both have ended: what one has said last still reaches the other
                for source in select.select(list(ways), (), ())[0]:
                    if not self._pass(source, ways[source]):
                        del ways[source]
        for sock in (one, other):
            sock.close()

    def _pass(self, source, target):
        """All that there is; whether there may be more."""
        data = b""
        with contextlib.suppress(OSError):
            data = source.recv(1 << 16)
            while getattr(source, "pending", int)():
                data += source.recv(1 << 16)
        self.seen += data
        with contextlib.suppress(OSError):
            if data:
                target.sendall(data)
            else:  # of the connection below: TLS would go on in plain text
                socket.socket.shutdown(target, socket.SHUT_WR)
        return bool(data)
