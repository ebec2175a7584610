"""Replicas that take many steps apart, and exchange what they have learned once in a while.

    model, optimizer = …
    local = outlast.LocalUpdates(model, optimizer, every=30)
    with outlast.session(model=model, optimizer=optimizer, local=local) as session:
        for batch in session.steps(loader, until=10_000):
            train_step(batch)  # with optimizer.step(), which is all that LocalUpdates hears
        local.sync()

DiLoCo (arXiv 2311.08105, algorithm 1): each replica makes H steps with its own optimizer; the mean
over replicas of (anchor − parameters) is the gradient of an outer optimizer, SGD with Nesterov
momentum, which moves the anchor; all go on from there. Streaming DiLoCo (arXiv 2501.18512,
algorithm 2): the parameters in fragments, each with a phase of its own; a mean that is asked for at
step t is applied at t + τ, while training goes on:

    θ ← α θ + (1 − α) (anchor after the outer step)

How the anchor moves (torch.optim.SGD's formulas): v ← m v + g; d = g + m v with Nesterov, else v;
anchor ← anchor − lr d. Each operation is rounded by itself, so that processors of any kind have
the same bits.

Where things are: the anchor, the outer momentum, and what is exchanged lie in the host's memory, in
fp32. Exchanges go between the hosts over a gloo group of their own, whatever the model is on, by a
thread of their own; a step with an exchange in flight waits for nothing.

Guarantees: after the same local steps all replicas have the same anchor and outer momentum, in
every bit. Every trained parameter is in every round. A resume at any step and at the same number of
replicas goes on with the same bits, with an exchange in flight too: what was sent is in the state,
and is sent again.
What is left of a round when ``sync`` ends it, or when a state is taken by another number of
replicas, is no round: the anchor becomes the plain mean of the replicas, without the outer
optimizer, whose momentum stays. Where nothing was trained since the newest round, nothing moves.
At another number of replicas those count whose own parameters there are (ranks below both numbers);
all go on from their mean; what was in flight, and the remainders of rounding, are dropped.

What can go wrong: a replica is gone (the error is raised in ``optimizer.step()``, as DDP does in
``backward``). Replicas that make other numbers of steps (a gradient scaler that skips the step of
one alone, batches that end sooner): ahead of each exchange all say which one it is, behind how many
steps, and where they differ all of them raise an error that names the replica.
Rejected: waiting for an exchange before a snapshot (a save would last as long as the link is slow);
all-reduce with the group's own backend (another sum with another number of buckets).
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
import xxhash

from outlast.checkpoint import writers
from outlast.errors import ConfigError, StateMismatch
from outlast.fleet.averaging import (
    ROW_BYTES,
    BandwidthLimit,
    ExchangeThread,
    GroupWire,
    ReplicaWire,
    compress,
    compressed_mean,
    in_blocks,
    mean,
    own_blocks,
)
from outlast.fleet.fragments import Fragment, cut, missing, trained
from outlast.ledger.narrator import say
from outlast.reduce.losses import waiting
from outlast.reduce.same_bits import DDP, SameBits, among, ddp_around, unwrapped

VERSION: Final = 1  # of what replicas say to each other, and of the state
FP32: Final = "fp32"
INT8: Final = "int8"
ALPHA: Final = 0.5  # with overlap, as published
OWN: Final = "own"  # the key of the state that differs from replica to replica
NOTHING: Final = -1  # no exchange is in flight
Result = TypeVar("Result")

_HELLO_BYTES: Final = 4096
_ROUND, _SYNC, _CLOSE = "exchanges fragment {}", "is in sync()", "closes a round"
_KINDS: Final = (_ROUND, _SYNC, _CLOSE)
living: Final[weakref.WeakSet[LocalUpdates]] = weakref.WeakSet()  # in this process
_counted: Final[weakref.WeakSet[torch.optim.Optimizer]] = weakref.WeakSet()  # whose steps we hear
Mean = tuple[torch.Tensor, torch.Tensor | None]  # and what its rounding has left


class _Round:
    """One fragment's side of the exchange: its anchor, and what is between two of its rounds.

    Attributes:
        anchor: (n,): where all replicas began from after the newest round.
        momentum: (n,): the outer optimizer's.
        sent: what was sent last; None where it is not kept, since nothing is in flight for long.
        residual: (blocks, BLOCK): what rounding has taken from what was sent.
        residual_of_means: likewise from the means of this replica's part.
        launched: local step at which what is in flight was sent; ``NOTHING`` if nothing is.
        applied_at: local step behind which all replicas went on from this anchor.
        coming: the mean that is in flight.
    """

    def __init__(self, fragment: Fragment, *, keeps: bool, is_int8: bool, size: int) -> None:
        self.fragment = fragment
        self.anchor = torch.zeros(fragment.num_elements)
        self.momentum = torch.zeros_like(self.anchor)
        self.sent: torch.Tensor | None = None
        self.residual: torch.Tensor | None = None
        self.residual_of_means: torch.Tensor | None = None
        if is_int8:
            self.residual = torch.zeros_like(in_blocks(self.anchor))
            part = own_blocks(fragment.num_elements, size)
            self.residual_of_means = torch.zeros(part, *self.residual.shape[1:])
        if keeps and is_int8:
            assert self.residual is not None  # noqa: S101 - made above
            self.sent = torch.zeros(len(self.residual), ROW_BYTES, dtype=torch.uint8)
        elif keeps:
            self.sent = torch.zeros_like(self.anchor)
        self.launched = NOTHING
        self.applied_at = 0
        self.coming: Future[Mean] | None = None

    def own(self) -> dict[str, torch.Tensor]:
        """What is this replica's alone."""
        found = {
            "sent": self.sent,
            "residual": self.residual,
            "residual_of_means": self.residual_of_means,
        }
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def delta(self, *, began_there: bool) -> torch.Tensor:
        """How far this replica has come: (n,), new memory.

        Args:
            began_there: it began from the anchor itself, as its parameters' dtypes could take it.
                What they could not is the anchor's alone then, and not undone by the difference:
                so outer steps below half a place of bf16 add up.
        """
        start = self.fragment.rounded(self.anchor) if began_there else self.anchor
        return start - self.fragment.values()

    def take(self, *, began_there: bool) -> torch.Tensor:
        """What is to be sent, as it is sent; what rounding takes from it is the new residual."""
        delta = self.delta(began_there=began_there)
        if self.residual is None:
            made = delta
        else:
            values = in_blocks(delta).add_(self.residual)
            made, worth = compress(values)
            self.residual.copy_(values.sub_(worth))
        if self.sent is None:
            return made
        return self.sent.copy_(made)

    def asked(
        self, wire: ReplicaWire, sent: torch.Tensor, pace: BandwidthLimit
    ) -> Callable[[], Mean]:
        """The exchange of what is sent, to be made in the lane; holds nothing that changes."""
        if self.residual_of_means is None:
            return functools.partial(_mean_of, wire, sent, pace)
        feedback, num = self.residual_of_means.clone(), self.fragment.num_elements
        return functools.partial(_compressed_mean_of, wire, sent, feedback, pace, num)

    def add_residuals(self, delta: torch.Tensor, rank: int, size: int) -> None:
        """What rounding has held back goes with ``delta``, which is sent as it is."""
        if self.residual is None or self.residual_of_means is None:
            return
        delta.add_(self.residual.view(-1)[: delta.numel()])
        first = rank * self.residual_of_means.numel()
        mine = delta[first : first + self.residual_of_means.numel()]  # the part that it owns
        mine.add_(self.residual_of_means.view(-1)[: mine.numel()].mul(size))  # of the means


