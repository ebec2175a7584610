"""The demo's model through changes of the number of workers, beside an undisturbed run.

One worker trains to the end. Then the same job again on one to four workers, and at each change
either one of them is killed or all are told to leave; the next attempt has another number. Every
loss of every attempt is compared with the undisturbed run's, to the last bit; then both are drawn.

    python benchmarks/learning_curves.py [--changes 30] [--steps 310] [--picture docs/same-bits.svg]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from bench.lettering import SANS, Lettering, picture
from bench.ports import free_port

SHARDS, GLOBAL_BATCH, MOST = 12, 12, 4
LIMIT_S: Final = 300.0
WIDTH, HEIGHT, LEFT, TOP, BELOW = 760, 340, 66, 44, 94
LIGHT: Final = {
    "page": "fill:#fff;stroke:#d0d7de",
    "text": "fill:#1f2328",
    "calm": "fill:none;stroke:#9ecae1;stroke-width:6",
    "disturbed": "fill:none;stroke:#08306b;stroke-width:1.2",
    "workers": "fill:#74c476;shape-rendering:crispEdges",
}
DARK: Final = {
    "page": "fill:#161b22;stroke:#30363d",
    "text": "fill:#e6edf3",
    "calm": "stroke:#1f4e79",
    "disturbed": "stroke:#9cd0ff",
    "workers": "fill:#2e7d46",
}

_warm = get_context("forkserver")
_warm.set_forkserver_preload(["torch", "torch._dynamo", "outlast.training.session"])


def train(corpus: Path, records: Path, steps: int) -> None:
    """What each worker does."""
    import torch
    import torch.distributed as dist

    import outlast
    from outlast.drill.demo_train import Gpt, Windows

    if os.environ["WORLD_SIZE"] != "1":
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = outlast.SameBits(Gpt(), shards=SHARDS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = outlast.data.Loader(Windows(corpus), global_batch=GLOBAL_BATCH, shards=SHARDS, seed=7)
    with (
        (records / f"rank-{os.environ['RANK']}.jsonl").open("a", buffering=1) as file,
        outlast.session(model=model, optimizer=optimizer, every="5 steps") as session,
    ):
        for batch in session.steps(loader, until=steps):
            for _, text in model.shards(batch):
                model.backward(model(text))
            optimizer.step()
            assert model.loss is not None
            line = {"step": session.step + 1, "loss": model.loss.item().hex()}
            file.write(json.dumps(line | {"workers": int(os.environ["WORLD_SIZE"])}) + "\n")


def become(arguments: tuple[Path, Path, int], environment: dict[str, str]) -> None:
    """In a warm process: be a worker."""
    os.setsid()
    os.environ.update(environment)
    try:
        train(*arguments)
    except SystemExit as left:
        os._exit(int(left.code or 0))
    except RuntimeError as error:  # another worker was killed
        print(str(error).partition("\n")[0], file=sys.stderr)
        os._exit(1)
    os._exit(0)


class Attempt:
    """Some workers."""

    def __init__(self, place: Path, name: str, workers: int, steps: int) -> None:
        self.records = place / f"{name}-records"
        self.records.mkdir(exist_ok=True)
        environment = {
            "OUTLAST_DIR": str(place / name),
            "OUTLAST_NOTICE_PLATFORM": "none",
            "WORLD_SIZE": str(workers),
            "LOCAL_WORLD_SIZE": str(workers),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        arguments = place / "corpus.bin", self.records, steps
        self.processes = [
            _warm.Process(
                target=become, args=(arguments, {**environment, "RANK": str(rank)}), daemon=False
            )
            for rank in range(workers)
        ]
        for process in self.processes:
            process.start()

    def lines(self) -> list[dict[str, Any]]:
        """What was recorded so far, of all attempts."""
        found = []
        for file in self.records.glob("rank-*.jsonl"):
            found += [json.loads(line) for line in file.read_text().splitlines() if line[-1] == "}"]
        return found

    def wait(self) -> None:
        """Until all have ended."""
        for process in self.processes:
            process.join(LIMIT_S)
            if process.exitcode is None:
                process.kill()
                raise SystemExit("a worker did not end")

    def reach(self, step: int) -> None:
        """Wait for a step."""
        until_s = time.monotonic() + LIMIT_S
        while not any(line["step"] >= step for line in self.lines()):
            if time.monotonic() > until_s or not any(p.is_alive() for p in self.processes):
                raise SystemExit(f"step {step} was never reached")
            time.sleep(0.02)


def main() -> None:
    """Train twice, compare, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", type=int, default=30)
    parser.add_argument("--steps", type=int, default=310)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", type=Path, default=Path("docs/same-bits.svg"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        from outlast.drill.demo import gather

        gather(place / "corpus.bin")
        calm = Attempt(place, "calm", 1, options.steps)
        calm.wait()
        expected = {line["step"]: line["loss"] for line in calm.lines()}
        lines = disturb(place, options)
    wrong = [line for line in lines if line["loss"] != expected[line["step"]]]
    done = {line["step"] for line in lines}
    result = {
        "steps": options.steps,
        "changes": options.changes,
        "recorded": len(lines),
        "not_equal": len(wrong),
        "complete": done == set(range(1, options.steps + 1)),
        "seed": options.seed,
    }
    print(json.dumps(result, indent=1))
    if wrong or not result["complete"]:
        raise SystemExit(1)
    options.picture.write_text(draw(expected, lines, options.changes))


