"""Messages and keys between the workers (and agents) of one attempt.

Two things travel: small values under a key that is set once (``publish``, ``fetch``), and messages
to one rank's inbox, in the order they were sent (``send``, ``receive``). Both go over a TCPStore of
torch's: the attempt's own one, which the agent makes afresh each time, or without our agent one
that rank 0 opens. A thread that waits is blocked inside torch without the interpreter's lock, so
an idle link costs the training loop nothing.

Rejected: polling a key at each step (70 µs a step, and late); a collective (on the step's path).
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from datetime import timedelta
from typing import Any, Final, Protocol

import msgspec
import torch
import torch.distributed as dist

from outlast.attempt.nameless import nameless
from outlast.checkpoint import devices
from outlast.errors import ConfigError

STORE_VARIABLE: Final = "OUTLAST_STORE"  # host:port of the attempt's store, set by our agent
ATTEMPT_VARIABLE: Final = "OUTLAST_ATTEMPT"  # number of the attempt, set by our agent
PREFIX: Final = "outlast"
DATA_KEY: Final = "data"  # rank 0's session says whether its data go with any number of workers
TIED: Final = b"tied"
FREE: Final = b"free"
_WAIT: Final = timedelta(hours=1)
_SHORT: Final = timedelta(minutes=5)
Message = dict[str, Any]


class Link(Protocol):
    """How a rank reaches the others."""

    rank: int
    world_size: int
    host: str  # where the others are reached from here

    def publish(self, key: str, value: bytes) -> None:
        """Set ``key`` for all ranks."""

    def fetch(self, key: str, timeout_s: float) -> bytes:
        """Wait for ``key``; TimeoutError when it does not come."""

    def send(self, rank: int, message: Message) -> None:
        """Put ``message`` into the inbox of ``rank``."""

    def receive(self) -> Message | None:
        """The next message for this rank, waited for; None once the link is gone."""

    def close(self) -> None:
        """Wake the receiver with None."""

    def let_go(self) -> None:
        """Nothing is asked any more."""


class LocalLink:
    """A link of one rank to itself."""

    rank = 0
    world_size = 1
    host = "127.0.0.1"

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()

    def publish(self, key: str, value: bytes) -> None:
        """Set ``key``."""
        self._values[key] = value

    def fetch(self, key: str, timeout_s: float) -> bytes:
        """The value of ``key``; nobody else could set it later."""
        if key not in self._values:
            raise TimeoutError(f"{key} was never published")
        return self._values[key]

    def send(self, rank: int, message: Message) -> None:
        """Put ``message`` into the only inbox."""
        self._inbox.put(message)

    def receive(self) -> Message | None:
        """The next message."""
        return self._inbox.get()

    def close(self) -> None:
        """Wake the receiver."""
        self._inbox.put(None)

    def let_go(self) -> None:
        """Nothing is held."""


class StoreLink:
    """A link over a TCPStore; ``prefix`` keeps attempts apart that share a store."""

    def __init__(self, host: str, port: int, rank: int, world_size: int, prefix: str = PREFIX):
        self.rank = rank
        self.world_size = world_size
        self.host = host
        self._prefix = prefix
        # Each client serialises its calls, so whoever waits long has one of its own.
        self._for_inbox = connect(host, port, _WAIT)
        self._for_fetch = connect(host, port, _WAIT)
        self._for_sending = connect(host, port, _SHORT)
        self._closed = threading.Event()

    def publish(self, key: str, value: bytes) -> None:
        """Set ``key`` for all ranks; OSError when the store is gone."""
        self._translate(lambda: self._for_sending.set(f"{self._prefix}/{key}", value))

    def fetch(self, key: str, timeout_s: float) -> bytes:
        """Wait for ``key``; TimeoutError when it does not come, OSError when the store is gone."""
        name = f"{self._prefix}/{key}"

        def wait() -> bytes:
            self._for_fetch.wait([name], timedelta(seconds=max(timeout_s, 0.01)))
            return bytes(self._for_fetch.get(name))

        value: bytes = self._translate(wait)
        return value

    def send(self, rank: int, message: Message) -> None:
        """Put ``message`` into the inbox of ``rank``."""
        post(self._for_sending, rank, message, self._prefix)

    def receive(self) -> Message | None:
        """The next message for this rank; None when the link was closed or the store is gone."""
        inbox = self._for_inbox
        while not self._closed.is_set():
            try:
                raw = inbox.queue_pop(_inbox(self.rank, self._prefix))
            except dist.DistStoreError:
                continue  # an hour without a message
            except RuntimeError:
                return None
            message: Message = msgspec.json.decode(raw)
            if message.get("kind") != "closed":
                return message
        return None

    def close(self) -> None:
        """Wake the receiver by a message to oneself."""
        self._closed.set()
        with contextlib.suppress(RuntimeError):  # the store is gone, and the receiver with it
            self.send(self.rank, {"kind": "closed"})

    def let_go(self) -> None:
        """Nothing is asked any more: connections end with who still uses them."""
        self._for_inbox = self._for_fetch = self._for_sending = _Closed()

    @staticmethod
    def _translate(call: Any) -> Any:
        try:
            return call()
        except dist.DistStoreError as error:
            raise TimeoutError(str(error).partition("\n")[0]) from None
        except RuntimeError as error:
            raise ConnectionError(str(error).partition("\n")[0]) from None


class _Closed:
    """In the place of a store that is connected to no more."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("connection closed: this link was")


