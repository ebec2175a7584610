"""What the same bits at any number of workers cost: the ordered sum, and the whole step.

For 2, 3 and 4 workers on gloo, side by side in the same processes, taking turns:

- **sum**: a gradient's worth of numbers through ``SameBits``'s exchange, beside ``dist.all_reduce``
  of one tensor of that size;
- **step**: a GPT with AdamW on the same micro-batches, through ``SameBits``, beside
  DistributedDataParallel that accumulates them under ``no_sync`` and sums behind the last one.

What the numbers are made of. Sum: what crosses the network (``sent``, in gradients: a
ring all-reduce sends 2(W-1)/W), the additions (one for each node beyond the first, on 1/W of the
gradient) and one division. Step, besides the sum: adding up the micro-batches' gradients (as DDP
does), a copy into the buckets (DDP has that too, and one back), seeding random numbers for each
shard and keeping the script's, one message with losses. ``alone`` is a step of the same
micro-batches without any exchange: no data parallel step can be quicker.

    python benchmarks/same_bits.py [--workers 2 3 4] [--turns 12] [--shards 12 8]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

import outlast
from bench import tables
from bench.ports import free_port
from outlast.drill.demo_train import Gpt
from outlast.reduce.exchange import Bucket, GroupChannel, ReductionPlan, group, open_exchange

WIDTH, LAYERS, HEADS, CONTEXT, SAMPLES = 256, 6, 8, 64, 2
SUM_LIMIT: Final = 1.3
STEP_LIMIT: Final = 1.15
SETTLE: Final = 2


def main() -> None:
    """Measure each number of workers, print JSON and tables."""
    options = parse()
    if options.worker:
        work(options)
        return
    result: dict[str, Any] = {"machine": tables.machine(), "runs": []}
    for world_size in options.workers:
        for num_shards in options.shards:
            print(f"{world_size} workers, {num_shards} shards", file=sys.stderr, flush=True)
            result["runs"].append(launch(options, world_size, num_shards))
    tables.emit(result, [sums(result["runs"]), steps(result["runs"]), verdict(result["runs"])])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--shards", type=int, nargs="+", default=[12, 8])
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--sum-turns", type=int, default=20)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def launch(options: argparse.Namespace, world_size: int, num_shards: int) -> dict[str, Any]:
    """One group of workers; what its first one found."""
    environment = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, "--worker", "--shards", str(num_shards)]
    command += ["--turns", str(options.turns), "--sum-turns", str(options.sum_turns)]
    processes = [
        subprocess.Popen(
            command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(world_size)
    ]
    try:
        out, *_ = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    found: dict[str, Any] = json.loads(out)
    return found


# --- in a worker ---------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    """Measure, and print what rank 0 found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plan = ReductionPlan(options.shards[0], dist.get_rank(), dist.get_world_size())
    found = {
        "workers": plan.world_size,
        "shards": plan.num_shards,
        "nodes": [len(nodes) for nodes in plan.nodes],
        "sent": float(max(plan.sent(rank) for rank in range(plan.world_size))),
        "sent_by_a_ring": 2 * (plan.world_size - 1) / plan.world_size,
        **measure_sum(plan, options.sum_turns),
        **measure_step(plan, options.turns),
    }
    if plan.rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


class Turns:
    """Acts that take turns.

    Attributes:
        seconds: of each act, from when all workers begin it until the last has ended it.
        processor: seconds of processor time that this worker's threads spent on it.
    """

    def __init__(self, acts: Mapping[str, Callable[[], object]], turns: int) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in acts}
        self.processor: dict[str, list[float]] = {name: [] for name in acts}
        for turn in range(-SETTLE, turns):
            names = list(acts)
            for name in names if turn % 2 else reversed(names):
                dist.barrier()
                start, spent = time.perf_counter(), time.process_time()
                acts[name]()
                dist.barrier()
                if turn >= 0:
                    self.seconds[name].append(time.perf_counter() - start)
                    self.processor[name].append(time.process_time() - spent)


def measure_sum(plan: ReductionPlan, turns: int) -> dict[str, Any]:
    """The exchange alone, beside an all-reduce of the same size."""
    parameters = list(gpt().parameters())
    buckets = [Bucket([parameters[i] for i in indices], plan) for indices in group(parameters)]
    exchange = open_exchange(plan, buckets, GroupChannel(None))
    whole = torch.zeros(sum(parameter.numel() for parameter in parameters))

    def ordered() -> None:
        exchange.begin()
        for number in range(len(buckets)):
            exchange.launch(number)
        exchange.finish()

    took = Turns({"ordered": ordered, "ring": lambda: dist.all_reduce(whole)}, turns)
    return {
        "gradient_bytes": whole.numel() * whole.element_size(),
        "sum_s": took.seconds["ordered"],
        "all_reduce_s": took.seconds["ring"],
        "sum_processor_s": took.processor["ordered"],
        "all_reduce_processor_s": took.processor["ring"],
    }


