"""A worker's line to the keeper: found or started, and made again when the keeper has died."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from outlast.errors import OutlastError, StorageError
from outlast.keeper import wire
from outlast.keeper.client import Client
from outlast.keeper.memory import MemoryTier
from outlast.keeper.process import SOCKET_VARIABLE, Setup, Supervisor, TierWaits, is_foreign

logger = logging.getLogger(__name__)

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

    def wait_for_keeper(self, timeout_s: float) -> None:
        """Wait until a keeper that has died is there again, but no longer than it may take."""
        with self._changed:
            limit_s = min(timeout_s, CONNECT_TIMEOUT_S)
            self._changed.wait_for(lambda: self.client is not None, limit_s)

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

    def _connect(self, timeout_s: float) -> None:
        self.client = Client(
            self.socket, self._hello, self._on_message, self._lost, timeout_s=timeout_s
        )
        if self._closing:
            self.client.leave()
            return
        with self._changed:
            standing = list(self._standing.values())
        for item in standing:
            with contextlib.suppress(OSError):  # whoever reads hears of it too
                self.client.send(*item)

    def _lost(self) -> None:
        if self._closing:
            return
        self.client = None
        self._on_lost()
        threading.Thread(target=self._reconnect, name="outlast-reconnect", daemon=True).start()

    def _reconnect(self) -> None:
        said = False
        while not self._closing and (self.client is None or self.client.lost):
            try:
                self._connect(CONNECT_TIMEOUT_S)
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
