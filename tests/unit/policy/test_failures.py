"""The kinds of failures: texts that torch, Python and drivers really write; the table itself."""

import itertools
import re
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from outlast.policy.failures import (
    ROWS,
    TABLE,
    Failure,
    Kind,
    Remedy,
    Signs,
    kind_of,
    most_telling,
    title_of,
)
from outlast.policy.restart import RestartPolicy

DOCS = Path(__file__).parents[3] / "docs" / "failures.md"
MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000000 bytes."
NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/"
    "ProcessGroupNCCL.cpp:2501, "
)
HINT = "\nCUDA kernel errors might be asynchronously reported at some other API call."


def raised(message, *, step=5, rank=0, before=""):
    trace = f"{before}Traceback (most recent call last):\n"
    trace += f'  File "train.py", line 7, in step\n    loss = f(x)\n{message}'
    return Failure(rank=rank, exit_code=1, message=message, traceback=trace, step=step)


def ended(signal, *, rank=0, pid=0):
    return Failure(rank=rank, exit_code=-signal, pid=pid, step=5)


TEXTS = {
    # Those of one machine, as torch, CUDA and NCCL word them (their sources, and public trackers).
    Kind.NO_GPU: [
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA",
        "RuntimeError: No CUDA GPUs are available",
        "torch.AcceleratorError: CUDA error: no CUDA-capable device is detected" + HINT,
        "torch.AcceleratorError: CUDA error: invalid device ordinal" + HINT,
        "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment",
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
        "RuntimeError: CUDA driver initialization failed, you might not have a CUDA gpu.",
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions",
        "Error 803: system has unsupported display driver / cuda driver combination",
        "Error 804: forward compatibility was attempted on non supported HW",
        "CUDA driver version is insufficient for CUDA runtime version",
        "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
        "AssertionError: Torch not compiled with CUDA enabled",
        "RuntimeError: Failed to initialize NVML: Driver/library version mismatch",
    ],
    Kind.GPU: [
        "RuntimeError: CUDA error: uncorrectable ECC error encountered" + HINT,
        "torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "RuntimeError: CUDA error: unknown error" + HINT,
        "RuntimeError: NVML: GPU is lost",
        "RuntimeError: Unable to determine the device handle: GPU has fallen off the bus",
        "RuntimeError: CUDA error: system not yet initialized",
        NCCL + "unhandled cuda error\nLast error:\nCuda failure 214 'uncorrectable ECC error'",
    ],
    Kind.GPU_MEMORY: [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a …",
        "torch.cuda.OutOfMemoryError: CUDA out of memory.",
        "RuntimeError: CUDA error: out of memory" + HINT,
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
    Kind.CUDA: [
        "RuntimeError: CUDA error: an illegal memory access was encountered" + HINT,
        "torch.AcceleratorError: CUDA error: unspecified launch failure",
        "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`",
    ],
    Kind.NCCL: [
        NCCL
        + "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3\n"
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed.",
        NCCL + "internal error - please report this issue to the NCCL developers",
        "RuntimeError: NCCL Error 2: unhandled system error",
    ],
    Kind.MEMORY: [
        "MemoryError",
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.28 TiB for an array",
        "OSError: [Errno 12] Cannot allocate memory",
        f"RuntimeError: [enforce fail at alloc_cpu.cpp:121] err == 0. {MEMORY}",
        (
            "RuntimeError: DataLoader worker (pid 77) is killed by signal: Bus error. It is "
            "possible that dataloader's workers are out of shared memory. Please …"
        ),
    ],
    Kind.STORAGE: [
        "OSError: [Errno 28] No space left on device: '/data/cache'",
        "OSError: [Errno 5] Input/output error",
        "OSError: [Errno 30] Read-only file system: '/data/x'",
        "OSError: [Errno 116] Stale file handle",
        "OSError: [Errno 122] Disk quota exceeded",
        "OSError: [Errno 107] Transport endpoint is not connected: '/mnt/fuse'",
        (
            "RuntimeError: Caught OSError in DataLoader worker process 0.\nOriginal Traceback "
            "(most recent call last):\n  File ...\nOSError: [Errno 5] Input/output error"
        ),
    ],
    Kind.NETWORK: [
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "TimeoutError: [Errno 110] Connection timed out",
        "socket.gaierror: [Errno -2] Name or service not known",
        "socket.gaierror: [Errno -3] Temporary failure in name resolution",
        "OSError: [Errno 113] No route to host",
        "TimeoutError: timed out",
        (
            "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms "
            "for recv operation to complete"
        ),
        "RuntimeError: Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144] no error",
        (
            "torch.distributed.DistNetworkError: The client socket has timed out after 1000ms "
            "while trying to connect to (127.0.0.1, 1)."
        ),
        "torch.distributed.DistStoreError: wait timeout after 200ms, keys: /x",
        (
            "torch.distributed.DistBackendError: [Rank 0] Watchdog caught collective operation "
            "timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600029 ms"
        ),
        "requests.exceptions.ConnectionError: Max retries exceeded with url: (Connection refused)",
    ],
    Kind.PEER: [
        "RuntimeError: [gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.0.0.1]:1",
        NCCL + "remote process exited or there was a network error, NCCL version 2.27.3",
    ],
    Kind.SCRIPT: [
        "ValueError: boom",
        "AssertionError",
        "RuntimeError: CUDA error: device-side assert triggered" + HINT,
        "RuntimeError: expected 5 rows",
        "FileNotFoundError: [Errno 2] No such file or directory: 'x'",
        "PermissionError: [Errno 13] Permission denied: 'x'",
        "ModuleNotFoundError: No module named 'x'",
    ],
}
CASES = [(kind, text) for kind, texts in TEXTS.items() for text in texts]


@pytest.mark.parametrize(
    ("kind", "text"), CASES, ids=[f"{kind.value}-{n}" for n, (kind, _) in enumerate(CASES)]
)
def test_a_text_has_its_kind(kind, text):
    assert kind_of(raised(text)) is kind


@pytest.mark.parametrize(
    ("signal", "kind"),
    [
        (9, Kind.KILLED),
        (15, Kind.KILLED),
        (1, Kind.KILLED),
        (10, Kind.KILLED),
        (11, Kind.CRASH),
        (7, Kind.CRASH),
        (4, Kind.CRASH),
        (8, Kind.CRASH),
        (6, Kind.ABORT),
    ],
)
def test_signals_are_told_apart(signal, kind):
    assert kind_of(ended(signal)) is kind
    assert kind_of(Failure(rank=0, exit_code=128 + signal)) is kind  # as a shell says it


def test_a_kill_is_the_oom_killers_where_the_machine_has_seen_it():
    assert kind_of(ended(9), Signs(oom_kills=1)) is Kind.MEMORY
    assert kind_of(ended(9, pid=7), Signs(oom_pids=frozenset({7}))) is Kind.MEMORY
    assert kind_of(ended(9, pid=8), Signs(oom_pids=frozenset({7}))) is Kind.KILLED
    assert kind_of(ended(15), Signs(oom_kills=1)) is Kind.KILLED
    loader = raised("RuntimeError: DataLoader worker (pid 77) is killed by signal: Killed. ")
    assert kind_of(loader) is Kind.KILLED
    assert kind_of(loader, Signs(oom_kills=1)) is Kind.MEMORY


def test_a_loader_that_is_killed_while_it_hands_over_is_no_network():
    reset = "ConnectionResetError: [Errno 104] Connection reset by peer"
    alone = raised(reset)
    trace = alone.traceback.replace(
        'File "train.py", line 7, in step',
        'File "/x/torch/utils/data/dataloader.py", line 1291, in _try_get_data',
    )
    lost = msgspec.structs.replace(alone, traceback=trace)
    assert kind_of(alone) is Kind.NETWORK
    assert kind_of(lost) is Kind.KILLED
    assert RestartPolicy(9).judge([lost], lasted_s=1.0, echoes=False).kind is Kind.KILLED


@pytest.mark.parametrize(
    "failure",
    [raised(TEXTS[Kind.CUDA][0]), raised(TEXTS[Kind.NCCL][0]), ended(6)],
    ids=["cuda", "nccl", "abort"],
)
def test_what_its_driver_says_of_a_gpu_decides(failure):
    assert kind_of(failure, Signs(xids=(31, 79))) is Kind.GPU
    assert kind_of(failure, Signs(ecc_errors=1)) is Kind.GPU
    assert kind_of(failure, Signs(xids=(13, 31, 43, 45, 94))) is kind_of(failure)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (2, Kind.USAGE),
        (75, Kind.DRAINED),
        (77, Kind.STORAGE_GONE),
        (78, Kind.REFUSED),
        (3, Kind.UNKNOWN),
        (1, Kind.UNKNOWN),
    ],
)
def test_exit_codes(code, kind):
    assert kind_of(Failure(rank=0, exit_code=code)) is kind


