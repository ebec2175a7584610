"""Data parallel training whose result does not depend on the number of workers, in no bit.

    loader = outlast.data.Loader(dataset, global_batch=96, shards=12)
    model = outlast.SameBits(model, shards=12)  # in place of DistributedDataParallel

    for batch in session.steps(loader, until=10_000):
        for x, y in model.shards(batch):
            model.backward(loss_function(model(x), y))
        optimizer.step()
        session.log(loss=model.loss)

Guarantees, at any number of workers on machines of one kind: after the loop over ``shards`` every
worker has the same ``.grad``, ``model.loss`` and buffers, and they are the ones that any other
number of workers would have come to. How: the global batch is cut into V shards; what is computed
for one depends on nothing but the shard and the state that the step began with (random numbers are
seeded, buffers put back, for each); and what the shards come to is added in one fixed tree.

What breaks it, and is checked where it can be: other kinds of processors or versions on different
workers; another number of threads; kernels that add in any order (on a GPU); a model that
communicates by itself (SyncBatchNorm); state that a forward pass leaves outside of buffers.

Rejected: hooks into DDP (it averages what each rank has summed, and lays out its buckets anew);
sums of whole numbers (they need a common scale, and lose bits).

``Facts`` are what sums depend on besides their order, as far as a process can tell. Equal facts do
not prove equal bits (a kernel may add in the order in which its threads happen to arrive), but
other facts are reason enough to expect other ones.

Whether a resume will have the same bits, and if not, why, is told by the wrappers of a session's
models (``Bits``). With three workers or more, torch's DDP lays out its buckets anew after its first
iteration, so that the first step after a resume sums in another order than it would have
undisturbed. A wrapper that was not named is found by the parameters that it holds; one that is made
later than the session is entered is not.
"""

from __future__ import annotations

import copy
import functools
import gc
import hashlib
import json
import os
import platform
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from outlast.data import random_state
from outlast.data.order import Shards, mix64
from outlast.errors import ConfigError
from outlast.ledger.narrator import say
from outlast.reduce import losses
from outlast.reduce.exchange import GroupChannel, ReductionPlan, gather
from outlast.reduce.losses import NO_TIME, at_the_beginning, late_watch_of, sent
from outlast.reduce.parts import Buffers, ModelGradients, Summary

Facts = dict[str, str]

NOT_DETERMINISTIC: Final = (
    "on a GPU some of torch's kernels add in any order: for the same bits call "
    "torch.use_deterministic_algorithms(True), with CUBLAS_WORKSPACE_CONFIG=:4096:8 in the "
    "environment, and leave torch.backends.cudnn.benchmark off"
)


def facts_of(device: torch.device) -> Facts:
    """The facts of this process, for a model on ``device``."""
    found = {
        "torch": str(torch.__version__),
        "processor": _processor(),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "deterministic algorithms": _in_words(torch.are_deterministic_algorithms_enabled()),
        "precision of matrix products": torch.get_float32_matmul_precision(),
    }
    if device.type == "cpu":
        found["threads"] = str(torch.get_num_threads())
        found["oneDNN"] = _in_words(torch.backends.mkldnn.enabled)
    if device.type == "cuda":
        found["GPU"] = torch.cuda.get_device_name(device)
        found["CUDA"] = f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        found["cuDNN's benchmark"] = _in_words(torch.backends.cudnn.benchmark)
        found["TF32 in cuDNN"] = _in_words(torch.backends.cudnn.allow_tf32)
    return found


