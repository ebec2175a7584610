"""Train a small language model of bytes from a stream of files.

outlast run --dir jobs/stream examples/stream.py

While it trains, kill a worker from another terminal (pgrep -f launch.worker finds it), or press
Ctrl-C and type the command again. It ends with the same stream.safetensors, to the last bit, as
without the kill. The script without Outlast ends with another one: it shuffles in another way.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import outlast

STEPS, CONTEXT = 5000, 32
FILES = sorted(Path(json.__file__).parent.glob("*.py"))  # any text will do


def read(shard):
    """The rows (CONTEXT + 1,) of one file."""
    yield from torch.tensor(list(FILES[shard].read_bytes())).unfold(0, CONTEXT + 1, CONTEXT)


def train_step(rows, model, optimizer):
    loss = nn.functional.cross_entropy(model(rows[:, :-1]), rows[:, -1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def main():
    torch.manual_seed(0)
    stream = outlast.data.Stream(read, num_shards=len(FILES), global_batch=16, lanes=2, buffer=100)
    layers = [nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 128), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(128, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with outlast.session(model=model, optimizer=optimizer) as session:
        for rows in session.steps(stream, until=STEPS):
            loss = train_step(rows, model, optimizer)
            if session.step % 100 == 0:
                print(f"step {session.step}: loss {loss.item():.4f}", flush=True)
    save_file(model.state_dict(), "stream.safetensors")


if __name__ == "__main__":
    main()