def test_what_an_exception_came_from_counts_and_source_lines_do_not():
    before = 'Traceback (most recent call last):\n  File "a.py"\n    f()\n'
    cause = f"{before}ConnectionRefusedError: [Errno 111] Connection refused\n\nThe above …\n\n"
    assert kind_of(raised("RuntimeError: no data server", before=cause)) is Kind.NETWORK
    source = raised("ValueError: boom")
    quoting = source.traceback.replace(
        "loss = f(x)", "raise OSError(28, 'No space left on device')"
    )
    assert kind_of(Failure(rank=0, exit_code=1, message="ValueError: boom", traceback=quoting)) is (
        Kind.SCRIPT
    )


def test_the_table_is_whole():
    assert [row.kind for row in TABLE] == list(Kind)
    assert len({row.title for row in TABLE}) == len(TABLE)
    assert all(row.action is Remedy.STOP for row in TABLE[:4])
    assert {row.action for row in TABLE[4:]}.isdisjoint({Remedy.STOP})
    assert title_of("crash") == "crashed"
    assert title_of("of a later version") == "of a later version"


def test_the_document_has_the_same_table():
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in DOCS.read_text().splitlines()
        if re.match(r"\| `\w", line)
    ]
    told = {row[0].strip("`"): row[1:] for row in cells}
    for row in TABLE:
        title, signs, action, counts, bug = told[row.kind.value]
        assert (title, signs, action) == (row.title, row.signs, row.action.value)
        assert counts == {0: "", 1: "at once", -1: "`restart.failures`"}[row.own_after] + (
            ", alone" if row.alone else ""
        )
        assert bug == {0: "", 2: "twice", 3: "three times"}[row.bug_after]
    assert list(told)[: len(TABLE)] == [row.kind.value for row in TABLE]