def difference(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """What differs first, and how many more do: "threads: 1 and 2"; "" if nothing does."""
    names = [name for name in dict.fromkeys([*one, *other]) if one.get(name) != other.get(name)]
    if not names:
        return ""
    name = names[0]
    more = f" (and {len(names) - 1} more)" if names[1:] else ""
    return f"{name}: {one.get(name, 'unknown')} and {other.get(name, 'unknown')}{more}"


def among(workers: Sequence[Mapping[str, str]]) -> str:
    """How the first worker that differs from worker 0 does; "" if none does."""
    for rank, worker in enumerate(workers):
        if found := difference(workers[0], worker):
            return f"rank 0 and rank {rank} differ in {found}"
    return ""


def _in_words(value: bool) -> str:
    return "on" if value else "off"


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


living: Final[weakref.WeakSet[SameBits]] = weakref.WeakSet()  # in this process
_TAG: Final = 0x5A4D
_FACTS_BYTES: Final = 4096
# What holds on to one model's parameters, or belongs to the step that it is in: no copy's.
_OF_ONE: Final = frozenset(
    {
        *("_named", "_held", "_plan", "_layout", "_gradients", "_is_open", "_number", "_losses"),
        *("_layout_word", "_is_compared", "_compared", "_channel", "_known"),
        "_watch",
    }
)
EXAMPLE: Final = "for shard in model.shards(batch): … model.backward(loss)"


class SameBits(torch.nn.Module):
    """Wraps a model for data parallel training with the same bits at any number of workers.

    Args:
        module: the model; its parameters and buffers are made those of rank 0, as DDP does.
        shards: into how many parts each global batch is cut, the same for the whole job. Best is
            the usual number of workers, or 2, 4, 8 … times that.
        seed: of the random numbers that a forward pass draws (dropout), in ``range(2**63)``.
        threads: with which a model on the CPU computes, since sums depend on it; a model on a GPU
            leaves them as they are.
        process_group: None is the default one.

    Attributes:
        module: the model itself, for evaluation and saving.
        num_shards: as given.
        loss: mean loss over all shards of the step before, a 0-dimensional float64 tensor; the
            same on all workers. None before the first.
        is_scaled: whether a scaler was given to :meth:`backward`.

    Raises:
        ConfigError: a model or an argument that cannot be used.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        shards: int,
        seed: int = 0,
        threads: int = 1,
        process_group: Any = None,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("shards", shards, 1),
            ("seed", seed, 0),
            ("threads", threads, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
                raise ConfigError(f"{name} must be a whole number from {least} on, not {value!r}")
        self._device = _checked(module)
        self.module = module
        self.num_shards = shards
        self.seed = seed
        self.loss: torch.Tensor | None = None
        self.is_scaled = False
        self._group = process_group
        self._threads = threads if self._device.type == "cpu" else None
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        self._wrap()
        self._prepare()
        self._same_start()
        living.add(self)

    def _wrap(self) -> None:
        self._named = dict(self.module.named_parameters())
        self._known = {id(each): each for owner in _parts(self.module) for each in _own(owner)}
        self._held = Buffers(self.module)
        self._channel = GroupChannel(self._group)
        self._plan: ReductionPlan | None = None
        self._layout: Any = None  # what the gradients were laid out for
        self._layout_word = 0  # of it, but for the devices: the same on all workers
        self._is_compared = False  # whether it was found to be
        self._gradients: ModelGradients
        self._is_open = False  # whether a step has begun and its sums are not there yet
        self._number: int | None = None  # which of this worker's shards is being computed
        self._losses: list[torch.Tensor] = []
        self._compared: tuple[int, int] | None = None  # the workers whose facts were compared
        self._watch: losses.LateWatch | None = None
        _guard(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of the model, wrapped like it; what is under way here is not copied.

        Nothing is sent, so that one worker alone may copy. The process group is shared.
        """
        made = memo[id(self)] = type(self).__new__(type(self))
        memo[id(self._group)] = self._group
        for name, value in vars(self).items():
            if name not in _OF_ONE:
                made.__dict__[name] = copy.deepcopy(value, memo)
        made._wrap()
        if any(parameter.requires_grad for parameter in made.module.parameters()):
            made._prepare()  # one that is frozen, as averages are, can be thawed again
        return made

    @property
    def world_size(self) -> int:
        """How many workers its sums are made by."""
        return place(self._group, "outlast.SameBits()")[1]

    @property
    def device(self) -> torch.device:
        """Where its losses are."""
        return self._device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's; outside of :meth:`shards` nothing is seeded and no gradient may arise."""
        return self.module(*args, **kwargs)

    @property
    def facts(self) -> Facts:
        """What the bits of this run depend on besides the script, as far as can be told."""
        here = {"shards": str(self.num_shards), "seed of SameBits": str(self.seed)}
        return {**here, **facts_of(self._device)}

    def shards(self, batch: Shards) -> Iterator[Any]:
        """The shards of a global batch that this worker holds, one after the other.

        Each wants one ``model.backward(loss)``. When the loop has come to its end, every
        parameter's ``.grad`` is the mean over the shards of all workers, :attr:`loss` is the mean
        loss, and random numbers go on where they were before the loop. Gradients from before are
        dropped: ``zero_grad`` is not needed.

        Args:
            batch: from ``outlast.data.Loader(…, shards=V)``, or an ``outlast.data.Shards``.

        Raises:
            ConfigError: the batch does not fit, or the loop before was left early.
            RuntimeError: another worker is gone.
        """
        if self._is_open:
            raise ConfigError(
                "the loop over model.shards(batch) was left before its end, and the other workers "
                f"wait for its sums; let it run to its end: {EXAMPLE}"
            )
        self._check(batch)
        self._prepare(batch.counts)
        self._check_held(batch)
        if self._channel.open():
            self._compared, self._is_compared = None, False
        with sent():
            self._compare_facts()
        self._is_open = True
        self._gradients.begin()
        self._held.begin()
        self._losses = []
        self._watch = late_watch_of(self)
        return self._run(batch)

    def backward(self, loss: torch.Tensor, scaler: Any = None) -> None:
        """Go backward from the loss of the shard at hand, once for each shard.

        Args:
            loss: the shard's mean loss, one element.
            scaler: a ``torch.amp.GradScaler``, which scales what goes backward; :attr:`loss` stays
                unscaled. ``scaler.unscale_`` and ``scaler.step`` come after the loop.

        Raises:
            ConfigError: not in a loop over :meth:`shards`, or the second time for a shard.
        """
        if self._number is None:
            raise ConfigError(f"model.backward() is for the shards of a batch: {EXAMPLE}")
        if len(self._losses) > self._number:
            raise ConfigError(
                "model.backward() was called twice for one shard; add the losses up and call it "
                "once"
            )
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ConfigError(f"a loss is a tensor of one element, not {found}; take its mean")
        self._losses.append(loss.detach().clone())  # the script may go on to add to its own
        self.is_scaled = self.is_scaled or scaler is not None
        scaled = loss if scaler is None else scaler.scale(loss)
        with sent():
            self._gradients.backward(scaled, self._number)

    # --- a step ------------------------------------------------------------------------------

    def _run(self, batch: Shards) -> Iterator[Any]:
        watch = self._watch
        if watch is not None:
            watch.begins(batch)
        with random_state.preserved():
            for number, part in enumerate(batch.parts):
                if watch is not None and not watch.goes_on(number):
                    break
                shard = batch.first + number
                seed = mix64(_TAG, self.seed, batch.position, shard)
                random_state.seed_all(seed, cuda=True)
                self._number = number
                yield part
                self._number = None
                if len(self._losses) <= number:
                    raise ConfigError(
                        f"shard {shard} of {self.num_shards} had no model.backward(loss), and the "
                        f"other workers wait for its gradients: {EXAMPLE}"
                    )
                self._held.collect()
        with torch.no_grad(), sent() as sums:
            self._finish()
        if sums.is_void:
            self._give_up()
        self._is_open, self._watch = False, None

    def _give_up(self) -> None:
        """The step is void: there are no sums, and nobody takes what there is for them."""
        self._gradients.give_up()
        self.loss = torch.full((), torch.nan, dtype=torch.float64, device=self._device)

    def _finish(self) -> None:
        assert self._plan is not None  # noqa: S101 - a step has begun
        gradients, watch = self._gradients, self._watch
        if self._losses and len(self._losses) < len(self._plan.held):
            gradients.leave_out(len(self._losses))
        gradients.set_out()
        numbers = self._held.numbers()
        count = len(gradients.present)
        summary = Summary(
            self._plan,
            self._device,
            self._group,
            losses=self._losses,
            numbers=[
                [self._held.value(shard, index) for index in numbers]
                for shard in range(len(self._losses))
            ],
            num_numbers=len(numbers),
            bits=[*gradients.present, *self._held.changed()],
            layout=self._layout_word,
            words=losses.words(),
            late_words=NO_TIME if watch is None else watch.words(),
        )
        losses.heard(summary.words())
        made = self._made(summary)
        gradients.finish()
        self._compare_layouts(summary)
        bits = summary.bits()
        self._held.settle(self._plan, bits[count:], summary, self._channel, made)
        if made:
            gradients.scale(self.num_shards, sum(made))
        gradients.give(bits[:count])
        self.loss = summary.loss(made)

    def _made(self, summary: Summary) -> list[int]:
        """By worker, how many of its shards are in the sum; [] where all are."""
        assert self._plan is not None  # noqa: S101 - a step has begun
        if self._watch is None:
            return []
        num_held = [len(each) for each in self._plan.ranges]
        self._watch.heard(summary.late_words())
        made = summary.made() if self._watch.may_leave_out else num_held
        if made == num_held:
            return []
        self._watch.left_out(made, num_held)
        return made

    def _check(self, batch: Shards) -> None:
        if not isinstance(batch, Shards):
            raise ConfigError(
                f"model.shards() takes what outlast.data.Loader(…, shards={self.num_shards}) "
                f"hands out, not a {type(batch).__name__}; for data of another kind see "
                "outlast.data.Shards"
            )
        if batch.of != self.num_shards:
            raise ConfigError(
                f"the batch is cut into {batch.of} shards and the model was wrapped for "
                f"{self.num_shards}; give both the same number"
            )

    def _check_held(self, batch: Shards) -> None:
        assert self._plan is not None  # noqa: S101 - prepared
        here, held = range(batch.first, batch.first + len(batch)), self._plan.held
        if here != held:
            raise ConfigError(
                f"rank {self._plan.rank} of {self._plan.world_size} holds the shards "
                f"{list(held)} and was given {list(here)}; a session tells the loader which, "
                "without one call loader.set_worker(rank, world_size)"
            )

    def _prepare(self, counts: tuple[int, ...] = ()) -> None:
        """See that what was laid out still fits the workers, the parameters and the threads."""
        threads = torch.get_num_threads()
        if self._threads not in (None, threads):
            raise ConfigError(
                f"torch now computes with {threads} threads, and the model was wrapped for "
                f"{self._threads}: sums would differ. Give SameBits(…, threads={threads}), or "
                "leave torch.set_num_threads alone"
            )
        self._check_complete()
        rank, world_size = place(self._group, "outlast.SameBits()")
        if counts and len(counts) != world_size:
            raise ConfigError(
                f"the batch is shared out to {len(counts)} workers, and there are {world_size}"
            )
        plan = ReductionPlan(self.num_shards, rank, world_size, counts)
        layout = [
            (p.device, p.requires_grad, p.dtype, p.shape, p.stride()) for p in self._named.values()
        ]
        if plan == self._plan and layout == self._layout:
            return
        if self._plan is not None:
            self._gradients.close()
        trained = {name: p for name, p in self._named.items() if p.requires_grad}
        self._device = _checked(self.module)
        self._plan, self._layout = plan, layout
        self._layout_word, self._is_compared = _word([each[1:] for each in layout]), False
        self._gradients = ModelGradients(trained, plan, self._channel)
        self._held.forget()

    def _check_complete(self) -> None:
        """See that nothing came to the model that nobody here knows of."""
        known, buffers = self._known, set(map(id, self._held.live))
        for owner in _parts(self.module):
            if not all(id(parameter) in known for parameter in _own(owner)):
                raise ConfigError(
                    "the model has got other parameters since it was wrapped, and nobody would "
                    "add up their gradients; give outlast.SameBits the model once it is complete"
                )
            for key, buffer in owner._buffers.items():
                if buffer is not None and id(buffer) not in buffers:
                    raise ConfigError(
                        f"the model has got the buffer {key} of a {type(owner).__name__} since it "
                        "was wrapped, and it would go on from shard to shard; give "
                        "outlast.SameBits the model once it is complete, after a forward pass if "
                        "that makes the buffer"
                    )

    def _compare_facts(self) -> None:
        """Say in one line what the workers do not have in common, once."""
        plan = self._plan
        if plan is None or (plan.rank, plan.world_size) == self._compared:
            return
        self._compared, facts = (plan.rank, plan.world_size), self.facts
        if facts.get("GPU") and facts["deterministic algorithms"] == "off" and plan.rank == 0:
            say(NOT_DETERMINISTIC)
        if plan.world_size == 1:
            return
        text = json.dumps(facts).encode()
        row = torch.zeros(_FACTS_BYTES, dtype=torch.uint8)
        row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = torch.empty(plan.world_size, _FACTS_BYTES, dtype=torch.uint8, device=self._device)
        gather(rows.view(-1), row.to(self._device), self._group)
        workers = [json.loads(bytes(each.tolist()).rstrip(b"\0")) for each in rows.cpu()]
        found = among(workers)
        if found and plan.rank == 0:
            say(
                f"the workers are not alike, so that another number of them may give other bits: "
                f"{found}. See docs/same-bits.md"
            )

    def _compare_layouts(self, summary: Summary) -> None:
        """Sums of differently laid out parameters are of nothing; in the first step with them.

        Raises:
            ConfigError: the workers' are.
        """
        if self._is_compared:
            return
        words = summary.layouts()
        for rank, word in enumerate(words):
            if word != words[0]:
                raise ConfigError(
                    f"the parameters of rank 0 and of rank {rank} differ in what is trained, in "
                    "dtype, shape or memory format, so that their gradients cannot be added up; "
                    "change the model in the same way on all workers"
                )
        self._is_compared = True

    def _same_start(self) -> None:
        if place(self._group, "outlast.SameBits()")[1] == 1:
            return
        with at_the_beginning():
            for each in (*self._named.values(), *self._held.live):
                tensor = each.detach()
                whole = tensor.clone(memory_format=torch.contiguous_format)  # of any strides
                raw = whole.reshape(-1).view(torch.uint8)  # and any dtype
                before = raw.clone()
                dist.broadcast(raw, group=self._group, group_src=0)
                if not torch.equal(before, raw):
                    tensor.copy_(whole)


def place(group: Any, caller: str) -> tuple[int, int]:
    """(rank, number of workers) in a group, for ``caller``.

    Raises:
        ConfigError: there are several, and no process group yet.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        raise ConfigError(
            f"WORLD_SIZE is {world_size} and the process group is not there yet; call "
            f"torch.distributed.init_process_group() before {caller}"
        )
    return 0, 1


def _checked(module: torch.nn.Module) -> torch.device:
    """The device of a model that can be wrapped.

    Raises:
        ConfigError: one that cannot.
    """
    if isinstance(module, torch.nn.parallel.DistributedDataParallel | SameBits):
        raise ConfigError(
            f"outlast.SameBits takes the place of {type(module).__name__}; give it the model itself"
        )
    for name, inner in module.named_modules():
        if isinstance(inner, torch.nn.SyncBatchNorm):
            raise ConfigError(
                f"{name or 'the model'} is a SyncBatchNorm, whose statistics depend on the number "
                "of workers; use torch.nn.BatchNorm, which sees one shard, or GroupNorm"
            )
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise ConfigError(f"{name} has no shape yet; run the model once before wrapping it")
        if hasattr(parameter, "device_mesh"):
            raise ConfigError(
                f"{name} is divided among workers (FSDP2 or tensor parallel); outlast.SameBits is "
                "for models of which each worker has all"
            )
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError("the model has no parameter that requires a gradient")
    devices = {parameter.device for parameter in parameters.values()}
    if len({device.type for device in devices}) > 1:
        raise ConfigError(
            f"the model is on {' and '.join(sorted(map(str, devices)))}; put it on one kind of "
            "device"
        )
    return next(iter(parameters.values())).device


def _parts(module: torch.nn.Module) -> list[torch.nn.Module]:
    """A model's modules; faster than ``modules()``, which also makes their names."""
    found, seen = [module], {id(module)}
    for owner in found:
        for inner in owner._modules.values():
            if inner is not None and id(inner) not in seen:
                seen.add(id(inner))
                found.append(inner)
    return found


def _own(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def _word(layout: Any) -> int:
    """Of 48 bits, which a float64 holds."""
    return int.from_bytes(hashlib.blake2b(repr(layout).encode(), digest_size=6).digest(), "big")


def _guard(model: SameBits) -> None:
    """Refuse an optimizer's step while a step's sums are not there; as long as the model lives."""
    reference = weakref.ref(model)

    def called(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        wrapped = reference()
        if wrapped is None or not wrapped._is_open:
            return
        trained = set(map(id, wrapped._named.values()))
        if any(id(p) in trained for each in optimizer.param_groups for p in each["params"]):
            raise ConfigError(
                "the optimizer's step was called before the loop over model.shards(batch) had come "
                "to its end; call it after the loop, once a batch"
            )

    weakref.finalize(model, register_optimizer_step_pre_hook(called).remove)


# --- what a session's wrappers promise ------------------------------------------------------------

DDP: Final = torch.nn.parallel.DistributedDataParallel
WHERE: Final = "See docs/same-bits.md"


def unwrapped(value: Any, wrappers: list[torch.nn.Module]) -> Any:
    """What is inside of DDP, SameBits and torch.compile; ``wrappers`` gets what is around it."""
    while isinstance(value, torch.nn.Module):
        inner = getattr(value, "_orig_mod", None)
        if isinstance(value, DDP | SameBits):
            inner = value.module
        if inner is None:
            break
        wrappers.append(value)
        value = inner
    return value


class Bits:
    """What the wrappers of a session's models promise.

    Args:
        wrappers: modules that were taken off: SameBits, DDP, others.
        models: what was inside of them, and those that came without.
    """

    def __init__(
        self,
        wrappers: Iterable[torch.nn.Module] = (),
        models: Iterable[torch.nn.Module] = (),
    ) -> None:
        wrappers = list(wrappers)
        self._ddp = [each for each in wrappers if isinstance(each, DDP)]
        self._models = list(models)
        named = [each for each in wrappers if isinstance(each, SameBits)]
        self._same = named or _around(self._models, list(living))

    @property
    def summed(self) -> list[SameBits]:
        """The models whose sums are ours."""
        return self._same

    @property
    def any_size(self) -> bool:
        """Whether the bits are meant to be the same at any number of workers."""
        return bool(self._same)

    def facts(self) -> list[dict[str, str]]:
        """What they depend on; goes into each checkpoint."""
        return [each.facts for each in self._same]

    def tell_at_start(self, rank: int, world_size: int) -> None:
        """Say what will not be the same after a resume, and the remedy."""
        if rank or world_size < 3:
            return
        # As torch's Reducer::should_rebuild_buckets has it.
        found = [
            each
            for each in (*self._ddp, *ddp_around(self._models))
            if each.static_graph or not each.find_unused_parameters
        ]
        if found:
            more = " and no static_graph" if any(each.static_graph for each in found) else ""
            say(
                f"DDP on {world_size} workers sums in another order in the first step after a "
                f"resume; for the same bits give it find_unused_parameters=True{more}, or use "
                f"outlast.SameBits in its place. {WHERE}"
            )

    def tell_of_resume(
        self, saved: Iterable[Mapping[str, Any]], rank: int, saved_by: int, world_size: int
    ) -> None:
        """Say what is not as it was when the checkpoint was written.

        Args:
            saved: the facts then.
            rank: this worker's.
            saved_by: the number of workers then.
            world_size: the number of workers now.
        """
        if rank:
            return
        found = next(filter(None, map(difference, saved, self.facts())), "")
        if found:
            say(f"the run's bits may differ from here on: other {found} than before. {WHERE}")
        elif world_size != saved_by and not self.any_size:
            say(
                f"resumed with {world_size} in place of {saved_by} workers: random numbers "
                "and sums of gradients are not those of an undisturbed run"
            )


def _around(models: Iterable[torch.nn.Module], wrappers: Iterable[Any]) -> list[Any]:
    """Those of the wrappers that hold a parameter of ``models``."""
    ours = {id(parameter) for model in models for parameter in model.parameters()}
    return [each for each in wrappers if any(id(p) in ours for p in each.parameters())]


def ddp_around(models: Iterable[torch.nn.Module]) -> list[Any]:
    """DDP objects of this process that hold a parameter of ``models``."""
    return _around(models, _ddp_objects())


def _ddp_objects() -> list[torch.nn.parallel.DistributedDataParallel]:
    """Of this process.

    DDP keeps no list of them, so the garbage collector is asked: some tens of milliseconds, once.
    """
    kinds = [DDP]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return [each for each in gc.get_referrers(*kinds) if isinstance(each, DDP)]
