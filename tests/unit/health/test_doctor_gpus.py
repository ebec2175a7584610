"""NVML's answers, read: a GPU that does not know a question answers the others."""

import types

import pytest

from outlast.health.doctor.probes import look


class NvmlError(Exception):
    pass


def no_answer(*_):
    raise NvmlError("Not Supported")


def nvml(gpus=2, **answers):
    """What stands for pynvml; a question without an answer raises, as the real one's do."""
    module = types.SimpleNamespace(
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        NVML_TEMPERATURE_GPU=0,
        NVML_NVLINK_MAX_LINKS=4,
        nvmlInit=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "570.86",
        nvmlDeviceGetCount=lambda: gpus,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda _: b"NVIDIA H100",
        nvmlDeviceGetTotalEccErrors=lambda *_: 0,
        nvmlDeviceGetRemappedRows=lambda _: (3, 0, 0, 0),
        nvmlDeviceGetRetiredPagesPendingStatus=no_answer,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: 0x1,  # idle
        nvmlDeviceGetTemperature=lambda *_: 41,
        nvmlDeviceGetMemoryInfo=lambda _: types.SimpleNamespace(used=10**9),
        nvmlDeviceGetNvLinkState=lambda _, link: 1,
    )
    for name, answer in answers.items():
        setattr(module, f"nvml{name}", answer)
    return module


def test_a_healthy_gpu_is_read_in_full():
    facts = look(nvml())
    assert [gpu.index for gpu in facts.gpus] == [0, 1]
    gpu = facts.gpus[0]
    assert (gpu.model, facts.driver) == ("NVIDIA H100", "570.86")
    assert (gpu.uncorrected, gpu.retired_pending, gpu.remap_failed) == (0, False, False)
    assert (gpu.links_up, gpu.throttled, gpu.temperature_c) == (4, [], 41)


@pytest.mark.parametrize(
    ("answers", "seen"),
    [
        ({"DeviceGetTotalEccErrors": lambda *_: 7}, {"uncorrected": 7}),
        ({"DeviceGetRemappedRows": lambda _: (0, 1, 1, 1)}, {"remap_failed": True}),
        ({"DeviceGetRemappedRows": no_answer}, {"retired_pending": None, "remap_failed": None}),
        (
            {"DeviceGetCurrentClocksThrottleReasons": lambda _: 0xC0},
            {"throttled": ["hardware thermal slowdown", "power brake"]},
        ),
        ({"DeviceGetNvLinkState": lambda _, link: link != 2}, {"links_up": 3}),
        ({"DeviceGetNvLinkState": lambda *_: 0}, {"links_up": 0}),
        ({"DeviceGetNvLinkState": no_answer}, {"links_up": 0}),
    ],
    ids=["ecc", "remap", "no-rows", "throttled", "link", "alone", "no-links"],
)
def test_what_is_wrong_is_seen_and_what_is_not_known_is_left_out(answers, seen):
    gpu = look(nvml(**answers)).gpus[0]
    assert {name: getattr(gpu, name) for name in seen} == seen


def test_a_gpu_that_fell_off_the_bus_is_missed():
    def handle(index):
        if index == 1:
            raise NvmlError("GPU is lost")
        return index

    facts = look(nvml(DeviceGetHandleByIndex=handle))
    assert len(facts.gpus) == 1
    assert facts.error == "GPU 1 does not answer: GPU is lost"


def test_a_machine_without_a_driver_has_no_gpus():
    assert look(nvml(Init=no_answer)).gpus == []
