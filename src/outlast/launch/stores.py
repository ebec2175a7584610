"""A fresh store for every attempt, whatever rendezvous decides who takes part.

torch 2.13 shares one store over all attempts, and workers of the second read the first one's keys
(pytorch#135712): most jobs never recover. Here the agent with rank 0 serves a new store each time
and tells its address through the rendezvous' own store.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from outlast.attempt.link import connect, open_store
from outlast.peer.term import Term

_TIMEOUT = timedelta(minutes=5)


class OneMachine(RendezvousHandler):
    """The rendezvous of a job on one machine: nobody to wait for, all on loopback.

    Args:
        run_id: the job's id.
        term: claims the attempts.

    Attributes:
        attempt: the number of the newest; 0 before the first.
    """

    def __init__(self, run_id: str, term: Term) -> None:
        self._run_id = run_id
        self.term = term
        self.attempt = 0
        self._server: Any = None
        self._closed = False

    def get_backend(self) -> str:
        """Name of the rendezvous."""
        return "outlast-local"

    @property
    def use_agent_store(self) -> bool:
        """Workers connect to the store that the agent serves."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """An attempt of this machine alone, with a fresh store."""
        self.attempt = self.term.begin()
        self._server, port = open_store("127.0.0.1")
        return _info("127.0.0.1", port, rank=0, world_size=1)

    def is_closed(self) -> bool:
        """Whether the job is over."""
        return self._closed

    def set_closed(self) -> None:
        """The job is over."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Nobody ever waits."""
        return 0

    def get_run_id(self) -> str:
        """The job's id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close it; nothing is left to clean up."""
        self._closed = True
        return True


class FreshStore(RendezvousHandler):
    """Any rendezvous of torch's, with a fresh store for the workers of each attempt."""

    def __init__(self, inner: RendezvousHandler, local_addr: str | None) -> None:
        self._inner = inner
        self._local_addr = local_addr
        self._server: Any = None
        self._attempts = 0

    @property
    def use_agent_store(self) -> bool:
        """Workers connect to the store that the agent serves."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """What the inner rendezvous decides, with a store of the attempt's own."""
        info = self._inner.next_rendezvous()
        self._attempts += 1
        # A static rendezvous keeps one store for all attempts, the others have one for each round.
        static = self._inner.get_backend() == "static"
        key = f"outlast/store/{self._attempts}" if static else "outlast/store"
        if info.rank == 0:
            self._server, port = open_store("0.0.0.0")  # noqa: S104
            host = self._local_addr or info.bootstrap_store_info.master_addr
            info.store.set(key, f"{host}:{port}")
        host, _, number = info.store.get(key).decode().rpartition(":")
        return _info(host, int(number), rank=info.rank, world_size=info.world_size)

    def get_backend(self) -> str:
        """Name of the inner rendezvous."""
        return str(self._inner.get_backend())

    def is_closed(self) -> bool:
        """Whether the job is over."""
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        """The job is over."""
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """Machines that want to join."""
        return int(self._inner.num_nodes_waiting())

    def get_run_id(self) -> str:
        """The job's id."""
        return str(self._inner.get_run_id())

    def shutdown(self) -> bool:
        """Close the inner rendezvous: the other agents stop."""
        return bool(self._inner.shutdown())


def _info(host: str, port: int, *, rank: int, world_size: int) -> RendezvousInfo:
    # Bare, without a prefix: agents and workers meet under the same keys (see attempt.link).
    return RendezvousInfo(
        connect(host, port, _TIMEOUT), rank, world_size, RendezvousStoreInfo(host, port)
    )
