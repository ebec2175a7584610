"""What the metadata of a save costs at thousands of ranks: simulated ranks, the real code.

A job like Llama 3 70B: 723 parameters, Adam, FSDP2 over R ranks. No bytes of tensors are made; what
is measured is what a save and a resume say to each other and write besides the tensors.

    python benchmarks/save_scale.py                 # 1,024 to 65,536 ranks
    python benchmarks/save_scale.py --ranks 4096
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from bench.save_end import save_end
from outlast.attempt.link import LocalLink
from outlast.checkpoint.manifest import (
    BLOCK_BYTES,
    FORMAT,
    FileEntry,
    Manifest,
    PartEntry,
    SaveName,
    decode,
    encode,
    encode_part,
    hashed,
    make_part,
    part_entry,
    shard_file,
    state_file,
)
from outlast.checkpoint.plan import (
    Held,
    HeldPiece,
    PieceLocation,
    Structure,
    World,
    describe,
    make,
    share,
)
from outlast.checkpoint.spreads import Spread, pieces_of, spread_over
from outlast.checkpoint.transfer import Inventory
from outlast.training.sharing import Sharing

LAYER = {
    "attention.wq": (8192, 8192),
    "attention.wk": (1024, 8192),
    "attention.wv": (1024, 8192),
    "attention.wo": (8192, 8192),
    "feed_forward.w1": (28672, 8192),
    "feed_forward.w2": (8192, 28672),
    "feed_forward.w3": (28672, 8192),
    "attention_norm": (8192,),
    "ffn_norm": (8192,),
}
SLOTS = ("exp_avg", "exp_avg_sq")


def shapes() -> dict[str, tuple[int, ...]]:
    """The 723 parameters."""
    found: dict[str, tuple[int, ...]] = {
        f"layers.{n}.{name}.weight": shape for n in range(80) for name, shape in LAYER.items()
    }
    big = (128256, 8192)
    return {**found, "tok_embeddings.weight": big, "norm.weight": (8192,), "output.weight": big}


def held(rank: int, spread: Spread) -> list[Held]:
    """What a rank holds: parameters, Adam's two moments, and its count of steps."""
    found: list[Held] = []
    for name, shape in shapes().items():
        named = [f"model.{name}", *(f"optimizer.state.{name}.{slot}" for slot in SLOTS)]
        for one in named:
            for number, box in enumerate(pieces_of(shape, spread, rank)):
                found.append(
                    (HeldPiece(one, "F32", shape, *box), PieceLocation(number, (), spread))
                )
        step = HeldPiece(f"optimizer.state.{name}.step", "F32", (), (), ())
        found.append((step, PieceLocation(0, ())))
    return found


def timed(act: Callable[[], Any]) -> tuple[Any, float]:
    """What ``act`` returns, and processor seconds."""
    start_s = time.process_time()
    result = act()
    return result, time.process_time() - start_s


class Words(LocalLink):
    """Rank 0's link to ranks that have all named their structures."""

    def __init__(self, words: list[str]) -> None:
        super().__init__()
        self.world_size = len(words)
        self._words = words
        self.published: dict[str, int] = {}

    def publish(self, key: str, value: bytes) -> None:
        """Note how long a message is."""
        self.published[key] = len(value)
        super().publish(key, value)

    def fetch(self, key: str, timeout_s: float) -> bytes:
        """What the simulated rank has published."""
        name, _, last = key.rpartition("/")
        if name.startswith("sharing/") and last.isdigit():
            return self._words[int(last)].encode()
        return super().fetch(key, timeout_s)


