"""A loop that a framework runs: it says where each step ends, and what it counts itself.

``Session.steps()`` hands out a batch and has its caller's loop for a step. A framework has a loop
of its own, takes several batches for a step, and calls back. For it the session hands out turns in
place of batches: each boundary ends the turn before, does what is due (saves, drains, rollbacks)
and begins the next. The batches come from a feed beside it, whose position is saved with the turn,
together with whatever the framework counts (its epoch, its logs, its callbacks).

Guarantees: at a boundary the position is that of the batches handed out by then; the framework must
not have loaded any ahead. A resumed loop gets the batches and the random numbers that the
undisturbed one would have got, as exactly as ``data/feed.py`` says for each kind of loader. What a
rollback has left out is a whole turn: as many batches as ``per_turn`` says.

What can go wrong: the framework's body of an interrupted step cannot be run again, so survivors of
a loss start anew. Which samples went into which steps is in no record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Protocol

from outlast.data import open_feed
from outlast.data.epochs import EpochFeed
from outlast.data.generators import Held
from outlast.errors import ConfigError
from outlast.ledger.narrator import say
from outlast.training.session import Session
from outlast.training.session import session as new_session

NO_REPEAT: Final = "a framework runs the loop, and cannot be asked to run a step again"


def numbered(kind: str, objects: Iterable[Any]) -> dict[str, Any]:
    """Name what a framework has several of: ``optimizer``, ``optimizer1`` and so on."""
    return {f"{kind}{number or ''}": one for number, one in enumerate(objects)}


def open_session(*, at_step: int, **given: Any) -> Session:
    """As :func:`outlast.session`, for a loop that a framework runs.

    Args:
        at_step: steps that the framework has done already, by a checkpoint of its own. One of the
            job's is gone on from where it is as new, or newer.
        **given: for :func:`outlast.session`.
    """
    session = new_session(**given)
    session.cannot_repeat, session.begins_at = NO_REPEAT, at_step
    return session


class Framework(Protocol):
    """What the framework counts itself; each rank has its own."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors, as they stand at this boundary."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Back to what :meth:`state_dict` gave."""


class Driven:
    """The loop of one session that a framework runs.

    Args:
        session: it is open.
        loader: gives the batches of one epoch each time it is iterated.
        framework: what else is saved with the position.
        per_turn: batches of a step.

    Attributes:
        is_over: there is no step left: the loop had ended when the checkpoint was written.
    """

    def __init__(
        self, session: Session, loader: Any, framework: Framework, *, per_turn: int = 1
    ) -> None:
        link = session._on.link
        self._rank = link.rank
        self._session = session
        feed = open_feed(loader, rank=link.rank, world_size=link.world_size)
        if not isinstance(feed, EpochFeed):
            raise ConfigError(
                f"{type(loader).__name__} knows no epochs of a framework; give it a DataLoader"
            )
        self._feed = feed
        self._feed.hold(Held([("loader", loader)]))
        self._turns = _TurnSource(self._feed, framework, per_turn)
        self._loop: Any = None
        self.is_over = False

    def begin(self) -> None:
        """The loop begins, or goes on where the checkpoint stands; the first turn is under way.

        Raises:
            ConfigError: the loader does not fit the checkpoint.
            SystemExit: with code 75, once a drain is agreed and committed.
        """
        self._loop = self._session.steps(self._turns)
        self.boundary()
        for doubt in self._feed.doubts if self._rank == 0 else ():
            say(f"going on at step {self._session.step}: {doubt}")

    @property
    def place(self) -> tuple[int, int]:
        """The epoch that the next batch belongs to, and how many of its batches came before it."""
        self._feed.max_epochs = self._feed.epoch + 1
        is_over = self._turns.is_left or (self._turns.batches > 0 and self._feed.is_at_end())
        return (self._feed.epoch + 1, 0) if is_over else (self._feed.epoch, self._turns.batches)

    @property
    def is_used(self) -> bool:
        """Whether a batch was taken since the newest boundary."""
        return self._turns.is_used

    def enter_epoch(self, epoch: int) -> None:
        """Batches are those of this epoch from here on; what is left of the one before is not."""
        self._feed.begin_at(epoch)  # a framework's own checkpoint may be in a later one
        if self._turns.batches and self._feed.epoch < epoch:
            self._turns.leave_epoch()
        self._feed.max_epochs = epoch + 1

    def batch(self) -> Any:
        """The next batch.

        Raises:
            StopIteration: the epoch has no other.
        """
        return self._turns.take()

    def boundary(self) -> None:
        """A step is complete, with all that the framework does at its end; another one begins.

        Raises:
            SystemExit: with code 75, once a drain is agreed and committed.
        """
        self.is_over = next(self._loop, None) is None

    def end(self, *, is_complete: bool) -> None:
        """The loop is over.

        Args:
            is_complete: whether the turn under way is a step of the job.
        """
        if is_complete and not self.is_over:
            self._turns.are_over = True
            self.boundary()
        else:
            self._loop.close()
        self.close()

    def close(self) -> None:
        """End the loader's processes, whatever has ended the loop."""
        self._feed.close()


class _TurnSource:
    """What the session iterates: one item for each step, with the position beside it."""

    has_exact_state = True

    def __init__(self, feed: EpochFeed, framework: Framework, per_turn: int) -> None:
        self._feed, self._framework, self._per_turn = feed, framework, per_turn
        self._number, self.is_used = 0, True
        self.is_left = False  # what is left of the feed's epoch is not wanted
        self.are_over = False
        self.batches = 0

    def besides(self) -> list[str]:
        """Loaders that the framework iterates for itself, as in an evaluation, are no doubt."""
        return []

    def leave_epoch(self) -> None:
        self.is_left = True
        self._feed.leave_epoch()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.are_over:
            raise StopIteration
        if not self.is_used:  # a rollback leaves it out
            for _ in range(self._per_turn):
                self.take()
        self._number, self.is_used = self._number + 1, False
        return self._number

    def take(self) -> Any:
        epoch = self._feed.epoch
        batch = next(self._feed)
        self.is_used, self.is_left = True, False
        self.batches = self.batches + 1 if self._feed.epoch == epoch else 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {
            "feed": self._feed.state(),
            "batches": self.batches,
            "is_left": self.is_left,
            "framework": self._framework.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._framework.load_state_dict(state["framework"])
        self._feed.max_epochs = None
        self._feed.restore(state["feed"])
        self.batches = int(state["batches"])
        if state["is_left"]:
            self.leave_epoch()
