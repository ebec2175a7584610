"""A worker's end of the keeper: the connection, a line that outlives it, tiers read through it.

``Client`` is one connection. Requests wait for their answer; everything else is told to the owner
in the thread that reads. When the keeper is gone every request fails, and so does every later one.
``KeeperLine`` finds the keeper or starts it, and makes a new client when it has died.

A tier that only the keeper may touch is an object store: the library behind it runs threads of its
own that a forked child hangs on, and training processes fork (data loaders). So the keeper asks,
and hands the answer over (``Remote``).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from outlast.errors import OutlastError, StorageError
from outlast.keeper import wire
from outlast.keeper.memory import Arena, KeptSnapshot, MemoryTier, ReadOnlyTier
from outlast.keeper.process import (
    SOCKET_VARIABLE,
    Setup,
    Supervisor,
    TierWaits,
    connect,
    is_foreign,
)
from outlast.tiers import PEER

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S: Final = 120.0
RECALL_TIMEOUT_S: Final = 660.0
_LOOK_S: Final = 0.02


class Client:
    """A connection to the keeper.

    Args:
        path: its socket.
        hello: who we are.
        on_message: told what comes without having been asked for, in the reading thread.
        on_lost: told once that the keeper is gone, in the reading thread.
        timeout_s: how long a keeper that is not there yet is waited for.

    Raises:
        OSError: there is none.
    """

    def __init__(
        self,
        path: Path,
        hello: wire.Hello,
        on_message: Callable[[Any, bytes], None],
        on_lost: Callable[[], None] = lambda: None,
        timeout_s: float = 0.0,
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._wire = wire.KeeperSocket(_connect(path, timeout_s))
        try:
            self._wire.send(hello)
        except BaseException:
            self._wire.close()
            raise
        self._numbers = itertools.count(1)
        self._answered = threading.Condition()
        self._expected: set[Any] = set()
        self._answers: dict[Any, tuple[Any, bytes, list[int]]] = {}
        self._asking = {wire.Reserved: threading.Lock(), wire.Recalled: threading.Lock()}
        self.lost = False
        self._thread = threading.Thread(target=self._read, name="outlast-client", daemon=True)
        self._thread.start()

    def send(self, message: Any, blob: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        """Tell the keeper; ``fds`` stay the caller's.

        Raises:
            OSError: it is gone, or does not read: it counts as gone then.
        """
        try:
            self._wire.send(message, blob, fds)
        except OSError:  # perhaps in the middle of a message: nothing more would be understood
            self.lost = True
            self._wire.close()
            raise

    def reserve(
        self,
        num_bytes: int,
        buffers: int | None,
        workers: int,
        *,
        useful: int = 1,
        versions: int = 1,
        copies: int = 0,
    ) -> tuple[wire.Reserved, list[Arena]]:
        """Memory for snapshots.

        Raises:
            OSError: the keeper is gone, or does not answer.
        """
        ask = wire.Reserve(
            num_bytes=num_bytes,
            buffers=buffers,
            useful=useful,
            workers=workers,
            versions=versions,
            copies=copies,
        )
        answer, _, fds = self._ask_alone(ask, wire.Reserved, ANSWER_TIMEOUT_S)
        return answer, [Arena.seen(fd) for fd in fds]

    def recall(self) -> MemoryTier:
        """The snapshots in memory, as a tier.

        Raises:
            OSError: the keeper is gone, or does not answer.
        """
        answer, blob, fds = self._ask_alone(wire.Recall(), wire.Recalled, RECALL_TIMEOUT_S)
        arenas = dict(zip(answer.arenas, [Arena.seen(fd) for fd in fds], strict=True))
        small = msgspec.msgpack.decode(blob, type=dict[str, dict[str, bytes]])
        kept = {
            save: KeptSnapshot(files=files, small=small.get(save, {}))
            for save, files in answer.files.items()
        }
        return MemoryTier(arenas, kept, num_peers=answer.num_peers)

    def fetch(
        self,
        tier: str,
        operation: str,
        name: str,
        start: int = 0,
        size: int = 0,
        *,
        copy: int = 0,
    ) -> bytes:
        """An answer about a tier that only the keeper may touch.

        Raises:
            OSError: as the tier gave it, or the keeper is gone.
        """
        number = next(self._numbers)
        ask = wire.Fetch(
            number=number,
            tier=tier,
            operation=operation,
            name=name,
            start=start,
            size=size,
            copy=copy,
        )
        answer, blob, _ = self._ask(ask, number, ANSWER_TIMEOUT_S)
        if answer.error:
            raise OSError(answer.errno or None, answer.error, name)
        return blob

    def hear(self, timeout_s: float) -> None:
        """Wait for a word of the keeper's: one that is being killed lets others connect to it.

        Its descriptors are closed in no order that could be relied on, the listening one late.

        Raises:
            OSError: it is gone, or does not answer.
        """
        number = next(self._numbers)
        ask = wire.Fetch(number=number, tier="", operation="exists", name="")  # there is no such
        self._ask(ask, number, timeout_s)

    def close(self) -> None:
        """Leave on purpose."""
        with contextlib.suppress(OSError):
            self._wire.send(wire.Goodbye())
        self.leave()

    def leave(self) -> None:
        """Leave without a word, as a process that dies does."""
        self._on_lost = lambda: None
        self._wire.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def _ask_alone(self, message: Any, kind: Any, timeout_s: float) -> tuple[Any, bytes, list[int]]:
        """Ask what is answered without a number: one at a time, and a late answer is nobody's."""
        with self._asking[kind]:
            try:
                return self._ask(message, kind, timeout_s)
            except TimeoutError:
                self._wire.close()
                raise

    def _ask(self, message: Any, key: Any, timeout_s: float) -> tuple[Any, bytes, list[int]]:
        with self._answered:
            self._expected.add(key)
        try:
            self.send(message)
            with self._answered:
                self._answered.wait_for(lambda: key in self._answers or self.lost, timeout_s)
                if key in self._answers:
                    return self._answers.pop(key)
        finally:
            with self._answered:
                self._expected.discard(key)
        if self.lost:
            raise ConnectionResetError("the keeper is gone")
        raise TimeoutError(f"the keeper did not answer within {timeout_s:.0f} s")

    def _read(self) -> None:
        try:
            while (frame := self._wire.receive()) is not None:
                self._handle(*frame)
        except ValueError as error:
            logger.warning("the keeper said what is not understood: %s", error)
        finally:
            with self._answered:
                self.lost = True
                self._answered.notify_all()
            self._wire.close()
            self._wire.drop_descriptors()
            self._on_lost()

    def _handle(self, message: Any, blob: bytes, fds: list[int]) -> None:
        key: Any = None
        if isinstance(message, wire.Fetched):
            key = message.number
        elif isinstance(message, wire.Reserved | wire.Recalled):
            key = type(message)
        with self._answered:
            if key in self._expected:
                self._answers[key] = (message, blob, fds)
                self._answered.notify_all()
                return
        for fd in fds:
            os.close(fd)
        if key is None:
            self._on_message(message, blob)


