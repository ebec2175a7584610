"""All connections of an agent in one thread: sealed messages in and out, and who has gone silent.

Callbacks run in the hub's thread, so that what they change needs no lock; ``call`` brings a
function there from another thread. Whoever connects proves the job's key before anything it says is
decoded; strangers are few at a time and have little time.

A machine that dies is noticed by its kernel's reset in milliseconds, one that is cut off by the
missing acknowledgements of its kernel (see :mod:`outlast.policy.succession`). A process that hangs
while its kernel answers sends nothing: that is judged in the same way, with a limit ten times as
long, and ends no connection by itself.

The coordinator holds a descriptor for each machine, and its stores hold some for each worker. Most
systems begin with a limit of 1024 that any process may raise, to half a million as a rule. It
is raised as far as the job may need it and no further: workers inherit it, and what uses select()
cannot have a descriptor above 1024.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import ipaddress
import itertools
import logging
import os
import resource
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Final

from outlast.errors import ConfigError, SealError
from outlast.peer.key import Piped, Tls
from outlast.peer.seal import Handshake, Sealer, Unsealer
from outlast.policy.succession import Silence

SPARE: Final = 512  # for all else that an agent opens
OF_MACHINE: Final = 2  # its connection, and one for its agent at the store
OF_WORKER: Final = 2  # at the store


def wanted_for(machines: int, workers: int) -> int:
    """How many a coordinator of so many machines may have open, with so many workers on each."""
    return machines * (OF_MACHINE + OF_WORKER * workers) + SPARE


def make_room(wanted: int | None = None) -> bool:
    """Raise this process's limit to what is wanted, None: as far as it goes; whether that was more.

    It is never lowered.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return False
    most = hard if hard != resource.RLIM_INFINITY else 1 << 20
    limit = most if wanted is None else min(wanted, most)
    if limit <= soft:
        return False
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        return True
    return False


def lack(machines: int, workers: int) -> str:
    """What is wrong with this process's limit for such a job, in words; "" for nothing.

    The limit is raised first.
    """
    wanted = wanted_for(machines, workers)
    make_room(wanted)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return ""
    return (
        f"one that coordinates {machines} machines opens up to {wanted:,} files, and here {soft:,} "
        "are allowed: raise it (ulimit -Hn), or more machines than fit will wait"
    )


logger = logging.getLogger(__name__)

PINGS: Final = 8  # in the time of the limit
PURPOSE: Final = "membership"
HUNG: Final = 10.0  # times the limit of a kernel's silence: a process that hangs
HUNG_S: Final = 10.0  # and at least so long
PROCESS_RECENT: Final = 32  # delays that it is judged by, one in the time of a kernel's limit
HANDSHAKE_S: Final = 5.0
DIAL_S: Final = 2.0
DIALS_PER_S: Final = 1000.0  # that a busy machine takes at least
STRANGERS_MAX: Final = 256
QUIET_S: Final = 0.25  # for a stranger that says nothing while others want its place
FULL_S: Final = 0.02  # before the next look whether strangers have become fewer
FULL_AGAIN_S: Final = 60.0  # between two warnings that there are no descriptors
PINGS_PER_S: Final = 10_000
UNSENT_MAX: Final = 8 << 20
UNREAD_MAX: Final = 1 << 20
HANGS: Final = "takes the connection and does not answer"
REFUSED: Final = f"cannot be reached: {os.strerror(errno.ECONNREFUSED)}"
PARTS: Final = b"\0"  # the last word on a connection whose process goes on
_LAST_ACK: Final = 56  # offset of tcpi_last_ack_recv, milliseconds, in Linux's struct tcp_info


