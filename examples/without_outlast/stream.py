"""Train a small language model of bytes from a stream of files.

python examples/without_outlast/stream.py
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

STEPS, CONTEXT = 5000, 32
FILES = sorted(Path(json.__file__).parent.glob("*.py"))  # any text will do


def read(shard):
    """The rows (CONTEXT + 1,) of one file."""
    yield from torch.tensor(list(FILES[shard].read_bytes())).unfold(0, CONTEXT + 1, CONTEXT)


class Files(IterableDataset):
    def __iter__(self):
        while True:
            for shard in torch.randperm(len(FILES)).tolist():
                yield from read(shard)


def train_step(rows, model, optimizer):
    loss = nn.functional.cross_entropy(model(rows[:, :-1]), rows[:, -1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def main():
    torch.manual_seed(0)
    stream = DataLoader(Files(), batch_size=16)
    layers = [nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 128), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(128, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, rows in zip(range(STEPS), stream, strict=False):
        loss = train_step(rows, model, optimizer)
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    save_file(model.state_dict(), "stream.safetensors")


if __name__ == "__main__":
    main()
