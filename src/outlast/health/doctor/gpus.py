"""What NVML says about the GPUs, and the newest Xid lines of the kernel where they may be read.

Each question is asked by itself: a GPU (or a driver) that does not know one answers the others.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from outlast.policy.fitness import GpuFacts, GpusFacts

LINES_MAX: Final = 20_000
_XID: Final = re.compile(rb"NVRM: Xid \(([^)]*)\): (\d+)")
_DRIVER: Final = Path("/proc/driver/nvidia")
# Reasons for which clocks are down that are a matter of health or of the power supply; the others
# (idle, an owner's own limit) are as somebody wants them.
_THROTTLES: Final = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


def probe() -> GpusFacts:
    """All GPUs of this machine; an empty answer where there are none."""
    try:
        import pynvml  # type: ignore[import-not-found]
    except ImportError:
        error = "NVML is not installed, so the health of the GPUs is not known"
        return GpusFacts(error=error if _DRIVER.exists() else "", xids=_xids())
    return look(pynvml)


def look(nvml: Any) -> GpusFacts:
    """The same with ``nvml`` at hand (pynvml, or what stands for it in a test)."""
    try:
        nvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 - no library, no driver, no right: all in its words
        wrong = f"the driver does not answer: {error}"
        return GpusFacts(error=wrong if _DRIVER.exists() else "", xids=_xids())
    facts = GpusFacts(driver=str(_asked(nvml.nvmlSystemGetDriverVersion) or ""), xids=_xids())
    for index in range(_asked(nvml.nvmlDeviceGetCount) or 0):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except Exception as error:  # noqa: BLE001 - "fell off the bus" comes here
            facts.error = f"GPU {index} does not answer: {error}"
            continue
        facts.gpus.append(_gpu(nvml, handle, index))
    return facts


def _gpu(nvml: Any, handle: Any, index: int) -> GpuFacts:
    name = _asked(lambda: nvml.nvmlDeviceGetName(handle)) or "GPU"
    gpu = GpuFacts(index=index, model=name.decode() if isinstance(name, bytes) else str(name))
    gpu.uncorrected = _asked(
        lambda: int(
            nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
        )
    )
    remapped = _asked(lambda: tuple(nvml.nvmlDeviceGetRemappedRows(handle)))
    if remapped is not None:  # corrected, uncorrected, pending, failed
        gpu.retired_pending, gpu.remap_failed = bool(remapped[2]), bool(remapped[3])
    else:
        gpu.retired_pending = _asked(
            lambda: bool(nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))
        )
    reasons = _asked(lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))) or 0
    gpu.throttled = [words for bit, words in _THROTTLES.items() if reasons & bit]
    gpu.temperature_c = _asked(
        lambda: int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    )
    gpu.used_bytes = _asked(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used)) or 0
    states = [
        _asked(lambda link=link: int(nvml.nvmlDeviceGetNvLinkState(handle, link)))  # type: ignore[misc]
        for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18))
    ]
    gpu.links_up = states.count(1)
    return gpu


def _asked(question: Callable[[], Any]) -> Any:
    """The answer, or None where this GPU has none."""
    try:
        return question()
    except Exception:  # noqa: BLE001 - NVML's errors, and names that an older binding lacks
        return None


def _xids() -> list[str]:
    """The kernel's newest Xid lines; none where they may not be read."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            for _ in range(LINES_MAX):
                try:
                    line = os.read(fd, 8192)
                except BrokenPipeError:  # overwritten while we read
                    continue
                match = _XID.search(line)
                if match:
                    found.append(f"Xid {match[2].decode()} on {match[1].decode(errors='replace')}")
        except BlockingIOError:
            pass
        finally:
            os.close(fd)
    return found
