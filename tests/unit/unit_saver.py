"""Saving in one process: what workers and their keepers do, without sockets and processes.

Everything that decides about a checkpoint is the real thing: the ranks agree (``Sharing``), plan,
copy into an arena (``Capture``), and each machine's ``Saves`` write, compare and commit; several
machines' keepers talk over sealed channels. Only the connections of workers are not: their messages
go through JSON, and no further.
"""

import errno
import queue
import threading
import time
from typing import Any, NamedTuple

import msgspec
import torch
from unit_fakes import Hub, WatchedStorage, on_ranks

from outlast.checkpoint import capture, manifest, plan, transfer
from outlast.checkpoint.capture import Capture
from outlast.checkpoint.manifest import FULL, small_state
from outlast.checkpoint.plan import Share, make, name_of, structure
from outlast.checkpoint.tree import flatten
from outlast.keeper import conclude, flight, wire
from outlast.keeper.copies import WordsSaid
from outlast.keeper.flight import Pool
from outlast.keeper.memory import Books, MemoryTier
from outlast.keeper.saves import SavesInFlight
from outlast.keeper.shared_saves import SaveFollower, SaveLeader
from outlast.peer import listen
from outlast.storage import Directory
from outlast.training.sharing import Sharing

LIMIT_S = 20.0  # a test that hangs fails instead
MAX_TRIES = 4  # of a snapshot that is void
KEY = b"k" * 32


class Captured(NamedTuple):
    """What one rank saves at a boundary; ``tensors`` are live.

    ``between`` is called when what cannot wait has been copied, and nothing else.
    """

    step: int
    data: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    lazy: frozenset = frozenset()
    order: tuple = ()
    narrow: frozenset = frozenset()
    kind: str = FULL
    tiers: tuple | None = None
    between: Any = None


def captured(state, step=7, **more):
    """``state`` (key → nested state) at the boundary of ``step``."""
    data, tensors = {}, {}
    for key, value in state.items():
        data[key], found = flatten(value, key)
        tensors |= found
    return Captured(step=step, data=data, tensors=tensors, **more)


def save_all(storage, states, step=7, **more):
    """Save ``states``, one for each rank; how the save ended for each of them."""
    with Attempt(storage, len(states), **more) as attempt:
        return attempt.save(states, step)


def written(storage, states, step=7, **more):
    """``save_all``, which must succeed."""
    results = save_all(storage, states, step, **more)
    assert [(one.step, one.error) for one in results] == [(step, "")] * len(states), results
    return results


def share_everything(monkeypatch):
    """The smallest tensor is worth comparing."""
    monkeypatch.setattr(plan, "SHARE_MIN_BYTES", 0)


def small_blocks(monkeypatch, num_bytes):
    """Files of a few bytes have many blocks."""
    for room in (manifest, capture, transfer, flight, plan):
        monkeypatch.setattr(room, "BLOCK_BYTES", num_bytes)


def no_pauses(monkeypatch):
    """What failed is tried again at once."""
    monkeypatch.setattr(flight, "RETRY_S", (0.0,) * len(flight.RETRY_S))
    monkeypatch.setattr(conclude, "PAUSES_S", (0.0,) * len(conclude.PAUSES_S))


def snapshot(tensors, *, elsewhere=(), rank=0):
    """What ``rank`` does of a save of ``tensors``, and its file as it lies in memory then.

    Tensors named in ``elsewhere`` are shared, and the next rank's to write.
    """
    pieces = structure(tensors)
    writers = {piece.key: rank + 1 for piece, _ in pieces if piece.name in elsewhere}
    mine = make(pieces, rank, Share(writers), {})
    buffer = torch.zeros(max(mine.size, 1), dtype=torch.uint8)
    taken = Capture(mine, tensors, (), buffer, on_blocks=lambda _: None)
    taken.take_now()
    assert (taken.void, taken.error) == ([], None)
    return taken, bytes(buffer.numpy())[: mine.size]


def failing(path, where, operation, error=None, *, times=None):
    """A storage on which ``operation`` fails so many ``times`` on names with ``where`` in them."""
    error = error or OSError(errno.ENOSPC, "No space left on device")
    left = [float("inf") if times is None else times]

    def fail(did, name):
        if did != operation or where not in name or left[0] <= 0:
            return None
        left[0] -= 1
        return error

    return WatchedStorage(Directory(path), fail)


def how_often(storage, operation, where):
    """How many times ``operation`` was asked for on names with ``where`` in them."""
    return sum(did == operation and where in name for did, name in storage.log)


def errors_of(results):
    """How saves ended; "" is a commit. None of them was void."""
    assert not any(one.void for one in results), results
    return {one.error for one in results}


