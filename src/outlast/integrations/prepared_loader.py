"""A loader that Accelerate has prepared, with a place that can be saved and gone back to.

A ``DataLoaderShard`` loads one batch ahead of the step, to know the epoch's last one. So does this,
in the same order and with the same random draws: an undisturbed run has the bits of one without
Outlast. What is saved stands in front of the batch that is loaded ahead, with the random numbers
of that moment. A resume loads that batch again and no other, as far as ``data/feed.py`` says for
the DataLoader inside: torch's own, torchdata's, or one over a stream.

What can go wrong: with processes that persist (``persistent_workers``) each epoch begins with new
ones. Loaders of a dispatcher are not for this. Behind the end of an epoch of a stream, or of a
loader with a state of its own, there is no last batch for the code that reads what the loop's body
sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from accelerate.utils import send_to_device, synchronize_rng_states

from outlast.data import Feed, open_feed, random_state
from outlast.data.epochs import standing
from outlast.data.generators import Held
from outlast.ledger.narrator import say

_END: Final = object()


class PreparedLoader:
    """Iterated in place of a prepared loader; each time for one of its epochs.

    Args:
        loader: a ``DataLoaderShard``.
        rank: this process's, from 0.
        world_size: number of processes.

    Attributes:
        newest: the last batch of the epoch, if it is gone on from behind that.
    """

    has_exact_state = True

    def __init__(self, loader: Any, *, rank: int, world_size: int) -> None:
        self._loader, self._rank, self._world_size = loader, rank, world_size
        self._place: dict[str, Any] = {}
        self._ahead: Any = _END
        self._epoch = 0  # of the newest iteration
        self._resumed: Feed | None = None
        self.newest: list[Any] = []

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Pass for a DataLoader, as what it stands for does: a state is one of a single epoch."""
        return self._loader.__class__

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_loader"], name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        feed, self._resumed = self._resumed, None  # now: this one alone goes on from there
        return self._batches(feed)

    def _batches(self, feed: Feed | None) -> Iterator[Any]:
        loader = self._loader
        if feed is None and loader.rng_types is not None:
            synchronize_rng_states(loader.rng_types, loader.synchronized_generator)
        loader.begin()
        try:
            if feed is None:
                self._epoch = loader.iteration
                loader.set_epoch(self._epoch)
                feed = self._open()
                for _ in range(loader.skip_batches + 1):
                    self._load(feed)
            while self._ahead is not _END:
                batch = self._sent(self._ahead)
                loader._update_state_dict()
                self._load(feed)
                if self._ahead is _END:
                    loader.end_of_dataloader = True
                    loader._update_state_dict()
                yield batch
        finally:
            if feed is not None:
                feed.close()
        # Not one more than it is: what was saved behind an epoch's end has counted it already, and
        # the resumed loop comes to that end once more.
        loader.iteration = self._epoch + 1
        loader.end()

    def _sent(self, batch: Any) -> Any:
        loader = self._loader
        if loader.device is None:
            return batch
        return send_to_device(batch, loader.device, non_blocking=loader._non_blocking)

    def _open(self) -> Feed:
        base = self._loader.base_dataloader
        feed = open_feed(base, rank=self._rank, world_size=self._world_size, is_trusted=True)
        feed.hold(Held([("loader", base)]))
        feed.max_epochs = 1
        return feed

    def _load(self, feed: Feed) -> None:
        self._place = {
            "epoch": self._epoch,
            "feed": feed.state(),
            "random": random_state.capture(cuda=False),
        }
        self._ahead = next(feed, _END)

    def state_dict(self) -> dict[str, Any]:
        """The place behind the batch handed out last: plain values and tensors."""
        return self._place

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go there: the next iteration goes on from it.

        Raises:
            ConfigError: the DataLoader inside does not fit.
        """
        self._epoch = int(state["epoch"])
        with random_state.preserved():
            self.newest = self._last(state)
            feed = self._at(state)
            random_state.restore(state["random"])
            self._load(feed)
        self._resumed = feed
        for doubt in feed.doubts if self._rank == 0 else ():
            say(f"going on in the loader's epoch {state['epoch']}: {doubt}")

    def _last(self, state: Mapping[str, Any]) -> list[Any]:
        """The epoch's last batch, where the place is behind it and it can be loaded once more."""
        base = self._loader.base_dataloader
        try:
            if state["feed"]["batches"] < len(base):
                return []
        except TypeError:  # a stream
            return []
        with standing(base):
            feed = self._at(state, again=True)
            feed.close()
        return [*map(self._sent, feed.newest)]

    def _at(self, state: Mapping[str, Any], *, again: bool = False) -> Feed:
        """A feed at that place; with the batch before it if it is to be loaded ``again``."""
        counted = self._loader.iteration
        self._loader.set_epoch(self._epoch)
        self._loader.iteration = counted  # the accelerator's state says how many have ended
        feed = self._open()
        (feed.again if again else feed.restore)(state["feed"])
        return feed
