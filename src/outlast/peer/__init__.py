"""How processes of one job on several machines recognise each other, talk, and decide who is first.

``key``      the job's key, which its storage hands out; TLS below the seal
``seal``     the handshake and sealed frames, as bytes in and bytes out
``channel``  a sealed connection over TCP, for threads that block
``claims``   an attempt's number, claimed on the job's storage: needs no connection and no key

Guarantees: whoever speaks on a sealed connection has the job's key, which the job's own storage
hands out to those who may read it; nothing that was altered, replayed, reordered, cut or meant for
another purpose is ever handed on, and a stranger makes this process hold a few hundred bytes, for
as long as the handshake's time-out, and nothing else. What is sent can be read on its way unless
TLS is set: the seal authenticates, it does not hide. Of two processes that claim one number, one at
most has it.

What can go wrong: a :class:`~outlast.errors.SealError` ends the connection, and is logged once with
the other side's address; OSError is the network. There is no way to go on after either.

Rejected: TLS alone (certificates would have to be made and handed out before a first job runs;
the key needs nothing but the storage that the job has); torch's stores (they neither know who
speaks nor notice a changed byte); sealing with a cipher that hides (the standard library has none,
and a wheel of OpenSSL bindings is no thing to depend on for an option that TLS covers).
"""

from __future__ import annotations

from outlast.peer.channel import Channel, accept, connect, listen
from outlast.peer.key import KEY_NAME, Tls, job_key
from outlast.peer.seal import Handshake, Sealer, Unsealer

__all__ = [
    "KEY_NAME",
    "Channel",
    "Handshake",
    "Sealer",
    "Tls",
    "Unsealer",
    "accept",
    "connect",
    "job_key",
    "listen",
]
