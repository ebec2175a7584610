"""Fails in one certain way, so many times, then finishes: PLACE CASE [--times N] [--at PATH]."""

import argparse
import ctypes
import mmap
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path

NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2501, {}, NCCL "
    "version 2.27.3"
)
HINT = "\nCUDA kernel errors might be asynchronously reported at some other API call."
LIMIT_S = 60.0


def fill_memory(_):
    """Until the kernel ends it."""
    Path("/proc/self/oom_score_adj").write_text("1000")
    held = []
    while True:
        held.append(bytearray(b"x") * (16 << 20))


def memory_error(_):
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 32, most))
    bytearray(1 << 33)


def torchs_allocator(_):
    import torch

    torch.empty(1 << 50, dtype=torch.uint8)


def signalled(number):
    def send(_):
        os.kill(os.getpid(), number)
        time.sleep(LIMIT_S)

    return send


def null_pointer(_):
    ctypes.string_at(0)


def lost_page(at):
    """A mapped file that somebody cuts short."""
    at.write_bytes(bytes(2 * mmap.PAGESIZE))
    with at.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
        file.truncate(mmap.PAGESIZE)
        print(mapped[mmap.PAGESIZE])


def no_instruction(_):
    """The two bytes that every x86 processor refuses; elsewhere the signal itself."""
    if os.uname().machine != "x86_64":
        signalled(signal.SIGILL)(_)
    memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(b"\x0f\x0b")
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.CFUNCTYPE(None)(address)()


def write(at):
    (at / "file").write_bytes(bytes(1 << 20))


def unreadable(_):
    """The kernel's own EIO: what is at address 0 of a process is nothing."""
    with open("/proc/self/mem", "rb", buffering=0) as file:
        file.read(1)


def refused(_):
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    socket.create_connection(("127.0.0.1", port))


def _group(timeout_s):
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    dist.all_reduce(torch.ones(1))
    return torch, dist


def gloo_time_out(_):
    """Rank 0 waits for a sum that rank 1 does not come to."""
    torch, dist = _group(2)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    time.sleep(LIMIT_S)


def killed_peer(_):
    """Rank 1 is killed, and rank 0 hears of it through a broken connection."""
    torch, dist = _group(60)
    if dist.get_rank() == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def loader_killed(_):
    """A data loader's process is killed from outside."""
    import torch

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            if index == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return index

    list(torch.utils.data.DataLoader(Data(), num_workers=1))


def raises(make, text):
    def fail(_):
        raise make(text)

    return fail


def _of_torch(name):
    def make(text):
        import torch
        import torch.distributed

        kind = torch.distributed if name == "DistBackendError" else torch
        return getattr(kind, name)(text)

    return make


CASES = {
    "oom-killer": fill_memory,
    "memory-error": memory_error,
    "torch-memory": torchs_allocator,
    "kill": signalled(signal.SIGKILL),
    "term": signalled(signal.SIGTERM),
    "segv": null_pointer,
    "bus": lost_page,
    "ill": no_instruction,
    "abort": lambda _: os.abort(),
    "exit": lambda _: sys.exit(3),
    "assert": raises(AssertionError, "rows differ"),
    "write": write,
    "eio": unreadable,
    "refused": refused,
    "gloo": gloo_time_out,
    "peer": killed_peer,
    "loader-killed": loader_killed,
    "gpu-memory": raises(_of_torch("OutOfMemoryError"), "CUDA out of memory. Tried to allocate …"),
    "cuda": raises(
        _of_torch("AcceleratorError"), "CUDA error: an illegal memory access was encountered" + HINT
    ),
    "device-assert": raises(RuntimeError, "CUDA error: device-side assert triggered" + HINT),
    "ecc": raises(RuntimeError, "CUDA error: uncorrectable ECC error encountered" + HINT),
    "lost-gpu": raises(RuntimeError, "NVML: GPU is lost"),
    "nccl": raises(_of_torch("DistBackendError"), NCCL.format("unhandled system error")),
    "watchdog": raises(
        _of_torch("DistBackendError"),
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, "
        "OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.",
    ),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("place", type=Path)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--at", type=Path)
    options = parser.parse_args()
    note = options.place / f"worker-{os.environ['RANK']}"
    times = len(note.read_text().splitlines()) if note.exists() else 0
    with note.open("a") as file:
        file.write(f"{os.getpid()}\n")
    if times < options.times:
        CASES[options.case](options.at)


if __name__ == "__main__":
    main()