class Peer:
    """One connection of the hub, to another machine's agent.

    Attributes:
        address: of the other end, host:port, for people.
        on_message: told each message, as bytes.
        on_closed: told once why it is over, and whether the other process is known to have ended.
        on_open: told when a connection that we asked for is there.
        on_hung: told that the other process hangs, though its kernel answers; and when it moves.
        heard_s: when something came last, on the monotonic clock.
    """

    def __init__(self, hub: Hub, sock: socket.socket, address: str, *, connects: bool) -> None:
        self.address = address
        self.on_message: Callable[[bytes], None] = lambda _: None
        self.on_closed: Callable[[str, bool], None] = lambda *_: None
        self.on_open: Callable[[Peer], None] = lambda _: None
        self.on_hung: Callable[[bool], None] = lambda _: None
        self.connects = connects
        self.is_connected = not connects
        self.is_closed = self.parts = False
        self.sock = sock
        self.silence = Silence(hub.silence_s)
        self.process = Silence(hub.hung_s, recent=PROCESS_RECENT)
        self.is_hung = False
        self.heard_s = time.monotonic()
        self.handshake = Handshake(hub.key, PURPOSE, connects=connects)
        self.ends: tuple[Sealer, Unsealer] | None = None
        self.tls: Piped | None = None
        self.unsent = bytearray()
        self._hub = hub

    def send(self, message: bytes) -> None:
        """Send a message; nothing happens when the connection is over."""
        if self.ends is not None and not self.is_closed:
            self._hub.write(self, b"".join(bytes(part) for part in self.ends[0].seal(message)))

    def ping(self) -> None:
        """Send what only has to be acknowledged."""
        if self.ends is not None and not self.is_closed:
            self.silence.asked(time.monotonic())
            self._hub.write(self, b"".join(bytes(part) for part in self.ends[0].seal()))

    def close(self) -> None:
        """End it, without a callback; what was sent before still goes out if it can at once."""
        self._hub.drop(self)

    def part(self) -> None:
        """End it as ``close`` does, and let the other end know that no process has ended."""
        self.send(PARTS)
        with contextlib.suppress(OSError):  # for what nobody has read the kernel sends a reset
            self.sock.recv(UNREAD_MAX)
        self.close()


