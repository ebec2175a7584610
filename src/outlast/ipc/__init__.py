"""Messages and file descriptors between the processes of one machine."""

from outlast.ipc.sockets import (
    Codec,
    FrameSocket,
    Message,
    PacketSocket,
    ReceivedFrame,
    peer_credentials,
    readable,
)

__all__ = [
    "Codec",
    "FrameSocket",
    "Message",
    "PacketSocket",
    "ReceivedFrame",
    "peer_credentials",
    "readable",
]
