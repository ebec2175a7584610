"""Why two runs of a script differ: found by trying, one thing at a time.

A try holds one thing still (``conditions``) and looks whether the difference goes. If it does, that
thing is the cause, whatever else one may think of the script; the line is the one at which the
script was seen to read it, or where the source says it.

Two kinds of differences are told apart by the caller. A script may differ from itself without any
stop: then its seeds, its clock, its kernels are tried on two undisturbed runs. Or only a run that
was stopped differs: then what its names reach is compared at the same step, brought across by hand,
and its loaders' processes are tried.

What can go wrong: several causes at once. Then none of the single tries makes the difference go;
those of the first kind are held still together, and left out one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from outlast.drill.compare import (
    BATCH,
    BEFORE,
    LOSS,
    RANDOM,
    RANDOM_AFTER,
    RATE,
    STATE,
    StepDifference,
)
from outlast.drill.proof import conditions as of
from outlast.drill.proof.script_lines import ScriptLines
from outlast.drill.record import COMPILED, NotedCall, NotedOperations, WorkerRecord


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Why two runs differ.

    Attributes:
        kind: one word or two, for programs.
        what: for people, a whole sentence.
        where: the script's line, as "train.py:12"; "" if it is not known.
        write: what to write there.
    """

    kind: str
    what: str
    where: str
    write: str


class TriedChange(msgspec.Struct, frozen=True, kw_only=True):
    """One try.

    Attributes:
        what: was held still, or brought across.
        helped: whether the difference was gone.
    """

    what: str
    helped: bool


PLACES_MAX: Final = 4  # of one cause
_FIRST_BY_PART: Final = {
    BEFORE: (of.SEED_TORCH, of.ENTROPY, of.SEED_NUMPY, of.SEED_PYTHON),
    RANDOM: (of.SEED_TORCH, of.ENTROPY, of.SEED_NUMPY, of.SEED_PYTHON),
    BATCH: (of.SEED_TORCH, of.SEED_PYTHON, of.SEED_NUMPY, of.HASH_SEED, of.ENTROPY),
    RATE: (of.CLOCK, of.IDENTITY),
    LOSS: (of.DETERMINISTIC, of.CLOCK, of.ENTROPY, of.HASH_SEED),
    STATE: (of.DETERMINISTIC, of.CLOCK, of.ENTROPY),
    RANDOM_AFTER: (of.ENTROPY, of.CLOCK),
}
_STILL: Final = (
    *(of.SEED_TORCH, of.SEED_NUMPY, of.SEED_PYTHON, of.ENTROPY, of.CLOCK, of.HASH_SEED),
    *(of.IDENTITY, of.DETERMINISTIC, of.ONE_THREAD, of.NO_LOADER_WORKERS),
)
TRIED_WORDS: Final = {
    of.SEED_TORCH: "torch seeded at the start",
    of.SEED_NUMPY: "NumPy seeded at the start",
    of.SEED_PYTHON: "Python's random seeded at the start",
    of.ENTROPY: "the machine's own randomness (urandom, uuid4, generators without a seed) fixed",
    of.CLOCK: "the clock stopped",
    of.HASH_SEED: "PYTHONHASHSEED=0",
    of.IDENTITY: "process id, host name and addresses of objects fixed",
    of.DETERMINISTIC: "torch.use_deterministic_algorithms(True)",
    of.ONE_THREAD: "one thread",
    of.NO_LOADER_WORKERS: "num_workers=0 in each DataLoader",
    of.COUNT_ON: "enumerate(session.steps(…)) begun at the resumed step",
}


def still_in_order(first: StepDifference) -> list[str]:
    """What is held still, one after the other, where a script differs from itself.

    Those come first that make what differs first.
    """
    begin = list(_FIRST_BY_PART[first.part])
    if first.part == RANDOM and first.names:
        named = {
            "python": of.SEED_PYTHON,
            "numpy": of.SEED_NUMPY,
            "torch": of.SEED_TORCH,
            "devices": of.SEED_TORCH,
        }
        begin = [*dict.fromkeys(named[n] for n in first.names if n in named), *begin]
    return list(dict.fromkeys([*begin, *_STILL]))


