"""Stock DDP, undisturbed and gone on with by a new process's DDP: are they the same? On gloo.

Prints for each setting whether losses and weights are equal after a resume in the middle, and what
a session would say about it. Nothing of outlast takes part in the training.
"""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn

from outlast.reduce.same_bits import Bits
from same_bits import Texts, Transformer

STEPS, MIDDLE = 10, 5


def batch(step):
    data, rank, world = Texts(), dist.get_rank(), dist.get_world_size()
    ids = [(step * world + rank) * 2, (step * world + rank) * 2 + 1]
    return torch.stack([data[index % len(data)][1] for index in ids])


def train(model, state, start, stop, **options):
    """Losses of the steps, the state after ``MIDDLE`` of them, and after all."""
    if state is not None:
        model.load_state_dict(state[0])
    ddp = nn.parallel.DistributedDataParallel(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if state is not None:
        optimizer.load_state_dict(state[1])
    losses, middle = [], None
    for step in range(start, stop):
        loss = ddp(batch(step), None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
        if step + 1 == MIDDLE:
            middle = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    return losses, middle, list(model.state_dict().values()), ddp


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    unused = {"find_unused_parameters": True}
    for options in ({}, unused, {**unused, "static_graph": True}):
        torch.manual_seed(0)
        calm, middle, end, ddp = train(Transformer(width=128).eval(), None, 0, STEPS, **options)
        again, _, end_again, _ = train(
            Transformer(width=128).eval(), middle, MIDDLE, STEPS, **options
        )
        same = again == calm[MIDDLE:] and all(map(torch.equal, end, end_again))
        print(f"{options or 'as it comes'}: {'same' if same else 'other'} bits", flush=True)
        Bits(models=[ddp.module]).tell_at_start(dist.get_rank(), dist.get_world_size())
    dist.barrier()
    os._exit(0)  # past the destructor of DDP, which may wait for a thread that waits for it


if __name__ == "__main__":
    main()
