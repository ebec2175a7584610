"""The script of ``recovery_local.py``: a tiny GPT under DDP on gloo, like any that torchrun runs.

Its own checkpoints are torch.save every five steps; with ``BENCH_SESSION`` it uses a session
instead. Each completed step is a line in ``BENCH_EVENTS``.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

VOCABULARY, WIDTH, HEADS, LENGTH = 256, 64, 4, 64
PAUSE_S = 0.03  # what a larger model would compute for


class Block(nn.Module):  # type: ignore[misc]
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and a layer that mixes each place."""
        batch, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).view(batch, length, 3, HEADS, width // HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        deeper: torch.Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return deeper


class Gpt(nn.Module):  # type: ignore[misc]
    """A model of 150,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = self.blocks(self.tokens(ids) + self.places(torch.arange(ids.shape[1])))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def main() -> None:
    events = os.open(os.environ["BENCH_EVENTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def tell(step: int) -> None:
        line = {"t": time.time(), "rank": rank, "pid": os.getpid(), "step": step}
        os.write(events, (json.dumps(line) + "\n").encode())

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    run = with_session if os.environ.get("BENCH_SESSION") else with_torch_save
    run(model, optimizer, rank, tell)


def step_once(ddp: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(1000003 * step + rank)
    ids = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=generator)
    time.sleep(PAUSE_S)
    loss = ddp(ids[:, :-1], ids[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def with_torch_save(model: Gpt, optimizer: torch.optim.Optimizer, rank: int, tell) -> None:  # type: ignore[no-untyped-def]
    path, step = Path(os.environ["BENCH_CHECKPOINT"]), 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    ddp = nn.parallel.DistributedDataParallel(model)
    while True:
        step_once(ddp, optimizer, step, rank)
        step += 1
        if rank == 0 and step % 5 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"step": step}, f"{path}.new")
            Path(f"{path}.new").replace(path)
        tell(step)


def with_session(model: Gpt, optimizer: torch.optim.Optimizer, rank: int, tell) -> None:  # type: ignore[no-untyped-def]
    import outlast

    with outlast.session(model=model, optimizer=optimizer, every=5) as session:
        ddp = nn.parallel.DistributedDataParallel(model)
        for _ in session.steps(range(10**9)):
            step_once(ddp, optimizer, session.step, rank)
            tell(session.step + 1)


if __name__ == "__main__":
    main()
