"""Train a small classifier in a loop of your own, with Accelerate and accumulated gradients.

outlast run --dir jobs/accelerate_loop examples/accelerate_loop.py

While it trains, kill a worker from another terminal (pgrep -f launch.worker finds it), or press
Ctrl-C and type the command again. It ends with the same accelerate.safetensors, to the last
bit, as the script without Outlast.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from outlast.integrations.accelerate import session_of

EPOCHS = 100


def spirals(num):
    """Points of three spiral arms (num, 2), and the arm of each (num,)."""
    arm, radius = torch.arange(num) % 3, torch.rand(num)
    angle = 5 * radius + 2.1 * arm + 0.1 * torch.randn(num)
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], 1) * radius[:, None], arm)


def train_step(batch, accelerator, model, optimizer):
    x, arm = batch
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(x), arm)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def accuracy(model, data):
    """The share of the points that the model gets right."""
    x, arm = data.tensors
    return (model(x).argmax(1) == arm).float().mean().item()


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    data = spirals(3000)
    loader = DataLoader(data, batch_size=50, shuffle=True)
    layers = [nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with session_of(accelerator) as session:
        for epoch in session.epochs(EPOCHS):
            for batch in session.steps(loader):
                train_step(batch, accelerator, model, optimizer)
            accelerator.print(f"epoch {epoch}: {accuracy(model, data):.1%} right", flush=True)
    if accelerator.is_main_process:
        save_file(accelerator.unwrap_model(model).state_dict(), "accelerate.safetensors")


if __name__ == "__main__":
    main()
