"""A step that a loss interrupts comes to the end of its loop's body, and changes nothing.

Where a sum has no end because the attempt is over, the script is not to hear of it: the code of its
loop goes on to the boundary, where the session takes over. From the moment that a sum has failed
until then

- backward passes end without an exception, whatever they have left in ``.grad``: zeros where there
  was nothing, since the body goes on with what it finds there;
- the script's own collectives do too;
- DDP's forward passes sum and send nothing;
- an optimizer's step is made by a stand-in that has its hyperparameters and no parameters: no
  weight, no state and no counter of the optimizer itself changes.

What else the body changes (schedules, scalers, averages, buffers, random numbers) the session puts
back. In a step in which nothing fails only what is called more is paid for: three calls of Python
a pass.

What can go wrong: an optimizer that is none of torch's kind, or whose step is compiled as a whole:
the weights are seen to have changed, and are taken from another worker.

The script's own collectives within a step (``StepCollectives``): a mean loss, a norm over all
workers, a barrier. Of one that has no end because the attempt is over the script does not hear. It
gets what this rank alone can give (what is changed in place
stays as it lies; what is gathered is its own part, as often as there are ranks), the step is void,
and the loop's body goes on to its end. From then on nothing more is sent in that body.

Collectives of divided tensors (a norm of FSDP2's gradients) are sent by torch's C++, and waited for
there. So torch's functions in Python that lead there are seen to in the same way. ``vote`` is a sum
of our own, which is not to leave a void step: see :mod:`outlast.inprocess.divided`.

Whether the result of a collective goes into the state nobody can tell from outside. So one that
fails behind the optimizer's step does not leave a step that counts: the step is void there too, the
weights have changed, and the state comes from a rank whose collective had an end, or from a
checkpoint. No collective is excepted from that: a barrier has no result, but what it orders has.

Guarantees: a result that is not the collective's own is never part of a state that is gone on from.

What can go wrong: an asynchronous one that is waited for in a later step than it began in. It can
not be made again, so its error is the script's, and a process that holds such a one while the
attempt ends starts anew. The same goes for what is sent by threads of the script's own, by
point-to-point messages, and within compiled code.

``Doubts`` sees in the first steps of a script what costs steps at a loss, and says it once.
Survivors go on from the newest step's end because an interrupted step changes no weights. That does
not hold for weights that the script changes itself, outside of an optimizer's step, and for a
collective behind that step. Both are the script's right; whoever trusts in ``no step is lost`` is
to know.

What can go wrong: only the first ``BODIES`` are looked at, and fused optimizers move no version
counter: what they are followed by is not seen.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from outlast.attempt.groups import num_sent
from outlast.attempt.link import device_of_group
from outlast.attempt.over import over
from outlast.checkpoint import devices
from outlast.checkpoint.attributes import parameters_of
from outlast.errors import NotInProcess
from outlast.inprocess.survivor import is_main_thread
from outlast.reduce import losses
from outlast.script.objects import FULLGRAPH, Hook

IN_PLACE: Final = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "monitored_barrier"),
)
APART: Final = (  # what comes goes into the first argument, what is given is the second
    *("allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "gather", "scatter"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single"),
)
OF_OBJECTS: Final = (
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
)
FUNCTIONAL: Final = "torch.distributed._functional_collectives"  # those of divided tensors
UNDER_WAY: Final = (
    "connection closed by a loss elsewhere, and this process starts anew: a collective of the "
    "script's own was under way from one step to the next"
)

Undo = Callable[[], None]
Replaced = Callable[[Any, str, Callable[[Any], Any]], Undo]


class StepCollectives:
    """Those of the thread that trains.

    Attributes:
        num_sent: how many were sent in steps, but for those of backward passes.
        has_voted: whether there was a vote in this step.
    """

    def __init__(self) -> None:
        self.num_sent = 0
        self._turn = 0  # number of the body that runs; none with the same number ran before
        self._is_in_step = self._is_inside = self._has_sent = self.has_voted = False
        self._written: set[int] = set()  # addresses of what was given to be written in this step
        self._pending: weakref.WeakKeyDictionary[Any, _Pending] = weakref.WeakKeyDictionary()

    def stand(self, replaced: Replaced) -> list[Undo]:
        """From now on, until what this gives is called, collectives in steps are seen to.

        Args:
            replaced: puts something around an attribute, and gives what undoes it.
        """
        c10d: Any = dist.distributed_c10d
        undo = [replaced(dist.Work, "wait", self._waiting)]
        if (functional := sys.modules.get(FUNCTIONAL)) is not None:
            undo.append(replaced(functional, "wait_tensor", self._waiting_for_tensor))
            for name, own in OF_DIVIDED.items():
                if hasattr(functional, name):
                    around = functools.partial(self._calling_for_divided, own=own)
                    undo.append(replaced(functional, name, around))
        for name in (*IN_PLACE, *APART):
            if hasattr(dist.ProcessGroup, name):
                fill = _fill if name in APART else _leave
                around = functools.partial(self._calling, fill=fill)
                undo.append(replaced(dist.ProcessGroup, name, around))
        for name in OF_OBJECTS:
            undo.append(replaced(c10d, name, self._calling_for_objects))
            undo.append(replaced(dist, name, functools.partial(_instead, getattr(c10d, name))))
        return undo

    def begin(self) -> None:
        """A step's body begins."""
        self._turn += 1
        self._is_in_step, self._has_sent, self.has_voted = True, False, False
        self._written.clear()

    def end(self) -> None:
        """It has ended, or was left.

        On a GPU a collective that was broken ends without a word, and what is there may be of
        nothing: none is broken before the attempt is over.
        """
        if self._is_in_step and self._has_sent and over.is_held:
            for device in (used := devices.used()):
                torch.cuda.current_stream(device).synchronize()
            over.is_void = over.is_void or (bool(used) and over.is_over)
        self._is_in_step = False

    def vote(self) -> None:
        """Come to the end of all sums of this step; returns once all workers have.

        Raises:
            RuntimeError, ConnectionError: whether they have is not known.
        """
        self.has_voted = self._is_inside = True
        before = num_sent()
        try:
            here = torch.ones(1, dtype=torch.int32, device=device_of_group())
            dist.all_reduce(here)
        finally:
            self.num_sent += num_sent() - before
            self._is_inside = False
        if int(here) != dist.get_world_size():  # on a GPU one that was aborted ends without a word
            raise ConnectionError("connection closed in a vote")

    def have_written(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether one of these may have been changed by a collective in this step.

        They change no version counter.
        """
        written = self._written
        return bool(written) and any(_address(one) in written for one in tensors)

    def refuse_pending(self) -> None:
        """The attempt is over.

        Raises:
            NotInProcess: the script is going to wait for something that belongs to it.
        """
        if any(not one.is_waited for one in self._pending.values()):
            raise NotInProcess(UNDER_WAY)

    @property
    def _concerns_us(self) -> bool:
        return self._is_in_step and not self._is_inside and not losses.sending and is_main_thread()

    def _calling(self, call: Any, fill: _Fill) -> Any:
        @functools.wraps(call)
        def collective(group: Any, *args: Any, **options: Any) -> Any:
            if not self._concerns_us:
                return call(group, *args, **options)
            self._has_sent = True
            self._written.update(map(_address, _tensors(args[:1])))
            before = num_sent()
            try:
                if over.sends_nothing:
                    raise ConnectionError
                work = call(group, *args, **options)
            except (RuntimeError, ConnectionError) as error:
                if not over.voids(error):
                    raise
                fill(args, group.rank())
                return _EndedWork(args[:1])
            is_in_backward = torch._C._current_graph_task_id() >= 0  # a model's gradients are sent
            self.num_sent += 0 if is_in_backward else num_sent() - before
            if work is not None:
                fill_own = functools.partial(fill, args, group.rank())
                self._pending[work] = _Pending(self._turn, fill_own)
            return work

        return collective

    def _waiting(self, call: Any) -> Any:
        @functools.wraps(call)
        def wait(work: Any, *args: Any, **options: Any) -> Any:
            pending = self._pending.get(work)
            if pending is None:
                return call(work, *args, **options)
            try:
                found = call(work, *args, **options)
            except RuntimeError as error:
                if pending.turn != self._turn or not self._is_in_step or not over.voids(error):
                    raise
                pending.fill()
                found = True
            pending.is_waited = True
            return found

        return wait

    def _calling_for_divided(self, call: Any, own: Callable[..., torch.Tensor]) -> Any:
        """Those of divided tensors: torch's C++ sends them, and waits for them."""

        @functools.wraps(call)
        def collective(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            if self._concerns_us and over.sends_nothing:
                over.is_void = True
                return own(*inspect.signature(call).bind(tensor, *args, **options).args)
            return call(tensor, *args, **options)

        return collective

    def _waiting_for_tensor(self, call: Any) -> Any:
        @functools.wraps(call)
        def wait_tensor(tensor: Any) -> Any:
            if not self._concerns_us:
                return call(tensor)
            self._has_sent = True
            try:
                return call(tensor)
            except RuntimeError as error:
                if not over.voids(error):
                    raise
                return tensor  # a part of the sum, or anything

        return wait_tensor

    def _calling_for_objects(self, call: Any) -> Any:
        @functools.wraps(call)
        def collective(*args: Any, **options: Any) -> Any:
            if not self._concerns_us:
                return call(*args, **options)
            self._is_inside = True  # no part of it has an end without the others
            before = num_sent()
            try:
                if over.sends_nothing:
                    raise ConnectionError
                return call(*args, **options)
            except (RuntimeError, ConnectionError) as error:
                if not over.voids(error):
                    raise
                _fill_objects(call.__name__, inspect.signature(call).bind(*args, **options))
            finally:
                self.num_sent += num_sent() - before
                self._is_inside = False

        return collective


class _Pending:
    """One that was sent.

    Args:
        turn: in which body.
        fill: leaves what this rank can give.
    """

    def __init__(self, turn: int, fill: Callable[[], None]) -> None:
        self.turn, self.fill, self.is_waited = turn, fill, False


class _EndedWork(dist.Work):  # type: ignore[misc]
    """What the script waits for where nothing was sent."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        super().__init__()
        self._found = args[0] if args and isinstance(args[0], list) else [*args]

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def result(self) -> Any:
        return self._found

    def get_future(self) -> Any:
        done: Any = torch.futures.Future()
        done.set_result(self._found)
        return done


_Fill = Callable[[tuple[Any, ...], int], None]


def _leave(args: tuple[Any, ...], rank: int) -> None:
    """What is changed in place stays as it lies."""


def _fill(args: tuple[Any, ...], rank: int) -> None:
    with torch.no_grad():
        _put(args[0], args[1], rank)


def _put(into: Any, own: Any, rank: int) -> None:
    """Into each tensor what this rank gives to all; zeros where it gives nothing."""
    if isinstance(into, list):
        for number, one in enumerate(into):
            is_apart = isinstance(own, list)
            _put(one, (own[number] if number < len(own) else None) if is_apart else own, rank)
    elif isinstance(own, list):
        _put(into, own[rank] if rank < len(own) else None, rank)
    else:
        _put_tensor(into, own, rank)


def _put_tensor(into: torch.Tensor, own: torch.Tensor | None, rank: int) -> None:
    num, num_own = into.numel(), 0 if own is None else own.numel()
    with contextlib.suppress(RuntimeError):  # of a kind that cannot be written here
        if own is not None and num_own and not num % num_own:
            into.copy_(own.reshape(-1).repeat(num // num_own).view(into.shape))
        elif own is not None and num and num_own >= (rank + 1) * num:
            into.copy_(own.reshape(-1)[rank * num : (rank + 1) * num].view(into.shape))
        else:
            into.zero_()


def _fill_objects(name: str, bound: inspect.BoundArguments) -> None:
    given = bound.arguments
    if name == "all_gather_object":
        given["object_list"][:] = [given["obj"]] * len(given["object_list"])
    elif name == "gather_object" and given.get("object_gather_list"):
        given["object_gather_list"][:] = [given["obj"]] * len(given["object_gather_list"])
    elif name == "scatter_object_list" and given.get("scatter_object_input_list"):
        given["scatter_object_output_list"][0] = given["scatter_object_input_list"][dist.get_rank()]


def _instead(now: Any, _: Any) -> Any:
    return now


def _reduced(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return tensor.clone()


def _gathered(tensor: torch.Tensor, dim: int, group: Any, *_: Any) -> torch.Tensor:
    return torch.cat([tensor] * _size_of(group), dim)


def _scattered(tensor: torch.Tensor, _: str, dim: int, group: Any, *__: Any) -> torch.Tensor:
    return tensor.tensor_split(_size_of(group), dim)[0].clone()


def _size_of(group: Any) -> int:
    """Of a group, or of (a device mesh, one of its dimensions)."""
    return int(group[0].size(group[1]) if isinstance(group, tuple) else group.size())


OF_DIVIDED: Final = {
    "all_reduce": _reduced,
    **dict.fromkeys(("all_gather_tensor", "all_gather_single"), _gathered),
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_single"), _scattered),
}


def _tensors(tree: Any) -> Iterable[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for one in tree:
            yield from _tensors(one)


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


BODIES: Final = 4  # looked at
WRITES: Final = (
    "the script changes weights outside of the optimizer's step, which an interrupted step does too"
)
LATE: Final = (
    "a collective stands behind the optimizer's step, where weights have changed already: put it "
    "before"
)
NOTHING: Final = "at the ends of its steps there is none (see docs/recovery.md)"


class Doubts:
    """One worker's.

    Args:
        optimizers: gives those that the session knows.
        collectives: the script's own.
    """

    def __init__(
        self,
        optimizers: Callable[[], Iterable[torch.optim.Optimizer]],
        collectives: StepCollectives,
    ) -> None:
        self._optimizers = optimizers
        self._collectives = collectives
        self._num_seen = self._num_without = 0
        self._versions: list[int] = []  # of the weights, when an optimizer had stepped last
        self._sent: int | None = None  # collectives by then; None before

    @property
    def _is_over(self) -> bool:
        return self._num_seen >= BODIES

    def begins(self) -> None:
        """A batch is handed out."""
        if not self._is_over:
            self._versions, self._sent = self._now(), None

    def stepped(self, *_: Any) -> None:
        """An optimizer has made its step."""
        if not self._is_over:
            self._versions, self._sent = self._now(), self._collectives.num_sent

    def found(self) -> str:
        """What there is to say of a body that has come to its end; "" for nothing more."""
        if self._is_over:
            return ""
        self._num_seen += 1
        if self._now() != self._versions:
            return self._said(WRITES)
        is_late = self._sent is not None and self._collectives.num_sent > self._sent
        return self._said(LATE if is_late else "")

    def kept(self, *, is_there: bool) -> str:
        """The same of a step's end, and whether there is a state to go on from."""
        if self._is_over or not self._num_seen:
            return ""
        self._num_without = 0 if is_there else self._num_without + 1
        return self._said(NOTHING if self._num_without == BODIES - 1 else "")

    def _said(self, why: str) -> str:
        if why:
            self._num_seen = BODIES
        return why

    def _now(self) -> list[int]:
        return [
            -1 if one.is_inference() else one._version
            for optimizer in self._optimizers()
            for one in parameters_of(optimizer)
        ]


def stand(
    optimizers: Callable[[], Iterable[torch.optim.Optimizer]],
    collectives: StepCollectives,
    stepped: Callable[..., None] = lambda *_: None,
) -> Hook:
    """From now on, until it is removed, interrupted steps change nothing.

    Args:
        optimizers: gives those that the session knows.
        collectives: the script's own.
        stepped: told of each optimizer's step that is made.
    """
    ddp = torch.nn.parallel.DistributedDataParallel
    if "torch._dynamo" in sys.modules:
        stepped = torch.compiler.disable(stepped, reason=FULLGRAPH)
    losses.voiding.append(over.voids)
    return Hook(
        lambda: losses.voiding.remove(over.voids),
        stand_in().remove,
        register_optimizer_step_post_hook(stepped).remove,
        _replaced(torch.autograd, "backward", lambda call: _backward(call, optimizers)),
        _replaced(ddp, "_pre_forward", _before_forward),
        _replaced(ddp, "_post_forward", _after_forward),
        *collectives.stand(_replaced),
    )


def stand_in() -> Hook:
    """From now on, until it is removed, an optimizer that steps in a void step changes nothing.

    One that is captured in a CUDA graph changes nothing either, and is to be in the graph.
    """

    def instead(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> Any:
        is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if not over.is_void or is_captured:
            return None
        return (_stand_in(optimizer), *args[1:]), options

    if "torch._dynamo" in sys.modules:
        instead = torch.compiler.disable(instead, reason=FULLGRAPH)
    return Hook(register_optimizer_step_pre_hook(instead).remove)


def _replaced(owner: Any, name: str, around: Callable[[Any], Any]) -> Callable[[], None]:
    before = vars(owner)[name]  # of a class of C++ what getattr gives would be bound to nothing
    setattr(owner, name, around(getattr(owner, name)))
    return lambda: setattr(owner, name, before)


def _backward(call: Any, optimizers: Callable[[], Iterable[torch.optim.Optimizer]]) -> Any:
    @functools.wraps(call)
    def backward(*args: Any, **options: Any) -> None:
        try:
            call(*args, **options)
        except RuntimeError as error:
            if not over.voids(error):
                raise
            for optimizer in optimizers():
                _leave_gradients(optimizer)

    return backward


def _leave_gradients(optimizer: torch.optim.Optimizer) -> None:
    """The body is made for weights that have one each; ``ScriptGradients.forget`` removes them."""
    for one in parameters_of(optimizer):
        if one.requires_grad and one.grad is None:
            one.grad = torch.zeros_like(one)


def _before_forward(call: Any) -> Any:
    @functools.wraps(call)
    def before_forward(ddp: Any, *args: Any, **options: Any) -> Any:
        try:
            if not over.is_apart:
                return call(ddp, *args, **options)
        except RuntimeError as error:
            if not over.voids(error):
                raise
        if ddp.device_ids:
            moved, named = ddp.to_kwargs(args, options, ddp.device_ids[0])
            return moved[0], named[0]
        return args, options

    return before_forward


def _after_forward(call: Any) -> Any:
    @functools.wraps(call)
    def after_forward(ddp: Any, output: Any) -> Any:
        try:
            return output if over.is_apart else call(ddp, output)
        except RuntimeError as error:
            if not over.voids(error):
                raise
        return output

    return after_forward


def _stand_in(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """One of the same kind with nothing to change."""
    made = object.__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    made.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    made.state = defaultdict(dict)
    return made
