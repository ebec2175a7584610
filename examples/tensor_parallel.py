"""Train a small classifier whose layers are divided among workers, with tensor parallelism.

outlast run --dir jobs/tensor_parallel --nproc-per-node 2 examples/tensor_parallel.py

While it trains, kill a worker from another terminal (pgrep -f launch.worker finds it), or press
Ctrl-C and type the command again. It ends with the same tensor_parallel.safetensors, to the last
bit, as the script without Outlast.
"""

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

import outlast

EPOCHS = 50


def spirals(num):
    """Points of three spiral arms (num, 2), and the arm of each (num,)."""
    arm, radius = torch.arange(num) % 3, torch.rand(num)
    angle = 5 * radius + 2.1 * arm + 0.1 * torch.randn(num)
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], 1) * radius[:, None], arm)


def train_step(batch, model, optimizer):
    x, arm = batch
    loss = nn.functional.cross_entropy(model(x), arm)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@torch.no_grad()
def accuracy(model, data):
    """The share of the points that the model gets right."""
    x, arm = data.tensors
    return (model(x).argmax(1) == arm).float().mean().item()


def main():
    dist.init_process_group("gloo")  # "nccl" on GPUs
    torch.manual_seed(0)  # all workers see the same batches
    data = spirals(3000)
    loader = DataLoader(data, batch_size=100, shuffle=True)
    layers = {"up": nn.Linear(2, 256), "relu": nn.ReLU(), "down": nn.Linear(256, 3)}
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with outlast.session(model=model, optimizer=optimizer) as session:
        for epoch in session.epochs(EPOCHS):
            for batch in session.steps(loader):
                train_step(batch, model, optimizer)
            right = accuracy(model, data)
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: {right:.1%} right", flush=True)
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if dist.get_rank() == 0:
        save_file(whole, "tensor_parallel.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
