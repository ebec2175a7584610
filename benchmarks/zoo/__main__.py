"""The zoo: optimizers and models that nobody here wrote, killed and resumed, compared to the bit.

Each trains six steps; its process is killed with SIGKILL in the fourth, when a checkpoint of the
third is committed; a fresh process resumes and trains on. Losses, weights, the optimizer's state
and its attributes must be those of six steps without a session, or the optimizer must have been
refused by name at the start. Anything else makes the command exit with 1.

    make zoo
    python benchmarks/zoo [--only TEXT] [--part 1/10] [--kinds torch,models] [--write docs/zoo.md]
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import logging
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

for name in [name for name in os.environ if name.startswith("OUTLAST_")]:
    del os.environ[name]

from lives import Outcome, examine  # noqa: E402
from menagerie import of_timm, of_transformers, warm  # noqa: E402
from pages import page  # noqa: E402
from specimens import Specimen, of_pytorch_optimizer, of_torch, of_torchao  # noqa: E402

GOOD = ("equal", "refused", "skipped")


def main() -> int:
    """Examine what was asked for; print the table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--part", default="1/1", help="a share, chosen by --seed: 1/10")
    parser.add_argument("--seed", type=int, default=int(time.time()) // 86400)
    parser.add_argument("--kinds", default="torch,pytorch-optimizer,torchao,models")
    parser.add_argument("--write", type=Path, help="write the page here")
    parser.add_argument("--json", action="store_true", help="one JSON object, nothing else")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    found: dict[str, dict[str, Outcome]] = {}
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="outlast-zoo-") as room:
        for kind, specimen in _chosen(options):
            since = time.monotonic()
            outcome = examine(specimen, Path(room) / "one")
            found.setdefault(kind, {})[specimen.name] = outcome
            if not options.json:
                took_s = time.monotonic() - since
                print(
                    f"{specimen.name:40} {outcome.result:10} {took_s:5.1f} s  {outcome.note}",
                    flush=True,
                )
    if options.write is not None:
        options.write.write_text(page(found))
    counts = collections.Counter(one.result for kind in found.values() for one in kind.values())
    print(
        json.dumps(
            {
                "counts": counts,
                "seconds": round(time.monotonic() - start),
                "seed": options.seed,
                "torch": torch.__version__,
                "results": {
                    kind: {name: one._asdict() for name, one in rows.items()}
                    for kind, rows in found.items()
                },
            },
            indent=1 if not options.json else None,
        )
        if options.json
        else f"{dict(counts)}"
    )
    return int(any(result not in GOOD for result in counts) or not counts["equal"])


def _chosen(options: argparse.Namespace) -> Iterator[tuple[str, Specimen]]:
    kinds = {
        "torch": of_torch,
        "pytorch-optimizer": of_pytorch_optimizer,
        "torchao": of_torchao,
        "models": _models,
    }
    number, _, of = options.part.partition("/")
    for kind in options.kinds.split(","):
        all_of = [one for one in kinds[kind]() if options.only.lower() in one.name.lower()]
        order = random.Random(options.seed).sample(range(len(all_of)), len(all_of))
        share = set(order[int(number) - 1 :: int(of)])
        yield from ((kind, one) for index, one in enumerate(all_of) if index in share)


def _models() -> Iterator[Specimen]:
    warm()
    return itertools.chain(of_transformers(), of_timm())


if __name__ == "__main__":
    sys.exit(main())