class Hub:
    """All connections of an agent, in one thread.

    Args:
        key: the job's.
        host: the address to listen on, a number.
        silence_s: how long a machine may be silent on a network that answers at once.
        on_failed: told the exception that ended the thread, if one does.
        tls: wrap all connections.

    Raises:
        ConfigError: its files cannot be used.
        OSError: the address cannot be listened on.
    """

    def __init__(
        self,
        key: bytes,
        host: str,
        silence_s: float,
        on_failed: Callable[[Exception], None],
        *,
        tls: Tls | None = None,
    ) -> None:
        self.silence_s = silence_s
        self.hung_s = max(HUNG * silence_s, HUNG_S)
        # Told of each proven connection that came to us.
        self.on_accepted: Callable[[Peer], None] = lambda peer: peer.close()
        self.key = key
        self._on_failed = on_failed
        self._tls = tls
        if tls is not None:
            tls.client()  # what cannot be used is said now
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=4096)
        self._listener.setblocking(False)
        name = f"[{host}]" if ":" in host else host
        self.address = f"{name}:{self._listener.getsockname()[1]}"
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._waker_fd: int | None
        self._wake_fd, self._waker_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._peers: set[Peer] = set()
        # Of them: came to us, and have proven nothing yet; the one that came first is first.
        self._strangers: dict[Peer, None] = {}
        self._is_accepting = True
        self._full_said_s = -FULL_AGAIN_S
        self._calls: list[Callable[[], None]] = []
        self._calls_lock = threading.Lock()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._beats = 0
        self._judged_s = time.monotonic()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="outlast-membership", daemon=True)

    def start(self) -> None:
        """Begin."""
        self.later(self.silence_s / PINGS, self._beat)
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread and all connections; from another thread."""
        self.call(self._finish)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def call(self, function: Callable[[], None]) -> None:
        """Run ``function`` in the hub's thread soon; from any thread."""
        with self._calls_lock:
            self._calls.append(function)
            if self._waker_fd is not None:  # its number may be another file's by then
                with contextlib.suppress(BlockingIOError):  # full: it is awake already
                    os.write(self._waker_fd, b"\0")

    def later(self, delay_s: float, function: Callable[[], None]) -> None:
        """Run ``function`` after ``delay_s``; in the hub's thread, or before it starts."""
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._numbers), function))

    def dial(self, address: str, *, rush: int = 0) -> Peer:
        """Begin to connect to ``address``; set the callbacks of what is returned at once.

        ``rush``: so many others may connect to it just now, which takes it time.
        """
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        sock.setblocking(False)
        peer = Peer(self, sock, address, connects=True)
        self._peers.add(peer)
        try:
            ipaddress.ip_address(
                host
            )  # a name would be looked up, here, by all that run in the hub
            problem = sock.connect_ex((host, int(port)))
        except (OSError, ValueError, OverflowError):
            self.later(0.0, lambda: self._lose(peer, "has no usable address", certain=False))
            return peer
        if problem not in (0, errno.EINPROGRESS):
            self.later(0.0, lambda: self._refused(peer, problem))
            return peer
        self._selector.register(sock, selectors.EVENT_WRITE, peer)
        limit_s = max(DIAL_S, self.silence_s) + rush / DIALS_PER_S
        self.later(limit_s, lambda: self._give_up(peer))
        return peer

    # --- used by Peer --------------------------------------------------------------------------

    def write(self, peer: Peer, data: bytes) -> None:
        """Send bytes, now as far as they go."""
        if peer.is_closed:
            return
        try:
            peer.unsent += data if peer.tls is None else peer.tls.sent(data)
        except SealError as error:
            self._lose_soon(peer, f"was refused: {error}", certain=False)
            return
        self._flush(peer)
        if len(peer.unsent) > UNSENT_MAX:
            self._lose_soon(peer, "does not read what it is sent", certain=False)

    def drop(self, peer: Peer) -> None:
        """Close a connection."""
        if peer.is_closed:
            return
        peer.is_closed = True
        self._peers.discard(peer)
        self._strangers.pop(peer, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.sock)
        peer.sock.close()

    # --- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_over:
                self._turn()
        except Exception as error:
            logger.exception("membership failed")
            self._on_failed(error)
        finally:
            for peer in list(self._peers):
                self.drop(peer)
            self._listener.close()
            self._selector.close()
            with self._calls_lock:
                waker_fd, self._waker_fd = self._waker_fd, None
            if waker_fd is not None:
                os.close(waker_fd)
            os.close(self._wake_fd)

    def _turn(self) -> None:
        wait_s = None
        if self._timers:
            wait_s = max(self._timers[0][0] - time.monotonic(), 0.0)
        for key, events in self._selector.select(wait_s):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_fd, 4096)
            elif not key.data.is_closed:
                self._serve(key.data, events)
        with self._calls_lock:
            calls, self._calls = self._calls, []
        for call in calls:
            call()
        now_s = time.monotonic()
        while self._timers and self._timers[0][0] <= now_s and not self._is_over:
            heapq.heappop(self._timers)[2]()

    def _finish(self) -> None:
        self._is_over = True

    def _accept(self) -> None:
        while self._is_accepting:
            try:
                sock, where = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno == errno.EMFILE and make_room():
                    continue
                self._cannot_take(error)
                return
            sock.setblocking(False)
            peer = Peer(self, sock, f"{where[0]}:{where[1]}", connects=False)
            self._peers.add(peer)
            self._strangers[peer] = None
            if len(self._strangers) >= STRANGERS_MAX and not self._make_room():
                self._accept_later()  # a closed door would be taken for a dead machine
            self._selector.register(sock, selectors.EVENT_READ, peer)
            self._greet(peer)
            self.later(HANDSHAKE_S, lambda one=peer: self._give_up(one))  # type: ignore[misc]

    def _cannot_take(self, error: OSError) -> None:
        """No more descriptors: those who wait may come later."""
        now_s = time.monotonic()
        if now_s >= self._full_said_s + FULL_AGAIN_S:
            self._full_said_s = now_s
            logger.warning("machines wait, connections cannot be taken: %s", error.strerror)
        self._accept_later()

    def _accept_later(self) -> None:
        if self._is_accepting:
            self._is_accepting = False
            self._selector.unregister(self._listener)
            self.later(FULL_S, self._accept_again)

    def _accept_again(self) -> None:
        if len(self._strangers) >= STRANGERS_MAX and not self._make_room():
            self.later(FULL_S, self._accept_again)
        elif not self._is_accepting:
            self._is_accepting = True
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _make_room(self) -> bool:
        """Whether one that says nothing had to give its place to the next.

        Who wants to come in says so at once: one whose words lie here unread is not silent.
        """
        latest_s = time.monotonic() - QUIET_S
        for peer in self._strangers:
            if peer.heard_s < latest_s and not _has_said(peer.sock):
                self._lose(peer, "said nothing while others wanted to come in", certain=False)
                return True
        return False

    def _serve(self, peer: Peer, events: int) -> None:
        if not peer.is_connected:
            problem = peer.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if problem:
                self._refused(peer, problem)
                return
            self._begin(peer)
            return
        if events & selectors.EVENT_WRITE:
            self._flush(peer)
        if events & selectors.EVENT_READ and not peer.is_closed:
            self._read(peer)

    def _begin(self, peer: Peer) -> None:
        peer.is_connected = True
        self._selector.modify(peer.sock, selectors.EVENT_READ, peer)
        self._greet(peer)

    def _greet(self, peer: Peer) -> None:
        peer.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            try:
                peer.tls = Piped(self._tls, connects=peer.connects)
            except ConfigError as error:  # the files have changed since the job began
                logger.warning("%s", error)
                self._lose_soon(peer, "cannot be spoken to without TLS", certain=False)
                return
        self.write(peer, peer.handshake.hello)

    def _flush(self, peer: Peer) -> None:
        if not peer.is_connected or peer.is_closed:
            return
        try:
            while peer.unsent:
                sent = peer.sock.send(peer.unsent)
                del peer.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose_soon(peer, _in_words(error), certain=_has_ended(error))
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        self._selector.modify(peer.sock, events, peer)

    def _read(self, peer: Peer) -> None:
        wanted = 1 << 16
        if peer.ends is None and peer.tls is None:
            wanted = peer.handshake.wanted_bytes
        try:
            data = peer.sock.recv(wanted)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(peer, _in_words(error), certain=_has_ended(error))
            return
        if not data and peer.parts:
            self._lose(peer, "has broken off the connection", certain=False)
            return
        if not data:
            self._lose(peer, "has ended", certain=True)
            return
        peer.heard_s = time.monotonic()
        if peer.is_hung:
            peer.is_hung = False
            peer.on_hung(False)
        try:
            if peer.tls is not None:
                data, answer = peer.tls.came(data)
                peer.handshake.below = peer.tls.below
                peer.unsent += answer
                self._flush(peer)
            self._take(peer, data)
        except (SealError, ValueError) as error:
            logger.warning("%s was refused: %s", peer.address, error)
            self._lose(peer, f"was refused: {error}", certain=False)

    def _take(self, peer: Peer, data: bytes) -> None:
        if peer.ends is None:
            data = self._take_proof(peer, data)
        if peer.ends is None or not data:
            return
        for message in peer.ends[1].feed(data):
            if message == PARTS:
                peer.parts = True
            elif message and not peer.is_closed:
                peer.on_message(message)

    def _take_proof(self, peer: Peer, data: bytes) -> bytes:
        """What comes before the first message; returns what comes behind it."""
        handshake = peer.handshake
        was_met = handshake.is_met
        rest = handshake.feed(data)
        if handshake.is_met and not was_met:
            self.write(peer, handshake.proof())
        if handshake.is_proven and not peer.is_closed:
            peer.ends = handshake.ends()
            self._strangers.pop(peer, None)
            (peer.on_open if peer.connects else self.on_accepted)(peer)
        return rest

    def _give_up(self, peer: Peer) -> None:
        if not peer.is_closed and peer.ends is None:
            why = HANGS if peer.is_connected else "does not answer"
            self._lose(peer, why, certain=False)

    def _refused(self, peer: Peer, problem: int) -> None:
        self._lose(peer, f"cannot be reached: {os.strerror(problem)}", certain=False)

    def _lose_soon(self, peer: Peer, why: str, *, certain: bool) -> None:
        """Not now: whoever sends to many has not told them all yet, and would be called back."""
        self.later(0.0, lambda: self._lose(peer, why, certain=certain))

    def _lose(self, peer: Peer, why: str, *, certain: bool) -> None:
        if peer.is_closed:
            return
        if certain:
            peer.close()
        else:  # it may hear us still
            peer.part()
        peer.on_closed(why, certain)

    def _beat(self) -> None:
        """Ask every connection for a sign of life, and judge those that gave none."""
        self._beats += 1
        judges = self._beats % PINGS == 0
        began_s = time.monotonic()
        usual_s = PINGS * self._beat_wait_s()
        was_held_up = began_s - self._judged_s > max(self.hung_s / 4, 2 * usual_s)
        if judges:
            self._judged_s = began_s
        for peer in list(self._peers):
            if peer.ends is None or peer.is_closed:
                continue
            now_s = time.monotonic()
            peer.silence.seen(now_s - _since_last_ack_s(peer.sock))
            if peer.silence.is_lost(now_s):
                self._lose(peer, f"has been silent for {peer.silence.limit_s:.1f} s", certain=False)
            else:
                peer.ping()
                if judges:
                    self._judge_process(peer, now_s, was_held_up=was_held_up)
        self.later(self._beat_wait_s(), self._beat)

    def _beat_wait_s(self) -> float:
        # Ten thousand machines are asked less often: to ask them must not be all that we do.
        wait_s = max(self.silence_s / PINGS, len(self._peers) / PINGS_PER_S)
        return min(wait_s, self.silence_s / 2)

    @staticmethod
    def _judge_process(peer: Peer, now_s: float, *, was_held_up: bool) -> None:
        """Its pings have to come as ours have to be acknowledged."""
        if was_held_up:  # it is we who hung
            peer.process.excuse()
        peer.process.seen(peer.heard_s)
        peer.process.asked(now_s)
        if peer.process.is_lost(now_s) and not (peer.is_hung or peer.is_closed):
            peer.is_hung = True
            peer.on_hung(True)


def _has_said(sock: socket.socket) -> bool:
    """Whether something came that was not read yet."""
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


def _since_last_ack_s(sock: socket.socket) -> float:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK + 4)
    return float(struct.unpack_from("=I", info, _LAST_ACK)[0]) / 1000


def _has_ended(error: OSError) -> bool:
    return isinstance(error, ConnectionResetError | BrokenPipeError)


def _in_words(error: OSError) -> str:
    return "has ended" if _has_ended(error) else f"cannot be reached: {error.strerror or error}"