class Job:
    """One save of a job of ``num_ranks``; parts are made when they are asked for."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.spread = spread_over(range(num_ranks), (num_ranks,), ((0, 1),))
        known: dict[tuple[int, ...], Structure] = {}
        words: dict[str, int] = {}
        self.table, self.words = [], []
        kinds = set(shapes().values())
        for rank in range(num_ranks):
            key = tuple(len(pieces_of(shape, self.spread, rank)) for shape in kinds)
            if key not in known:
                known[key] = describe(held(rank, self.spread), rank)
            self.words.append(known[key].digest())
            self.table.append(words.setdefault(self.words[-1], len(words)))
        by_word = {one.digest(): one for one in known.values()}
        self.structures = [by_word[word] for word in words]
        self._parts: dict[int, bytes] = {}
        self.bytes_read = 0

    def part(self, rank: int) -> tuple[bytes, PartEntry]:
        """A rank's part file and its entry in the manifest."""
        shared = share(World(self.table, self.structures), rank, ())
        plan = make(held(rank, self.spread), rank, shared, {})
        blocks = -(-plan.size // BLOCK_BYTES)
        files = {
            state_file(rank): hashed(b"{}"),
            shard_file(rank): FileEntry(size=plan.size, xxh3_128=("0" * 32,) * blocks),
        }
        data = encode_part(make_part(1000, rank, files, plan.contents))
        return data, part_entry(data, self.table[rank], files.values())

    def manifest(self) -> Manifest:
        """The manifest, with an entry of a real part for each rank."""
        _, entry = self.part(0)
        entries = [msgspec.structs.replace(entry, structure=number) for number in self.table]
        return Manifest(
            format=FORMAT,
            job="20260101-000000-abcdef",
            step=1000,
            attempt=1,
            world_size=self.num_ranks,
            layout={"world": self.num_ranks},
            created_t=0.0,
            parts=tuple(entries),
        )

    def read_file(self, name: str, _: FileEntry) -> bytes:
        """A part, as a reader of files would give it."""
        rank = int(name[5:10])
        if rank not in self._parts:
            self._parts[rank] = self.part(rank)[0]
        self.bytes_read += len(self._parts[rank])
        return self._parts[rank]


def measure(num_ranks: int) -> Iterator[tuple[str, float, str]]:
    """(what, figure, unit) for one size."""
    job = Job(num_ranks)
    mine = held(0, job.spread)
    described, seconds = timed(lambda: describe(mine, 0))
    yield "structures in all", len(job.structures), ""
    yield "longest structure published", len(described.encode()) / 1e3, "kB"
    yield "a rank describes its structure", seconds, "s"
    link = Words(job.words)
    _, seconds = timed(lambda: Sharing(link, lambda: None).publish_table(0))
    yield "rank 0 works the table out", seconds, "s"
    yield "the table", link.published["sharing/0/table"] / 1e3, "kB"
    shared, seconds = timed(lambda: share(World(job.table, job.structures), 0, ()))
    yield "a rank works its share out", seconds, "s"
    plan, _ = timed(lambda: make(mine, 0, shared, {}))
    part = make_part(1000, 0, {}, plan.contents)
    data, seconds = timed(lambda: encode_part(part))
    yield "a rank's part", len(data) / 1e3, "kB"
    yield "a rank encodes its part", seconds, "s"
    manifest = job.manifest()
    data, seconds = timed(lambda: encode(manifest))
    yield "the manifest", len(data) / 1e3, "kB"
    yield "rank 0 encodes it", seconds, "s"
    _, seconds = timed(lambda: decode(data, SaveName(1000)))
    yield "a reader decodes it", seconds, "s"
    entries = ((entry, job.words[rank]) for rank, entry in enumerate(manifest.parts))
    with tempfile.TemporaryDirectory() as directory:
        end = save_end(manifest.job, entries, Path(directory))
    yield "a save's end: a rank's report", end.report_bytes / 1e3, "kB"
    yield "a save's end: the outcome, to each machine", end.outcome_bytes / 1e3, "kB"
    yield "a save's end: rank 0 takes in all reports", end.reports_s, "s"
    yield "a save's end: rank 0 commits and tells all", end.commit_s, "s"
    for now in (num_ranks, num_ranks // 2, num_ranks // 8):
        rank = now // 3
        spread = spread_over(range(now), (now,), ((0, 1),))
        wanted = {
            piece.name: [(piece.offsets, piece.shape)]
            for piece, _ in held(rank, spread)
            if piece.whole
        }
        job.bytes_read = 0
        inventory = Inventory(manifest, job.read_file)
        inventory.locate(wanted, rank)  # the parts are made now
        job.bytes_read = 0
        inventory = Inventory(manifest, job.read_file)
        _, seconds = timed(lambda: inventory.locate(wanted, rank))  # noqa: B023 - called at once
        words = f"a rank of {now} that resumes"
        yield f"{words}: parts read", inventory.num_parts_read, ""
        yield f"{words}: bytes of parts", job.bytes_read / 1e3, "kB"
        yield f"{words}: processor time", seconds, "s"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--quick", action="store_true", help="a smoke run: 64 ranks")
    given = parser.parse_args()
    sizes = [64] if given.quick else given.ranks
    found = {ranks: list(measure(ranks)) for ranks in sizes}
    print(json.dumps({ranks: {w: v for w, v, _ in one} for ranks, one in found.items()}))
    for ranks, one in found.items():
        print(f"{ranks:,} ranks")
        for what, figure, unit in one:
            text = f"{figure:,.0f}" if not unit else f"{figure:,.3f} {unit}"
            print(f"  {what:<52}{text:>16}")


if __name__ == "__main__":
    main()
