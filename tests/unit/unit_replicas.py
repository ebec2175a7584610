"""Replicas of local updates in threads of one process, with a wire between them."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from outlast.fleet import local_updates

LIMIT_S = 60.0


class Meeting:
    """Where ``size`` threads put a tensor each, and see all of them."""

    def __init__(self, size):
        self._barrier = threading.Barrier(size, timeout=LIMIT_S)
        self._rows = [None] * size

    def all(self, rank, row):
        self._rows[rank] = row.clone()
        self._barrier.wait()
        found = list(self._rows)
        self._barrier.wait()
        return found


class ThreadWire:
    """One replica's end; counts what it sends to others, in bytes."""

    def __init__(self, meeting, rank, size):
        self.rank, self.size, self.ranks = rank, size, list(range(size))
        self._meeting = meeting
        self.sent_bytes = 0

    def swap(self, into, own):
        for rank, rows in enumerate(self._meeting.all(self.rank, own)):
            into[rank] = rows[self.rank]
        self.sent_bytes += own[0].numel() * own.element_size() * (self.size - 1)

    def collect(self, into, own):
        for rank, row in enumerate(self._meeting.all(self.rank, own)):
            into[rank] = row
        self.sent_bytes += own.numel() * own.element_size() * (self.size - 1)

    def adopt(self, tensor):
        tensor.copy_(self._meeting.all(self.rank, tensor)[0])


def wires(size):
    meeting = Meeting(size)
    return [ThreadWire(meeting, rank, size) for rank in range(size)]


def together(size, act):
    """What ``act`` of each rank gave, each in a thread of its own; the first error is raised."""
    failed = queue.SimpleQueue()

    def run(rank):
        try:
            return act(rank)
        except BaseException as error:
            failed.put(error)
            raise

    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(run, rank) for rank in range(size)]
    if not failed.empty():
        raise failed.get()
    return [one.result() for one in running]


class Replicas:
    """Runs scripts of replicas: each in a thread, over wires of this process."""

    def __init__(self, monkeypatch):
        self._here = threading.local()
        monkeypatch.setattr(local_updates, "GroupWire", lambda group=None: self._here.wire)

    def run(self, size, script):
        """What ``script(rank)`` gave, for each rank."""
        ends = wires(size)

        def act(rank):
            self._here.wire = ends[rank]
            return script(rank)

        return together(size, act)

    def alone(self):
        (self._here.wire,) = wires(1)


def same(one, other):
    """Whether two states have the same bits, whatever is nested in what."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.equal(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other
