"""A training process with loader workers, to be signalled: METHOD KIND ORDERS (a pipe)."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch

from outlast.data import Loader, open_feed
from outlast.data.shield import Cover, shut_down

# How often an idle worker looks for its parent, 5 s by default: here it is the shield's to end it.
torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 600.0


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return index, os.getpid()


class Stuck(Numbers):
    def __getitem__(self, index):
        if index >= 4:
            time.sleep(600)
        return index, os.getpid()


class Wedged(Numbers):
    """Hangs in C and keeps the interpreter's lock: no thread of the worker runs any more."""

    def __getitem__(self, index):
        if index >= 4:
            time.sleep(0.5)  # for the batch before to leave: a thread sends it
            ctypes.PyDLL(None).sleep(600)
        return index, os.getpid()


PATIENCE_S = 50.0
DATA = {"stuck": Stuck, "wedged": Wedged}


def build(method, kind):
    settings = {"num_workers": 2, "multiprocessing_context": method}
    if kind == "ours":
        return Loader(Numbers(), global_batch=4, **settings)
    if kind == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(Numbers(), 4, **settings)
    data = DATA.get(kind, Numbers)()
    return torch.utils.data.DataLoader(data, 4, **settings)


def main():
    method, kind = sys.argv[1:3]
    # torch's patience with a worker that does not end, 5 s by default.
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5 if kind in DATA else PATIENCE_S
    received = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: received.append(number))
    loader = build(method, kind)
    if kind == "covered":  # iterated by the script itself
        cover = Cover()
        cover.open()
    plain = kind in ("covered", "unshielded")
    feed = iter(loader) if plain else open_feed(loader, rank=0, world_size=1)
    workers = set()
    while len(workers) < (1 if kind in DATA else 2):
        workers |= set(next(feed)[1].tolist())
    print("workers", *sorted(workers), flush=True)
    with Path(sys.argv[3]).open() as orders:
        for line in orders:
            if line == "leave\n":
                return
            if line == "close\n":
                began = time.monotonic()
                shut_down(feed) if plain else feed.close()
                print("closed", time.monotonic() - began, flush=True)
                return
            for _ in range(10):  # more than was loaded ahead
                next(feed)
            print("received", *sorted({int(number) for number in received}), flush=True)


if __name__ == "__main__":
    main()
