"""A training loop with a state of any size: a transformer in fp32 with AdamW, on random tokens.

The model has 149 parameters at every size (12 blocks of 12, two embeddings, a norm and a head), so
that the number of tensors stays that of the real thing; ``width`` alone decides the size. Width 896
gives 2.13 GB of weights and AdamW moments. Forward and backward are real and every parameter gets a
gradient; the optimizer is torch's own AdamW (fused), which changes every tensor in each step.
"""

from __future__ import annotations

import contextlib
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

VOCABULARY: Final = 50_304
POSITIONS: Final = 2_048
CLASSES: Final = 16_384
NUM_BLOCKS: Final = 12


class Block(nn.Module):  # type: ignore[misc]
    """Attention and a feed-forward net, twelve parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block over a sequence of shape (tokens, width)."""
        query, key, value = self.qkv(self.ln1(x)).chunk(3, -1)
        attended = functional.scaled_dot_product_attention(query[None], key[None], value[None])[0]
        x = x + self.proj(attended)
        return x + self.fc2(functional.gelu(self.fc(self.ln2(x))))


class Model(nn.Module):  # type: ignore[misc]
    """149 parameters of fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(POSITIONS, width)
        self.h = nn.ModuleList([Block(width) for _ in range(NUM_BLOCKS)])
        self.lnf = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits for each of the tokens."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.numel(), device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.head(self.lnf(x))


def num_bytes(width: int) -> int:
    """Bytes of the weights and the two moments of AdamW at this width, as fp32."""
    block = 12 * width * width + 13 * width
    total = (VOCABULARY + POSITIONS + CLASSES) * width + NUM_BLOCKS * block + 2 * width
    return total * 4 * 3


def width_for(megabytes: float) -> int:
    """The width, a multiple of 64, whose state comes nearest to ``megabytes`` (of 10^6)."""
    return min(range(64, 8192, 64), key=lambda width: abs(num_bytes(width) - megabytes * 1e6))


@dataclass
class Step:
    """Where the seconds of one step went, by the host's monotonic clock.

    Attributes:
        start: at the step boundary.
        boundary: at the boundary, before the forward pass begins: what a save call takes.
        hook: from the call of the optimizer until it may begin to change the state.
        end: after the optimizer, and on a GPU after the device has finished.
    """

    start: float
    boundary: float
    hook: float
    end: float

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.end - self.start

    @property
    def work(self) -> float:
        """Seconds without what the boundary took."""
        return self.end - self.start - self.boundary


class Loop:
    """Steps of training, with clocks around the boundary and before the optimizer's work.

    Args:
        model: what ``Model`` is, or a wrapped one.
        optimizer: its AdamW.
        tokens: tokens in each step; they decide how long a step takes.
        seed: of the random tokens.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, tokens: int, seed: int = 0
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._tokens = tokens
        self._device = next(model.parameters()).device
        self._random = torch.Generator().manual_seed(seed)
        self._optimizer_begins = 0.0

    def forward_backward(self) -> None:
        """Gradients of a fresh batch."""
        tokens = torch.randint(0, VOCABULARY, (self._tokens,), generator=self._random)
        tokens = tokens.to(self._device)
        loss = functional.cross_entropy(self.model(tokens), tokens % CLASSES)
        loss.backward()

    def finish(self, start: float, guard: AbstractContextManager[Any] | None = None) -> Step:
        """The rest of a step whose boundary began at ``start`` and has just ended.

        Args:
            start: when the boundary began.
            guard: held while the optimizer changes the state; some libraries ask for one.
        """
        boundary = time.perf_counter() - start
        self.forward_backward()
        synchronize(self._device)
        # The last of the optimizer's hooks, whenever others were registered: it stops the clock.
        handle = self.optimizer.register_step_pre_hook(self._hooks_are_done)
        called = time.perf_counter()
        with guard or contextlib.nullcontext():
            self.optimizer.step()
        handle.remove()
        self.optimizer.zero_grad()
        synchronize(self._device)
        end = time.perf_counter()
        return Step(start, boundary, self._optimizer_begins - called, end)

    def _hooks_are_done(self, *_: object) -> None:
        self._optimizer_begins = time.perf_counter()


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what it was given; the host has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def build(width: int, device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, the same values in every process."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Model(width)
    return model, adamw(model)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW as all benchmarks use it."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors that a save keeps, those of this rank for sharded ones."""
    held = [*model.state_dict().values()]
    for state in optimizer.state.values():
        held += [value for value in state.values() if isinstance(value, torch.Tensor)]
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in held]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)
