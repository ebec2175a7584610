"""The way of a worker that takes a lost one's place: from its session's opening to its loop.

The others are in that loop, and answer nothing that is sent before it. So a script that sends
something on that way cannot have one worker started alone. It does not go through everything: code
in finished epochs of ``session.epochs()`` does not run again, so what is sent there, an evaluation
behind the loop, is on nobody's way. And barriers are left out on it: what they order has happened.

Where anything is sent between two loops, a state of before and one of behind it are of the same
step. So that workers of one attempt never stand on two sides of it, a loop that follows is entered
by all at once: all have come to it, then all have noted the state with which it begins, and only
then is a worker one that others can go on with.

What can go wrong: a script that sends only where it was resumed; nobody has seen it before.
"""

from __future__ import annotations

import torch.distributed as dist

from outlast.attempt.groups import groups, num_sent


class Way:
    """One worker's, from where its session is open.

    Args:
        joins: whether others are in the loop that it goes to.
    """

    def __init__(self, *, joins: bool) -> None:
        groups.skips_barriers = joins
        self._outside = self._inside = 0  # collectives on it: outside of epochs; in this one
        self._is_inside = self._has_sent = False
        self._sent, self._barriers = num_sent(), groups.num_barriers

    def epoch_begins(self) -> None:
        """Of ``session.epochs()``: the one before is finished."""
        self._note()
        self._is_inside, self._inside = True, 0

    def epochs_end(self, *, are_left: bool) -> None:
        """All of them are finished, or the newest one was left in its midst."""
        self._note()
        self._outside += self._inside if are_left else 0
        self._is_inside, self._inside = False, 0

    def is_silent(self) -> bool:
        """At a loop's beginning: whether nothing is sent on the way to it."""
        self._note()
        return not self._outside + self._inside

    def gather(self) -> None:
        """A loop is to begin: wait until all have come to it, if there were words since the last.

        Raises:
            RuntimeError: another rank is gone.
        """
        if self._has_sent:
            dist.barrier()

    def loop_begins(self) -> None:
        """The state with which it begins is noted: wait until all have noted theirs, likewise.

        Raises:
            RuntimeError: another rank is gone.
        """
        if self._has_sent:
            dist.barrier()
        self.arrived()

    def arrived(self) -> None:
        """The loop that others are in was come to, or passed: from here on all do the same."""
        groups.skips_barriers = False

    def loop_ends(self) -> None:
        """What was sent within it is on nobody's way."""
        self._has_sent = False
        self._sent, self._barriers = num_sent(), groups.num_barriers

    def _note(self) -> None:
        sent, barriers = num_sent() - self._sent, groups.num_barriers - self._barriers
        self._sent, self._barriers = num_sent(), groups.num_barriers
        self._has_sent = self._has_sent or sent > 0
        if self._is_inside:
            self._inside += sent - barriers
        else:
            self._outside += sent - barriers
