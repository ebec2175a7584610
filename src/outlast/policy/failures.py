"""What kind of failure it was, from what a worker left behind and what its machine saw.

``TABLE`` is the whole of it, in the order of precedence: of several failures in one attempt the
kind that stands first decides, whichever came first. So what cannot be the consequence of another
worker's end (a signal from outside, a broken GPU) stands before what often is (a connection that
broke, a time-out), and the order in which workers happened to die changes nothing.

What can go wrong: a text is only a text. A script that raises ``RuntimeError("CUDA error: …")``
itself is judged as if CUDA had; a library that words a broken mount in its own way is ``script``.
Nothing is ended for a wrong kind alone: the budgets in :mod:`outlast.policy.restart` bound all.

The texts are those of Python 3.11, torch 2.13 and NVIDIA's documents (Xid: the catalogue of
errors, see docs/failures.md).
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Collection
from typing import Final

import msgspec


class Remedy(enum.Enum):
    """What is done about it. The words go on from "…: "."""

    STOP = "stop"
    RESTART = "restart"
    ELSEWHERE = "restart elsewhere"
    LEAVE_OUT = "leave the machine out"
    BACK_OFF = "back off, then restart"


class Kind(enum.Enum):
    """The kinds of failures, in the order of precedence."""

    USAGE = "usage"
    STORAGE_GONE = "storage given up"
    REFUSED = "refused to resume"
    DRAINED = "drained"
    GPU = "gpu"
    NO_GPU = "no gpu"
    MEMORY = "memory"
    CRASH = "crash"
    CUDA = "cuda"
    STORAGE = "storage"
    HANG = "hang"
    KILLED = "killed"
    GPU_MEMORY = "gpu memory"
    SCRIPT = "script"
    UNKNOWN = "unknown"
    NCCL = "nccl"
    ABORT = "abort"
    NETWORK = "network"
    PEER = "peer"


class KindRow(msgspec.Struct, frozen=True):
    """One row of the table.

    Attributes:
        kind: the kind.
        title: in words, for people.
        signs: what it is known by, in words.
        action: what is done.
        bug_after: how many times in a row the same traceback (of a hang: the same stack) at the
            same step stops the job; 0 never.
        own_after: how many of this machine's own failures within the window leave it out: 0 never,
            1 at once, else (-1) as many as the owner has set.
        alone: such a failure counts only while no other machine fails in the same way.
    """

    kind: Kind
    title: str
    signs: str
    action: Remedy
    bug_after: int = 0
    own_after: int = 0
    alone: bool = False


AS_SET: Final = -1
TWICE: Final = 2
THRICE: Final = 3  # what only looked like it is given more time in between
TABLE: Final = (
    KindRow(Kind.USAGE, "called wrongly", "exit code 2", Remedy.STOP),
    KindRow(
        Kind.STORAGE_GONE,
        "the job's own storage is unusable",
        "exit code 77: our StorageError",
        Remedy.STOP,
    ),
    KindRow(Kind.REFUSED, "refuses to resume", "exit code 78", Remedy.STOP),
    KindRow(Kind.DRAINED, "drained", "exit code 75", Remedy.STOP),
    KindRow(
        Kind.GPU,
        "a GPU is broken",
        "uncorrectable ECC error, GPU lost or off the bus, NVLink error; CUDA or NCCL "
        "failed, or it aborted, with an Xid that needs a reset or with new ECC errors",
        Remedy.LEAVE_OUT,
        own_after=1,
    ),
    KindRow(
        Kind.NO_GPU,
        "no GPU can be used",
        "no NVIDIA driver, one that does not fit, no or fewer GPUs, torch without CUDA",
        Remedy.LEAVE_OUT,
        bug_after=TWICE,
        own_after=1,
        alone=True,
    ),
    KindRow(
        Kind.MEMORY,
        "out of memory on the host",
        "SIGKILL while the OOM killer's counters rose, MemoryError, ENOMEM, shared memory used up",
        Remedy.ELSEWHERE,
        bug_after=TWICE,
    ),
    KindRow(
        Kind.CRASH,
        "crashed",
        "SIGSEGV, SIGBUS, SIGILL, SIGFPE",
        Remedy.RESTART,
        own_after=AS_SET,
        alone=True,
    ),
    KindRow(
        Kind.CUDA,
        "CUDA failed",
        "CUDA, cuBLAS or cuDNN error, but for an assertion on the device",
        Remedy.RESTART,
        bug_after=TWICE,
        own_after=AS_SET,
        alone=True,
    ),
    KindRow(
        Kind.STORAGE,
        "storage failed",
        "OSError EIO, ENOSPC, EDQUOT, EROFS, ESTALE, ENODEV, ENOTCONN, ENXIO, EREMOTEIO",
        Remedy.BACK_OFF,
        own_after=AS_SET,
        alone=True,
    ),
    KindRow(
        Kind.HANG,
        "a worker hung",
        "the watch over hangs has named it",
        Remedy.RESTART,
        bug_after=THRICE,
    ),
    KindRow(
        Kind.KILLED,
        "killed from outside, nobody knows by whom",
        "SIGKILL without a sign of the OOM killer, SIGTERM, any other signal",
        Remedy.RESTART,
        own_after=AS_SET,
        alone=True,
    ),
    KindRow(
        Kind.GPU_MEMORY,
        "out of memory on a GPU",
        "torch.OutOfMemoryError, CUDA out of memory",
        Remedy.RESTART,
        bug_after=TWICE,
    ),
    KindRow(
        Kind.SCRIPT,
        "an error of the script",
        "any other exception, an assertion on the device",
        Remedy.RESTART,
        bug_after=TWICE,
    ),
    KindRow(
        Kind.UNKNOWN,
        "left without a word",
        "an exit code that nothing explains",
        Remedy.RESTART,
        own_after=AS_SET,
        alone=True,
    ),
    KindRow(
        Kind.NCCL,
        "NCCL failed",
        "NCCL error: unhandled system or CUDA error, internal error",
        Remedy.RESTART,
        own_after=AS_SET,
        alone=True,
    ),
    KindRow(
        Kind.ABORT,
        "aborted itself",
        "SIGABRT: os.abort, an uncaught C++ exception, NCCL's watchdog",
        Remedy.RESTART,
        own_after=AS_SET,
        alone=True,
    ),
    KindRow(
        Kind.NETWORK,
        "the network failed",
        "connection refused, timed out or reset, no route, a name not resolved, a collective "
        "or a store timed out",
        Remedy.BACK_OFF,
        own_after=AS_SET,
        alone=True,
    ),
    KindRow(
        Kind.PEER,
        "another worker was lost",
        "a connection closed or reset by a peer that has failed",
        Remedy.RESTART,
    ),
)
ROWS: Final = {row.kind: row for row in TABLE}
# What healthy survivors of a loss elsewhere may end in.
CONSEQUENCES: Final = frozenset({Kind.NCCL, Kind.ABORT, Kind.NETWORK})
_PLACES: Final = {row.kind: place for place, row in enumerate(TABLE)}
_ON_PURPOSE: Final = {
    2: Kind.USAGE,
    75: Kind.DRAINED,
    77: Kind.STORAGE_GONE,
    78: Kind.REFUSED,
    80: Kind.PEER,  # a survivor of a loss elsewhere that starts anew
}


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker left behind.

    Attributes:
        rank: its rank.
        exit_code: its exit code; negative is the signal that ended it.
        traceback: the exception as text, or "" when there was none.
        message: the exception's last line, or what is known instead.
        step: the last step it completed, or None.
        pid: its process, 0 if unknown.
        proven: whether it was one for certain: a worker called hung may have been slow.
        stack: of a hang, where the script was; "" where not the script may be why.
        hosts: of a hang, the machines of the ranks that hung; empty where nobody knows.
    """

    rank: int
    exit_code: int
    traceback: str = ""
    message: str = ""
    step: int | None = None
    pid: int = 0
    proven: bool = True
    stack: str = ""
    hosts: tuple[str, ...] = ()


