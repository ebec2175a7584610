"""Find the bandwidth between replicas that training needs, synchronously and with local updates.

A step is a list of nodes, one a layer: forward, backward with respect to activations (the first
layer has none), backward with respect to parameters; each takes the same time. After the last of a
layer its gradients can cross the link, one layer after the other in the order in which they are
ready. Their sum is needed by the layer's next forward pass, or by the one a step later.
That is the graph of Streaming DiLoCo (arXiv 2501.18512, section 3.1), with its methods:

=============  ==================================================================================
synchronous    all layers after every step, at 16 bits
local          all layers after every H-th step (DiLoCo, arXiv 2311.08105), at 16 bits
streaming      a fragment of some layers, strided, each after every H-th step at a phase of its own
overlapped     the same, and what was sent is needed one step later than it would be
compressed     the same, at 4 bits
=============  ==================================================================================

Utilisation is computing time over all time, in the last of several rounds: the first ones have no
links that are still busy from before. What a round does to the loss is not here. Only those
steps and layers are looked at that wait or send: a thousand layers cost no more than a few.

What can go wrong: parameters that are not spread evenly over layers; a link that others use too.
Rejected: a closed form for each method, which is right only while the link is idle between two
fragments.
"""

from __future__ import annotations

import functools
import math
from typing import Final, Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from outlast.planner.breakeven import Flags, ahead_spans

Bandwidths = npt.NDArray[np.float64]  # bits per second; all are worked out side by side
Method = Literal["synchronous", "local", "streaming", "overlapped", "compressed"]
METHODS: Final[tuple[Method, ...]] = get_args(Method)
BITS: Final = 16.0
COMPRESSED_BITS: Final = 4.0
OVERLAP_STEPS: Final = 1
_ROUNDS: Final = 3  # and as many more as make _STEPS; the later half is measured
_STEPS: Final = 20
BITS_LEAST, BITS_MOST = 1e3, 1e15  # per second, between which a bandwidth is looked for


class LinkJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job whose replicas exchange what they have learnt over a link.

    Attributes:
        parameters: of the model.
        layers: over which they are spread evenly; at least 1.
        step_s: of a step that waits for nothing; above 0.
        sync_steps: H, steps between two exchanges of a layer; at least 1.
        fragment_layers: of a fragment, of the methods that have some.
        crossing: times that the parameters cross a replica's link in one exchange: 2(R-1)/R in a
            ring of R.
        latency_s: from the last bit that is sent until the sum can be used.
    """

    parameters: float
    layers: int
    step_s: float
    sync_steps: int = 100
    fragment_layers: int = 3
    crossing: float = 1.0
    latency_s: float = 0.0

    def bits(self, method: Method) -> float:
        """That cross a replica's link in one exchange of all layers."""
        each = COMPRESSED_BITS if method == "compressed" else BITS
        return self.parameters * each * self.crossing

    def bits_per_step(self, method: Method) -> float:
        """On average."""
        return self.bits(method) / (1 if method == "synchronous" else self.sync_steps)


class _Sends(msgspec.Struct, frozen=True, kw_only=True):
    """What a method sends: which layers after which step of a round, and when they are needed."""

    length: int
    sends: dict[int, frozenset[int]]
    overlap: int


def ring_crossing(replicas: int) -> float:
    """Times that a tensor crosses each link of a ring that sums it: 2(R-1)/R.

    From Patarasuk and Yuan, JPDC 69(2), 2009: a reduce-scatter and an all-gather.
    """
    return 2 * (replicas - 1) / replicas


def utilisation(job: LinkJob, method: Method, bits_per_s: Bandwidths) -> Bandwidths:
    """Share of the time in which a replica computes.

    Args:
        job: with its layers, steps and exchange.
        method: what is sent, and when.
        bits_per_s: of the link, in each direction; shape (n,), above 0.

    Returns:
        Shares in (0, 1], shape (n,).
    """
    plan = _round(job, method)
    rounds = max(_ROUNDS, math.ceil(_STEPS / plan.length))
    measured = rounds // 2
    begins = plan.length * (rounds - measured)
    sent_s = job.bits(method) / job.layers / bits_per_s
    node_s = job.step_s / (3 * job.layers - 1)
    now_s, free_s = np.zeros_like(bits_per_s), np.zeros_like(bits_per_s)
    needed: dict[int, dict[int, Bandwidths]] = {}  # step → layer → when its sum is there
    began_s, before = now_s, 0
    for step in _busy(plan, rounds, begins):
        now_s = now_s + job.step_s * (step - before)
        before = step
        if step == begins:
            began_s = now_s
        waits, sends = needed.pop(step, {}), plan.sends.get(step % plan.length, ())
        for layer in sorted(waits):  # the forward pass begins at 0, where nothing holds it up
            now_s = np.maximum(now_s, waits[layer] - node_s * layer)
        back_s = now_s + node_s * job.layers
        for layer in sorted(sends, reverse=True):
            done_s = back_s + node_s * (2 * (job.layers - layer) - (layer == 0))
            free_s = np.maximum(free_s, done_s) + sent_s
            arrives = needed.setdefault(step + 1 + plan.overlap, {})
            arrives[layer] = free_s + job.latency_s
    now_s = now_s + job.step_s * (plan.length * rounds - before)
    return np.asarray(measured * plan.length * job.step_s / (now_s - began_s))


@functools.lru_cache(maxsize=1024)
def utilisation_at(job: LinkJob, method: Method, bits_per_s: float) -> float:
    """The same at one bandwidth."""
    return float(utilisation(job, method, np.array([bits_per_s]))[0])


def bandwidth_for(job: LinkJob, method: Method, share: float) -> float | None:
    """The bandwidth from which on this share of the time is computing, to a millionth.

    Args:
        job: see there.
        method: see there.
        share: of the time, in (0, 1).

    Returns:
        Bits per second, ``BITS_LEAST`` where that is enough; None where ``BITS_MOST`` is not.
    """

    def is_enough(bits_per_s: Bandwidths) -> Flags:
        return np.asarray(utilisation(job, method, bits_per_s) >= share)

    found = ahead_spans(is_enough, BITS_LEAST, BITS_MOST)
    return max(found[-1].low, BITS_LEAST) if found and math.isinf(found[-1].high) else None


def _busy(plan: _Sends, rounds: int, begins: int) -> list[int]:
    """Steps in which something is sent or waited for, and that from which on time is measured."""
    starts = range(0, plan.length * rounds, plan.length)
    sent = {start + step for start in starts for step in plan.sends}
    waiting = {step + 1 + plan.overlap for step in sent}
    return sorted(one for one in sent | waiting | {begins} if one < starts.stop)


def _round(job: LinkJob, method: Method) -> _Sends:
    everything = frozenset(range(job.layers))
    if method == "synchronous":
        return _Sends(length=1, sends={0: everything}, overlap=0)
    overlap = OVERLAP_STEPS if method in ("overlapped", "compressed") else 0
    if method == "local":
        last = job.sync_steps - 1
        return _Sends(length=job.sync_steps, sends={last: everything}, overlap=0)
    count = max(job.layers // job.fragment_layers, 1)
    sends: dict[int, frozenset[int]] = {}
    for number in range(count):
        step = job.sync_steps * number // count
        layers = frozenset(range(number, job.layers, count))
        sends[step] = sends.get(step, frozenset()) | layers
    return _Sends(length=job.sync_steps, sends=sends, overlap=overlap)
