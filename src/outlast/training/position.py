"""Where a worker is in its data, over all the loops of its script.

A position belongs to one loop; a checkpoint has that of the loop that was running, or had ended
last. Which loop a call of ``steps`` is follows from the line that it comes from and the script's
own counter there (``callsite.py``), else from the number of calls before it. Batches that a
rollback has left out are passed over on the way.

Where a resumed loop cannot be what it would have been, that is said as it begins, in one line with
what to write instead; a session that ends without having come to the loop that its checkpoint is in
ends with a refusal.
"""

from __future__ import annotations

import contextlib
import difflib
import numbers
import random
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch

from outlast.attempt.link import Link
from outlast.data import Feed, generators, random_state
from outlast.data.feed import BATCH, TRAIL, OutlastFeed, Skipping, given_back, place, take_over
from outlast.data.generators import Held, same
from outlast.data.order import mix64
from outlast.data.trail import Trail
from outlast.errors import ConfigError, NotInProcess, ResumeRefused
from outlast.ledger.narrator import say
from outlast.policy.rollbacks import Rollback, left_out
from outlast.script.callsite import KEY as EPOCHS
from outlast.script.callsite import Epochs, LoopLines, Site, recount
from outlast.script.objects import Objects
from outlast.training.afresh import Afresh, trace
from outlast.training.books import AttemptBooks