def cause_of(change: str, calls: Iterable[NotedCall], lines: ScriptLines) -> Cause:
    """The cause that a change has shown by making the difference go.

    Args:
        change: one of ``conditions``.
        calls: what workers were seen to do under it.
        lines: the script's.
    """
    calls = list(calls)
    is_compiled = any(call.what == COMPILED for call in calls)
    calls = [call for call in calls if call.what != COMPILED]
    seen = [call for call in calls if not call.what.startswith("draws from")]
    drawn = {call.what.removeprefix("draws from "): call.where for call in reversed(calls)}
    where = ", ".join(list(dict.fromkeys(call.where for call in seen))[:PLACES_MAX])
    read = seen[0].what if seen else ""
    if change in _SEEDS:
        name, stream, write = _SEEDS[change]
        first = drawn.get(stream, "")
        return Cause(
            kind=f"unseeded {stream}",
            what=f"{name} is not seeded: each run draws other numbers",
            where=first,
            write=f"{write} ahead of it",
        )
    if change == of.ENTROPY:
        return Cause(
            kind="entropy",
            what=f"the script takes randomness from the machine ({read or 'urandom'}), which is "
            "another one in each run",
            where=where,
            write=_SEEDED.get(read, "a generator with a seed, such as random.Random(0)"),
        )
    if change == of.CLOCK:
        return Cause(
            kind="clock",
            what=f"what is computed depends on the time of day ({read or 'the clock'})",
            where=where,
            write="count steps in place of seconds: session.step, or a counter that is saved",
        )
    if change == of.IDENTITY:
        return Cause(
            kind="identity",
            what=f"what is computed depends on which process computes it ({read or 'its id'})",
            where=where,
            write="the rank and the step in its place: they are the same in each run",
        )
    if change == of.HASH_SEED:
        return Cause(
            kind="hash order",
            what="an order depends on hashes of strings, which are others in each process",
            where=lines.set_gone_through(),
            write="sorted(…) around the set, or set PYTHONHASHSEED=0 for the job",
        )
    if change == of.NO_LOADER_WORKERS:
        return Cause(
            kind="loader workers",
            what="the data set draws random numbers in the loader's processes: what a sample gets "
            "depends on how many its process made before, and a resume has new processes",
            where=lines.called("DataLoader", "StatefulDataLoader"),
            write="draw by the index: np.random.default_rng((seed, epoch, index)) in "
            "__getitem__; or num_workers=0",
        )
    if change == of.COUNT_ON:
        return Cause(
            kind="enumerate",
            what="enumerate() counts from 0 again behind a resume, and the loop goes by it",
            where=where or lines.called("enumerate"),
            write="enumerate(session.steps(…), start=session.step)",
        )
    kernel = next((call for call in seen if call.what.startswith("kernel ")), None)
    name = f": {kernel.what.removeprefix('kernel ')}" if kernel else ""
    if not kernel and is_compiled:
        name = ", inside of what torch.compile has made (without it, the drill names it)"
    return Cause(
        kind="kernel",
        what=f"an operation adds in another order each time{name}",
        where=kernel.where if kernel else "",
        write="torch.use_deterministic_algorithms(True), or torch.set_num_threads(1)",
    )


def next_try(first: StepDifference, tried: Sequence[TriedChange], *, is_compiled: bool) -> str:
    """What a person can try where no cause was found, or the search was ended.

    Args:
        first: what differs first.
        tried: so far.
        is_compiled: whether a part of the script runs as ``torch.compile`` has made it.
    """
    if is_compiled:
        return (
            "the same without torch.compile, inside of which no operation is looked at by itself: "
            "what differs then has a name; if nothing does, it is a kernel that the compiler made, "
            "and torch.use_deterministic_algorithms(True) has it make others"
        )
    done = {one.what for one in tried}
    left = [TRIED_WORDS[one] for one in still_in_order(first) if TRIED_WORDS[one] not in done]
    if left:
        return f"the same with more time: not tried yet are {', '.join(left)}"
    return (
        f"the same with half of the script left out, and --steps {max(first.step, 4)}: what "
        "differs first is seen in that many"
    )


_SEEDS: Final = {
    of.SEED_TORCH: ("torch's generator", "torch", "torch.manual_seed(0)"),
    of.SEED_NUMPY: ("NumPy's global generator", "numpy", "numpy.random.seed(0)"),
    of.SEED_PYTHON: ("Python's random", "python", "random.seed(0)"),
}
_SEEDED: Final = {
    "numpy.random.default_rng()": "numpy.random.default_rng(0)",
    "numpy.random.RandomState()": "numpy.random.RandomState(0)",
    "random.Random()": "random.Random(0)",
    "torch.seed()": "torch.manual_seed(0)",
}


