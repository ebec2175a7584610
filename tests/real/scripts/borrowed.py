"""Training on a loader of another library, with its own state: KIND RECORDS STEPS [options].

Each step begun is a line of RECORDS/steps-RANK.jsonl; the end is RECORDS/final-RANK.json. Every
data set has ``SIZE`` samples, so that a job of some dozen steps goes through several epochs.
"""

import argparse
import json
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import outlast

SIZE, BATCH, SHARDS = 50, 4, 4
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def numbers(shards):
    for shard in shards:
        for item in range(shard, SIZE, SHARDS):
            yield {"x": item}


def stream(*, shuffled=False):
    """One of Hugging Face's data sets; each rank has its part."""
    import datasets
    from datasets.distributed import split_dataset_by_node

    shards = {"shards": list(range(SHARDS))}
    found = datasets.IterableDataset.from_generator(numbers, gen_kwargs=shards)
    if shuffled:
        found = found.shuffle(seed=3, buffer_size=10)
    return split_dataset_by_node(found, RANK, RANKS) if RANKS > 1 else found


def stateful(dataset, **settings):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(dataset, BATCH, **settings)


def nodes():
    from torch.utils.data import RandomSampler
    from torchdata.nodes import Batcher, Loader, MapStyleWrapper, Prefetcher

    items = MapStyleWrapper(range(SIZE), RandomSampler(range(SIZE)))
    return Loader(Prefetcher(Batcher(items, BATCH), prefetch_factor=3))


def grain_dataset():
    import grain

    found = grain.MapDataset.source(range(SIZE)).seed(3).shuffle()[RANK::RANKS]
    return found.batch(BATCH).repeat()


def grain_loader(**settings):
    import grain
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["borrowed"])
    sampler = grain.samplers.IndexSampler(
        SIZE,
        shuffle=True,
        seed=1,
        num_epochs=1,
        shard_options=grain.sharding.ShardOptions(RANK, RANKS),
    )
    operations = [grain.transforms.Batch(BATCH)]
    return grain.DataLoader(
        data_source=range(SIZE), sampler=sampler, operations=operations, **settings
    )


def mosaic(place, **settings):
    from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    if not RANK and not place.exists():
        with MDSWriter(out=str(place), columns={"x": "int"}, size_limit=200) as out:
            for item in range(SIZE):
                out.write({"x": item})
    while not (place / "index.json").exists():
        time.sleep(0.01)
    clean_stale_shared_memory()
    dataset = StreamingDataset(local=str(place), shuffle=True, batch_size=BATCH)
    return StreamingDataLoader(dataset, batch_size=BATCH, **settings)


PROCESSES = {"num_workers": 2}
KINDS = {
    "nodes": nodes,
    "stream": lambda: DataLoader(stream(), BATCH),
    "stream, shuffled": lambda: DataLoader(stream(shuffled=True), BATCH),
    "stream, processes": lambda: DataLoader(stream(shuffled=True), BATCH, **PROCESSES),
    "stream itself": lambda: stream().batch(BATCH),
    "stateful stream": lambda: stateful(stream()),
    "stateful stream, shuffled": lambda: stateful(stream(shuffled=True)),
    "stateful stream, processes": lambda: stateful(stream(), **PROCESSES),
    "stateful stream, shuffled, processes": lambda: stateful(stream(shuffled=True), **PROCESSES),
    "grain": grain_loader,
    "grain, processes": lambda: grain_loader(worker_count=2),
    "grain data set": lambda: grain_dataset().to_iter_dataset(),
    "grain iterator": lambda: iter(grain_dataset().to_iter_dataset()),
    "mosaic": lambda: mosaic(Path(os.environ["MDS"])),
    "mosaic, processes": lambda: mosaic(Path(os.environ["MDS"]), **PROCESSES),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("records", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds, in each step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if RANKS > 1:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(1 + RANK)
    random.seed(1 + RANK)
    np.random.seed(1 + RANK)
    loader = KINDS[options.kind]()
    model = nn.Linear(1, 1, bias=False)
    records = (options.records / f"steps-{RANK}.jsonl").open("a", buffering=1)
    with outlast.session(model=model, every="3 steps") as session:
        for batch in session.steps(loader, until=options.steps):
            ids = torch.as_tensor(batch["x"] if isinstance(batch, dict) else batch).tolist()
            line = {"pid": os.getpid(), "step": session.step + 1, "ids": ids}
            records.write(json.dumps(line) + "\n")
            with torch.no_grad():  # nothing but the same batches in the same order gives the same
                model.weight.mul_(0.9).add_(sum(ids) * random.random())
            time.sleep(options.pause)
    final = {"step": session.step, "hash": model.weight.item()}
    (options.records / f"final-{RANK}.json").write_text(json.dumps(final))
    if RANKS > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
