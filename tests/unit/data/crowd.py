"""All workers of a job in one process, as their number changes again and again.

Each stint opens a feed for each worker, resumes it from what the workers of the stint before had
saved (through JSON, as in a checkpoint), and takes some steps.
"""

import feed_gate

from outlast.data import open_feed
from outlast.data.audit import History
from outlast.data.feed import TRAIL, take_over
from outlast.data.trail import Trail, read_record


class Crowd:
    """A job's workers.

    Args:
        build: makes the loader that one worker has.
        rows: a batch → what went into it, one entry for each sample.
    """

    def __init__(self, build, rows):
        self.build, self.rows = build, rows
        self.steps = []  # step → all workers' rows, in the order of the ranks
        self.saved = []
        self.feeds = []

    def stint(self, world_size, num_steps, *, ahead=0):
        """``world_size`` workers take steps; ``ahead`` more are lost with the workers."""
        saved, step = self.saved, len(self.steps)
        self.feeds, trails = [], []
        for rank in range(world_size):
            data, trail = {}, Trail()
            if saved:
                data, trail = take_over(saved.__getitem__, len(saved), rank, world_size)
            trails.append(trail)
            whom = {"rank": rank, "world_size": world_size}
            feed = open_feed(self.build(), **whom, trail=trail, step=step)
            if data:
                feed.restore(data["position"])
            self.feeds.append(feed)
        try:
            for _ in range(num_steps):
                self.steps.append([row for feed in self.feeds for row in self.rows(next(feed))])
            self.saved = [
                feed_gate.through_json({"position": feed.state(), TRAIL: trail.state()})
                for feed, trail in zip(self.feeds, trails, strict=True)
            ]
            for _ in range(ahead):
                for feed in self.feeds:
                    next(feed)
        finally:
            for feed in self.feeds:
                feed.close()
        return self

    def history(self):
        records = [read_record(one[TRAIL]) for one in self.saved]
        return History(records, len(self.steps))

    def verdict(self):
        return self.history().verdict()