class SuspectKernel(NamedTuple):
    """An operation that gave two results for the same question: its name and the script's line."""

    name: str
    where: str


def suspect_kernel(
    one: Sequence[NotedOperations], other: Sequence[NotedOperations]
) -> SuspectKernel | None:
    """The first operation whose inputs are the same and whose outputs are not.

    One whose inputs differ may still be innocent: memory that it is to fill has any content.
    """
    for first, second in zip(one, other, strict=False):
        pairs = zip(first.operations, second.operations, strict=False)
        for (name, given, made, where), (name_2, given_2, made_2, _) in pairs:
            if name != name_2:
                return None
            if given == given_2 and made != made_2:
                return SuspectKernel(name, where)
    return None


def of_kernel(kernel: SuspectKernel) -> Cause:
    """The cause that it is."""
    return Cause(
        kind="kernel",
        what=f"{kernel.name} gives other bits each time for the same inputs",
        where=kernel.where,
        write="torch.use_deterministic_algorithms(True); where that knows no other kernel, "
        "on a CPU, torch.set_num_threads(1)",
    )


class Suspect(NamedTuple):
    """Values that are not the same, behind one name of the script's.

    Attributes:
        name: as the script has it: ``main().ema``, ``scale``.
        paths: of the values.
        owner: path of the object that gives and takes its state itself; "" for none.
        kind: class of that.
        of: class of a library's, of which it is an attribute; "" for none.
    """

    name: str
    paths: list[str]
    owner: str
    kind: str
    of: str = ""


def suspects(undisturbed: Sequence[WorkerRecord], resumed: Sequence[WorkerRecord]) -> list[Suspect]:
    """What two processes' names reach at the same step, and is not the same there."""
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for one, other in itertools.product(undisturbed, resumed):
        if one.begun.rank != other.begun.rank:
            continue
        for was, now in itertools.product(one.reached, other.reached):
            if was.step != now.step:
                continue
            for path, digest in now.values.items():
                if was.values.get(path, digest) != digest:
                    owner, kind = now.owners.get(path, ("", ""))
                    name, of = owner or _name_of(path), now.librarys.get(path, "")
                    paths = found.setdefault((name, owner, kind, of), [])
                    if path not in paths:
                        paths.append(path)
    return [Suspect(name, paths, *more) for (name, *more), paths in found.items()]


def _name_of(path: str) -> str:
    """The value itself where it lies in an object, without the keys of containers."""
    return path.partition("[")[0]


def of_state(suspect: Suspect, lines: ScriptLines) -> Cause:
    """The cause that state behind a name of the script's is in no checkpoint."""
    function, _, name = suspect.name.rpartition("().")
    *around, last = name.split(".")
    what = f"{name} is in no checkpoint: a resume begins it anew"
    if suspect.owner:
        return Cause(
            kind="unnamed object",
            what=f"{name} ({suspect.kind}) is in no checkpoint: a resume begins it anew",
            where=lines.called("session") or lines.assigned(last, function),
            write=f"outlast.session(…, {last}={last})",
        )
    where = lines.assigned(last, function)
    if not around:
        return Cause(
            kind="unprotected variable",
            what=what,
            where=where,
            write=f"work {last} out from session.step, or keep it in an object with state_dict and "
            "load_state_dict that the session is given",
        )
    holder = ".".join(around)
    if last == of.FROZEN:
        return Cause(
            kind="frozen parameter",
            what=f"whether {holder} is frozen is in no checkpoint: a resume has it as the script "
            "begins with it",
            where=lines.called("requires_grad_") or lines.assigned(last, function),
            write="set it by session.step, in each step or ahead of the loop's first one: "
            "requires_grad_(session.step < …)",
        )
    if suspect.of:
        return Cause(
            kind="unprotected attribute",
            what=f"{name}, an attribute of {suspect.of}, is in no checkpoint: a resume begins with "
            "the value that it was made with",
            where=where,
            write=f"set {last} by session.step, in each step or ahead of the loop's first one; or "
            f"keep its value in an object with state_dict and load_state_dict that the session is "
            f"given, and set {last} from that",
        )
    return Cause(
        kind="unprotected attribute",
        what=what,
        where=where,
        write=f"in a module: self.register_buffer({last!r}, …); in a data set: what depends on the "
        f"index alone; else give {holder} a state_dict and a load_state_dict with {last} in it, "
        "and name it for the session",
    )
