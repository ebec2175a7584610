"""Where a worker is in its data, over all the loops of its script.

A position belongs to one loop, the n-th call of ``steps``; a checkpoint has that of the loop that
was running, or had ended last. Batches that a rollback has left out are passed over on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from outlast.attempt.link import Link
from outlast.data import Feed
from outlast.data.feed import OutlastFeed
from outlast.data.handover import BATCH, place, take_over
from outlast.data.skipping import Skipping
from outlast.data.trail import Trail
from outlast.errors import ConfigError
from outlast.ledger.narrator import say
from outlast.policy.rollbacks import Rollback, left_out
from outlast.training.objects import Objects
from outlast.training.rig import Rig
from outlast.training.streams import Streams


def refuse_loop(
    until: int | None, epochs: int | None, *, is_over: bool, open_at: int | None
) -> None:
    """Refuse a loop that cannot be.

    Args:
        until: as :meth:`~outlast.training.session.Session.steps` was told.
        epochs: the same.
        is_over: whether the session is.
        open_at: the step at which another loop is in its midst, or None.

    Raises:
        ConfigError: there is no such loop.
    """
    if is_over:
        raise ConfigError("the session is over; call steps() inside its with block")
    if until is not None and until < 0:
        raise ConfigError(f"until={until} is no number of steps; count from 0")
    if epochs is not None and epochs < 0:
        raise ConfigError(f"epochs={epochs} is no number of passes; count from 0")
    if open_at is not None:
        # One position is kept: the first loop would go on in the second one's data.
        raise ConfigError(
            f"a loop over steps() begins while another one is in its midst, at step {open_at}: one "
            "batch of steps() is one step, so loops follow each other. For an evaluation iterate "
            "its loader itself; for a step of two data sets put them into one; a loop that was "
            "left and is held in a variable ends with its close()"
        )


def _tell_of_start(position: int, rank: int) -> None:
    if not rank:
        say(
            f"the loader stands at sample {position} before the job's first step (a batch was "
            "taken from it, or it was put there): what is before that is in no step. To look at a "
            "batch take it from another loader"
        )


class Position:
    """One worker's.

    Attributes:
        loop: how many times ``steps`` was called.
    """

    def __init__(self) -> None:
        self.loop = 0
        self._saved: Mapping[str, Any] | None = None  # until the feed tells its own
        self._trail = Trail()
        self._skipping = Skipping(())
        self._feed: Feed | None = None
        self._ahead: dict[str, Any] | None = None  # the position at the end of this step

    # --- from a checkpoint ----------------------------------------------------------------------

    def take_over(
        self, own_of: Callable[[int], Mapping[str, Any]], saved_by: int, link: Link
    ) -> None:
        """Go on from what workers saved.

        Args:
            own_of: rank → its own state.
            saved_by: how many workers saved.
            link: the workers of now.
        """
        self._saved, self._trail = take_over(
            lambda rank: own_of(rank)["data"], saved_by, link.rank, link.world_size
        )

    def leave_out(self, rollbacks: Iterable[Rollback]) -> None:
        """What these have left out is passed over."""
        self._skipping = Skipping(left_out(list(rollbacks)))

    @property
    def saved_loop(self) -> int:
        """The loop whose position the checkpoint has that was resumed from; 0 for none."""
        return int(self._saved["loop"]) if self._saved else 0

    # --- a loop ---------------------------------------------------------------------------------

    def open(
        self,
        loader: Iterable[Any],
        step: int,
        *,
        rig: Rig,
        objects: Objects,
        streams: Streams,
        epochs: int | None = None,
        one_pass: bool = False,
        is_over: bool = False,
    ) -> None:
        """Iterate ``loader`` from where this loop stands.

        It ends rather than starting the epoch number ``epochs``. With ``one_pass`` it ends with the
        epoch that it is in, whichever that is: the loop before may have ended with the one before,
        and a resumed loop is in the one that it had begun.

        Raises:
            ConfigError: the loader cannot be used, or does not fit the checkpoint.
        """
        self.close()
        feed = rig.open_feed(loader, self._trail, step)
        feed.max_epochs = epochs
        objects.forget_loader(loader)
        batch = 0
        if self._saved and self.saved_loop == self.loop:
            batch = int(self._saved.get(BATCH, step))
            if not is_over or feed.kind != "iterable":  # which would be read up to its end
                feed.restore(self._saved["position"])
            # Not before: what the script draws ahead of its loop (a list of data, say) it must
            # draw as in the undisturbed run, from its own seeds.
            streams.restore(step)
        elif self._saved and self.saved_loop > self.loop and isinstance(feed, OutlastFeed):
            feed.restore(self._saved["position"])  # the loops before are not there any more
        elif isinstance(feed, OutlastFeed) and not step and feed.loader.position:
            _tell_of_start(feed.loader.position, rig.link.rank)
        if one_pass:
            feed.max_epochs = feed.epoch + 1
        streams.forget()
        self._feed = feed
        self._skipping.begin(self.loop, batch)

    def next(self, step: int) -> Any:
        """The next batch; ``step`` are completed.

        Raises:
            StopIteration: there is none.
        """
        assert self._feed is not None  # noqa: S101 - opened before
        return self._skipping.next(self._feed, step)

    def completed(self) -> None:
        """The batch's step is complete."""
        self._saved = None  # it is the feed's to tell from here on

    @property
    def batch(self) -> tuple[int, int]:
        """The loop, and which of its batches was handed out last."""
        return self._skipping.loop, self._skipping.batch

    def leave(self) -> None:
        """The loop is over."""
        if self._feed is not None:
            self._feed.leave()

    def close(self) -> None:
        """End the loader's processes."""
        if self._feed is not None:
            self._feed.close()

    # --- to a checkpoint ------------------------------------------------------------------------

    def state(self) -> Mapping[str, Any]:
        """The position at this boundary."""
        if self._saved is not None or self._feed is None:
            return self._saved or {}
        return place(self._skipping.loop, self._feed, self._trail, self._skipping.batch)

    def forget_ahead(self) -> None:
        """Another step begins."""
        self._ahead = None

    def ahead(self) -> Mapping[str, Any]:
        """The position at the end of the step in progress."""
        if self._ahead is None and self._feed is not None:
            self._ahead = place(
                self._skipping.loop, self._feed, self._trail, self._skipping.batch, ahead=True
            )
        return self.state() if self._ahead is None else self._ahead
