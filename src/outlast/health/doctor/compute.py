"""A short multiplication of matrices, and a short all-reduce among a machine's own processes.

Processes of the all-reduce are forked before any of them has computed, as torch demands; on GPUs
each takes one, over NCCL, and without two of them gloo's loopback is tried, which every job needs.
The quickest of several is taken: what else runs on the machine makes one slow, never quick.
"""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import msgspec

WORKERS_MAX: Final = 8
REDUCED_BYTES: Final = {True: 256 << 20, False: 16 << 20}  # on GPUs, on processors
SIDE: Final = {True: 8192, False: 1024}
TRY_S: Final = 0.7
TRIES_LEAST: Final = 3
GROUP_S: Final = 25.0
_INTERFACE: Final = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


class Computed(msgspec.Struct, kw_only=True):
    """What came of it; None where it did not come to its end.

    Attributes:
        device: what was computed on.
        has_gpu: whether that is a GPU.
        matmul_gflops: of the slowest device.
        all_reduce_bytes: bytes a second that each process has seen reduced.
        workers: processes that took part in that.
        loaded: package → version that it says itself.
        lacking: what torch does not have of what survivors of a loss go on with; "" for nothing.
        error: why something is missing.
    """

    device: str = ""
    has_gpu: bool = False
    matmul_gflops: float | None = None
    all_reduce_bytes: float | None = None
    workers: int = 0
    loaded: dict[str, str] = {}
    lacking: str = ""
    error: str = ""


def probe(workers: int) -> Computed:
    """Measure with as many processes as the job runs here, at least two."""
    import torch

    from outlast.attempt.groups import lacking

    gpus = torch.cuda.device_count()  # does not touch them
    computed = Computed(loaded=_versions(torch), lacking=lacking())
    computed.workers = min(max(workers, 2), WORKERS_MAX, *([gpus] if gpus > 1 else []))
    try:
        computed.all_reduce_bytes = _all_reduce(computed.workers, on_gpus=gpus > 1)
    except (OSError, RuntimeError) as error:
        computed.error = str(error).split("\n")[0]
    try:
        rates = [_matmul(torch, f"cuda:{index}") for index in range(gpus)] or [
            _matmul(torch, "cpu")
        ]
        computed.matmul_gflops = min(rates)
    except RuntimeError as error:
        computed.error = str(error).split("\n")[0]
    computed.has_gpu = gpus > 0
    computed.device = torch.cuda.get_device_name(0) if gpus else _processor(torch)
    return computed


def _versions(torch: Any) -> dict[str, str]:
    import numpy as np

    found = {"torch": str(torch.__version__).partition("+")[0], "numpy": np.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        with contextlib.suppress(Exception):
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _processor(torch: Any) -> str:
    model = platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return f"{torch.get_num_threads()} threads of {model}"


def _matmul(torch: Any, device: str) -> float:
    is_gpu = device != "cpu"
    side = SIDE[is_gpu]
    kind = torch.bfloat16 if is_gpu else torch.float32
    one = torch.randn(side, side, device=device).to(kind)
    other = torch.randn(side, side, device=device).to(kind)

    def once() -> None:
        torch.matmul(one, other)
        if is_gpu:
            torch.cuda.synchronize(device)

    return float(2 * side**3 / _quickest_s(once) / 1e9)


def _quickest_s(act: Callable[[], None]) -> float:
    act()  # what is only slow the first time
    took_s: list[float] = []
    while len(took_s) < TRIES_LEAST or sum(took_s) < TRY_S:
        begun_s = time.perf_counter()
        act()
        took_s.append(time.perf_counter() - begun_s)
    return min(took_s)


def _all_reduce(workers: int, *, on_gpus: bool) -> float:
    """Bytes a second; RuntimeError if a process did not come to its end."""
    with tempfile.TemporaryDirectory(prefix="outlast-doctor-") as folder:
        pids = []
        for rank in range(workers):
            pid = os.fork()
            if not pid:
                code = 1
                try:
                    _take_part(folder, rank, workers, on_gpus=on_gpus)
                    code = 0
                finally:
                    os._exit(code)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if any(codes):
            said = [path.read_text() for path in Path(folder).glob("error-*")]
            raise RuntimeError(next(iter(said), f"a process ended with {max(codes, key=abs)}"))
        return float((Path(folder) / "rate").read_text())


def _take_part(folder: str, rank: int, workers: int, *, on_gpus: bool) -> None:
    import torch
    from torch import distributed

    os.environ.update({name: os.environ.get(name, way) for name, way in _INTERFACE.items()})
    torch.set_num_threads(1)
    try:
        if on_gpus:
            torch.cuda.set_device(rank)
        distributed.init_process_group(
            "nccl" if on_gpus else "gloo",
            store=distributed.FileStore(f"{folder}/store", workers),
            rank=rank,
            world_size=workers,
            timeout=timedelta(seconds=GROUP_S),
        )
        device = f"cuda:{rank}" if on_gpus else "cpu"
        tensor = torch.ones(REDUCED_BYTES[on_gpus] // 4, device=device)

        def once() -> None:
            distributed.all_reduce(tensor)
            if on_gpus:
                torch.cuda.synchronize(device)

        took_s = _quickest_of(once, 6)
        if rank == 0:
            (Path(folder) / "rate").write_text(repr(tensor.nbytes / took_s))
    except Exception as error:
        (Path(folder) / f"error-{rank}").write_text(str(error).split("\n")[0])
        raise


def _quickest_of(act: Callable[[], None], times: int) -> float:
    """All processes must do it as often: by number, not by time."""
    took_s = []
    for _ in range(times + 1):
        begun_s = time.perf_counter()
        act()
        took_s.append(time.perf_counter() - begun_s)
    return min(took_s[1:])