class Keeper:
    """One machine's keeper, as far as saving goes.

    Attributes:
        events: what went into the ledger, as (name, fields).
        commits: what was told of commits.
    """

    def __init__(self, tiers, job):
        self.books, self.pool = Books(), Pool()
        self.events, self.commits = [], []
        self.saves = SavesInFlight(
            job,
            tiers,
            self.books,
            self.pool,
            record=self.record,
            on_committed=self.commits.append,
            on_change=lambda: None,
        )

    def record(self, event, **fields):
        self.events.append((event, fields))

    def memory(self):
        """The tier of committed snapshots."""
        return MemoryTier(self.books.arenas, self.books.kept)

    def drop_memory(self):
        for number in list(self.books.arenas):
            self.books.drop(number)


class Attempt:
    """The ranks of one attempt, each with its saver, and the keepers of their machines.

    Args:
        storage: where all save to; a dict of tiers; or a list with one of these for each machine.
        world_size: number of ranks.
        machines: over which they are spread evenly.
        ring_bytes: if not 0, the size of the memory that a snapshot goes through.
    """

    def __init__(self, storage, world_size, *, machines=1, job="job", attempt=1, ring_bytes=0):
        self._others = set(threading.enumerate())
        self.number, self.ring_bytes, self.hub = attempt, ring_bytes, Hub(world_size)
        each = storage if isinstance(storage, list) else [storage] * machines
        tiers = [one if isinstance(one, dict) else {"local": one} for one in each]
        self.keepers = [Keeper(one, job) for one in tiers]
        local = world_size // machines
        self.sides = self._meet(world_size, local, job) if machines > 1 else []
        self.savers = [
            Saver(self, self.hub.link(rank), self.keepers[rank // local])
            for rank in range(world_size)
        ]

    def _meet(self, world_size, local, job):
        """The keepers talk to each other."""
        listener = listen("127.0.0.1")
        address = listener.getsockname()[:2]
        sides = []
        for number, keeper in enumerate(self.keepers):
            ranks = range(number * local, (number + 1) * local)
            keeper.saves.know(self.number, ranks)
            hello = wire.Hello(
                job=job,
                attempt=self.number,
                world_size=world_size,
                first_local=ranks.start,
                num_local=local,
            )
            if number:
                side = SaveFollower(
                    address, lambda: KEY, None, keeper.saves, hello=hello, said=WordsSaid()
                )
            else:
                rest = {"hello": hello, "local": set(ranks), "record": keeper.record}
                side = SaveLeader(listener, lambda: KEY, None, keeper.saves, **rest)
            keeper.saves.meet(self.number, side)
            sides.append(side)
        return sides

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.hub.close()
        for side in reversed(self.sides):
            side.close()
        for keeper in self.keepers:
            keeper.pool.stop()
        for thread in set(threading.enumerate()) - self._others:
            if thread.name.startswith("outlast-"):
                thread.join(LIMIT_S)
        for saver in self.savers:
            saver.forget()
        for keeper in self.keepers:
            keeper.drop_memory()

    def save(self, states, step=7, *, only=None, **more):
        """Save each rank's state or ``Captured``; by rank how it ended, None for who took no part.

        A snapshot that is void is taken again.
        """
        given = [
            one if isinstance(one, Captured) else captured(one, step, **more) for one in states
        ]
        self.agree(given)
        results = on_ranks(
            len(given),
            lambda link: self.savers[link.rank].save(given[link.rank]),
            hub=self.hub,
            only=only,
            limit_s=2 * LIMIT_S,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def agree(self, given):
        """All ranks offer what they have, as they do after their first step."""
        for saver, one in zip(self.savers, given, strict=True):
            saver.prepare(one)


class Saver:
    """One worker's part in saving, and as a ``Peer`` what its keeper has of it.

    Attributes:
        ended: how each save ended, the void ones too.
    """

    def __init__(self, attempt, link, keeper):
        self.rank, self.is_gone, self.ended = link.rank, False, []
        self.keeper = keeper
        self._attempt, self._link, self._saves = attempt, link, keeper.saves
        self._serial = self._arena = 0
        self._own = set()
        self._offered = None
        self._sharing = Sharing(link, lambda: None)
        self.forget()
        self._inbox = queue.SimpleQueue()
        self._room, self._written_blocks = threading.Condition(), set()

    # --- the worker -----------------------------------------------------------------------------

    def prepare(self, given):
        pieces = structure(given.tensors, given.narrow)
        if pieces != self._offered:
            self._offered = pieces
            self._sharing.offer(pieces, self._own)

    def save(self, given):
        """How the save ended."""
        at_once = False
        for _ in range(MAX_TRIES):
            self.begin(given, at_once=at_once)
            ended = self.wait()
            if not ended.void:
                break
            at_once = True
            self._own |= {name_of(name) for name in ended.void if "[" in name}
            self._sharing.offer(self._offered, self._own)
        return ended

    def begin(self, given, *, at_once=False):
        """Take a snapshot and give it to the keeper."""
        self.copy(given, at_once=at_once)
        self.complete()

    def copy(self, given, *, at_once=False):
        """Take a snapshot, block by block; the keeper has yet to hear that it is whole."""
        plan = self._plan(given)
        lazy = frozenset() if at_once else given.lazy
        arena = self.keeper.books.arenas[self._arena]
        self._capture = Capture(
            plan,
            given.tensors,
            lazy,
            torch.frombuffer(arena.view, dtype=torch.uint8),
            ring_bytes=self._attempt.ring_bytes,
            on_blocks=lambda full: self._about(
                self._saves.ready, wire.BlocksReady, blocks=tuple(full)
            ),
            wait_for_room=self._wait_for_room,
        )
        self._given, self._plan_of_it = given, plan
        self._capture.take_now()
        if given.between is not None:
            given.between()
        self._capture.wait()

    def complete(self):
        """The keeper is told that the snapshot is whole, or void."""
        taken, given = self._capture, self._given
        if taken.void:
            names = tuple(sorted(set(taken.void)))
            reason = f"{', '.join(names)} changed under the copy"
            self._about(self._saves.void, wire.Void, reason=reason, names=names)
            return
        text = small_state(given.step, self.rank, self._plan_of_it.own, given.data)
        self._about(self._saves.complete, wire.Complete, text, digests=taken.digests)

    def forget(self):
        """Keep nothing of the last snapshot: it looks at the memory."""
        self._capture = self._given = self._plan_of_it = None

    def refuse(self, step, reason):
        """This rank has no snapshot to give."""
        self._serial += 1
        message = wire.Absent(step=step, serial=self._serial, reason=reason)
        self._saves.absent(self, as_sent(message), **self._who)

    def wait(self):
        """How the save ended."""
        ended = self._inbox.get(timeout=LIMIT_S)
        assert ended.serial == self._serial, "a save ended twice, or another one did"
        self.ended.append(ended)
        return ended

    def die(self):
        """The connection is gone."""
        self.is_gone = True
        self._saves.lost(self._attempt.number, self)

    @property
    def _who(self):
        attempt = self._attempt.number
        hello = wire.Hello(job="job", attempt=attempt, world_size=self._link.world_size)
        return {"hello": hello}

    def _plan(self, given):
        """What this rank does of the save; it is begun, and there is memory for it."""
        self._serial += 1
        self._step, self._written_blocks = given.step, set()
        share = self._sharing.of(self._offered, LIMIT_S)
        assert share is not None, "the ranks did not agree"
        plan = make(structure(given.tensors, given.narrow), self.rank, share, dict(given.order))
        books, ring = self.keeper.books, self._attempt.ring_bytes
        with self._saves.lock:
            known = books.arenas.get(self._arena)
            if known is None or (known.num_bytes < plan.size and not ring):
                self._arena = books.make(self.rank, ring or max(plan.size, 1))
        begin = wire.BeginSave(
            step=given.step,
            serial=self._serial,
            layout=1,
            arena=self._arena,
            tiers=given.tiers,
            kind=given.kind,
            exact=not given.narrow,
            started_s=time.monotonic(),
        )
        layout = wire.Layout(
            number=1,
            size=plan.size,
            tensors=plan.tensors if self._link.world_size == 1 else {},
            contents=plan.contents,
            num_elements=share.num_elements if given.kind == FULL else 0,
            groups=share.groups,
        )
        self._saves.begin(self, as_sent(begin), as_sent(layout), ring_bytes=ring, **self._who)
        return plan

    def _about(self, tell, kind, *blob, **fields):
        message = kind(step=self._step, serial=self._serial, **fields)
        tell(self._attempt.number, self.rank, as_sent(message), *blob)

    def _wait_for_room(self, block):
        before = block - self._attempt.ring_bytes // plan.BLOCK_BYTES
        if self._attempt.ring_bytes and before >= 0:
            with self._room:
                assert self._room.wait_for(lambda: before in self._written_blocks, LIMIT_S)

    # --- the connection -------------------------------------------------------------------------

    def send(self, message, blob=b""):
        """What the keeper says; never waits."""
        match as_sent(message):
            case wire.SaveEnded() as ended:
                self._inbox.put(ended)
            case wire.BlockWritten(block=block):
                with self._room:
                    self._written_blocks.add(block)
                    self._room.notify_all()


def as_sent(message):
    """A message as it arrives at the other end."""
    return msgspec.json.decode(msgspec.json.encode(message), type=wire.Message)
