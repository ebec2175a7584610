"""What this machine's keeper has to do with those of other machines, put together.

Copies of this machine's newest snapshot go to others (``replicate``), those of others are kept here
(``reception``, ``guests``), and at a resume everybody's memory can be read (``neighbours``). None
of it begins before a supervisor has handed over the job's key and a listening socket.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from outlast.checkpoint.manifest import FULL, decode
from outlast.checkpoint.names import SaveName, named
from outlast.errors import CheckpointInvalid
from outlast.keeper import parley, wire
from outlast.keeper.guests import Guests, when
from outlast.keeper.holdings import Holdings
from outlast.keeper.memory import Kept, Memory
from outlast.keeper.neighbours import Neighbours
from outlast.keeper.reception import Reception, fingerprint
from outlast.keeper.replicate import Replicator
from outlast.keeper.setup import Setup
from outlast.peer import Channel, Tls, connect
from outlast.policy.retention import PlacedMachine, holders, num_replicas
from outlast.tiers import PEER

logger = logging.getLogger(__name__)


class Peers:
    """Other machines' keepers.

    Args:
        setup: this keeper's.
        holdings: its memory.
        lock: guards it.
        wait_for_earlier: waits until nothing of attempts before one is in flight.
        record: puts an event into the ledger.
    """

    def __init__(
        self,
        setup: Setup,
        holdings: Holdings,
        lock: threading.RLock,
        *,
        wait_for_earlier: Callable[[int], None],
        record: Callable[..., None],
    ) -> None:
        self._setup = setup
        self._holdings = holdings
        self._lock = lock
        self._wait_for_earlier = wait_for_earlier
        self._record = record
        self._guests = Guests(setup.job, holdings, lock)
        self._node = ""
        self._key = b""
        self._tls: Tls | None = None
        self._reception: Reception | None = None
        self._replicator: Replicator | None = None
        self._neighbours: Neighbours | None = None
        self._wards: frozenset[str] = frozenset()  # machines whose copies are to be here
        self._arrivals = (SaveName(0), SaveName(0))  # the last two that came or were made

    @property
    def key(self) -> bytes:
        """The job's key; b"" where nobody has given one."""
        return self._key

    @property
    def num_others(self) -> int:
        """How many other machines can be asked."""
        return len(self._neighbours.members) if self._neighbours else 0

    @property
    def tier(self) -> Neighbours:
        """Their memory.

        Raises:
            KeyError: there are none.
        """
        if self._neighbours is None:
            raise KeyError(PEER)
        return self._neighbours

    def serve(self, message: wire.Serve, key: bytes, fd: int) -> None:
        """Listen for other machines; a supervisor that comes later takes the place of this one.

        Without a socket (``fd`` is below 0) only the job's key is known from here on.
        """
        self.stop()
        self._node, self._key = message.node, key
        if fd < 0:
            return
        files = [Path(file) for file in message.tls or ()]
        self._tls = Tls(cert=files[0], key=files[1], ca=files[2]) if files else None
        self._reception = Reception(
            socket.socket(fileno=fd),
            key,
            self._tls,
            guests=self._guests,
            wait_for_earlier=self._wait_for_earlier,
            inventory=self._inventory,
            view=self._view,
            on_copy=self._came,
            gives_way=self._setup.rate_bytes is None,
            record=self._record,
        )
        self._replicator = Replicator(
            message.node,
            newest=self._newest,
            view=self._view_of,
            open_channel=self._open_channel,
            rate_bytes=self._setup.rate_bytes,
            record=self._record,
        )

    def tell(self, message: wire.Members) -> None:
        """An attempt has formed.

        Raises:
            ValueError: nobody has said who we are, or we are not among them.
        """
        nodes = {member.node: member for member in message.members}
        if self._replicator is None or self._node not in nodes:
            raise ValueError(f"{self._node or 'nobody'} is not among the members {sorted(nodes)}")
        others = [member for member in message.members if member.node != self._node]
        before, self._neighbours = (
            self._neighbours,
            Neighbours(message.attempt, others, self._open_channel),
        )
        if before is not None:
            before.close()
        replicas = num_replicas(self._setup.replicas, len(nodes))
        machines = [PlacedMachine(node=one.node, labels=one.labels) for one in message.members]
        chosen = holders(machines, replicas)
        self._wards = frozenset(node for node in nodes if self._node in chosen[node])
        self._replicator.to([nodes[node] for node in chosen[self._node]])

    def committed(self, newest: SaveName) -> None:
        """A snapshot of this machine is committed."""
        if self._replicator is not None:
            self._replicator.committed()
            if not self._wards:
                self._came(newest)

    def stop(self) -> None:
        """End all talk with other machines."""
        for part in (self._replicator, self._neighbours):
            if isinstance(part, Replicator):
                part.stop()
            elif part is not None:
                part.close()
        if self._reception is not None:
            self._reception.close()
        self._replicator = self._neighbours = self._reception = None

    # --- inside ---------------------------------------------------------------------------------

    def _came(self, newest: SaveName) -> None:
        """A copy has come in; or, where none does, a snapshot of this machine was committed.

        What others left here goes when two newer ones are there: until then it may be a part of the
        newest step of which everything is somewhere.
        """
        with self._lock:
            if when(newest) > when(self._arrivals[1]):
                self._arrivals = (self._arrivals[1], newest)
        self._guests.see_off(self._wards, self._arrivals[0])

    def _open_channel(self, member: wire.Member) -> Channel:
        return connect(
            (member.host, member.port),
            self._key,
            parley.PURPOSE,
            parley.CONNECT_S,
            silence_s=parley.SILENCE_S,
            tls=self._tls,
        )

    def _inventory(self) -> dict[str, Kept]:
        with self._lock:
            return self._holdings.books.everything()

    def _view(self, save: str, manifest: str, file: str) -> memoryview | None:
        """A file of a save, as it lies here."""
        with self._lock:
            books = self._holdings.books
            kept = books.everything().get(save)
            if kept is None or fingerprint(kept) != manifest:
                return None
            return Memory(books.arenas, {save: kept}).view(f"{save}/{file}")

    def _view_of(self, save: str, kept: Kept, file: str) -> memoryview | None:
        """A file of one of this machine's own snapshots, unless that is gone."""
        with self._lock:
            books = self._holdings.books
            if books.kept.get(save) is not kept:
                return None
            return Memory(books.arenas, {save: kept}).view(f"{save}/{file}")

    def _newest(self) -> tuple[SaveName, Kept] | None:
        """The newest of this machine's own snapshots that a job can be resumed from."""
        with self._lock:
            own = {named(save): kept for save, kept in self._holdings.books.kept.items()}
        for save in sorted(own, key=when, reverse=True):
            try:
                if decode(own[save].manifest, save).kind == FULL:
                    return save, own[save]
            except CheckpointInvalid as error:  # it was read back before it was put there
                logger.warning("%s in memory: %s", save, error.reason)
        return None
