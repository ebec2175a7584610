"""The demo's training script: a byte-level GPT on Python's own source, as a user would write it.

What outlast needs are the lines with ``outlast`` and ``session`` in them; the rest is ordinary.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn

import outlast

WIDTH, HEADS, LAYERS = 128, 4, 5
WINDOW = 64  # bytes that a sample predicts, each from those before it
GLOBAL_BATCH = 8
WARM_UP_STEPS = 20


class Windows(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """The text cut into windows; a sample is (its id, ``WINDOW + 1`` bytes as int64)."""

    def __init__(self, path: Path) -> None:
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // WINDOW

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        start = index * WINDOW
        window = self._bytes[start : start + WINDOW + 1].astype(np.int64)
        return index, torch.from_numpy(window)


class TransformerBlock(nn.Module):
    """A transformer block with dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: (batch, time, width) → the same."""
        batch, time_, width = x.shape
        split = self.qkv(self.norm_1(x)).view(batch, time_, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)))), 0.1, self.training)


class Gpt(nn.Module):
    """Predicts the next byte."""

    def __init__(
        self, width: int = WIDTH, heads: int = HEADS, layers: int = LAYERS, window: int = WINDOW
    ) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(window, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Mean loss over (batch, window + 1) bytes."""
        x = self.bytes(text[:, :-1]) + self.places.weight
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def main() -> None:
    """Train: demo_train.py CORPUS STEPS."""
    corpus, steps = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Gpt()
    torch.manual_seed(1 + dist.get_rank())  # dropout differs between ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=WARM_UP_STEPS)
    loader = outlast.data.Loader(Windows(corpus), global_batch=GLOBAL_BATCH, seed=7)
    ddp = nn.parallel.DistributedDataParallel(model)

    with outlast.session(
        model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, every="20 steps"
    ) as session:
        for _, text in session.steps(loader, until=steps):
            loss = ddp(text)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            session.log(loss=loss)


if __name__ == "__main__":
    main()