def disturb(place: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The run with changes; all that its workers recorded."""
    rng = random.Random(options.seed)
    workers = rng.randint(1, MOST)
    for number in range(options.changes):
        attempt = Attempt(place, "disturbed", workers, options.steps)
        attempt.reach(options.steps * (number + 1) // (options.changes + 1) + rng.randint(-3, 3))
        victim = rng.choice(attempt.processes)
        if rng.random() < 0.5 and victim.pid is not None:
            os.kill(victim.pid, signal.SIGKILL)
            what = "one is killed"
        else:
            for process in attempt.processes:
                process.terminate()
            what = "all leave"
        attempt.wait()
        fewer = rng.choice([count for count in range(1, MOST + 1) if count != workers])
        print(f"{number + 1}: {workers} workers, {what}", file=sys.stderr, flush=True)
        workers = fewer
    attempt = Attempt(place, "disturbed", workers, options.steps)
    attempt.wait()
    return attempt.lines()


def draw(expected: dict[int, str], lines: list[dict[str, Any]], changes: int) -> str:
    """Both curves, and below them how many workers there were."""
    steps = max(expected)
    calm = {step: float.fromhex(loss) for step, loss in expected.items()}
    low, high = min(calm.values()), max(calm.values())
    inner_width, inner_height = WIDTH - LEFT - 16, HEIGHT - TOP - BELOW

    def x(step: float) -> float:
        return LEFT + inner_width * step / steps

    def y(loss: float) -> float:
        return TOP + inner_height * (high - loss) / (high - low)

    def curve(points: dict[int, float], look: str) -> str:
        path = " ".join(f"{x(step):.1f},{y(points[step]):.1f}" for step in sorted(points))
        return f'<polyline class="{look}" points="{path}"/>'

    disturbed = {line["step"]: float.fromhex(line["loss"]) for line in lines}
    workers = {line["step"]: line["workers"] for line in lines}
    font = Lettering(SANS, 12)
    title = (
        f"loss of {steps} steps: undisturbed on 1 worker (broad), and through {changes} changes of "
        f"1 to {MOST} workers (thin)"
    )
    parts = [
        f'<rect class="page" x=".5" y=".5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
        font.draw(16, 24, title, "text"),
        curve(calm, "calm"),
        curve(disturbed, "disturbed"),
    ]
    parts += [
        font.draw(LEFT - 6, y(loss) + 4, f"{loss:.2f}", "text", "end") for loss in (low, high)
    ]
    base, unit, wide = HEIGHT - 36, 10, inner_width / steps + 0.2
    for step in range(1, steps + 1):
        height = unit * workers[step]
        place = f'x="{x(step - 1):.1f}" y="{base - height}"'
        parts.append(f'<rect class="workers" {place} width="{wide:.2f}" height="{height}"/>')
    parts += [
        font.draw(LEFT - 6, base, "workers", "text", "end"),
        font.draw(LEFT, HEIGHT - 16, "step 0", "text"),
        font.draw(x(steps), HEIGHT - 16, f"step {steps}", "text", "end"),
    ]
    return picture(WIDTH, HEIGHT, title, LIGHT, DARK, "\n".join(parts), font)


if __name__ == "__main__":
    main()
