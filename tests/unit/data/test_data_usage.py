"""Wrong uses of loaders: one line that shows the right form; and what torch's have and ours not."""

import inspect
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from outlast.data import Loader, Stream, open_feed
from outlast.data.usage import INSTEAD
from outlast.errors import ConfigError

DOCS = Path(__file__).parents[3] / "docs" / "data.md"


class Squares(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return index * index


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield 1


def numbers():
    yield 1


RIGHT = "outlast.data.Loader(dataset, global_batch=B)"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: Loader([1], batch_size=8), f"no batch_size=: global_batch= .*{re.escape(RIGHT)}"),
        (lambda: Loader([1], 8), f"all but dataset by name: {re.escape(RIGHT)}"),
        (lambda: Loader([1], global_bacth=8), "did you mean global_batch"),
        (Loader, f"given no dataset. Write {re.escape(RIGHT)}"),
        (lambda: Stream([1], num_shards=1), "given no global_batch. Write outlast.data.Stream"),
        (lambda: Loader([1]), f"not told how large a step is. Write {re.escape(RIGHT)}"),
        (lambda: Loader([1], global_batch=1, drop_last=True), "no sample is dropped"),
        (lambda: Loader(numbers(), global_batch=1), r"Loader\(list\(generator\), global_batch=B\)"),
        (lambda: Loader(Endless(), global_batch=1), "Endless is not one; for a stream"),
        (lambda: Loader(Endless, global_batch=1), r"class Endless is not one; make one: .*Endless"),
        (lambda: Loader(DataLoader([1]), global_batch=1), r"Loader\(loader.dataset, "),
        (lambda: Stream([1], 4), "all but shards by name: outlast.data.Stream"),
        (lambda: Stream([1], num_shards=1, batch_size=4), "no batch_size=: global_batch="),
        (lambda: Stream([1], num_shard=1), "did you mean num_shards"),
        (lambda: open_feed(None, rank=0, world_size=1), "NoneType, cannot be iterated. Write "),
        (lambda: open_feed(100, rank=0, world_size=1), r"Write steps\(loader, until=100\)"),
        (lambda: open_feed(numbers, rank=0, world_size=1), r"Write steps\(numbers\(…\)\)"),
        (lambda: open_feed(DataLoader, rank=0, world_size=1), r"Write steps\(DataLoader\(…\)\)"),
        (lambda: open_feed(Squares(), rank=0, world_size=1), "a data set, which has no batches"),
    ],
)
def test_it_is_answered_in_one_line(wrong, words):
    with pytest.raises(ConfigError, match=words) as said:
        wrong()
    assert "\n" not in str(said.value)


def test_a_loader_may_be_derived_from_and_copied():
    class Mine(Loader):
        def __init__(self, size, more, **settings):
            super().__init__(range(size), global_batch=more, **settings)

    loader = Mine(9, 3, seed=1)
    assert next(iter(loader)).tolist() == loader.ids(0)
    copied = pickle.loads(pickle.dumps(Loader(range(9), global_batch=3, seed=1)))
    assert copied.ids(0) == loader.ids(0)


def test_what_torch_has_is_in_the_table():
    there = [*inspect.signature(DataLoader).parameters]
    table = DOCS.read_text().split("## What torch's DataLoader has\n")[1].split("\n## ")[0]
    listed = {}
    for line in table.splitlines():
        if match := re.match(r"\| `(\w+)` \| ([^|]+) \|", line):
            listed[match[1]] = match[2].strip()
    assert [name for name in there if name not in listed] == []
    ours = inspect.signature(Loader).parameters
    for name, says in listed.items():
        assert (says in {"the same", f"`{name}`"}) is (name in ours), name
        assert (name in INSTEAD) is (name not in ours), name
