"""Ways in which one machine fails and others do not, in the words of those who say so.

The texts are those of torch, CUDA, NCCL and the kernel, from their sources and public trackers.
"""

# What torch, CUDA, NCCL and the kernel say of one machine: message, exit code. A "%" is a number
# that is another one each time: of a process, a rank, an address, gigabytes.
SICK = {
    "no driver": ("RuntimeError: Found no NVIDIA driver on your system.", 1),
    "no GPU": ("torch.AcceleratorError: CUDA error: no CUDA-capable device is detected", 1),
    "none available": ("RuntimeError: No CUDA GPUs are available", 1),
    "fewer GPUs": ("torch.AcceleratorError: CUDA error: invalid device ordinal", 1),
    "driver": ("RuntimeError: CUDA unknown error - this may be due to an incorrectly set up", 1),
    "ECC": ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", 1),
    "cuBLAS": ("RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `x`", 1),
    "taken": (
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a "
            "total capacity of 79.15 GiB of which 15.25 MiB is free. Process % has 78.% GiB memory "
            "in use. Of the allocated memory 14.06 MiB is allocated by PyTorch"
        ),
        1,
    ),
    "memory": ("OSError: [Errno 12] Cannot allocate memory", 1),
    "mount": ("OSError: [Errno 107] Transport endpoint is not connected: '/data/shard-%'", 1),
    "driver's crash": ("ended by SIGSEGV", -11),
    "bus": ("ended by SIGBUS", -7),
    "NCCL": (
        (
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3763, "
            "unhandled system error, NCCL version 2.28.8\nncclSystemError: System call (e.g. "
            "socket, malloc) or external library call failed or device error.\nLast error:\nCall "
            "to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_%:1"
        ),
        1,
    ),
    "a library": ("ImportError: libcudnn.so.9: cannot open shared object file", 1),
    "exit": ("", 3),
}


def words(name, rng):
    """(message, exit code), with other numbers at each call."""
    message, code = SICK[name]
    return "".join(str(rng.randrange(10**4)) if one == "%" else one for one in message), code