def measure_step(plan: ReductionPlan, turns: int) -> dict[str, Any]:
    """The whole step, beside DDP's and beside one that exchanges nothing."""
    same, theirs = outlast.SameBits(gpt(), shards=plan.num_shards), gpt()
    ddp = nn.parallel.DistributedDataParallel(theirs)
    our_optimizer = torch.optim.AdamW(same.parameters(), lr=1e-3)
    their_optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(plan.rank)
    shape = SAMPLES, CONTEXT + 1
    parts = [torch.randint(0, 256, shape, generator=generator) for _ in plan.held]
    positions = iter(range(10**9))

    def ours() -> None:
        batch = outlast.data.Shards(
            parts, of=plan.num_shards, first=plan.held.start, position=next(positions)
        )
        for text in same.shards(batch):
            same.backward(same(text))
        our_optimizer.step()

    def accumulate(exchanges: bool) -> None:
        for number, text in enumerate(parts):
            is_last = number == len(parts) - 1
            with contextlib.nullcontext() if is_last and exchanges else ddp.no_sync():
                (ddp(text) / len(parts)).backward()
        their_optimizer.step()
        their_optimizer.zero_grad()

    acts = {"same": ours, "ddp": lambda: accumulate(True), "alone": lambda: accumulate(False)}
    seconds = Turns(acts, turns).seconds
    return {
        "step_s": seconds["same"],
        "ddp_step_s": seconds["ddp"],
        "alone_step_s": seconds["alone"],
    }


def gpt() -> Gpt:
    """Predicts the next byte; 4.9 million parameters."""
    return Gpt(WIDTH, HEADS, LAYERS, CONTEXT)


# --- tables --------------------------------------------------------------------------------------


def milliseconds(values: list[float]) -> str:
    return tables.cell([value * 1000 for value in values], 1)


def ratio(ours: list[float], theirs: list[float]) -> str:
    """Of medians; the quartiles are those of neighbours' ratios."""
    low, _, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    return f"{statistics.median(ours) / statistics.median(theirs):.2f} [{low:.2f}–{high:.2f}]"


def rows(runs: list[dict[str, Any]], ours: str, *theirs: str) -> Iterator[list[str]]:
    for run in runs:
        yield [
            f"{run['workers']}",
            f"{run['shards']}",
            " + ".join(map(str, run["nodes"])),
            f"{run['sent']:.2f} ({run['sent_by_a_ring']:.2f})",
            milliseconds(run[ours]),
            *(milliseconds(run[name]) for name in theirs),
            ratio(run[ours], run[theirs[0]]),
        ]


HEADER: Final = ("workers", "shards", "nodes", "sent (a ring: )")


def sums(runs: list[dict[str, Any]]) -> str:
    header = [*HEADER, "ordered sum, ms", "all_reduce, ms", "ratio [quartiles]"]
    processor = [*HEADER, *(f"{name} (processor)" for name in header[len(HEADER) :])]
    return "\n\n".join(
        [
            tables.markdown(header, rows(runs, "sum_s", "all_reduce_s")),
            tables.markdown(processor, rows(runs, "sum_processor_s", "all_reduce_processor_s")),
        ]
    )


def steps(runs: list[dict[str, Any]]) -> str:
    header = [*HEADER, "SameBits step, ms", "DDP step, ms", "alone, ms", "ratio [quartiles]"]
    return tables.markdown(header, rows(runs, "step_s", "ddp_step_s", "alone_step_s"))


def verdict(runs: list[dict[str, Any]]) -> str:
    required = tables.Requirements()
    for run in runs:
        name = f"{run['workers']} workers, {run['shards']} shards"
        for what, limit, ours, theirs in (
            ("the sum beside all_reduce", SUM_LIMIT, "sum_s", "all_reduce_s"),
            ("the step beside DDP", STEP_LIMIT, "step_s", "ddp_step_s"),
        ):
            mine, other = statistics.median(run[ours]), statistics.median(run[theirs])
            required.at_most(f"{what}, {name}", mine, limit, other)
    return required.table()


if __name__ == "__main__":
    main()
