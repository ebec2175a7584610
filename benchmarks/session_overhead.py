"""What a session costs per step beyond checkpoints: the same loop with and without it.

Both loops run in one process, in alternating blocks of steps of a real model (forward, backward,
AdamW) padded to ``--step-ms``, so that the machine's moods hit both alike. Reported: the median of
each kind of block, the ratio of medians, and the spread of the ratios of neighbouring blocks. No
checkpoint is taken in between (the cadence is longer than the run). Besides, the session's own time
per step, with nothing in the step: what the ratio is made of.

    python benchmarks/session_overhead.py [--step-ms 50] [--blocks 40] [--steps 20]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

import torch

import outlast


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(32, 64), torch.randn(32, 1)

    def step() -> None:
        start = time.perf_counter()
        loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # Computing rather than sleeping: a sleeping loop would hide what a thread of ours costs.
        while time.perf_counter() - start < options.step_ms / 1000:
            pass

    with tempfile.TemporaryDirectory() as directory:
        named = {"model": model, "optimizer": optimizer}
        with outlast.session(dir=directory, every="10 h", **named) as session:
            with_session = iter(session.steps(Endless(batch), until=10**9))
            alone_us = cost_us(with_session, session)
            result = compare(step, with_session, session, options.blocks, options.steps)
            with_session.close()  # type: ignore[attr-defined]
    result["step_ms"] = options.step_ms
    result["session_alone_us_per_step"] = alone_us
    print(json.dumps(result, indent=1))


class Endless:
    """A loader that costs nothing."""

    def __init__(self, batch: object) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[object]:
        while True:
            yield self._batch


def cost_us(with_session: Iterator[object], session: outlast.Session, steps: int = 5000) -> float:
    """Microseconds that the session itself takes per step, without a step: best of five runs."""
    runs = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(steps):
            next(with_session)
            session.log(loss=1.0)
        runs.append((time.perf_counter() - start) / steps * 1e6)
    return min(runs)


def compare(
    step: Callable[[], None],
    with_session: Iterator[object],
    session: outlast.Session,
    blocks: int,
    steps: int,
) -> dict[str, float]:
    """Alternate blocks without and with the session; the order within a pair alternates too."""

    def bare() -> float:
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - start) / steps

    def held() -> float:
        start = time.perf_counter()
        for _ in range(steps):
            next(with_session)
            step()
            session.log(loss=1.0)
        return (time.perf_counter() - start) / steps

    bare(), held()
    without: list[float] = []
    within: list[float] = []
    for block in range(blocks):
        for kind in (bare, held) if block % 2 else (held, bare):
            (without if kind is bare else within).append(kind())
    ratios = [b / a for a, b in zip(without, within, strict=True)]
    quarters = statistics.quantiles(ratios, n=4)
    return {
        "without_session_ms": statistics.median(without) * 1000,
        "with_session_ms": statistics.median(within) * 1000,
        "overhead_percent": (statistics.median(within) / statistics.median(without) - 1) * 100,
        "ratio_median": statistics.median(ratios),
        "ratio_quartile_low": quarters[0],
        "ratio_quartile_high": quarters[2],
        "blocks": blocks,
        "steps_per_block": steps,
    }


if __name__ == "__main__":
    main()
