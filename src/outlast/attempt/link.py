"""The workers (and agents) of one attempt: what they say to each other, and how they act as one.

**Link.** Two things travel: small values under a key that is set once (``publish``, ``fetch``), and
messages to one rank's inbox, in the order they were sent (``send``, ``receive``). Both go over a
TCPStore of torch's: the attempt's own one, which the agent makes afresh each time, or without our
agent one that rank 0 opens. A thread that waits is blocked inside torch without the interpreter's
lock, so an idle link costs the training loop nothing. Rejected: polling a key at each step (70 µs a
step, and late); a collective (on the step's path).

**Agreement.** All ranks act at the same step, without a collective on the step's path. Rank 0
coordinates. When something is asked for (a save, a drain) it asks every rank for a pledge: the step
that the rank is in the middle of, beyond which it will not go before it knows the decision. The
decision is the largest pledge (or a later step, if one was asked for), so no rank has passed it.
Ranks answer from a thread, while the training thread computes; it waits only if it reaches its
pledge before the decision has come, which takes milliseconds. A drain for which there is no time is
decided without pledges: everybody leaves at once ("leave"). A drain and a rollback are the last
thing that an attempt agrees on. Deadlines travel as seconds left: clocks of two machines are not
comparable.

Prior art: torchft asks a lighthouse for a quorum at each step, which costs each step a round trip
and makes the lighthouse's life the job's life. A flag that is all-reduced each step costs a
collective. A stop flag on one rank alone followed by a barrier deadlocks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, Protocol

import msgspec
import torch
import torch.distributed as dist

from outlast.attempt.early import nameless
from outlast.checkpoint import devices
from outlast.errors import ConfigError

logger = logging.getLogger(__name__)

STORE_VARIABLE: Final = "OUTLAST_STORE"  # host:port of the attempt's store, set by our agent
ATTEMPT_VARIABLE: Final = "OUTLAST_ATTEMPT"  # number of the attempt, set by our agent
PREFIX: Final = "outlast"
DATA_KEY: Final = "data"  # rank 0's session says whether its data go with any number of workers
TIED: Final = b"tied"
FREE: Final = b"free"
_WAIT: Final = timedelta(hours=1)
_SHORT: Final = timedelta(minutes=5)
Message = dict[str, Any]


class Link(Protocol):
    """How a rank reaches the others."""

    rank: int
    world_size: int
    host: str  # where the others are reached from here

    def publish(self, key: str, value: bytes) -> None:
        """Set ``key`` for all ranks."""

    def fetch(self, key: str, timeout_s: float) -> bytes:
        """Wait for ``key``; TimeoutError when it does not come."""

    def send(self, rank: int, message: Message) -> None:
        """Put ``message`` into the inbox of ``rank``."""

    def receive(self) -> Message | None:
        """The next message for this rank, waited for; None once the link is gone."""

    def close(self) -> None:
        """Wake the receiver with None."""

    def let_go(self) -> None:
        """Nothing is asked any more."""


class LocalLink:
    """A link of one rank to itself."""

    rank = 0
    world_size = 1
    host = "127.0.0.1"

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()

    def publish(self, key: str, value: bytes) -> None:
        """Set ``key``."""
        self._values[key] = value

    def fetch(self, key: str, timeout_s: float) -> bytes:
        """The value of ``key``; nobody else could set it later."""
        if key not in self._values:
            raise TimeoutError(f"{key} was never published")
        return self._values[key]

    def send(self, rank: int, message: Message) -> None:
        """Put ``message`` into the only inbox."""
        self._inbox.put(message)

    def receive(self) -> Message | None:
        """The next message."""
        return self._inbox.get()

    def close(self) -> None:
        """Wake the receiver."""
        self._inbox.put(None)

    def let_go(self) -> None:
        """Nothing is held."""


class StoreLink:
    """A link over a TCPStore, which is this attempt's alone."""

    def __init__(self, host: str, port: int, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.host = host
        # Each client serialises its calls, so whoever waits long has one of its own.
        self._for_inbox = connect(host, port, _WAIT)
        self._for_fetch = connect(host, port, _WAIT)
        self._for_sending = connect(host, port, _SHORT)
        self._closed = threading.Event()

    def publish(self, key: str, value: bytes) -> None:
        """Set ``key`` for all ranks; OSError when the store is gone."""
        self._translate(lambda: self._for_sending.set(f"{PREFIX}/{key}", value))

    def fetch(self, key: str, timeout_s: float) -> bytes:
        """Wait for ``key``; TimeoutError when it does not come, OSError when the store is gone."""
        name = f"{PREFIX}/{key}"

        def wait() -> bytes:
            self._for_fetch.wait([name], timedelta(seconds=max(timeout_s, 0.01)))
            return bytes(self._for_fetch.get(name))

        value: bytes = self._translate(wait)
        return value

    def send(self, rank: int, message: Message) -> None:
        """Put ``message`` into the inbox of ``rank``."""
        post(self._for_sending, rank, message)

    def receive(self) -> Message | None:
        """The next message for this rank; None when the link was closed or the store is gone."""
        inbox = self._for_inbox
        while not self._closed.is_set():
            try:
                raw = inbox.queue_pop(_inbox(self.rank))
            except dist.DistStoreError:
                continue  # an hour without a message
            except RuntimeError:
                return None
            message: Message = msgspec.json.decode(raw)
            if message.get("kind") != "closed":
                return message
        return None

    def close(self) -> None:
        """Wake the receiver by a message to oneself."""
        self._closed.set()
        with contextlib.suppress(RuntimeError):  # the store is gone, and the receiver with it
            self.send(self.rank, {"kind": "closed"})

    def let_go(self) -> None:
        """Nothing is asked any more: connections end with who still uses them."""
        self._for_inbox = self._for_fetch = self._for_sending = _Closed()

    @staticmethod
    def _translate(call: Any) -> Any:
        try:
            return call()
        except dist.DistStoreError as error:
            raise TimeoutError(str(error).partition("\n")[0]) from None
        except RuntimeError as error:
            raise ConnectionError(str(error).partition("\n")[0]) from None


class _Closed:
    """In the place of a store that is connected to no more."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("connection closed: this link was")


def connect(host: str, port: int, timeout: timedelta) -> Any:
    """A client of the store at ``host:port``."""
    with nameless(host):
        return dist.TCPStore(host, port, is_master=False, timeout=timeout)


def post(store: Any, rank: int, message: Message) -> None:
    """Put ``message`` into the inbox of ``rank`` through ``store``."""
    store.queue_push(_inbox(rank), msgspec.json.encode(message))


def kept_key(machine: int) -> str:
    """Where the agent of a machine says, in the attempt's store, how many workers go on."""
    return f"{PREFIX}/kept/{machine}"


def _inbox(rank: int) -> str:
    return f"{PREFIX}/inbox/{rank}"


def open_link() -> Link:
    """The link of this process, from its surroundings.

    Raises:
        ConfigError: there are several workers and no way to reach them yet, or this is their
            second session in one attempt.
    """
    grouped = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if grouped else int(os.environ.get("RANK", "0"))
    world_size = dist.get_world_size() if grouped else int(os.environ.get("WORLD_SIZE", "1"))
    address = os.environ.get(STORE_VARIABLE)
    if address:
        if world_size > 1 and address in _opened:
            raise ConfigError(
                "a second session in one run of a script, on several workers: the words of the "
                "first are still there; name everything in one session, or run another script"
            )
        _opened.add(address)
        host, _, port = address.rpartition(":")
        return StoreLink(host, int(port), rank, world_size)
    if world_size == 1:
        return LocalLink()
    if not grouped:
        raise ConfigError(
            f"WORLD_SIZE is {world_size} and the process group is not there yet; call "
            "torch.distributed.init_process_group() before outlast.session()"
        )
    return _link_of_group(rank, world_size)


def _link_of_group(rank: int, world_size: int) -> Link:
    """Without our agent: rank 0 opens a store and tells its address through the process group."""
    global _server
    local = os.environ.get("LOCAL_WORLD_SIZE", str(world_size)) == str(world_size)
    address = torch.zeros(256, dtype=torch.uint8)
    if rank == 0:
        host = "127.0.0.1" if local else socket.getfqdn()
        _server, port = open_store("127.0.0.1" if local else "0.0.0.0")  # noqa: S104
        text = f"{host}:{port}".encode()
        address[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    address = address.to(device_of_group())
    dist.broadcast(address, src=0)
    host, _, number = bytes(address.cpu().tolist()).rstrip(b"\0").decode().rpartition(":")
    return StoreLink(host, int(number), rank, world_size)


def device_of_group() -> torch.device:
    """Where the process group takes tensors: in this memory, or else on the rank's device."""
    group: Any = dist.group.WORLD
    kinds = [torch.device(kind).type for kind in group._device_types]
    if "cpu" in kinds:
        return torch.device("cpu")
    if group.bound_device_id is not None:
        return torch.device(group.bound_device_id)
    return torch.device(kinds[0], devices.own() if kinds[0] == "cuda" else None)


_opened: set[str] = set()  # stores of attempts that this process had a session in
_server: Any = None  # the store that rank 0 serves lives as long as the process


def open_store(host: str) -> tuple[Any, int]:
    """Serve a fresh store on a free port of ``host``, an address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    with nameless(host):
        store = dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return store, port


DECISION_TIMEOUT_S: Final = 120.0
_COORDINATED: Final = ("ask", "pledge", "poke")
LAST: Final = ("move", "drain", "rollback")  # nothing is agreed after one of them
_HELD: Final = 0  # rounds count from 1; this pledge is the asking rank's own


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """Something that all ranks do once ``step`` is complete.

    Attributes:
        kind: "save", "drain", "rollback" (to another step's state, which ends the attempt), "move"
            (into the next attempt, in the same processes), or "leave": at once, wherever a rank
            is, without saving.
        step: completed steps at which it is done, the same on all ranks; 0 for "leave".
        info: what the one who asked said: reason, left_s (seconds from now, or None).
    """

    kind: str
    step: int
    info: dict[str, Any]


class _RankProgress:
    """Where this rank's training is; shared by the training thread and the answering thread."""

    def __init__(self, completed: int, *, in_step: bool) -> None:
        self.changed = threading.Condition()
        self.completed = completed
        self.in_step = in_step
        self.pledges: dict[int, int] = {}  # round → the step it must not pass, undecided
        self.due: list[Action] = []
        # The newest step that was acted on; one that was resumed from is committed already.
        self.acted = completed or -1
        self.saved: Action | None = None  # if that was a save
        self.ended = -1  # the newest step at which this rank has done what was due at a loop's end
        self.finished = False


class Agreement:
    """One rank's side of it, and on rank 0 the coordinator's.

    Args:
        link: the other ranks.
        completed: the step that training starts after.
        in_step: whether the step behind it is in progress already, an interrupted one say.
        on_decision: told of each decision, in the answering thread; must be quick.
        may_save: on rank 0, whether a save could begin now; one that could not waits for ``poke``.
        may_drain: on rank 0, whether there is time for a drain; it may add to its info.
        may_move: on rank 0, told what was said with each ask for a drain so far: whether all move
            instead, and then see who leaves.
        on_hurry: on rank 0, told of an early notice.
        on_deadline: told that the machine goes sooner than was said when a drain was agreed.
        on_other: told of messages that are for somebody else, in the answering thread.
    """

    def __init__(
        self,
        link: Link,
        completed: int,
        on_decision: Callable[[Action], None],
        *,
        may_save: Callable[[], bool],
        in_step: bool = False,
        may_drain: Callable[[dict[str, Any]], bool] = lambda _: True,
        may_move: Callable[[list[dict[str, Any]]], bool] = lambda _: False,
        on_hurry: Callable[[dict[str, Any]], None] = lambda _: None,
        on_deadline: Callable[[float], None] = lambda _: None,
        on_other: Callable[[Message], None] = lambda _: None,
    ) -> None:
        self._link = link
        self._on_other = on_other
        self._progress = _RankProgress(completed, in_step=in_step)
        self._on_decision = on_decision
        self._on_hurry = on_hurry
        self._on_deadline = on_deadline
        self._coordinator = None if link.rank else _RoundLeader(link, may_save, may_drain, may_move)
        self._thread = devices.Thread(target=self._answer, name="outlast-agreement", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def release(self) -> None:
        """The attempt is over: no decision comes any more, and whoever waits for one is let go."""
        with self._progress.changed:
            self._progress.finished = True
            self._progress.changed.notify_all()

    def stop(self) -> None:
        """Stop answering; whoever waits is let go."""
        self.release()
        self._link.close()
        self._thread.join(timeout=5)

    def request(self, kind: str, *, not_before: int, hold: bool = False, **info: Any) -> None:
        """Ask for an action at ``not_before`` or as soon after it as all ranks can.

        With ``hold`` this rank does not go beyond ``not_before`` before it knows the decision: the
        action then happens exactly there, unless another rank is further.
        """
        with self._progress.changed:
            if kind != "drain" and any(a.kind in LAST for a in self._progress.due):
                return  # nothing is agreed after a drain; another one may know of less time
            if hold:
                self._progress.pledges[_HELD] = not_before
        self._link.send(0, {"kind": "ask", "action": kind, "at": not_before, "info": info})

    def hurry(self, **info: Any) -> None:
        """An early notice was heard here: rank 0, which says when to save, is to know."""
        self._link.send(0, {"kind": "hurry", "info": info})

    def poke(self) -> None:
        """On rank 0: a save that had to wait may be able to begin."""
        if self._coordinator is not None:
            self._link.send(0, {"kind": "poke"})

    def boundary(self, completed: int) -> list[Action]:
        """Called between steps: what is due now; with nothing due, the next step has begun.

        Call it until it gives nothing. Waits only for a decision that this rank has pledged to
        wait for.
        """
        progress = self._progress
        with progress.changed:
            progress.completed = completed
            progress.in_step = False
            self._wait_for_decisions(completed)
            return self._take(completed, progress.due)

    def last_boundary(self, completed: int) -> list[Action]:
        """On rank 0, once a loop is over: saves that are due now; a drain waits for the next loop.

        Waits as ``boundary`` does; no step is begun. A decision may come to another rank after its
        loop is over: rank 0 tells what it has done here, and the others ``follow``.
        """
        progress = self._progress
        with progress.changed:
            progress.completed = completed
            progress.in_step = False
            self._wait_for_decisions(completed)
            due = self._take(completed, [a for a in progress.due if a.kind not in LAST])
            progress.in_step, progress.ended = False, completed
            return due

    def saved(self, completed: int) -> dict[str, Any] | None:
        """Of the save that this rank has made at this step, at either boundary, what was asked for.

        Another rank may have come by the first one before it had pledged to wait.
        """
        progress = self._progress
        with progress.changed:
            saved = progress.saved if progress.acted == completed else None
            return None if saved is None else saved.info

    def follow(self, completed: int) -> bool:
        """On other ranks: rank 0 has saved at the last boundary; whether this rank is still to."""
        progress = self._progress
        with progress.changed:
            progress.completed = completed
            progress.in_step = False
            late = [a for a in progress.due if a.kind not in LAST and a.step <= completed]
            progress.due = [action for action in progress.due if action not in late]
            if progress.acted >= completed:
                return False
            progress.acted = completed  # the decision, if it is still to come, finds it done
            return True

    def _take(self, completed: int, among: list[Action]) -> list[Action]:
        progress = self._progress
        due = [action for action in among if action.step <= completed]
        progress.due = [action for action in progress.due if action not in due]
        progress.in_step = not due
        if due:
            progress.acted = completed
            progress.saved = next((action for action in due if action.kind == "save"), None)
        return due

    def _wait_for_decisions(self, completed: int) -> None:
        """Until nothing is undecided that this rank has pledged to wait for; the lock is held."""
        progress = self._progress
        deadline = time.monotonic() + DECISION_TIMEOUT_S
        while not progress.finished and any(p <= completed for p in progress.pledges.values()):
            if not progress.changed.wait(timeout=deadline - time.monotonic()):
                # The coordinator is gone or stuck. Going on is right for a save (it will not be
                # committed); for a drain the agent's deadline ends what cannot end itself.
                logger.warning("no decision within %.0f s; going on", DECISION_TIMEOUT_S)
                progress.pledges.clear()

    @property
    def drains(self) -> list[dict[str, Any]]:
        """On rank 0: what was said with each ask for a drain so far, its seconds from now."""
        return [] if self._coordinator is None else self._coordinator.drains

    @property
    def in_step(self) -> bool:
        """Whether this rank is in the middle of a step."""
        return self._progress.in_step

    def leave(self, completed: int) -> None:
        """The loop is over: this rank takes no further step."""
        with self._progress.changed:
            self._progress.completed = completed
            self._progress.in_step = False

    def _answer(self) -> None:
        while True:
            message = self._link.receive()
            if message is None:
                return
            try:
                self._handle(message)
            except Exception as error:  # noqa: BLE001 - whatever it is, the next is answered
                logger.warning("a message was not handled (%s: %s)", type(error).__name__, error)

    def _handle(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "pledge?":
            self._pledge(message["round"])
        elif kind == "decided":
            self._decided(message)
        elif kind == "deadline":
            self._on_deadline(float(message["left_s"]))
        elif kind == "hurry":
            self._on_hurry(message["info"])
        elif kind in _COORDINATED:
            if self._coordinator is not None:
                self._coordinator.handle(message)
        else:
            self._on_other(message)

    def _pledge(self, number: int) -> None:
        progress = self._progress
        with progress.changed:
            step = progress.completed + progress.in_step
            if self._coordinator is not None and self._coordinator.asks_for_a_save:
                # A rank that is still in the loop would save alone what rank 0 has passed here.
                step = max(step, progress.ended + 1)
            progress.pledges[number] = step
        self._link.send(0, {"kind": "pledge", "round": number, "rank": self._link.rank, "at": step})

    def _decided(self, message: Message) -> None:
        action = Action(kind=message["action"], step=message["at"], info=message["info"])
        with self._progress.changed:
            self._progress.pledges.pop(message["round"], None)
            self._progress.pledges.pop(_HELD, None)
            if action.kind == "leave":
                self._on_decision(action)
                return
            # A second save of a step: a rank that had not acted yet would take both as one, and
            # this rank would wait in vain for the others' part of another.
            if action.kind in LAST or action.step > self._progress.acted:
                self._progress.due.append(action)
            self._on_decision(action)
            self._progress.changed.notify_all()


class _RoundLeader:
    """Rank 0's part: one round at a time, in the answering thread."""

    def __init__(
        self,
        link: Link,
        may_save: Callable[[], bool],
        may_drain: Callable[[dict[str, Any]], bool],
        may_move: Callable[[list[dict[str, Any]]], bool],
    ) -> None:
        self._link = link
        self._may_save = may_save
        self._may_drain = may_drain
        self._may_move = may_move
        self._drains: list[Message] = []  # all that was asked for
        self._waiting: list[Message] = []
        self._round = 0
        self._asked: Message | None = None
        self._pledges: dict[int, int] = {}
        self._draining = False

    def handle(self, message: Message) -> None:
        """Take a request or a pledge; anything else only has the waiting ones looked at."""
        if message["kind"] == "ask":
            left_s = message["info"].get("left_s")
            if self._draining and message["action"] == "drain" and left_s is not None:
                self._send_all({"kind": "deadline", "left_s": left_s})
            ask = {**message, "heard_s": time.monotonic()}
            self._waiting.append(ask)
            if ask["action"] == "drain":
                self._drains.append(ask)
        elif message["kind"] == "pledge" and message["round"] == self._round and self._asked:
            self._pledges[message["rank"]] = message["at"]
            if len(self._pledges) == self._link.world_size:
                self._decide(self._asked)
        self._begin()

    @property
    def asks_for_a_save(self) -> bool:
        """Whether the round under way is about one."""
        return self._asked is not None and self._asked["action"] not in LAST

    @property
    def drains(self) -> list[dict[str, Any]]:
        """What was said with each ask for one; from any thread."""
        return [{**ask["info"], "left_s": _left_s(ask)} for ask in list(self._drains)]

    def _begin(self) -> None:
        ask = self._next()
        if self._asked is not None or ask is None:
            return
        self._draining = ask["action"] in LAST
        self._waiting = [] if self._draining else [w for w in self._waiting if w is not ask]
        if ask["action"] == "drain" and self._may_move(self.drains):
            ask = {**ask, "action": "move"}
        if ask["action"] == "drain" and not self._may_drain(_as_of_now(ask)):
            self._tell({"round": 0, "action": "leave", "at": 0, "info": ask["info"]})
            return
        self._asked = ask
        self._round += 1
        self._pledges = {}
        for rank in range(self._link.world_size):
            self._link.send(rank, {"kind": "pledge?", "round": self._round})

    def _next(self) -> Message | None:
        """A drain overtakes everything but a rollback; what ends an attempt is agreed last."""
        if self._draining:
            return None
        for kind in reversed(LAST):
            last = next((ask for ask in self._waiting if ask["action"] == kind), None)
            if last is not None:
                return last
        if not self._waiting or not self._may_save():
            return None
        return self._waiting[0]

    def _decide(self, ask: Message) -> None:
        self._asked = None
        step = max(*self._pledges.values(), ask["at"], 0)
        # Whoever asked for this step or an earlier one is served by this decision.
        served = [w for w in self._waiting if w["action"] not in LAST and w["at"] <= step]
        self._waiting = [w for w in self._waiting if w not in served]
        info = _as_of_now(ask)
        if any(w["info"].get("tiers") is None for w in served):  # somebody wants all of it
            info = {key: one for key, one in info.items() if key not in ("tiers", "content")}
        self._tell({"round": self._round, "action": ask["action"], "at": step, "info": info})

    def _tell(self, decision: Message) -> None:
        self._send_all({"kind": "decided", **decision})

    def _send_all(self, message: Message) -> None:
        for rank in range(self._link.world_size):
            self._link.send(rank, message)


def _as_of_now(ask: Message) -> dict[str, Any]:
    """What was said with a request, its seconds counted from now."""
    info: dict[str, Any] = ask["info"]
    if info.get("left_s") is not None:
        info["left_s"] = _left_s(ask)
    ask["heard_s"] = time.monotonic()
    return info


def _left_s(ask: Message) -> float | None:
    left_s = ask["info"].get("left_s")
    return None if left_s is None else max(left_s - (time.monotonic() - ask["heard_s"]), 0.0)
