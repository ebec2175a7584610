"""What sums depend on besides their order, as far as a process can tell.

Equal facts do not prove equal bits (a kernel may add in the order in which its threads happen to
arrive), but other facts are reason enough to expect other ones.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

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
        "deterministic algorithms": _word(torch.are_deterministic_algorithms_enabled()),
        "precision of matrix products": torch.get_float32_matmul_precision(),
    }
    if device.type == "cpu":
        found["threads"] = str(torch.get_num_threads())
        found["oneDNN"] = _word(torch.backends.mkldnn.enabled)
    if device.type == "cuda":
        found["GPU"] = torch.cuda.get_device_name(device)
        found["CUDA"] = f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        found["cuDNN's benchmark"] = _word(torch.backends.cudnn.benchmark)
        found["TF32 in cuDNN"] = _word(torch.backends.cudnn.allow_tf32)
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


def _word(value: bool) -> str:
    return "on" if value else "off"


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