def _connect(path: Path, timeout_s: float) -> Any:
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            return connect(path)
        except OSError:
            if time.monotonic() > until_s:
                raise
        time.sleep(_LOOK_S)


# --- tiers behind the keeper ----------------------------------------------------------------------


class Remote(ReadOnlyTier):
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
        return self.read_copy(0, name, buffer, offset)

    def read_copy(self, number: int, name: str, buffer: memoryview, offset: int) -> int:
        """``read_into``; of several machines that have the file, that of this number is first."""
        data = self._client.fetch(self._tier, "read_into", name, offset, len(buffer), copy=number)
        buffer[: len(data)] = data
        return len(data)

    def open(self, name: str) -> _RemoteReader:
        """Open ``name``."""
        kind = _RemoteCopiesReader if self._tier == PEER else _RemoteReader
        return kind(self, name, self.size(name))

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


class _RemoteCopiesReader(_RemoteReader):
    def read_copy(self, number: int, buffer: memoryview, offset: int) -> int:
        return self._remote.read_copy(number, self._name, buffer, offset)


# --- the line, made again -------------------------------------------------------------------------

CONNECT_TIMEOUT_S: Final = 30.0
GONE: Final = "the keeper is gone"


class KeeperLine:
    """The connection to this machine's keeper.

    Attributes:
        client: the keeper's other end, None while there is none.
        socket: where the keeper listens; its log lies beside it.

    Args:
        setup: the keeper's, where this worker has to start it.
        hello: who we are.
        on_message: told what the keeper says, in the thread that reads.
        on_lost: told that the keeper has died.
        on_back: told that there is one again.
        say: tells people what they must know.
    """

    def __init__(
        self,
        setup: Setup,
        hello: wire.Hello,
        *,
        on_message: Callable[[Any, bytes], None],
        on_lost: Callable[[], None],
        on_back: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self.client: Client | None = None
        self._setup = setup
        self.socket = Path(os.environ.get(SOCKET_VARIABLE) or setup.socket)
        self._hello = hello
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_back = on_back
        self._say = say
        self._changed = threading.Condition()
        self._supervisor: Supervisor | None = None
        self._starter: threading.Thread | None = None
        self._unusable: StorageError | None = None  # why no keeper can be started
        self._closing = False
        self._standing: dict[type[Any], tuple[Any, bytes, tuple[int, ...]]] = {}
        # Each client that is lost has a thread make a new one; two new ones would be one too many,
        # which nobody closes and for which the keeper would stay.
        self._reconnecting = threading.Lock()
        self._tried: Client | None = None  # it has yet to say a word
        self._is_settled = False

    # --- beginning and end ----------------------------------------------------------------------

    def start(self) -> None:
        """Find the keeper; where there is none, begin to start it.

        One that runs already may have snapshots in memory; a new one has none, so that it can get
        ready while the state is read from elsewhere. ``wait_until_ready`` waits for it.

        Raises:
            StorageError: the agent's keeper is of another version.
        """
        if is_foreign(self.socket):
            raise StorageError(
                "outlast was upgraded while the job ran: this worker and the agent's keeper do "
                "not understand each other; start the same command again"
            )
        try:
            self._connect(0.0)
        except OSError:
            self._starter = threading.Thread(target=self._start, name="outlast-start", daemon=True)
            self._starter.start()
        else:
            self._supervise()

    def wait_until_ready(self, *, needed: bool = False) -> None:
        """Wait until the keeper is there; training goes on where only it does not come.

        Args:
            needed: nothing can be read without it.

        Raises:
            StorageError: it cannot be started, and no other one could; or it is needed.
        """
        if self._starter is not None:
            self._starter.join(2 * CONNECT_TIMEOUT_S)
        if self._unusable is not None:
            raise self._unusable
        if self.client is None and needed:
            raise StorageError("there is no keeper to read checkpoints with: it does not answer")
        if self.client is None:
            self._say("the keeper is not there yet; nothing is saved until it is")
            threading.Thread(target=self._reconnect, name="outlast-reconnect", daemon=True).start()

    def close(self, *, clean: bool, copying_s: float | None) -> None:
        """Leave; unless it is ``clean`` the keeper stays for the next attempt.

        Args:
            clean: whether the job, or this run of it, is over.
            copying_s: how long slower tiers may take to get what is due there.
        """
        self._closing = True
        if self._starter is not None:
            self._starter.join(CONNECT_TIMEOUT_S)
        client, self.client = self.client, None
        if client is not None:
            client.close() if clean else client.leave()
        if (tried := self._tried) is not None:
            tried.leave()
        if self._supervisor is None:
            return
        try:
            if clean:
                self._supervisor.close(copying_s)
        finally:  # this process may go on, as a notebook's does, and begin another session
            self._supervisor.leave()

    # --- while it lasts -------------------------------------------------------------------------

    def memory(self) -> MemoryTier | None:
        """The snapshots in this machine's memory, or None if the keeper cannot say.

        It says so once nothing of earlier attempts is in flight any more that is worth a wait.
        """
        self._is_settled = True
        try:
            return self.client.recall() if self.client else None
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            logger.warning("snapshots in memory cannot be read: %s", error)
            return None

    def settle(self) -> None:
        """Wait for saves of earlier attempts, where nobody has: their memory can be had then."""
        if not self._is_settled:
            self.memory()

    def reject(self, saves: tuple[str, ...]) -> None:
        """Tell the keeper which saves a resume found not to be valid."""
        if saves:
            self.send_quietly(wire.Rejected(saves=saves))

    def judge(self, judged: wire.Judged) -> None:
        """Tell the keeper, and whichever takes its place, what is known of the checkpoints."""
        self.tell_all(judged)

    def tell_all(self, message: Any, blob: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        """Tell the keeper, and whichever takes its place; the last one of a kind counts.

        ``fds`` stay the caller's, open for as long as this line.
        """
        with self._changed:
            self._standing[type(message)] = (message, blob, fds)
        client = self.client
        if client is not None:
            with contextlib.suppress(OSError):  # its successor is told
                client.send(message, blob, fds)

    def send(self, message: Any, blob: bytes = b"") -> None:
        """Tell the keeper.

        Raises:
            OSError: it is gone.
        """
        client = self.client
        if client is None:
            raise ConnectionResetError(GONE)
        client.send(message, blob)

    def send_quietly(self, message: Any, blob: bytes = b"") -> None:
        """Tell the keeper, if there is one; if not, whoever reads hears of it too."""
        try:
            self.send(message, blob)
        except OSError as error:
            logger.debug("not sent: %s", error)

    @property
    def is_gone(self) -> bool:
        """Whether there is no keeper, as far as this moment knows."""
        client = self.client
        return client is None or client.lost

    def wait_for_keeper(self, timeout_s: float) -> bool:
        """Wait until a keeper that has died is there again, but no longer than it may take.

        Returns:
            Whether it is.
        """
        with self._changed:
            limit_s = min(timeout_s, CONNECT_TIMEOUT_S)
            return self._changed.wait_for(lambda: not self.is_gone, limit_s)

    # --- inside ---------------------------------------------------------------------------------

    def _start(self) -> None:
        try:
            self._supervise()
            self._connect(CONNECT_TIMEOUT_S)
        except OutlastError as error:
            self._unusable = StorageError(f"there is no keeper to save checkpoints with: {error}")
        except OSError as error:
            logger.warning("%s", error)

    def _supervise(self) -> None:
        """Without an agent the first worker of a machine sees to the keeper."""
        if SOCKET_VARIABLE not in os.environ and int(os.environ.get("LOCAL_RANK", "0")) == 0:
            self._supervisor = Supervisor(self._setup, TierWaits(self._say).tell)
            self._supervisor.start()

    def _connect(self, timeout_s: float, *, again: bool = False) -> None:
        client = self._tried = Client(
            self.socket, self._hello, self._on_message, self._lost, timeout_s=timeout_s
        )
        try:
            if again and not self._closing:
                client.hear(CONNECT_TIMEOUT_S)
            with self._changed:
                self.client = client
                standing = list(self._standing.values())
        except OSError:
            client.leave()
            raise
        finally:
            self._tried = None
        if self._closing:
            client.leave()
            return
        for item in standing:
            with contextlib.suppress(OSError):  # whoever reads hears of it too
                client.send(*item)

    def _lost(self) -> None:
        if self._closing:
            return
        with self._changed:
            if self.is_gone:  # or its successor is there already
                self.client = None
        self._on_lost()
        threading.Thread(target=self._reconnect, name="outlast-reconnect", daemon=True).start()

    def _reconnect(self) -> None:
        said = False
        with self._reconnecting:
            while not self._closing and self.is_gone:
                try:
                    self._connect(CONNECT_TIMEOUT_S, again=True)
                except (ConnectionResetError, BrokenPipeError):  # it was on its way out
                    time.sleep(_LOOK_S)
                except OSError as error:
                    if not said and not self._closing:
                        self._say(f"{GONE} ({error}); nothing is saved until it is back")
                    said = True
        client = self.client
        if self._closing and client is not None:
            client.close()
        with self._changed:
            self._changed.notify_all()
        self._on_back()
