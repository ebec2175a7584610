"""Ranks as threads, a storage that remembers and fails, and what "the same" means for state."""

from __future__ import annotations

import collections
import math
import queue
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import torch


def listing(path):
    """Names in a directory, hidden ones too."""
    return sorted(found.name for found in Path(path).iterdir())


def num_descriptors():
    """Open file descriptors of this process."""
    return len(listing("/proc/self/fd"))


def stand_in_for_graphs(monkeypatch, replay):
    """CUDA graphs as far as a machine without a GPU has them: ``replay`` of what stands for one."""
    kind = torch.cuda.CUDAGraph
    root = next(one for one in reversed(kind.__mro__) if "replay" in vars(one))
    monkeypatch.setattr(root, "replay", replay)
    if root is not kind:  # torch with CUDA: what it does besides wants a graph
        monkeypatch.setattr(kind, "replay", lambda graph: root.replay(graph))  # noqa: PLW0108 - as it is then


class Hub:
    """What the ranks of one attempt share."""

    def __init__(self, world_size):
        self.world_size = world_size
        self.values = {}
        self.published = []  # keys, in order
        self.changed = threading.Condition()
        self.inboxes = [queue.SimpleQueue() for _ in range(world_size)]
        self.is_closed = False

    def close(self):
        """The store is gone: nobody waits for a key any more."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()

    def link(self, rank):
        return FakeLink(self, rank)


class FakeLink:
    """A Link and an Exchange between threads; values are bytes, messages go through JSON."""

    host = "127.0.0.1"

    def __init__(self, hub, rank):
        self.hub, self.rank, self.world_size = hub, rank, hub.world_size

    def publish(self, key, value):
        with self.hub.changed:
            self.hub.values[key] = bytes(value)
            self.hub.published.append(key)
            self.hub.changed.notify_all()

    def fetch(self, key, timeout_s):
        with self.hub.changed:
            limit_s = min(timeout_s, 20.0)  # a test that hangs fails instead
            if not self.hub.changed.wait_for(
                lambda: key in self.hub.values or self.hub.is_closed, limit_s
            ):
                raise TimeoutError(f"{key} did not come")
            if key not in self.hub.values:
                raise ConnectionResetError("the store is gone")
            return self.hub.values[key]

    def send(self, rank, message):
        self.hub.inboxes[rank].put(msgspec.json.encode(message))

    def receive(self):
        raw = self.hub.inboxes[self.rank].get(timeout=20)
        return None if raw is None else msgspec.json.decode(raw)

    def close(self):
        self.hub.inboxes[self.rank].put(None)


def on_ranks(world_size, act, *, only=None, hub=None, limit_s=20.0):
    """``act(link)`` on each rank in a thread; what each returned or raised, by rank."""
    hub = hub or Hub(world_size)
    results = [None] * world_size

    def run(rank):
        try:
            results[rank] = act(hub.link(rank))
        except BaseException as error:
            results[rank] = error

    ranks = range(world_size) if only is None else only
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    until_s = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(until_s - time.monotonic(), 0.0))
        assert not thread.is_alive(), f"a rank hangs; published so far: {hub.published}"
    return results


def at_once(num, act, *, limit_s=20.0):
    """``act(number)`` in so many threads, which begin together; what each returned or raised."""
    gate = threading.Barrier(num)

    def begun(link):
        gate.wait(limit_s)
        return act(link.rank)

    return on_ranks(num, begun, limit_s=limit_s)


class WatchedStorage:
    """Another storage whose operations are kept in ``log``, and fail where ``fail`` says so.

    ``fail(operation, name)`` returns an exception to raise, or None.
    """

    def __init__(self, inner, fail=lambda operation, name: None):
        self.inner, self.fail, self.log = inner, fail, []

    def __getattr__(self, operation):
        call = getattr(self.inner, operation)

        def watched(name="", *rest):
            self.log.append((operation, name))
            error = self.fail(operation, name)
            if error is not None:
                raise error
            result = call(name, *rest)
            return _WatchedBlob(self, name, result) if operation == "create" else result

        return watched

    def describe(self, name=""):
        return self.inner.describe(name)


class _WatchedBlob:
    def __init__(self, storage, name, inner):
        self.storage, self.name, self.inner = storage, name, inner
        self.positional = inner.positional

    def _say(self, operation):
        self.storage.log.append((operation, self.name))
        error = self.storage.fail(operation, self.name)
        if error is not None:
            raise error

    def write(self, data):
        self._say("write")
        self.inner.write(data)

    def write_at(self, data, offset):
        self._say("write_at")
        self.inner.write_at(data, offset)

    def finish(self):
        self._say("finish")
        self.inner.finish()

    def abandon(self):
        self.storage.log.append(("abandon", self.name))
        self.inner.abandon()


def bits(tensor):
    """A tensor's bytes: -0.0 is not 0.0, and NaN is NaN."""
    whole = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""


def same_tensor(one, other):
    return (
        isinstance(other, torch.Tensor)
        and (one.dtype, one.shape) == (other.dtype, other.shape)
        and bits(one) == bits(other)
    )


def same(one, other):
    """Equal in value and in kind, to the bit."""
    if isinstance(one, torch.Tensor):
        return same_tensor(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return _same_dict(one, other)
    if isinstance(one, list | tuple | collections.deque):
        limits = getattr(one, "maxlen", None) == getattr(other, "maxlen", None)
        return limits and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, set | frozenset):
        return sorted(map(repr, one)) == sorted(map(repr, other))
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, float):
        return repr(one) == repr(other) and math.copysign(1, one) == math.copysign(1, other)
    return repr(one) == repr(other) if isinstance(one, complex) else one == other


def _same_dict(one, other):
    pairs = list(one.items()), list(other.items())
    factories = [getattr(which, "default_factory", None) for which in (one, other)]
    return (
        factories[0] is factories[1]
        and len(one) == len(other)
        and all(same(a, c) and same(b, d) for (a, b), (c, d) in zip(*pairs, strict=True))
    )