class Signs(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine has seen since shortly before the failures.

    Attributes:
        oom_kills: how many processes the OOM killer has ended.
        oom_pids: those of them that the kernel's log names, in its own numbering.
        xids: the GPU driver's error numbers.
        ecc_errors: uncorrectable errors that GPUs have counted.
    """

    oom_kills: int = 0
    oom_pids: frozenset[int] = frozenset()
    xids: tuple[int, ...] = ()
    ecc_errors: int = 0


# Xids after which a GPU needs a reset or a repair, and which no script causes: uncorrectable ECC
# (48, uncontained 95), the micro-controller halted (62), a row not remapped (64), NVLink (74), off
# the bus (79), its own processor does not answer (119, 120).
XIDS_OF_HARDWARE: Final = frozenset({48, 62, 64, 74, 79, 95, 119, 120})
HANG: Final = "hang: "  # how the message of one begins
_DEVICE_ASSERT: Final = "device-side assert"
_ECHOES: Final = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "remote process exited",
    "communicator was aborted",
)


# What a text says, in the order in which it is looked for; compiled when it is first needed.
_TEXTS: Final = (
    (
        Kind.GPU,
        (
            "uncorrectable ecc",
            "gpu is lost",
            "fallen off the bus",
            "cuda-capable device.{0,4} is/are busy or unavailable",
            "nvlink error",
            "uncorrectable nvlink",
            "hardware stack error",
            "gpu requires reset",
            r"cuda error: unknown error",
            "system not yet initialized",
        ),
    ),
    (
        Kind.NO_GPU,
        (
            "found no nvidia driver",
            "no cuda-capable device",
            "no cuda gpus are available",
            "no gpus? found",
            "invalid device ordinal",
            "cuda unknown error",
            "cuda driver initialization failed",
            "(cuda|nvidia) driver .{0,40}(is insufficient|too old)",
            "unsupported display driver",
            "forward compatibility was attempted",
            "driver/library version mismatch",
            "unexpected error from cudagetdevicecount",
            "torch not compiled with cuda enabled",
        ),
    ),
    (
        Kind.GPU_MEMORY,
        (
            r"\boutofmemoryerror\b",
            r"(cuda|hip) out of memory",
            r"cuda error: out of memory",
            r"cublas_status_alloc_failed",
            r"cudaerrormemoryallocation",
        ),
    ),
    (Kind.SCRIPT, (_DEVICE_ASSERT,)),
    (
        Kind.NCCL,
        (
            r"nccl error(?!.*remote process exited)",
            r"\bnccl(unhandledcuda|system|internal|invalidusage|invalidargument)error\b",
        ),
    ),
    (
        Kind.CUDA,
        (r"\bcuda error\b", r"cuda driver error", r"\bcu(blas|dnn|solver|fft|sparse)_status_"),
    ),
    (
        Kind.MEMORY,
        (
            r"^(\w+\.)*\w*memoryerror\b",
            r"cannot allocate memory",
            r"defaultcpuallocator: (can't|not enough)",
            r"out of shared memory",
            r"insufficient shared memory",
            r"dataloader worker \(pid \d+\) is killed by signal: bus error",
            r"std::bad_alloc",
        ),
    ),
    (Kind.KILLED, (r"dataloader worker \(pid \d+\) is killed by signal: killed",)),
    (
        Kind.STORAGE,
        (
            r"\[errno (5|28|30|116|121|122|19|6|107)\]",
            r"input/output error",
            r"no space left on device",
            r"read-only file system",
            r"stale (nfs )?file handle",
            r"disk quota exceeded",
            r"transport endpoint is not connected",
        ),
    ),
    (
        Kind.NETWORK,
        (
            r"connection ?refused",
            r"connection ?timed ?out",
            r"\b(connecttimeout|readtimeout|connectionreset|connectionaborted)",
            r"no route to host",
            r"(host|network) is (unreachable|down)",
            r"name or service not known",
            r"temporary failure in name resolution",
            r"nodename nor servname",
            r"\bgaierror\b",
            r"timed out (waiting|connecting|in monitoredbarrier|after \d+)",
            r"timeout(ms)?\W.*(all_?reduce|broadcast|all_?gather|reduce_?scatter|barrier|collective)",
            r"watchdog caught collective operation timeout",
            r"operation timed out",
            r"connectfullmesh failed",
            r"\bdist(network|store)error\b",
            r"wait timeout after \d+ms",
            r"^(socket\.)?timeout(error)?\b",
        ),
    ),
)
# What torch's error adds where it is not this process that fills the GPU.
_OTHERS_MEMORY: Final = re.compile(r"\bProcess \d+ has [\d.]+ [KMGT]iB memory in use")
_VERDICTS: Final = {
    Kind.NO_GPU: "the workers find no GPU that they can use",
    Kind.MEMORY: "the workers need more memory than there is",
    Kind.CUDA: "the script's own GPU code, or a GPU (outlast doctor looks at it)",
    Kind.GPU_MEMORY: "the workers need more memory than the GPU has",
    Kind.HANG: "a bug in the script, or it needs more than health.hang_ceiling",
}
_NOT_NETWORK: Final = re.compile(
    r"subprocess\.TimeoutExpired|(Assertion|Attribute|Index|Key|Name|Type|Value)Error\b"
)
_LONGEST: Final = 20_000  # characters of a traceback that are looked at: its end


@functools.cache
def _patterns() -> list[tuple[Kind, re.Pattern[str]]]:
    flags = re.IGNORECASE | re.MULTILINE
    return [(kind, re.compile("|".join(texts), flags)) for kind, texts in _TEXTS]


def is_echo(failure: Failure) -> bool:
    """Whether it is what torch raises in a survivor when its peer's process goes."""
    return reads_as_echo(failure.message) and not _lost_its_loader(failure)


def reads_as_echo(message: str) -> bool:
    """Whether these words are such an error's."""
    text = message.lower()
    return any(sign in text for sign in _ECHOES)


def kind_of(failure: Failure, signs: Signs = Signs()) -> Kind:  # noqa: B008 - immutable
    """The kind of one worker's failure, by itself."""
    code = failure.exit_code
    if code in _ON_PURPOSE:
        return _ON_PURPOSE[code]
    if failure.message.startswith(HANG):
        return Kind.HANG
    said = _said(failure)
    number = signal_of(failure)
    if number:
        return _of_signal(number, failure, signs)
    if _lost_its_loader(failure):
        return _grave(Kind.KILLED, signs)
    for kind, pattern in _patterns():
        if pattern.search(_of_network(said) if kind is Kind.NETWORK else said):
            return _grave(kind, signs)
    if is_echo(failure):
        return Kind.PEER
    return Kind.SCRIPT if failure.traceback or _is_exception(failure.message) else Kind.UNKNOWN


def title_of(kind: str) -> str:
    """The title of a kind by its name, as a ledger has it; one that is not known names itself."""
    return next((row.title for row in TABLE if row.kind.value == kind), str(kind))


def verdict_on(kind: Kind, message: str) -> str:
    """What the same failure again and again says, where nowhere else it can be tried."""
    if kind is Kind.GPU_MEMORY and _OTHERS_MEMORY.search(message):
        return "another process holds memory of the GPU"
    return _VERDICTS.get(kind, "a bug in the script")


def signal_of(failure: Failure) -> int:
    """The signal that ended a worker, 0 for none; a shell leaves with 128 more than its number."""
    code = failure.exit_code
    if code < 0:
        return -code
    return code - 128 if 128 < code < 160 and not failure.traceback else 0


def most_telling(kinds: Collection[Kind]) -> Kind:
    """Of the kinds of one attempt's failures, the one that decides."""
    return min(kinds, key=_PLACES.__getitem__)


def graver_than(kind: Kind) -> list[Kind]:
    """Kinds that decide where this one is there as well."""
    return [other for other in ROWS if _PLACES[other] < _PLACES[kind]]


def _of_signal(number: int, failure: Failure, signs: Signs) -> Kind:
    if number == 9 and (signs.oom_kills or failure.pid in signs.oom_pids):
        return Kind.MEMORY
    if number in (4, 7, 8, 11):
        return Kind.CRASH
    if number == 6:
        return _grave(Kind.ABORT, signs)
    return Kind.KILLED


def _grave(kind: Kind, signs: Signs) -> Kind:
    """What CUDA or NCCL says is the GPU's own fault where its driver says so, and the like."""
    if kind is Kind.KILLED:
        return Kind.MEMORY if signs.oom_kills else kind
    broken = signs.ecc_errors or not XIDS_OF_HARDWARE.isdisjoint(signs.xids)
    return Kind.GPU if broken and kind in (Kind.CUDA, Kind.NCCL, Kind.ABORT) else kind


# A loader's process was killed while it handed over a batch: its socket says so before torch does.
_LOADER_GONE: Final = re.compile(r"utils/data/dataloader\.py\", line \d+, in _try_get_data\b")
_FROM_A_PIPE: Final = re.compile(r"(ConnectionReset|ConnectionRefused|EOF)Error\b")


def _lost_its_loader(failure: Failure) -> bool:
    gone = _LOADER_GONE.search(failure.traceback) and _FROM_A_PIPE.match(failure.message)
    return gone is not None


def _of_network(said: str) -> str:
    """Without exceptions whose class says that it was not the network, whatever they tell."""
    return "\n".join(line for line in said.splitlines() if not _NOT_NETWORK.match(line))


def _is_exception(message: str) -> bool:
    return re.match(r"[\w.]+(Error|Exception|Interrupt|Warning)\b", message) is not None


def _said(failure: Failure) -> str:
    """What the exception and those it came from say: not the source lines, which are indented."""
    lines = failure.traceback[-_LONGEST:].splitlines()
    own = [line for line in lines if line and not line[0].isspace()]
    return "\n".join([failure.message[-_LONGEST:], *own])