def connect(host: str, port: int, timeout: timedelta) -> Any:
    """A client of the store at ``host:port``."""
    with nameless(host):
        return dist.TCPStore(host, port, is_master=False, timeout=timeout)


def post(store: Any, rank: int, message: Message, prefix: str = PREFIX) -> None:
    """Put ``message`` into the inbox of ``rank`` through ``store``."""
    store.queue_push(_inbox(rank, prefix), msgspec.json.encode(message))


def kept_key(machine: int) -> str:
    """Where the agent of a machine says, in the attempt's store, how many workers go on."""
    return f"{PREFIX}/kept/{machine}"


def _inbox(rank: int, prefix: str) -> str:
    return f"{prefix}/inbox/{rank}"


def open_link() -> Link:
    """The link of this process, from its surroundings.

    Raises:
        ConfigError: there are several workers and no way to reach them yet, or this is their
            second session in one attempt.
    """
    grouped = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if grouped else int(os.environ.get("RANK", "0"))
    world_size = dist.get_world_size() if grouped else int(os.environ.get("WORLD_SIZE", "1"))
    address = os.environ.get(STORE_VARIABLE)
    if address:
        if world_size > 1 and address in _opened:
            raise ConfigError(
                "a second session in one run of a script, on several workers: the words of the "
                "first are still there; name everything in one session, or run another script"
            )
        _opened.add(address)
        host, _, port = address.rpartition(":")
        return StoreLink(host, int(port), rank, world_size)
    if world_size == 1:
        return LocalLink()
    if not grouped:
        raise ConfigError(
            f"WORLD_SIZE is {world_size} and the process group is not there yet; call "
            "torch.distributed.init_process_group() before outlast.session()"
        )
    return _link_of_group(rank, world_size)


def _link_of_group(rank: int, world_size: int) -> Link:
    """Without our agent: rank 0 opens a store and tells its address through the process group."""
    global _server
    local = os.environ.get("LOCAL_WORLD_SIZE", str(world_size)) == str(world_size)
    address = torch.zeros(256, dtype=torch.uint8)
    if rank == 0:
        host = "127.0.0.1" if local else socket.getfqdn()
        _server, port = open_store("127.0.0.1" if local else "0.0.0.0")  # noqa: S104
        text = f"{host}:{port}".encode()
        address[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    address = address.to(device_of_group())
    dist.broadcast(address, src=0)
    host, _, number = bytes(address.cpu().tolist()).rstrip(b"\0").decode().rpartition(":")
    return StoreLink(host, int(number), rank, world_size)


def device_of_group() -> torch.device:
    """Where the process group takes tensors: in this memory, or else on the rank's device."""
    group: Any = dist.group.WORLD
    kinds = [torch.device(kind).type for kind in group._device_types]
    if "cpu" in kinds:
        return torch.device("cpu")
    if group.bound_device_id is not None:
        return torch.device(group.bound_device_id)
    return torch.device(kinds[0], devices.own() if kinds[0] == "cuda" else None)


_opened: set[str] = set()  # stores of attempts that this process had a session in
_server: Any = None  # the store that rank 0 serves lives as long as the process


def open_store(host: str) -> tuple[Any, int]:
    """Serve a fresh store on a free port of ``host``, an address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    with nameless(host):
        store = dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return store, port