class LocalUpdates:
    """DiLoCo, and Streaming DiLoCo: replicas average what they have learned every H steps.

    It hears the steps of ``optimizer``, and acts in them; the loop stays as it is. Give it to
    ``outlast.session`` by a name, with the model and the optimizer.

    At its beginning the parameters and buffers of replica 0 become everybody's. Buffers (running
    statistics) stay each replica's own from then on.

    Args:
        model: this replica's. DistributedDataParallel may be around it where its group is the ranks
            of this replica alone.
        optimizer: the inner one, of any kind.
        every: H, the optimizer's steps between two exchanges of a fragment.
        outer_lr: of the outer SGD; published: 0.7, with fragments 0.4.
        outer_momentum: of the same, 0 to below 1.
        nesterov: whether it looks ahead.
        fragments: in how many parts the parameters are exchanged, each at a phase of its own
            (fragment p of P at steps that are p·H/P behind a multiple of H, rounded down); or the
            names of the parameters in each (a name's beginning up to a dot stands for all of them).
        overlap: τ, steps between sending and applying, 0 to below H; 0 waits for the exchange.
        alpha: with overlap, the share of its own parameters that a replica keeps when a round is
            applied; by default 0.5. At 0 the steps made meanwhile count for nothing.
        exchange: "fp32", or "int8" with error feedback: a quarter of the bytes.
        bandwidth: bytes a second that this replica sends at most, in bursts of a tenth of a second;
            None for as fast as it goes.
        group: the process group whose ranks are the replicas; by default all ranks are.

    Attributes:
        local_step: the optimizer's steps since the job's beginning.
        closed: how the round was closed that a state of another number of replicas was in; None
            where that has not happened in this process.

    Raises:
        ConfigError: an argument that cannot be used, or other ones on another replica.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int,
        *,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        fragments: int | Sequence[Sequence[str]] = 1,
        overlap: int = 0,
        alpha: float | None = None,
        exchange: str = FP32,
        bandwidth: float | None = None,
        group: Any = None,
    ) -> None:
        _check_numbers(every, overlap, alpha, outer_lr, outer_momentum)
        if exchange not in (FP32, INT8):
            raise ConfigError(f'exchange={exchange!r} is not known; write "{FP32}" or "{INT8}"')
        if bandwidth is not None and not (_is_number(bandwidth) and 0 < bandwidth < math.inf):
            raise ConfigError(f"bandwidth={bandwidth!r} is not a number of bytes a second above 0")
        wrappers = _wrappers_of(model)
        inner = unwrapped(model, [])
        parameters = trained(inner)
        _check_optimizer(optimizer, inner)
        if optimizer in _counted:
            raise ConfigError(
                "this optimizer's steps are counted by an outlast.LocalUpdates already, and two "
                "would average one after the other; make one for each optimizer"
            )
        pieces = cut(parameters, fragments)
        self._model, self.optimizer = inner, optimizer
        self._every, self._overlap = every, overlap
        self._alpha = (ALPHA if alpha is None else float(alpha)) if overlap else 0.0
        self._outer = float(outer_lr), float(outer_momentum), bool(nesterov)
        self._exchange = exchange
        self._wire = self._connect(group)
        self._check_ddp([*wrappers, *ddp_around([inner])])
        self._pace = BandwidthLimit(None if bandwidth is None else float(bandwidth))
        self._lane = ExchangeThread()
        is_int8, keeps = exchange == INT8, overlap > 0
        self._rounds = [
            _Round(one, keeps=keeps, is_int8=is_int8, size=self._wire.size) for one in pieces
        ]
        self.local_step = 0
        self._synced = NOTHING  # the local step at which all was exchanged last
        self._is_anchored = self._has_stepped = False
        self.closed: dict[str, Any] | None = None
        self._meet(len(pieces), bandwidth)
        before, after = self._before_step, self._after_step
        if "torch._dynamo" in sys.modules:  # a compiled step calls them each time
            before, after = map(torch.compiler.disable, (before, after))
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        living.add(self)
        _counted.add(optimizer)

    def trains(self, parameters: Collection[int]) -> bool:
        """Whether one of these parameters, by their ids, is the model's."""
        return any(id(parameter) in parameters for parameter in self._model.parameters())

    def sync(self) -> None:
        """Exchange all fragments now, in fp32, and go on from the anchor: all replicas are alike.

        For the end of training, or before an evaluation; all replicas call it after the same step.
        What is in flight is applied first. Of a fragment that was trained since its newest round
        the anchor becomes the plain mean of the replicas: no round, and the outer momentum stays. A
        second call after the same step does nothing.

        Raises:
            RuntimeError: another replica is gone.
            ConfigError: another replica is behind another step.
        """
        self._agree(_SYNC, NOTHING, self.local_step)
        if self._synced == self.local_step or not self._is_anchored:
            return
        writers.wait_for_copies()
        for each in self._rounds:
            if each.launched != NOTHING:
                self._apply(each)
        self._to_mean([True] * self._wire.size, with_residuals=True)
        self._synced = self.local_step

    def state_dict(self) -> dict[str, Any]:
        """All that a resume needs besides the model and the optimizer; tensors are the live ones.

        What is under ``own`` differs from replica to replica, the rest is the same on all.
        """
        return {
            "version": VERSION,
            "layout": self._layout(),
            "exchange": self._exchange,
            "rank": self._wire.rank,
            "num_replicas": self._wire.size,
            "place": self._place,
            "local_step": self.local_step,
            "synced": self._synced,
            "is_anchored": self._is_anchored,
            "launched": [each.launched for each in self._rounds],
            "applied_at": [each.applied_at for each in self._rounds],
            "anchor": [each.anchor for each in self._rounds],
            "momentum": [each.momentum for each in self._rounds],
            OWN: [each.own() for each in self._rounds],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; the model and the optimizer have theirs already. All replicas do.

        Raises:
            StateMismatch: it is of another model, of other fragments, or of another exchange; or of
                replicas of several ranks that lay elsewhere.
        """
        self._check_state(state)
        self._check_place(state)
        self.local_step, self._synced = int(state["local_step"]), int(state["synced"])
        self._is_anchored = bool(state["is_anchored"])
        for number, each in enumerate(self._rounds):
            each.anchor.copy_(state["anchor"][number])
            each.momentum.copy_(state["momentum"][number])
            each.launched, each.coming = NOTHING, None
            each.applied_at = int(state["applied_at"][number])
            for tensor in each.own().values():
                tensor.zero_()
        is_own = int(state["rank"]) == self._wire.rank
        if int(state["num_replicas"]) != self._wire.size:
            if self._is_anchored:
                self._close_round(int(state["num_replicas"]), is_own=is_own)
            return
        for each, own in zip(self._rounds, state[OWN], strict=True):
            for name, tensor in each.own().items():
                if name in own:  # an overlap that is new has nothing in flight
                    tensor.copy_(own[name])
        flying = [
            (launched, number) for number, launched in enumerate(state["launched"]) if launched >= 0
        ]
        for launched, number in sorted(flying):
            each = self._rounds[number]
            if each.sent is None:
                raise StateMismatch(
                    "an exchange was in flight in this state, and overlap is 0 now; keep the "
                    "overlap until a save with none in flight, or start a new job"
                )
            self._launch(each, each.sent, int(launched))

    # --- in the optimizer's step -----------------------------------------------------------------

    def _before_step(self, *_: Any) -> None:
        if not self._has_stepped:
            self._check_ddp(ddp_around([self._model]))  # it may have been wrapped since
            self._has_stepped = True
        if not self._is_anchored:
            for each in self._rounds:
                each.anchor.copy_(each.fragment.values())
            self._check_alike()
            self._is_anchored = True

    def _after_step(self, *_: Any) -> None:
        self.local_step += 1
        now = self.local_step
        for each in self._rounds:
            if each.launched != NOTHING and each.launched + self._overlap <= now:
                self._apply(each)
        due = [
            each
            for number, each in enumerate(self._rounds)
            if now % self._every == number * self._every // len(self._rounds)
            and each.launched == NOTHING
        ]
        if due:
            self._check_trained()
        for each in due:
            self._launch(each, each.take(began_there=self._begins_at_anchor), now)
            if not self._overlap:
                self._apply(each)

    @property
    def _begins_at_anchor(self) -> bool:
        """Whether replicas go on from the anchor itself, and not from a mixture with their own."""
        return not self._alpha

    def _check_trained(self) -> None:
        """See that what is trained now is what was when the fragments were cut."""
        _check_optimizer(self.optimizer, self._model)
        if found := missing(self._model, [each.fragment for each in self._rounds]):
            raise ConfigError(found)

    def _launch(self, each: _Round, sent: torch.Tensor, now: int) -> None:
        each.launched = now
        exchange = each.asked(self._wire, sent, self._pace)
        words = _ROUND, self._rounds.index(each), now
        each.coming = self._lane.submit(functools.partial(_agreed, self._wire, words, exchange))

    def _apply(self, each: _Round) -> None:
        coming = each.coming
        assert coming is not None  # noqa: S101 - it was launched
        gradient, left = self._wait_for(coming)
        each.coming, each.launched = None, NOTHING
        if left is not None and each.residual_of_means is not None:
            each.residual_of_means.copy_(left)
        self._move(each, gradient)
        each.fragment.take(each.anchor, self._alpha)
        each.applied_at = self.local_step

    def _move(self, each: _Round, gradient: torch.Tensor) -> None:
        """The outer optimizer's step; uses the gradient up."""
        rate, momentum, nesterov = self._outer
        if momentum:
            each.momentum.mul_(momentum).add_(gradient)
            if nesterov:
                gradient.add_(each.momentum.mul(momentum))
            else:
                gradient = each.momentum.clone()
        each.anchor.sub_(gradient.mul_(rate))

    # --- all fragments at once -------------------------------------------------------------------

    def _to_mean(self, who: list[bool], *, with_residuals: bool) -> bool:
        """Of each fragment that was trained since its newest round, the mean is the anchor now.

        The outer optimizer has no part in it: it is no round, and its momentum is of rounds.

        Returns:
            Whether there was one.
        """
        found = False
        for each in self._rounds:
            is_trained = each.applied_at < self.local_step or not self._begins_at_anchor
            if not is_trained or not any(who):
                continue
            found = True
            delta = each.delta(began_there=self._begins_at_anchor)
            if with_residuals:
                each.add_residuals(delta, self._wire.rank, self._wire.size)
            act = functools.partial(mean, self._wire, delta, who, self._pace)
            each.anchor.sub_(self._wait_for(self._lane.submit(act)))
            for tensor in each.own().values():
                tensor.zero_()
            each.fragment.take(each.anchor)
            each.applied_at = self.local_step
        return found

    def _close_round(self, before: int, *, is_own: bool) -> None:
        """A state of another number of replicas: those that have their own parameters end it."""
        self._agree(_CLOSE, NOTHING, self.local_step)
        who = [bool(one) for one in self._told(torch.tensor([is_own], dtype=torch.uint8))]
        is_trained = self._to_mean(who, with_residuals=False)
        for each in self._rounds:
            each.fragment.take(each.anchor)  # a newcomer's, whoever else has it already
        counted = [rank for rank, one in enumerate(who) if one and is_trained]
        self.closed = {
            "local_step": self.local_step,
            "from_replicas": before,
            "replicas": self._wire.size,
            "averaged": counted,
        }
        if self._wire.rank == 0:
            how = f"the mean of replicas {counted}" if counted else "the anchor alone"
            say(
                f"local updates: {self._wire.size} replicas in place of {before}; the round is "
                f"closed with {how}, and all go on from its anchor. See docs/local-updates.md"
            )

    # --- meeting the other replicas --------------------------------------------------------------

    def _connect(self, group: Any) -> ReplicaWire:
        wire = GroupWire(group)
        is_there = dist.is_available() and dist.is_initialized()
        self._place = {
            "rank": dist.get_rank() if is_there else wire.rank,
            "world_size": dist.get_world_size() if is_there else wire.size,
            "replicas": list(wire.ranks),
        }
        return wire

    def _check_ddp(self, wrappers: Sequence[torch.nn.Module]) -> None:
        for each in wrappers:
            ranks = dist.get_process_group_ranks(each.process_group) if _is_ddp(each) else []
            ours = self._wire.ranks
            if len(set(ranks) & set(ours)) > 1:
                raise ConfigError(
                    "the model is wrapped in DistributedDataParallel over the replicas: gradients "
                    "would be averaged in every step, and once more by outlast.LocalUpdates; give "
                    "it the model itself, or DDP a process_group of the ranks of one replica"
                )

    def _meet(self, num_fragments: int, bandwidth: float | None) -> None:
        """See that all replicas mean the same, and begin from the same."""
        if self._wire.size == 1:
            return
        lr, momentum, nesterov = self._outer
        words = {
            "version": VERSION,
            "every": self._every,
            "outer_lr": lr,
            "outer_momentum": momentum,
            "nesterov": nesterov,
            "number of fragments": num_fragments,
            "overlap": self._overlap,
            "alpha": self._alpha,
            "exchange": self._exchange,
            "bandwidth": bandwidth,
            "names, shapes or dtypes of the parameters": self._layout(),
        }
        text = json.dumps({name: str(value) for name, value in words.items()}).encode()
        row = torch.zeros(_HELLO_BYTES, dtype=torch.uint8)
        row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        replicas = [
            json.loads(bytes(each.tolist()).rstrip(b"\0")) for each in self._told(row).unbind()
        ]
        if found := among(replicas):
            raise ConfigError(
                f"outlast.LocalUpdates is not the same on all replicas: {found}; build the model, "
                "and call LocalUpdates, in the same way on all of them"
            )
        self._wait_for(self._lane.submit(functools.partial(_adopt, self._wire, self._model)))

    def _check_alike(self) -> None:
        """See that nobody has changed one replica's model before its first step."""
        digest = xxhash.xxh3_128()
        for each in self._rounds:
            digest.update(each.anchor.numpy())
        mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
        for rank, one in enumerate(rows := self._told(mine)):
            if not torch.equal(one, rows[0]):
                raise ConfigError(
                    f"the parameters of replicas 0 and {rank} differ before their first step; load "
                    "the same weights on all, or call outlast.LocalUpdates once they are loaded"
                )

    def _agree(self, kind: str, fragment: int, step: int) -> None:
        """See that all replicas do the same now."""
        words = kind, fragment, step
        act = functools.partial(_agreed, self._wire, words, lambda: None)
        if self._wire.size > 1:
            self._wait_for(self._lane.submit(act))

    def _told(self, row: torch.Tensor) -> torch.Tensor:
        """All replicas' rows, for each of them."""
        if self._wire.size == 1:
            return row[None]
        rows = torch.empty(self._wire.size, len(row), dtype=row.dtype)
        act = functools.partial(self._wire.collect, rows, row)
        self._wait_for(self._lane.submit(act))
        return rows

    @staticmethod
    def _wait_for(coming: Future[Any]) -> Any:
        if coming.done():
            return coming.result()
        with waiting():
            return coming.result()

    def _layout(self) -> str:
        layout = json.dumps([each.fragment.layout() for each in self._rounds])
        return hashlib.blake2b(layout.encode(), digest_size=8).hexdigest()

    def _check_state(self, state: Mapping[str, Any]) -> None:
        for key, mine, what in (
            ("version", VERSION, "version of Outlast"),
            ("layout", self._layout(), "fragments, or parameters"),
            ("exchange", self._exchange, "exchange"),
        ):
            if state.get(key) != mine:
                raise StateMismatch(
                    f"the state of local updates is of other {what} ({state.get(key)!r}, and "
                    f"{mine!r} now); build LocalUpdates as it was, or start a new job with "
                    "another --dir"
                )

    def _check_place(self, state: Mapping[str, Any]) -> None:
        """Replicas of several ranks: nobody could tell whose parameters are whose elsewhere."""
        then: Mapping[str, Any] = state["place"]
        now: Mapping[str, Any] = self._place
        are_one_rank_each = all(len(one["replicas"]) == one["world_size"] for one in (then, now))
        if are_one_rank_each or then == now:
            return
        words = [
            f"rank {one['rank']} of {one['world_size']} with replicas on ranks {one['replicas']}"
            for one in (then, now)
        ]
        raise StateMismatch(
            f"the state of local updates is that of {words[0]}, and this is {words[1]}: replicas "
            "of several ranks (group=) resume on the same ranks alone; start as many as before in "
            "the same groups, or start a new job with another --dir"
        )


def _agreed(wire: ReplicaWire, words: tuple[str, int, int], act: Callable[[], Result]) -> Result:
    """Make an exchange, once all replicas have said that it is the same one that they make.

    Args:
        wire: to the others.
        words: kind of it, fragment, local step.
        act: makes it.

    Raises:
        ConfigError: another replica makes another one.
    """
    if wire.size > 1:
        kind, fragment, step = words
        mine = torch.tensor([_KINDS.index(kind), fragment, step]).view(torch.uint8)
        rows = torch.empty(wire.size, len(mine), dtype=torch.uint8)
        wire.collect(rows, mine)
        said = [tuple(one) for one in rows.view(torch.int64).tolist()]
        usual = max(said, key=said.count)  # the first of those that are said most often
        other = next((rank for rank, one in enumerate(said) if one != usual), None)
        if other is not None:
            raise ConfigError(
                f"replica {other} {_in_words(said[other])}, and replica {said.index(usual)} "
                f"{_in_words(usual)}: replicas must make the same number of the optimizer's steps; "
                "give all as many batches, skip a step on all or on none (a GradScaler skips on "
                "one alone: use bf16), and call sync() on all"
            )
    return act()


def _in_words(said: tuple[int, int, int]) -> str:
    kind, fragment, step = said
    return f"{_KINDS[kind].format(fragment)} behind its step {step}"


def _mean_of(wire: ReplicaWire, sent: torch.Tensor, pace: BandwidthLimit) -> Mean:
    return mean(wire, sent, None, pace), None


def _compressed_mean_of(
    wire: ReplicaWire,
    sent: torch.Tensor,
    feedback: torch.Tensor,
    pace: BandwidthLimit,
    num_elements: int,
) -> Mean:
    found, left = compressed_mean(wire, sent, feedback, pace)
    return found.view(-1)[:num_elements], left


def _adopt(wire: ReplicaWire, model: torch.nn.Module) -> None:
    """Parameters, frozen ones too, and buffers become replica 0's."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.numel():
            continue
        whole = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        wire.adopt(whole.reshape(-1).view(torch.uint8))
        tensor.detach().copy_(whole)


# --- what cannot be used --------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_numbers(every: Any, overlap: Any, alpha: Any, lr: Any, momentum: Any) -> None:
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ConfigError(
            f"every={every!r}: replicas exchange every so many of the optimizer's steps; give a "
            "whole number from 1 on (published: 30 to 500)"
        )
    if not isinstance(overlap, int) or isinstance(overlap, bool) or not 0 <= overlap < every:
        raise ConfigError(
            f"overlap={overlap!r}: what is sent is applied before it is sent again; give a whole "
            f"number from 0 to {every - 1}, below every={every}"
        )
    if alpha is not None and not (_is_number(alpha) and 0 <= alpha <= 1):
        raise ConfigError(f"alpha={alpha!r} is a share: give 0 to 1 (published: 0.5)")
    if alpha and not overlap:
        raise ConfigError(
            f"alpha={alpha!r} mixes in the steps that were made during an overlap, and overlap is "
            "0; leave alpha out, or give an overlap"
        )
    if not (_is_number(lr) and 0 < lr < math.inf):
        raise ConfigError(f"outer_lr={lr!r} must be a number above 0 (published: 0.7)")
    if not (_is_number(momentum) and 0 <= momentum < 1):
        raise ConfigError(f"outer_momentum={momentum!r} must be from 0 to below 1 (published: 0.9)")


def _is_ddp(module: torch.nn.Module) -> bool:
    return isinstance(module, DDP)


def _wrappers_of(model: Any) -> list[torch.nn.Module]:
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    wrappers: list[torch.nn.Module] = []
    unwrapped(model, wrappers)
    if any(isinstance(each, SameBits) for each in wrappers):
        raise ConfigError(
            "outlast.SameBits averages gradients in every step, and outlast.LocalUpdates "
            "parameters in some; use one of them"
        )
    return wrappers


def _check_optimizer(optimizer: Any, model: torch.nn.Module) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__}; give the torch.optim.Optimizer whose "
            "steps are counted"
        )
    ours = set(map(id, model.parameters()))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in ours:
                raise ConfigError(
                    f"the optimizer has a parameter of shape {list(parameter.shape)} that is not "
                    "the model's, and would never be averaged; give outlast.LocalUpdates the model "
                    "that the optimizer trains"
                )
