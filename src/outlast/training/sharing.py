"""The ranks agree on who writes what, without a barrier and off the training thread.

Each rank offers its structure; rank 0 works out everybody's share and tells each its own. A new
round begins at the same points on all ranks: after the first step, and after a save that was void.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Final

import msgspec

from outlast.attempt.link import Link
from outlast.checkpoint.plan import Held, Piece, Share, share, signature

logger = logging.getLogger(__name__)

_SLICE_S: Final = 1.0
Structure = Sequence[Held]


class Sharing:
    """One rank's side of it.

    Args:
        link: the other ranks.
        on_settled: told that a round has come to its end.
    """

    def __init__(self, link: Link, on_settled: Callable[[], None]) -> None:
        self._link = link
        self._on_settled = on_settled
        self._changed = threading.Condition()
        self._round = 0
        self._offered: Structure = ()
        self._share: Share | None = None
        self._is_over = False

    def stop(self) -> None:
        """No round comes to its end any more: whoever waits is let go."""
        with self._changed:
            self._is_over = True
            self._round += 1  # ends the thread of the one under way
            self._changed.notify_all()

    def offer(self, structure: Structure, own: Collection[str]) -> None:
        """Begin a round; all ranks do. ``own`` are names known to differ, the same on all ranks."""
        with self._changed:
            self._round += 1
            self._share = None
            self._offered = structure
            number = self._round
        pieces = [piece for piece, _ in structure]
        if self._link.world_size == 1:
            self._settle(number, share([pieces], own)[0])
            return
        threading.Thread(
            target=self._agree,
            args=(number, pieces, sorted(own)),
            name="outlast-sharing",
            daemon=True,
        ).start()

    @property
    def is_settled(self) -> bool:
        """Whether this round's share is known."""
        return self._share is not None

    @property
    def has_begun(self) -> bool:
        """Whether there was an offer."""
        return self._round > 0

    def of(self, structure: Structure, timeout_s: float) -> Share | None:
        """This rank's share, waited for; None if ``structure`` is another than was offered."""
        if structure is not self._offered and structure != self._offered:
            return None
        with self._changed:
            self._changed.wait_for(lambda: self._share is not None or self._is_over, timeout_s)
            return self._share

    def _agree(self, number: int, pieces: list[Piece], own: list[str]) -> None:
        link, word = self._link, signature(pieces)
        try:
            link.publish(f"structure/{word}", msgspec.msgpack.encode(pieces))
            link.publish(f"sharing/{number}/{link.rank}", word.encode())
            if link.rank == 0:
                self._work_out(number, own)
            raw = self._fetch(number, f"sharing/{number}/of/{link.rank}")
            self._settle(number, msgspec.msgpack.decode(raw, type=Share))
        except (OSError, RuntimeError) as error:  # the attempt is over, or another round has begun
            logger.info("the ranks did not agree on who writes what: %s", error)

    def _work_out(self, number: int, own: list[str]) -> None:
        link = self._link
        known: dict[str, list[Piece]] = {}
        structures = []
        for rank in range(link.world_size):
            word = self._fetch(number, f"sharing/{number}/{rank}").decode()
            if word not in known:
                raw = self._fetch(number, f"structure/{word}")
                known[word] = msgspec.msgpack.decode(raw, type=list[Piece])
            structures.append(known[word])
        for rank, one in enumerate(share(structures, own)):
            link.publish(f"sharing/{number}/of/{rank}", msgspec.msgpack.encode(one))

    def _fetch(self, number: int, key: str) -> bytes:
        """Wait in slices, since a link serves one waiting thread at a time; a rank may be late."""
        while number == self._round:
            try:
                return self._link.fetch(key, _SLICE_S)
            except TimeoutError:
                continue
        raise ConnectionAbortedError("another round has begun")

    def _settle(self, number: int, share: Share) -> None:
        with self._changed:
            if number == self._round:
                self._share = share
                self._changed.notify_all()
        self._on_settled()
