"""Where the ranks of a script compute, and how they meet.

On the CPU with gloo; with ``TEST_DEVICE=cuda:0`` on a GPU with NCCL. Ranks that share a GPU are a
mistake to NCCL unless each is on a machine of its own: they say so, and speak over sockets. What
is summed has the same bits in every run.
"""

import os

import torch
import torch.distributed as dist

DEVICE = torch.device(os.environ.get("TEST_DEVICE", "cpu"))
ON_A_GPU = DEVICE.type == "cuda"
_OF_NCCL = {
    "NCCL_HOSTID": str(os.getpid()),
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


def prepare():
    """What has to be so before there is a group."""
    torch.set_num_threads(1)
    if ON_A_GPU:
        os.environ.update(_OF_NCCL)
        torch.cuda.set_device(DEVICE)
        torch.use_deterministic_algorithms(True)


def meet():
    """Come into the default group; the rank, and the number of workers."""
    prepare()
    dist.init_process_group("nccl" if ON_A_GPU else "gloo")
    return dist.get_rank(), dist.get_world_size()


def random_states():
    """What torch's generators would draw next."""
    found = [torch.get_rng_state()]
    return [*found, torch.cuda.get_rng_state()] if ON_A_GPU else found
