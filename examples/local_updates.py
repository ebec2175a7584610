"""Train a small classifier on workers that exchange what they learned every 30 steps (DiLoCo).

outlast run --dir jobs/local_updates --nproc-per-node 2 examples/local_updates.py

While it trains, kill a worker from another terminal (pgrep -f launch.worker finds it), or press
Ctrl-C and type the command again. It ends with the same local_updates.safetensors, to the
last bit: a resume goes on within a round. Without Outlast the script is one with DDP.
"""

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outlast

EPOCHS = 150


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
    torch.manual_seed(0)
    data = spirals(3000)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=50, sampler=sampler)
    layers = [nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    local = outlast.LocalUpdates(model, optimizer, every=30, overlap=2, fragments=2, outer_lr=0.4)
    with outlast.session(model=model, optimizer=optimizer, local=local) as session:
        for epoch in session.epochs(EPOCHS):
            sampler.set_epoch(epoch)
            for batch in session.steps(loader):
                train_step(batch, model, optimizer)
            right = accuracy(model, data)
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: {right:.1%} right", flush=True)
        local.sync()
    if dist.get_rank() == 0:
        save_file(model.state_dict(), "local_updates.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
