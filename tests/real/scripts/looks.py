"""A worker that writes down all that a script can see of its process: OUT [ARGUMENT…]."""

# ruff: noqa: E402 - what is loaded already is looked at first

import sys

AHEAD = "torch" in sys.modules

import gc
import hashlib
import json
import locale
import logging
import multiprocessing
import os
import random
import re
import resource
import signal
import threading
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # as any optimizer does: it sets a variable

RANK = int(os.environ["RANK"])
LIMITS = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))


def descriptors():
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if not target.startswith("/proc/"):
            target = re.sub("outlast-beats-[^/]*", "outlast-beats", target)  # each agent's own
            found[int(entry.name)] = target.partition(":")[0]
    return found


def computed():
    """The bits of a small training run from a seed of its own."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
    flat = torch.cat([one.detach().flatten() for one in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def process():
    main = sys.modules["__main__"]
    return {
        "descriptors": descriptors(),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "command": Path("/proc/self/cmdline").read_bytes().decode("utf-8", "surrogateescape"),
        "name": Path("/proc/self/comm").read_text(),
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "cwd": str(Path.cwd()),
        "umask": os.umask(0o77),
        "nice": os.nice(0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
        "blocked": sorted(int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "handlers": {int(one): str(signal.getsignal(one)) for one in signal.valid_signals()},
        "children": multiprocessing.active_children(),
        "parent": multiprocessing.parent_process(),
        "start_method": multiprocessing.get_start_method(allow_none=True),
        "main": [main.__name__, main.__file__, getattr(main.__spec__, "name", None)],
        "in_main_thread": threading.current_thread() is threading.main_thread(),
    }


def interpreter():
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "executable": sys.executable,
        "path": sys.path,
        "flags": str(sys.flags),
        "hash": hash("outlast"),
        "streams": [
            [one.encoding, one.errors, one.line_buffering, one.write_through, one.name]
            for one in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "gc": [gc.isenabled(), gc.get_threshold()],
        "recursion": sys.getrecursionlimit(),
        "locale": locale.setlocale(locale.LC_ALL),
        "logging": [str(one) for one in logging.getLogger().handlers],
        "excepthook": sys.excepthook is sys.__excepthook__,
        "environ": {
            name: value for name, value in os.environ.items() if not name.startswith("OUTLAST_")
        },
        "our_environ": sorted(name for name in os.environ if name.startswith("OUTLAST_")),
    }


def in_torch():
    return {
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": torch.is_grad_enabled(),
        "cuda_began": torch.cuda.is_initialized(),
        "bits": computed(),
    }


seeds = [torch.initial_seed(), random.getrandbits(64), int(np.random.randint(2**62))]
found = {
    "ahead": AHEAD,
    "seeds": seeds,
    "same": {"process": process(), "interpreter": interpreter(), "torch": in_torch()},
}
Path(sys.argv[1], f"looks-{RANK}.json").write_text(json.dumps(found))
print(f"out {RANK}")
print(f"err {RANK}", file=sys.stderr)