class Streams:
    """The random numbers of one rank, until they are put back where a resumed loop goes on.

    Args:
        link: says which rank this is, and of how many.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._state: Mapping[str, Any] | None = None
        self._saved_by = 1
        self._any_size = False

    def resumed(self, state: Mapping[str, Any], saved_by: int, *, any_size: bool) -> None:
        """Note what is to be put back, of ``saved_by`` workers' random numbers.

        ``any_size``: all workers' are the same, however many there are.
        """
        self._state, self._any_size = state, any_size
        self._saved_by = saved_by

    def forget(self) -> None:
        """The loop goes on: from here they are its own."""
        self._state = None

    def restore(self, step: int) -> None:
        """Put them back, if that is still to be done."""
        if self._state is None:
            return
        random_state.restore(self._state)
        if self._link.rank >= self._saved_by and not self._any_size:  # its stream is another's
            seed = mix64(torch.initial_seed(), step, self._link.rank)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed % 2**63)


EVERY_LOOP: Final = (
    "Let the script call steps() for every loop, as in `for epoch in session.epochs(n)`: those "
    "that had ended are not run again"
)

CANNOT_GO: Final = (
    "connection closed by a loss elsewhere, and this process starts anew: its loader cannot go to "
    "another place"
)


def refuse_call(loader: Any, unknown: Mapping[str, Any]) -> None:
    """Refuse a call of ``steps()`` that names no loader, or tells it how to make batches.

    Raises:
        ConfigError: shows how it is written.
    """
    right = "write: session.steps(loader, until=10_000)"
    if unknown:
        name = next(iter(unknown))
        close = difflib.get_close_matches(name, ("until", "epochs", "loader"), n=1)
        what = f"did you mean {close[0]}?" if close else f"batches are made by the loader; {right}"
        raise ConfigError(f"steps() has no {name}: {what}")
    if loader is None or isinstance(loader, int | float | str):
        given = "steps() was given no loader" if loader is None else f"{loader!r} is no loader"
        raise ConfigError(f"{given}; {right}")


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
    for name, given, what in (("until", until, "steps"), ("epochs", epochs, "passes")):
        if given is not None and (not isinstance(given, numbers.Integral) or given < 0):
            raise ConfigError(f"{name}={given!r} is no number of {what}; count from 0")
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


class Aside(NamedTuple):
    """The feed of a loop that has ended, whose loader may come again, and its position."""

    feed: Feed
    state: Mapping[str, Any]


def _ended(feed: Feed | None) -> list[str]:
    """Have a loop behind its last batch see its end; what differs from then, in words."""
    if feed is None:
        return []
    with contextlib.suppress(StopIteration):
        next(feed)
    feed.leave()
    feed.close()
    return feed.doubts


def _may_come_again(feed: Feed) -> bool:
    """Whether a later loop may go on with this one's loader: it keeps its place, and is held.

    An iterator that was made for its loop (``steps(islice(loader, 9))``) ends with it.
    """
    if not feed.goes_on or feed.is_used_up:
        return False
    held_here = sum(value is feed.loader for value in vars(feed).values())
    return sys.getrefcount(feed.loader) - 1 > held_here  # one is that of the call


def _say_doubt(doubt: str, step: int, rank: int) -> None:
    whose = f"rank {rank}: " if rank else ""
    say(f"{whose}going on at step {step}: {doubt}")


class Position:
    """One worker's.

    Attributes:
        loop: number of the loop that was called last, from 1, over the whole job.
    """

    def __init__(self) -> None:
        self.loop = 0
        self._saved: Mapping[str, Any] | None = None  # until the feed tells its own
        self._is_reached = False
        self._trail = Trail()
        self._skipping = Skipping(())
        self._feed: Feed | None = None
        self._until: int | None = None
        self._left = False  # the script has ended the loop
        self._done = 0  # completed steps
        self._ahead: dict[str, Any] | None = None  # the position at the end of this step
        self._is_given_back = False  # the newest batch
        self._newest: list[Any] = []  # that batch, in a process that has not had it
        self._num_had = 0  # batches of this loop in a process before, until its next one is here
        self._loops = LoopLines()
        self._epochs = Epochs()
        self._site = Site()
        self._held = Held()
        self._end_held: list[dict[str, Any]] | None = None  # where the loop left them
        self._end_random: list[Any] | None = None
        self._objects: Objects | None = None
        self._end_trace: list[Any] | None = None
        self._aside: dict[str, Any] = {}  # line → where the loader of its loops stood, elsewhere
        self._put_aside: dict[str, Aside] = {}  # line → the same of this process
        self._feed_line = ""
        self._is_ended = False  # the session: what the script does behind its loop is done
        self._has_told_of_loops = False
        self._is_counted = False  # nothing else tells which loop it is, and the script computes it
        self._acts_between: bool | None = None  # whether the script draws, or changes its objects

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
        self._loops = LoopLines(self._saved.get("loops"))
        self._epochs = Epochs(self._saved)
        self._acts_between = self._saved.get("between")
        self._aside = {str(line): state for line, state in self._saved.get("aside", ())}

    def skip(self, rollbacks: Iterable[Rollback]) -> None:
        """What these have left out is passed over."""
        self._skipping = Skipping(left_out(list(rollbacks)))

    @property
    def loader(self) -> Any:
        """What is handed out of now; None where there is no loop."""
        return None if self._feed is None else self._feed.loader

    def dropped(self, num: int) -> None:
        """The last samples of the newest batch are not in its step's sum; of our own loader."""
        self._trail.dropped(num)

    @property
    def saved_loop(self) -> int:
        """The loop whose position the checkpoint has that was resumed from; 0 for none."""
        return int(self._saved["loop"]) if self._saved else 0

    @property
    def is_first(self) -> bool:
        """Whether the checkpoint is in the midst of the job's first loop."""
        saved = self._saved or {}
        return self.saved_loop == 1 and not saved.get("over", True)

    def ends_anew(self, afresh: Afresh) -> bool:
        """At the end of a session without a step: whether its state is another one than before.

        All ranks call it. Behind a loop whose session had ended, the script has done again what is
        in the checkpoint already.
        """
        ended = (self._saved or {}).get("ended")
        if ended:
            afresh.put_back()
        return ended is False and afresh.is_changed()  # a checkpoint of before does not say

    def refuse_unreached(self, step: int) -> None:
        """At the session's end.

        Raises:
            ResumeRefused: steps of the saved loop were to follow, and it was not come to.
        """
        is_missed = self._is_counted or not self._was_over(step)
        if self._saved and not self._is_reached and is_missed:
            raise ResumeRefused(
                f"the job is not finished: the checkpoint of step {step} is in the midst of loop "
                f"{self.saved_loop} ({self._saved_line()}), and this run has ended without coming "
                f"to it. {EVERY_LOOP}"
            )

    def _was_over(self, step: int) -> bool:
        """Whether the saved loop had ended; yes where a checkpoint of before does not say."""
        saved = self._saved or {}
        until = saved.get("until")
        return bool(saved.get("over", True)) or (until is not None and step >= until)

    def _saved_line(self) -> str:
        return str((self._saved or {}).get("line") or "its line is not known")

    # --- epochs ---------------------------------------------------------------------------------

    def begin_epochs(self, num: int) -> int:
        """``epochs(num)`` begins; the first one to go through, ``num`` or above if there is none.

        Raises:
            ConfigError: another one is under way.
        """
        first, self.loop = self._epochs.begin(num, self.loop, self.saved_loop)
        return first

    def enter_epoch(self, epoch: int) -> None:
        """An epoch begins."""
        self._epochs.enter(epoch, self.loop)

    def end_epochs(self, epochs: int, *, is_left: bool) -> None:
        """The epochs have ended, or were left."""
        self._epochs.end(epochs, self.loop, is_left=is_left)

    @property
    def is_in_known_epoch(self) -> bool:
        """Whether finished epochs were passed over as a whole."""
        return self._epochs.is_known

    # --- a loop ---------------------------------------------------------------------------------

    def called(self, site: Site, step: int, until: int | None) -> None:
        """``steps`` is called: say which loop that is."""
        self._site, self._until = site, until
        self.loop += 1
        if self._saved:
            saved = self.saved_loop
            near = {saved, saved + 1} if self._was_over(step) else {saved}
            number = self._loops.number_of(site, near)
            if number is not None and not self._is_reached:
                self.loop = number
            is_first = self.loop == 1 and not self._epochs.is_known and not self._is_reached
            if is_first and until is None and site.reads_step:
                may_be_behind = saved > 1 or any(
                    (self._saved or {}).get(name, True) for name in ("over", "may_be_over")
                )
                self._is_counted = may_be_behind and not self._loops.is_first(site)
        self._loops.begins(site, self.loop)

    def is_passed(self, step: int, rank: int) -> bool:
        """Whether the loop that was called had ended when the checkpoint was written."""
        if self._until is not None:
            return step >= self._until
        if self.loop >= self.saved_loop:
            return False
        if not rank and not self._has_told_of_loops:  # there may be a hundred
            self._has_told_of_loops = True
            around = ""
            if self._site.counted and not self.is_in_known_epoch:
                around = (
                    "; the code around them is, as range() knows of no resume: "
                    "`for epoch in session.epochs(n)` leaves finished epochs out"
                )
            say(
                f"going on in loop {self.saved_loop}, at step {step}: "
                f"the loops before it had ended and are not run again{around}"
            )
        return True

    def open(
        self,
        loader: Iterable[Any],
        step: int,
        *,
        books: AttemptBooks,
        objects: Objects,
        streams: Streams,
        afresh: Afresh,
        epochs: int | None = None,
        one_pass: bool = False,
        is_over: bool = False,
        can_repeat: bool = False,
    ) -> None:
        """Iterate ``loader`` from where this loop stands.

        It ends rather than starting the epoch number ``epochs``. With ``one_pass`` it ends with the
        epoch that it is in, whichever that is: the loop before may have ended with the one before,
        and a resumed loop is in the one that it had begun. At its end it ``can_repeat`` its newest
        batch.

        Raises:
            ConfigError: the loader cannot be used, or does not fit the checkpoint.
        """
        self._look_between()
        self._objects, was_reached = objects, self._is_reached
        feed, aside = self._opened(loader, step, books)
        self._is_given_back = False
        feed.max_epochs = epochs
        objects.forget_loader(loader)
        self._hold(loader, feed)
        batch = 0
        doubts: list[str] = []
        self._newest = []
        if self._saved and self.saved_loop == self.loop:
            self._is_reached = True
            batch = int(self._saved.get(BATCH, step))
            # At its end it would be read for nothing, but for one that goes on in the next loop, or
            # for its newest batch: where that cannot be had (of so many workers), there is none.
            is_needed = not is_over or feed.goes_on or feed.kind != "iterable"
            if is_needed or can_repeat:
                may_be_over = is_over or self._saved.get("over", False)
                with contextlib.nullcontext() if is_needed else contextlib.suppress(ConfigError):
                    (feed.again if may_be_over else feed.restore)(self._saved["position"])
                    self._newest = feed.newest
            afresh.put_back()
            doubts = self._go_on(step, streams)
            if self._is_counted:
                doubts.append(
                    f"no variable of a loop around {self._site.line} tells which loop this is, so "
                    f"calls are counted: it is taken for loop {self.loop}. If the script computes "
                    "from session.step how many are left, it will end too early. Write `for epoch "
                    "in range(session.step // len(loader), epochs)`, or range(epochs)"
                )
        elif self._saved and not self._is_reached:
            doubts = self._begin_behind(feed, step, aside)
            before = self._at_its_end(loader, feed, step, books)
            doubts += self._go_on(step, streams) + _ended(before) + self._may_count_twice(afresh)
        elif aside is not None:
            self._take_up(feed, aside)
        elif isinstance(feed, OutlastFeed) and not step and feed.loader.position:
            _tell_of_start(feed.loader.position, books.link.rank)
        if self._saved and self.loop > 1 and feed.is_hidden:
            doubts.append(
                "the loader keeps one iterator, or its processes, for all its passes, behind "
                "something that is given to steps(): they begin anew. Give steps() the loader "
                "itself"
            )
        if self._saved and self.loop > self.saved_loop:
            if was_reached and self._saved.get("ended"):
                afresh.put_back()
            afresh.release()
            self._saved = None  # what is saved from here on has what was done between the loops
        if one_pass:
            feed.max_epochs = feed.epoch + 1
        for doubt in [*feed.doubts, *doubts]:
            _say_doubt(doubt, step, books.link.rank)
        feed.doubts.clear()
        streams.forget()
        self._feed, self._left, self._end_held, self._done = feed, False, None, step
        self._skipping.begin(self.loop, batch)
        self._num_had = batch

    def _look_between(self) -> None:
        """A loop begins: has the script drawn, or changed its objects, since the one before?"""
        before, self._end_random = self._end_random, None
        if before is not None and self._objects is not None and not self._acts_between:
            acted = not same(before, [*random_state.look()])
            acted = acted or trace(self._objects) != self._end_trace
            self._acts_between = acted

    def _opened(self, loader: Iterable[Any], step: int, books: AttemptBooks) -> tuple[Feed, Any]:
        """The loop's feed; and where its loader stood in another process, if it was put aside."""
        before, feed = self._feed, books.open_feed(loader, self._trail, step)
        if before is not None and before.loader is not loader and _may_come_again(before):
            self._put_aside[self._feed_line] = Aside(before, before.state())
        line = self._site.line
        aside = self._aside.pop(line, None)
        known = before if before is not None and before.loader is loader else None
        for other, kept in list(self._put_aside.items()):
            if kept.feed.loader is loader:
                known = self._put_aside.pop(other).feed
        if known is not None:  # it stands where it was
            aside = None
            feed.go_on_from(known)
        self._put_aside.pop(line, None)  # another object has taken its place
        if before is not None:
            before.put_down()
        self._feed_line = line
        return feed, aside

    def _asides(self) -> dict[str, Any]:
        """Line → where a loader stands that is put aside, in this process or in the one before."""
        return self._aside | {line: kept.state for line, kept in self._put_aside.items()}

    def _take_up(self, feed: Feed, aside: Mapping[str, Any]) -> None:
        """The loader was put aside for another one's loop, in the process before."""
        if aside["kind"] != feed.kind:
            return
        if isinstance(feed, OutlastFeed):
            feed.restore(aside)
            feed.epoch = feed.loader.epoch or 0
            return
        held = self._held.state()
        with random_state.preserved():  # its next pass begins here, where the script stands
            feed.restore({**aside, "batches": 0, "started": False, "passed": []})
        self._held.restore(held)

    def _hold(self, loader: Any, feed: Feed) -> None:
        for _, value in self._site.roots:
            generators.adopt(value)
        self._held = Held([("loader", loader), *self._site.roots])
        feed.hold(self._held)
        self._site = msgspec.structs.replace(self._site, roots=[])  # it is not to be kept alive

    def _go_on(self, step: int, streams: Streams) -> list[str]:
        """Random numbers stand where they stood; what cannot be put back, in words.

        Not before: what the script draws ahead of its loop (a list of data, say) it must draw as in
        the undisturbed run, from its own seeds.
        """
        assert self._saved is not None  # noqa: S101
        streams.restore(step)
        doubts = [
            f"the random-number generator {name} was drawn from, and is not there now: what it "
            "draws is not what it would have drawn. Make it before the loop, in each run"
            for name in self._held.restore(self._saved.get("held", ()))
        ]
        doubts += [
            f"the script took batches besides steps(), from {other}: its place is not kept, and it "
            "begins anew. Give steps() one data set of both"
            for other in self._saved.get("besides", ())
        ]
        return doubts

    def _begin_behind(self, feed: Feed, step: int, aside: Any) -> list[str]:
        """The first loop of this run is another one than that of the checkpoint."""
        assert self._saved is not None  # noqa: S101
        saved, is_next = self._saved, self.loop == self.saved_loop + 1
        self._is_reached = True
        if aside is not None:
            self._take_up(feed, aside)
        elif isinstance(feed, OutlastFeed) and saved.get("position", {}).get("kind") == feed.kind:
            feed.restore(saved["position"])
            if self.loop > self.saved_loop:
                feed.epoch = feed.loader.epoch or 0
        if isinstance(feed, OutlastFeed):
            return []
        if is_next and self._was_over(step):
            if self._acts_between is False:
                return []
            doubt = (
                f"loop {self.saved_loop} had ended, and this run begins with the next one: what "
                "the script does between them (random draws of an evaluation, a scheduler's step) "
                f"was not done. {EVERY_LOOP}"
            )
            return [doubt]
        doubt = (
            f"the checkpoint is in the midst of loop {self.saved_loop} ({self._saved_line()}), and "
            f"this run goes on with loop {self.loop} from its beginning: samples are repeated or "
            f"left out. {EVERY_LOOP}"
        )
        return [doubt]

    def _at_its_end(self, loader: Any, feed: Feed, step: int, books: AttemptBooks) -> Feed | None:
        """The saved loop over this loader behind its last batch, where it had yet to see its end.

        A sampler may draw as it ends (torch's RandomSampler does, from a generator of the script).
        """
        assert self._saved is not None  # noqa: S101
        position = self._saved["position"]
        is_same = self._saved.get("line") == self._site.line and position["kind"] == feed.kind
        has_seen = self._saved.get("left", True) or not self._saved.get("over", True)
        if has_seen or not is_same or feed.goes_on:
            return None
        before = books.open_feed(loader, Trail(), step)
        before.hold(self._held)
        before.restore(position)
        before.max_epochs = before.epoch + 1
        feed.go_on_from(before)
        return before

    def _may_count_twice(self, afresh: Afresh) -> list[str]:
        """In words, where the script has changed its objects in front of a later loop."""
        if not afresh.is_changed():
            return []
        doubt = (
            "what the script has changed in front of this loop takes effect; what it does so in "
            f"front of the loops before it too counts twice. {EVERY_LOOP}"
        )
        return [doubt]

    def next(self, step: int) -> Any:
        """The next batch; ``step`` are completed.

        Raises:
            StopIteration: there is none.
        """
        assert self._feed is not None  # noqa: S101 - opened before
        batch = self._skipping.next(self._feed, step)
        self._newest.clear()
        return batch

    def take_newest(self) -> list[Any]:
        """The batch in front of a resumed loop's end, where that is known and it has none more."""
        found = [*self._newest]
        self._newest.clear()
        return found

    def handed_out(self, frame: types.FrameType, step: int, rank: int) -> None:
        """A batch is about to leave ``frame``: say once what begins anew beside a resumed loop."""
        num_had, self._num_had = self._num_had, 0
        counter = recount(frame, num_had) if num_had and not rank else None
        if counter is not None and self._feed is not None:
            # What keeps its own place hides it inside of enumerate.
            may_wrap = not isinstance(self._feed, OutlastFeed) and not self._feed.goes_on
            _say_doubt(counter.doubt(num_had, may_wrap=may_wrap), step, rank)

    def generators(self) -> list[dict[str, Any]]:
        """Where the generators stand that the script holds."""
        return self._held.state()

    def put_generators(self, state: Any) -> None:
        """Back to where they stood."""
        self._held.restore(state)

    @property
    def line(self) -> str:
        """Where the script has its loop."""
        return self._site.line

    @property
    def has_counter(self) -> bool:
        """Whether the script counts loops like the one that was called last."""
        return bool(self._site.counted or self._site.added)

    @property
    def is_tied(self) -> bool:
        """Whether the loader's place is one of so many workers' own."""
        return self._feed is not None and self._feed.is_tied

    def tell(self, books: AttemptBooks) -> None:
        """Another attempt: what must be known there of the loader."""
        if self._feed is not None:
            books.tell_of(self._feed)

    def begin_again(self, step: int, *, in_hand: bool) -> None:
        """Another attempt, in which this worker goes on where it is.

        Args:
            step: completed steps.
            in_hand: whether the newest batch belongs to the step behind it.
        """
        if isinstance(self._feed, OutlastFeed):
            self._feed.begin_again(step, in_hand=in_hand)

    def move(
        self,
        own_of: Callable[[int], Mapping[str, Any]],
        saved_by: int,
        books: AttemptBooks,
        step: int,
        *,
        is_same: bool,
    ) -> None:
        """In the midst of a loop, go to another place in its data: that of ``step``, for this rank.

        Args:
            own_of: rank → what it knew alone, as ``take_over`` has it.
            saved_by: how many there were.
            books: of the new attempt.
            step: completed steps.
            is_same: whether that place is one of this rank's own, of as many workers.

        Raises:
            NotInProcess: the loader cannot go there, or that place is in another loop: what stands
                between the two is to run again, or has not run.
        """
        before, link = self._feed, books.link
        assert before is not None  # noqa: S101 - it is in a loop
        if before.is_tied and not (is_same and before.kind == "stock"):
            raise NotInProcess(CANNOT_GO)
        saved, self._trail = take_over(
            lambda rank: own_of(rank)["data"], saved_by, link.rank, link.world_size
        )
        if saved["loop"] != self.loop:
            raise NotInProcess(
                "connection closed by a loss elsewhere, and this process starts anew: it is in "
                f"loop {self.loop} over steps(), and step {step} is of loop {saved['loop']}"
            )
        before.leave()  # a sampler stands where the loop has found it
        before.put_down()
        feed = books.open_feed(before.loader, self._trail, step)
        feed.max_epochs = before.max_epochs
        feed.hold(self._held)
        feed.restore(saved["position"])
        if feed.doubts and feed.is_tied:
            raise NotInProcess(f"{CANNOT_GO}: {feed.doubts[0]}")
        for doubt in feed.doubts:
            _say_doubt(doubt, step, link.rank)
        feed.doubts.clear()
        self._feed, self._done, self._ahead = feed, step, None
        self._newest = []
        self._held.restore(saved.get("held", ()))
        self._skipping.begin(self.loop, int(saved[BATCH]))

    def end(self) -> None:
        """The session is over: what is saved now has what the script did behind its loop."""
        self._is_ended = True

    def completed(self) -> None:
        """The batch's step is complete."""
        self._saved = None  # it is the feed's to tell from here on
        self._done += 1

    def give_back(self, step: int) -> None:
        """The newest batch is in no step: the position is the one before it, if the loader can."""
        self._is_given_back = self._saved is None
        if self._feed is not None and self._feed.kind == "outlast":
            self._trail.cut(step)

    @property
    def batch(self) -> tuple[int, int]:
        """The loop, and which of its batches was handed out last."""
        return self._skipping.loop, self._skipping.batch

    def leave(self) -> None:
        """The loop is over."""
        self._left = True
        self._end_held = self._held.state()
        self._end_random = [*random_state.look()]
        if self._objects is not None and not self._acts_between:
            self._end_trace = trace(self._objects)
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
            saved = dict(self._saved or {})
            if saved and self._is_ended:
                saved |= {"ended": True, EPOCHS: self._epochs.state()}
            return saved
        found = self._placed(self._trail.state())
        return given_back(found)[0] if self._is_given_back else found

    @property
    def random(self) -> Mapping[str, Any] | None:
        """The random numbers of the position, where they are not those of now."""
        if not self._is_given_back or self._feed is None:
            return None
        return given_back(self._placed({}))[1]

    def forget_ahead(self) -> None:
        """Another step is in progress from here on."""
        self._ahead = None

    def reached(self) -> Mapping[str, Any]:
        """The position at this boundary, as ``state``; the same object as ``ahead`` gave, if so."""
        foreseen = self._ahead
        if foreseen is None or self._feed is None or self._is_given_back or self._left:
            return self.state()
        is_as_foreseen = same(
            [foreseen["held"], foreseen["position"]], [self._held.state(), self._feed.state()]
        )
        return foreseen if is_as_foreseen else self.state()

    def ahead(self) -> Mapping[str, Any]:
        """The position at the end of the step in progress."""
        if self._feed is None:
            return self.state()
        if self._ahead is None:
            self._ahead = self._placed(self._trail.uncounted())
        elif not same(self._ahead["held"], held := self._held.state()):  # drawn from meanwhile
            self._ahead = {**self._ahead, "held": held}
        return self._ahead

    def record(self) -> Mapping[str, Any]:
        """The record of samples, as of the end of the step in progress; not counted to its end."""
        found: Mapping[str, Any] = self.ahead().get(TRAIL, {})
        return found

    def _placed(self, trail: Mapping[str, Any]) -> dict[str, Any]:
        assert self._feed is not None  # noqa: S101
        placed = place(self._skipping.loop, self._feed, trail, self._skipping.batch)
        at_until = self._until is not None and self._done >= self._until
        return placed | {
            "line": self._site.line,
            "loops": self._loops.state(),
            EPOCHS: self._epochs.state(),
            # The same behind the loop's last step and behind the loop, wherever that can be told:
            # a session's end that is what is committed already is not saved once more.
            "over": self._feed.is_at_end() or (self._left and not at_until),
            "left": self._left,
            "may_be_over": not self._feed.has_more(),
            "until": self._until,
            "ended": self._is_ended,
            "between": self._acts_between,
            "aside": [[line, state] for line, state in self._asides().items()],
            "held": self._held.state() if self._end_held is None else self._end_held,
            "besides": getattr(self._feed.loader, "besides", generators.in_progress)(),
        }