some = st.sampled_from(list(Kind))


@given(st.lists(some, min_size=1))
def test_the_order_of_failures_does_not_change_what_decides(kinds):
    decides = most_telling(kinds)
    assert decides in kinds
    assert all(most_telling(one) is decides for one in itertools.islice(_orders(kinds), 24))


def _orders(kinds):
    return (
        itertools.permutations(kinds) if len(kinds) < 6 else [kinds[::-1], sorted(kinds, key=str)]
    )


@given(
    message=st.text(max_size=200),
    trace=st.text(max_size=400),
    code=st.integers(-64, 255).filter(bool),
    signs=st.builds(
        Signs,
        oom_kills=st.integers(0, 2),
        oom_pids=st.frozensets(st.integers(0, 9)),
        xids=st.lists(st.integers(0, 160)).map(tuple),
        ecc_errors=st.integers(0, 2),
    ),
)
def test_whatever_a_worker_leaves_behind_has_a_kind(message, trace, code, signs):
    failure = Failure(rank=0, exit_code=code, message=message, traceback=trace, pid=5)
    kind = kind_of(failure, signs)
    assert kind in ROWS
    assert kind_of(failure, signs) is kind


@pytest.mark.parametrize(
    "message",
    [
        "subprocess.TimeoutExpired: Command '['ffmpeg']' timed out after 30 seconds",
        "ValueError: expected connection refused flag",
    ],
    ids=["a command", "a value"],
)
def test_a_class_that_is_not_the_networks_is_the_scripts_whatever_it_tells(message):
    traceback = f"Traceback (most recent call last):\n  x\n{message}"
    one = Failure(rank=0, exit_code=1, message=message, traceback=traceback)
    assert kind_of(one) is Kind.SCRIPT
    cause = f"ConnectionRefusedError: [Errno 111] Connection refused\n\n{traceback}"
    assert kind_of(msgspec.structs.replace(one, traceback=cause)) is Kind.NETWORK
